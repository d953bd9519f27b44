"""A rank's work over its latest steps, for the other ranks to be compared with."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import sqrt
from statistics import fmean, median, stdev
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.ranks import rank_work
from lightning_forge_profiling.names import (
    DATA_LOADER,
    GC_FULL,
    GC_YOUNG,
    OWN_WORK,
    REGIONS,
    SIGTERM_LEAF,
    WAIT_PREFIX,
    hook_region,
)
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import WatchedWaits
from lightning_forge_profiling.schema import (
    CpuUse,
    RankWork,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunRanks,
    ShareInterval,
    StepCounters,
)
from lightning_forge_profiling.timing.counters import KINDS, count_step
from lightning_forge_profiling.timing.estimate import timing_of
from lightning_forge_profiling.timing.run_totals import own_ms
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork

_FEWEST: Final = 8  # steps
_BLOCKS: Final = 8
_T: Final = 2.365  # Student's t for the 95 % interval of the mean of 8 blocks
_MARKS: Final = 256


class LiveWork:
    """Computes the rank's work over its latest steps, in another thread than training."""

    def __init__(
        self,
        step_timer: StepTimer,
        rank: int,
        host: str,
        *,
        waits: WatchedWaits | None,
        cpu: Callable[[], CpuUse | None],
        sensors: Callable[[], Mapping[str, float]],
    ) -> None:
        self._step_timer, self._rank, self._host = step_timer, rank, host
        self._waits, self._cpu, self._sensors = waits, cpu, sensors
        # number of a step, and nanoseconds by part of the ledger until then
        self._marks: deque[tuple[int, dict[str, int]]] = deque(maxlen=_MARKS)
        self._work: RankWork | None = None
        self._until = -1

    def latest(self) -> RankWork | None:
        """The work over the latest steps; None before enough of them."""
        with suppress(RuntimeError):  # training has changed what was just being read
            self._renew()
        return self._work

    def _renew(self) -> None:
        step_timer = self._step_timer
        latest, ledger = list(step_timer.totals.latest), step_timer.ledger
        if not self._marks and ledger.counted.since is not None:
            self._marks.append((step_timer.warmup_steps, ledger.counted.since))
        if self._marks:
            self._marks.append((step_timer.step, ledger.peek()))
        if len(latest) >= _FEWEST and latest[-1][0].step != self._until:
            self._until = latest[-1][0].step
            self._work = self._work_of(latest)

    def _work_of(self, latest: Sequence[tuple[StepTimes, bool | None]]) -> RankWork:
        steps, sensors, counters = [times for times, _ in latest], self._sensors(), StepCounters()
        for times, starved in latest:
            count_step(
                counters, KINDS[1][0], times.device_ms, times.host_ms, times.step_ms, StepWork(), StepTiming(starved)
            )
        timing = timing_of(counters, on_device=self._step_timer.timers.on_device)
        own_work = mean_interval([own_ms(times.device_ms) for times in steps], timing.step_ms.mean)
        evidence = RunEvidence(
            timing=replace(timing, intervals={OWN_WORK: own_work}),
            machine=RunMachine(cpu=self._cpu()),
            ranks=RunRanks(rank=self._rank),
            ledger=self._hooks(steps[0].step, len(steps)),
        )
        waits = None if self._waits is None else self._waits.measured(timing)
        work = rank_work(evidence, host=self._host, waits=waits)
        return replace(work, sm_mhz=sensors.get("sm_mhz"), throttled_pct=sensors.get("throttled_pct"))

    def _hooks(self, first: int, steps: int) -> RunLedger | None:
        """The hooks, loggers and collections of the mean step since about the step `first`, as those of so many."""
        if not self._marks:
            return None
        before, now = [mark for mark in self._marks if mark[0] <= first], self._marks[-1]
        then = before[-1] if before else self._marks[0]
        if now[0] - then[0] < _FEWEST:
            return None
        each = steps / (now[0] - then[0]) / 1e9
        parts = {
            part: (ns - then[1].get(part, 0)) * each
            for part, ns in now[1].items()
            if hook_region(part) or part in {DATA_LOADER, GC_FULL, GC_YOUNG}
        }
        counted = {part: max(seconds, 0.0) for part, seconds in parts.items() if seconds}
        return RunLedger(wall_s=0.0, parts=counted, unexplained_s=0.0, counts={}, counted_s=counted)


_STEPS: Final = 12  # fewer do not tell which are unusual
_UNUSUAL: Final = 4.0  # times the scatter of the usual steps
_AT_LEAST: Final = 0.05  # of a step
_SIGMA: Final = 1.4826  # standard deviation of a normal distribution whose median absolute deviation is 1


def late_steps(latest: Sequence[StepTimes]) -> tuple[dict[int, float], str]:
    """How much longer than usual a rank's own work took in some steps, and the region that most of it was in.

    Args:
        latest: steps whose regions were timed.

    Returns:
        Milliseconds by number of the step, 0 for about as long as usual; ({}, "") for fewer than 12 steps.
    """
    if len(latest) < _STEPS:
        return {}, ""
    own = {times.step: own_ms(times.device_ms) for times in latest}
    usual = sorted(own.values())[: len(own) // 2]  # of two ranks that are late in turns each is so in half of them
    base = median(usual)
    scatter = _SIGMA * median(abs(each - base) for each in usual)
    least = max(_UNUSUAL * scatter, _AT_LEAST * fmean(times.step_ms for times in latest))
    excess = {step: each - base if each - base > least else 0.0 for step, each in own.items()}
    late, in_time = (
        [_own_regions(times.device_ms) for times in latest if (excess[times.step] > 0) is is_late]
        for is_late in (True, False)
    )
    if not late:
        return excess, ""

    def longer_ms(region: str) -> float:
        return fmean(own.get(region, 0.0) for own in late) - median(own.get(region, 0.0) for own in in_time)

    return excess, max(REGIONS, key=longer_ms)


def _own_regions(device_ms: Mapping[str, float]) -> dict[str, float]:
    """The time of each region without measured waits for other ranks in it."""
    own = {name: device_ms.get(name, 0.0) for name in REGIONS}
    for name, ms in device_ms.items():
        leaf = name.removeprefix(WAIT_PREFIX)
        region = leaf if leaf in own else "other" if leaf == SIGTERM_LEAF else hook_region(leaf)
        if name != leaf and region in own:
            own[region] -= ms
    return own


def mean_interval(values: Sequence[float], whole: float) -> ShareInterval:
    """The mean of consecutive values as a share of a whole, with its 95 % interval by the means of eight blocks."""
    mean, length = fmean(values), len(values) // _BLOCKS
    blocks = [fmean(values[number * length : (number + 1) * length]) for number in range(_BLOCKS)]
    error = _T * stdev(blocks) / sqrt(_BLOCKS)
    pct = 100 / whole if whole > 0 else 0.0
    return ShareInterval(pct=pct * mean, low_pct=pct * (mean - error), high_pct=pct * (mean + error))
