"""CPU time of the training process, of its loader and of the machine's cores, over the counted steps of a run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Final

import torch

from lightning_forge_profiling.host import CpuTimes, ThreadClock, cpu_times, usable_cores, waited_s
from lightning_forge_profiling.names import BETWEEN_EPOCHS, REGIONS, VALIDATION_DATA
from lightning_forge_profiling.run.worker_batches import batch_ms
from lightning_forge_profiling.schema import CpuUse, RegionCpu, ShareInterval
from lightning_forge_profiling.timing.bootstrap import share_interval
from lightning_forge_profiling.timing.counters import Marks

# a reading takes 0.6 to 1 ms (two CPU cores, and H100 hosts of 16), and workers that ended cannot be read
ACCOUNT_PERIOD_S: Final = 0.5
_SHARE: Final = 1e-3  # the largest share of the training thread's time that readings take

_ENOUGH_S: Final = 0.5  # the kernel counts in hundredths of a second: less is no evidence
_ENOUGH_FETCH_NS: Final = 50_000_000

AUTOGRAD: Final = "pt_autograd"  # PyTorch's name of the threads that run backward for a GPU


@dataclass(slots=True)
class _Sums:
    """What was used in the steps that count."""

    wall_s: float = 0.0
    process_s: float = 0.0
    children_s: float = 0.0  # of the processes that it started
    idle_s: float | None = 0.0  # of all cores
    worker_s: float = 0.0  # that its workers were there, each by itself
    worker_busy_s: float = 0.0
    known_s: float = 0.0  # in which it is known whether the training thread waited for a core
    waits_s: float = 0.0
    throttled_s: float = 0.0
    throttled_periods: int = 0
    stolen_s: float = 0.0
    pressure_s: float = 0.0
    switches: int = 0


class CpuAccount:
    """Reads CPU times at both ends of consecutive steps that count, and up to twice a second in between."""

    def __init__(
        self,
        workers: Callable[[], Sequence[int]],
        read: Callable[[Sequence[int]], CpuTimes] | None = None,
        threads: str = "",
    ) -> None:
        self._workers, self._times = workers, read or partial(cpu_times, threads=threads)
        self._first: CpuTimes | None = None
        self._last: CpuTimes | None = None
        self._sums = _Sums()
        self._readings = 0
        self._marks: Marks[tuple[float, float]] = Marks()  # seconds, and those in which it waited
        # for how long the thread has waited for a core only because the stack sampler woke it, in nanoseconds
        self.woken_ns: Callable[[], int] = lambda: 0
        self._woken_then_ns = 0  # at the last reading
        self.clock: ThreadClock | None = None  # that of the training thread; None if the system does not have it
        self._turned_ns = 0, 0, 0
        self._period_s = ACCOUNT_PERIOD_S
        # wall, CPU, waits for a core, and the three longest times in which it was blocked, ascending
        self._regions_ns: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 6)
        self._regions_then_ns: dict[str, list[int]] = {}  # at the last reading

    def watch_thread(self) -> None:
        """Read the CPU time of this thread at each `turn` from here on, if the system has it."""
        try:
            self.clock = ThreadClock()
            self.clock.ns()
        except (OSError, ValueError):  # as in a sandbox: waits are then unknown
            self.close()

    def close(self) -> None:
        """Close what was opened to read."""
        clock, self.clock = self.clock, None
        if clock is not None:
            clock.close()

    def turn(self, region: str) -> None:
        """A region of a split step ends: add its time, the CPU time in it, and its waits for a core. Takes 2 us."""
        if self.clock is None:
            return
        waited_ns, now_ns, cpu_ns = self.clock.ns()[1] - self.woken_ns(), perf_counter_ns(), thread_time_ns()
        if self._last is not None or region == VALIDATION_DATA:
            sums, (then_ns, cpu_then_ns, waited_then_ns) = self._regions_ns[region], self._turned_ns
            sums[0] += now_ns - then_ns
            sums[1] += cpu_ns - cpu_then_ns
            sums[2] += waited_ns - waited_then_ns
            blocked_ns = (now_ns - then_ns) - (cpu_ns - cpu_then_ns) - (waited_ns - waited_then_ns)
            if blocked_ns > sums[3]:
                sums[3:] = sorted((blocked_ns, *sums[4:]))
        self._turned_ns = now_ns, cpu_ns, waited_ns

    def due(self, now_s: float, *, counts: bool) -> bool:
        """Whether to `read` between two steps, of which the later one counts or not, by `time.perf_counter`."""
        if self._last is None or not counts:
            return counts or self._last is not None
        return now_s - self._last.at_s >= self._period_s

    def read(self, *, counts: bool) -> None:
        """Read, and add what was used since the last reading if that was of steps that count."""
        began_ns = thread_time_ns()
        before, now = self._last, self._times(self._workers())
        woken_ns, self._woken_then_ns = self.woken_ns() - self._woken_then_ns, self.woken_ns()
        self._period_s = max(ACCOUNT_PERIOD_S, (thread_time_ns() - began_ns) / 1e9 / _SHARE)
        self._first = self._first or now
        self._last = now if counts else None
        self._regions_then_ns = {region: [*ns] for region, ns in self._regions_ns.items()}
        if before is not None:
            self._add(before, now, woken_ns / 1e9)

    def skip(self) -> None:
        """Leave out what was since the last reading: training stood still."""
        self._last = None
        for region, ns in self._regions_ns.items():
            ns[:] = self._regions_then_ns.get(region, [0] * 6)

    def _add(self, before: CpuTimes, now: CpuTimes, woken_s: float) -> None:
        sums, wall_s = self._sums, now.at_s - before.at_s
        sums.wall_s += wall_s
        sums.process_s += now.process_s - before.process_s
        if sums.idle_s is None or now.idle_s is None or before.idle_s is None:
            sums.idle_s = None
        else:
            sums.idle_s += now.idle_s - before.idle_s
        # a child that was not known while it ran counts with its whole life when it ends: at most what there was
        most_s = usable_cores() * wall_s - (now.process_s - before.process_s)
        sums.children_s += min(max(now.children_s - before.children_s, 0.0), max(most_s, 0.0))
        for pid in now.processes_s.keys() & before.processes_s.keys():
            busy_s = sum(now.processes_s[pid]) - sum(before.processes_s[pid])
            sums.worker_s += wall_s
            sums.worker_busy_s += min(busy_s, wall_s)
        if now.thread_s is not None and before.thread_s is not None:
            if self._readings >= self._marks.due:
                self._marks.add(self._readings, (sums.known_s, sums.waits_s))
            sums.known_s += wall_s
            sums.waits_s += min(max(waited_s(before, now) - woken_s, 0.0), wall_s)
            self._readings += 1
        sums.stolen_s += _grown(before.stolen_s, now.stolen_s)
        sums.pressure_s += _grown(before.pressure_s, now.pressure_s)
        sums.switches += int(_grown(before.switches, now.switches))
        if before.throttled is not None and now.throttled is not None:
            sums.throttled_s += now.throttled.seconds - before.throttled.seconds
            sums.throttled_periods += now.throttled.periods - before.throttled.periods

    def use(self, ranks: int, *, brief: bool = False) -> CpuUse | None:
        """The mean use over the steps that counted, with so many ranks on the cores; None if they were too few.

        `brief` leaves out the interval, which takes a millisecond.
        """
        sums = self._sums
        if sums.wall_s < _ENOUGH_S or self._first is None:
            return None
        cores, used = usable_cores() / ranks, sums.process_s / sums.wall_s
        workers = sums.children_s / sums.wall_s
        left = cores - used - workers  # of a container's quota
        idle = None if sums.idle_s is None else sums.idle_s / sums.wall_s / ranks
        pct = 100 / sums.wall_s
        return CpuUse(
            cores=cores,
            used=used,
            idle=None if idle is None else max(min(idle, left), 0.0),
            threads=torch.get_num_threads(),
            loader_busy_pct=self._loader_busy_pct(),
            validation_busy_pct=self._busy_pct(VALIDATION_DATA),
            workers=workers,
            batch_ms=batch_ms(),
            waits_pct=pct * sums.waits_s if self._readings else None,
            waits=None if brief else share_of(self._marks, self._readings, (sums.known_s, sums.waits_s)),
            throttled_pct=min(pct * sums.throttled_s, 100.0),
            throttled_periods=sums.throttled_periods,
            stolen_pct=pct * sums.stolen_s / max(usable_cores(), 1),
            pressure_pct=pct * sums.pressure_s,
            switches_per_s=sums.switches / sums.wall_s,
            missing=self._first.missing,
            regions=self._regions(),
        )

    def _regions(self) -> dict[str, RegionCpu]:
        """What the training thread did in each built-in region, in percent of its time."""
        regions: dict[str, RegionCpu] = {}
        data = [sum(ns) for ns in zip(*(self._regions_ns[name] for name in ("data", *BETWEEN_EPOCHS)), strict=True)]
        for name, (wall_ns, cpu_ns, waited_ns, *longest_ns) in {**self._regions_ns, "data": data}.items():
            if name in REGIONS and wall_ns > 0:
                blocked_ns = max(wall_ns - cpu_ns - waited_ns, 0)
                longer_ns = sum(longest_ns) - 3 * min(longest_ns)
                regions[name] = RegionCpu(
                    used_pct=min(100 * cpu_ns / wall_ns, 100.0),
                    waits_pct=min(max(100 * waited_ns / wall_ns, 0.0), 100.0),
                    blocked_pct=(blocked_pct := min(100 * blocked_ns / wall_ns, 100.0)),
                    longer_pct=min(100 * longer_ns / wall_ns, blocked_pct),
                )
        return regions

    def _loader_busy_pct(self) -> float | None:
        sums = self._sums
        if sums.worker_s >= _ENOUGH_S:
            return 100 * sums.worker_busy_s / sums.worker_s
        return self._busy_pct("data", *BETWEEN_EPOCHS)

    def _busy_pct(self, *regions: str) -> float | None:
        """For what share of some regions the thread used a core or waited for one; None for too short ones."""
        wall_ns, cpu_ns, waited_ns, *_ = (
            sum(ns) for ns in zip(*map(self._regions_ns.__getitem__, regions), strict=True)
        )
        if wall_ns < _ENOUGH_FETCH_NS:
            return None
        # of the time in which it had a core or asked for none: one that sleeps waits for a core on a busy machine, too
        return float(min(100 * cpu_ns / max(wall_ns - max(waited_ns, 0), 0.01 * wall_ns), 100.0))


def share_of(marks: Marks[tuple[float, float]], count: int, now: tuple[float, float]) -> ShareInterval | None:
    """The share of a part in a time, both by marks and now, after so many readings, with its interval."""
    blocks = list(pairwise([*marks.read(), (count, now)]))
    part, whole = ([end[place] - begin[place] for (_, begin), (_, end) in blocks] for place in (1, 0))
    return share_interval(part, whole, [end - begin for (begin, _), (end, _) in blocks])


def _grown(before: float | None, now: float | None) -> float:
    return 0.0 if before is None or now is None else now - before
