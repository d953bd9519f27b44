"""CPU time of the training process, of its loader and of the machine's cores, over the counted steps of a run."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import Final

import torch

from lightning_forge_profiling.host import CoreWait, CpuTimes, cpu_times, usable_cores
from lightning_forge_profiling.results.cpu import CpuUse

ACCOUNT_PERIOD_S: Final = 1.0
"""A reading takes some 0.1 ms, and workers that ended cannot be read."""

_ENOUGH_S: Final = 0.5
"""The kernel counts in hundredths of a second: less is no evidence."""

_ENOUGH_FETCH_NS: Final = 50_000_000


class CpuAccount:
    """Reads CPU times at both ends of a row of steps that count, and once a second in between.

    Args:
        workers: returns the process ids of the loader's workers.
        read: reads the CPU times of this process and those.
    """

    def __init__(
        self, workers: Callable[[], Sequence[int]], read: Callable[[Sequence[int]], CpuTimes] = cpu_times
    ) -> None:
        self._workers, self._times = workers, read
        self._last: CpuTimes | None = None
        self._wall_s = self._process_s = 0.0
        self._idle_s: float | None = 0.0
        self._worker_s = self._worker_busy_s = 0.0
        self._thread_s = self._thread_waits_s = 0.0
        self._fetch_began_ns = 0, 0
        self._fetch_ns = self._fetch_cpu_ns = 0
        self._stack: list[str] = []
        self._core_wait: CoreWait | None = None
        self._measures: Callable[[], bool] = bool
        self._turned_ns = 0, 0
        self._inside_ns: Counter[str] = Counter()
        self._blocked_ns: Counter[str] = Counter()

    def inside(self, measures: Callable[[], bool]) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """What to call at both ends of the regions in which training may wait without using a core.

        Args:
            measures: whether the current step is one to measure; each end of a region takes some 2 us.
        """
        self._measures = measures
        try:
            self._core_wait = CoreWait()
            self._core_wait.ns()
        except (OSError, ValueError, IndexError):  # as in a sandbox: such waits are then unknown
            return {}
        return {name: (partial(self._begins, name), self._ends) for name in ("forward", "backward")}

    def close(self) -> None:
        """Close what was opened to read."""
        core_wait, self._core_wait = self._core_wait, None
        if core_wait is not None:
            core_wait.close()

    def _begins(self, region: str) -> None:
        if self._measures():
            self._turn()  # manual optimization runs backward inside of forward
            self._stack.append(region)

    def _ends(self) -> None:
        if self._stack:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        """Add the time since the last turn to the innermost region: all of it, and what was without a core."""
        waited_ns = 0 if self._core_wait is None else self._core_wait.ns()
        now_ns = perf_counter_ns()
        blocked_ns = now_ns - thread_time_ns() - waited_ns
        if self._stack and self._last is not None:
            region, (turned_ns, blocked_before_ns) = self._stack[-1], self._turned_ns
            self._inside_ns[region] += now_ns - turned_ns
            self._blocked_ns[region] += max(blocked_ns - blocked_before_ns, 0)
        self._turned_ns = now_ns, blocked_ns

    def fetch_begins(self) -> None:
        """The training thread begins to wait for a batch."""
        self._fetch_began_ns = perf_counter_ns(), thread_time_ns()

    def fetch_ends(self) -> None:
        """It has the batch."""
        began_ns, cpu_ns = self._fetch_began_ns
        if self._last is not None:
            self._fetch_cpu_ns += thread_time_ns() - cpu_ns
            self._fetch_ns += perf_counter_ns() - began_ns

    def due(self, now_s: float, *, counts: bool) -> bool:
        """Whether to `read` between two steps, of which the later one counts or not, by `time.perf_counter`."""
        if self._last is None or not counts:
            return counts or self._last is not None
        return now_s - self._last.at_s >= ACCOUNT_PERIOD_S

    def read(self, *, counts: bool) -> None:
        """Read, and add what was used since the last reading if that was of steps that count."""
        before, now = self._last, self._times(self._workers())
        self._last = now if counts else None
        if before is not None:
            self._add(before, now)

    def _add(self, before: CpuTimes, now: CpuTimes) -> None:
        wall_s = now.at_s - before.at_s
        self._wall_s += wall_s
        self._process_s += now.process_s - before.process_s
        if self._idle_s is None or now.idle_s is None or before.idle_s is None:
            self._idle_s = None
        else:
            self._idle_s += now.idle_s - before.idle_s
        for pid in now.processes_s.keys() & before.processes_s.keys():
            busy_s = sum(now.processes_s[pid]) - sum(before.processes_s[pid])
            self._worker_s += wall_s
            self._worker_busy_s += min(busy_s, wall_s)
        if now.thread_s is not None and before.thread_s is not None:
            self._thread_s += now.thread_s[0] - before.thread_s[0]
            self._thread_waits_s += now.thread_s[1] - before.thread_s[1]

    def use(self, ranks: int) -> CpuUse | None:
        """The mean use over the steps that counted, with so many ranks on the cores; None if they were too few."""
        if self._wall_s < _ENOUGH_S:
            return None
        cores, used = usable_cores() / ranks, self._process_s / self._wall_s
        left = cores - used - self._worker_busy_s / self._wall_s  # of a container's quota
        idle = None if self._idle_s is None else self._idle_s / self._wall_s / ranks
        return CpuUse(
            cores=cores,
            used=used,
            idle=None if idle is None else max(min(idle, left), 0.0),
            threads=torch.get_num_threads(),
            loader_busy_pct=self._loader_busy_pct(),
            blocked_pct={name: 100 * self._blocked_ns[name] / ns for name, ns in self._inside_ns.items() if ns},
        )

    def _loader_busy_pct(self) -> float | None:
        if self._worker_s >= _ENOUGH_S:
            return 100 * self._worker_busy_s / self._worker_s
        if self._fetch_ns < _ENOUGH_FETCH_NS or not self._thread_s:
            return None
        waits = 1 + self._thread_waits_s / self._thread_s  # for a core, as often in the fetch as elsewhere
        return min(100 * self._fetch_cpu_ns * waits / self._fetch_ns, 100.0)
