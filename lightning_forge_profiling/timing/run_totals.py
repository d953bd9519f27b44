"""The totals of a run: which steps count, which are left out and why, and the counters of those that do."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.names import (
    BETWEEN_EPOCHS,
    EXCLUDED,
    HANG,
    OWN_WORK,
    PROFILER,
    REGIONS,
    STEPS,
    WAIT_PREFIX,
    WHOLE,
)
from lightning_forge_profiling.schema import (
    Distribution,
    EndToEnd,
    LeftOutSteps,
    RunRegion,
    RunTiming,
    SlowStep,
    StepCounters,
)
from lightning_forge_profiling.timing.bootstrap import FEWEST_PIECES, share_intervals, step_drift, window_effect
from lightning_forge_profiling.timing.counters import (
    KINDS,
    Marks,
    Typical,
    added,
    combined,
    copied,
    count_step,
    step_total_ms,
)
from lightning_forge_profiling.timing.estimate import region_pieces, timing_of, with_between
from lightning_forge_profiling.timing.growth import part_growth, region_growth
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork

MEDIAN_OVER: Final = 4096  # the median covers at most this many recent steps, which is what is kept of them

# the percentiles of regions cover at most this many recent steps of those whose regions were timed
REGIONS_OVER: Final = 1024

_FEWEST_FOR_P95: Final = 20  # one step in twenty lies above the 95th percentile
_MOST: Final = 5
_SHOWN: Final = 3
_LATEST: Final = 64


class TimedStep(NamedTuple):
    """A step and its time."""

    ms: float  # device time; host time without a GPU
    step: int
    ended_ns: int  # by the host's clock; 0 if unknown
    device_ms: Mapping[str, float]  # by region, for the regions that were timed


class SlowestSteps:
    """Keeps the five slowest steps."""

    def __init__(self) -> None:
        self.least_ms = 0.0  # a step that took no longer than this need not be added
        self.steps: tuple[TimedStep, ...] = ()  # slowest first

    def add(self, slow: TimedStep) -> None:
        """Add a step that took longer than `least_ms`."""
        self.steps = tuple(sorted((*self.steps, slow), key=lambda each: (-each.ms, each.step))[:_MOST])
        if len(self.steps) == _MOST:
            self.least_ms = self.steps[-1].ms


LeftOut = Literal["warm-up", "recorded", "stalled"]

# steps at the start of a fit, and right after a window, that say nothing about the others' pace
SETTLING_STEPS: Final = 5
_BESIDE_WINDOW: Final = 256  # how many steps before a window and after it are kept, to compare them
_FIRST: Final = 512  # how many of the first counted steps are kept, to see whether their time drifts
_FIRST_ENOUGH: Final = 128  # a window ends that; if there were fewer, it begins anew behind the window


class CountedSteps:
    """Counters of steps, and the times of the latest of them, for medians."""

    def __init__(
        self, regions: tuple[str, ...], bucket: Callable[[float], int] | None = None, *, on_device: bool
    ) -> None:
        self.counters = StepCounters()
        self._regions, self._bucket, self._on_device = regions, bucket, on_device
        self._typical = Typical(), Typical()  # accumulating, changing the weights
        # of each step how long, and whether weights changed: numbers, which the garbage collector does not count
        self._latest: deque[float] = deque(maxlen=MEDIAN_OVER)
        self._latest_changed: deque[bool] = deque(maxlen=MEDIAN_OVER)
        self._latest_split: deque[tuple[Mapping[str, float], bool]] = deque(maxlen=REGIONS_OVER)  # and whether chosen
        self._shortest_ms, self._longest_ms = float("inf"), 0.0

    def add(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        """Add a step with its time."""
        _, device_ms, host_ms = times
        changes = work.optimizer_steps > 0
        self._latest.append(took_ms)
        self._latest_changed.append(changes)
        self._shortest_ms = min(self._shortest_ms, took_ms)
        self._longest_ms = max(self._longest_ms, took_ms)
        counters = self.counters
        if self._bucket is not None:
            bucket, histogram = self._bucket(took_ms), counters.steps_us
            histogram[bucket] = histogram.get(bucket, 0) + 1
        kind = KINDS[changes][self._typical[changes].length(took_ms)]
        count_step(counters, kind, device_ms, host_ms, took_ms, work, timing)
        if WHOLE not in device_ms:
            self._latest_split.append((device_ms, timing.chosen))

    def of(self, counters: StepCounters, workers: int = 0) -> RunTiming:
        """The figures of some of the steps, without their distribution."""
        return timing_of(counters, self._regions, on_device=self._on_device, workers=workers)

    def timing(self, counters: StepCounters | None = None, workers: int = 0) -> RunTiming:
        """The figures of the steps with their distribution."""
        timing = self.of(counters or self.counters, workers)
        if not self._latest:
            return timing
        p50, p95 = percentiles(list(self._latest))
        mean_ms = timing.step_ms.mean
        return replace(
            timing,
            step_ms=Distribution(mean=mean_ms, p50=p50, min=self._shortest_ms, max=self._longest_ms, p95=p95),
            typical_mean_ms=self._typical_mean_ms(),
            regions=self._spread(timing),
        )

    def _typical_mean_ms(self) -> float:
        latest, counters = [*zip(self._latest, self._latest_changed, strict=True)], self.counters
        kinds = [[ms for ms, changes in latest if changes is kind] for kind in (False, True)]
        counts = (counters.steps - counters.optimizer_steps, counters.optimizer_steps)
        medians = [(count, median(times)) for count, times in zip(counts, kinds, strict=True) if times]
        return sum(count * ms for count, ms in medians) / max(sum(count for count, _ in medians), 1)

    def split_steps(self) -> list[dict[str, float]]:
        """Times by region of the latest split steps."""
        # if some steps are unsplit, the forced ones are left out: they would count too often.
        split = sum(group.split for group in self.counters.groups.values())
        only_chosen = split < self.counters.steps and any(chosen for _, chosen in self._latest_split)
        return [region_times(times, self._regions) for times, chosen in self._latest_split if chosen or not only_chosen]

    def _spread(self, timing: RunTiming) -> dict[str, RunRegion]:
        """The regions with percentiles over the latest split steps: 0 in a step without it."""
        steps = self.split_steps()
        spread = {name: percentiles([times.get(name, 0.0) for times in steps]) for name in timing.regions}
        return {
            name: replace(region, p50_ms=spread[name][0], p95_ms=spread[name][1])
            for name, region in timing.regions.items()
        }


def percentiles(times_ms: Sequence[float]) -> tuple[float, float | None]:
    """The median and 95th percentile of times, None for fewer than 20."""
    enough = len(times_ms) >= _FEWEST_FOR_P95
    return median(times_ms), quantiles(times_ms, n=20, method="inclusive")[-1] if enough else None


def region_times(times_ms: Mapping[str, float], regions: tuple[str, ...] = REGIONS) -> dict[str, float]:
    """Times by region, what is between two epochs in one of them."""
    apart = {name: ms for name, ms in times_ms.items() if name not in BETWEEN_EPOCHS}
    between_ms = sum(times_ms.get(part, 0.0) for part in BETWEEN_EPOCHS)
    return with_between(apart, between_ms, "data" if "data" in regions else "other")


def own_ms(region_ms: Mapping[str, float]) -> float:
    """Time of the built-in regions without measured waits for other ranks."""
    waits_ms = sum(ms for name, ms in region_ms.items() if name.startswith(WAIT_PREFIX))
    return sum(ms for name, ms in region_times(region_ms).items() if name in REGIONS) - waits_ms


class BesideWindow:
    """Times of the steps before a recorded window and after it, and of the first that count, for comparisons."""

    def __init__(self) -> None:
        self.after_ms: list[float] = []
        self._before: deque[float] = deque(maxlen=_BESIDE_WINDOW)
        self._ended = 0  # the step after the window; 0 before it
        self._first: tuple[dict[int, float], dict[int, float]] = {}, {}  # accumulating, changing the weights
        self._left = _FIRST

    def add(self, step: int, took_ms: float) -> None:
        """Add a step that was not recorded."""
        if not self._ended:
            if step >= SETTLING_STEPS:
                self._before.append(took_ms)
        elif step >= self._ended + SETTLING_STEPS and len(self.after_ms) < _BESIDE_WINDOW:
            self.after_ms.append(took_ms)

    def add_counted(self, step: int, took_ms: float, *, changes: bool) -> None:
        """Add a step that counts, and does or does not change the weights."""
        if self._left and step >= (self._ended and self._ended + SETTLING_STEPS):
            self._left -= 1
            self._first[changes][step] = took_ms

    def add_recorded(self, step: int) -> None:
        """Add a step of the window."""
        self._ended = step + 1
        enough = _FIRST - self._left >= _FIRST_ENOUGH
        self._left = 0 if enough else _FIRST
        if not enough:
            self._first = {}, {}

    @property
    def before_ms(self) -> tuple[float, ...]:
        """Times of the latest steps before the window; empty without one."""
        return tuple(self._before) if self._ended else ()

    @property
    def first_ms(self) -> dict[int, float]:
        """Times of the first steps that count by number, of the more frequent kind."""
        accumulating, changing = self._first
        return dict(accumulating if len(accumulating) > len(changing) else changing)


class Portions:
    """Counters in the portions that log entries and the record take: of accumulation cycles, for log entries whole."""

    def __init__(self, counters: StepCounters) -> None:
        self.cycle: StepCounters | None = None  # before one that has begun, if it has more than one step
        self.is_broken = False  # whether log entries leave it out
        self.log_us = 0.0  # host time that log entries and the record took between steps
        self._counters = counters
        self._not_logged = StepCounters()  # of such cycles
        self._logged, self._recorded = StepCounters(), StepCounters()  # what log entries and the record have had

    def begin_cycle(self) -> None:
        """Begin an accumulation cycle."""
        self.cycle = copied(self._counters)

    def end_cycle(self) -> None:
        """End it, if one has begun."""
        if self.cycle is not None and self.is_broken:
            self._not_logged = combined(self._not_logged, combined(self._counters, self.cycle, -1))
        self.cycle, self.is_broken = None, False

    def logged(self) -> StepCounters:
        """Those since the last call, in whole accumulation cycles."""
        before = self._logged
        self._logged = combined(self.cycle or self._counters, self._not_logged, -1)
        self._logged.log_entries_us = self.log_us
        return combined(self._logged, before, -1)

    def recorded(self, *, last: bool) -> StepCounters:
        """Those since the last call but for those that `logged` has still to return."""
        # together these are all counted steps, those of broken accumulation cycles included.
        before = self._recorded
        if last:
            self.cycle, self.is_broken = None, False
            self._recorded = copied(self._counters)
            self._logged = combined(self._recorded, self._not_logged, -1)
            self._recorded.log_entries_us = self._logged.log_entries_us = self.log_us
        else:
            self._recorded = combined(self._logged, self._not_logged)
            if self.cycle is not None and self.is_broken:
                self._recorded = combined(self._recorded, combined(self._counters, self.cycle, -1))
        return combined(self._recorded, before, -1)


class RunTotals:
    """Sums up the steps of a run: those that count, and those that are left out with the reason."""

    def __init__(
        self,
        regions: tuple[str, ...] = REGIONS,
        bucket: Callable[[float], int] | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self._counted = CountedSteps(regions, bucket, on_device=on_device)
        self._warmup, self._first = (CountedSteps(regions, on_device=on_device) for _ in range(2))
        self._marks: Marks[StepCounters] = Marks()
        self._portions = Portions(self._counted.counters)
        self._beside = BesideWindow()
        self._left_out: dict[str, int] = {"warm-up": 0, "recorded": 0, "stalled": 0}
        self._excluded_ms = dict.fromkeys(EXCLUDED, 0.0)
        self._samples: float | None = 0.0
        self._first_step_s: float | None = None
        self._recorded_tokens: dict[int, float] = {}
        self._slowest = SlowestSteps()
        self.stalls: list[str] = []  # what is said of steps in which training stood still
        # the latest that count and were split by choice, and whether the GPU waited; read in another thread
        self.latest: deque[tuple[StepTimes, bool | None]] = deque(maxlen=_LATEST)

    def add(self, times: StepTimes, work: StepWork, left_out: LeftOut | None, timing: StepTiming | None = None) -> None:
        """Enter one step."""
        timing = timing or StepTiming()
        if self._samples is not None:
            self._samples = added(self._samples, work.samples)
        if len(times.device_ms) > 1 or times.split:  # else it is one piece, with nothing beside it
            self.add_excluded(times)
        took_ms = times.step_ms
        if times.step == 0:
            self._first_step_s = (
                sum(times.device_ms.get(name, 0.0) for name in (*REGIONS, *BETWEEN_EPOCHS, WHOLE, *EXCLUDED)) / 1e3
            )
        if left_out not in {"recorded", "stalled"}:
            self._beside.add(times.step, took_ms)
        if left_out is None:
            self._add_counted(times, took_ms, work, timing)
            return
        self.skip(work)
        self._left_out[left_out] += 1
        if left_out == "recorded":
            self._beside.add_recorded(times.step)
            if work.tokens is not None:
                self._recorded_tokens[times.step] = work.tokens
        if left_out == "warm-up":
            (self._warmup if times.step else self._first).add(times, took_ms, work, timing)

    def _add_counted(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        self._beside.add_counted(times.step, took_ms, changes=work.optimizer_steps > 0)
        if took_ms > self._slowest.least_ms:
            by_region = times.device_ms if times.split else {}
            self._slowest.add(TimedStep(took_ms, times.step, timing.ended_ns, by_region))
        counted, portions = self._counted, self._portions
        if times.step >= self._marks.due:
            self._marks.add(times.step, copied(counted.counters))
        if portions.cycle is None and not work.ends_cycle:
            portions.begin_cycle()
        counted.add(times, took_ms, work, timing)
        if portions.cycle is not None and work.ends_cycle:
            portions.end_cycle()
        if timing.chosen and times.split:  # one that had to be split, as after validation, is unlike the others
            self.latest.append((times, timing.gpu_starved))

    @property
    def slowest(self) -> tuple[TimedStep, ...]:
        """The slowest steps that count, the slowest first."""
        return self._slowest.steps

    def skip(self, work: StepWork) -> None:
        """Leave the accumulation cycle of a step that does not count out of the log entries."""
        portions = self._portions
        if portions.cycle is None and not work.ends_cycle:
            portions.begin_cycle()
        portions.is_broken = True
        if work.ends_cycle:
            portions.end_cycle()

    def add_excluded(self, times: StepTimes) -> None:
        """Enter validation, checkpoints and the profiler's stalls, which are not part of a step."""
        for name in EXCLUDED:
            if name in times.device_ms:
                self._excluded_ms[name] += times.device_ms[name]

    def take(self) -> RunTiming:
        """Figures of the counted steps since the last call, in whole accumulation cycles."""
        return self._counted.of(self._portions.logged())

    def take_interval(self, *, last: bool = False) -> StepCounters:
        """Counters of the steps since the last call but for those that `take` has still to return."""
        return self._portions.recorded(last=last)

    def counters(self) -> StepCounters:
        """Those of all steps that count, as they are now."""
        counters = copied(self._counted.counters)
        counters.log_entries_us = self._portions.log_us
        return counters

    def blocks(self, every: int = 1) -> list[tuple[int, StepCounters]]:
        """Up to 64 blocks of steps, each from a step that so many divide, and the counters of its steps."""
        marks = [*self._marks.read(every), (0, copied(self._counted.counters))]
        return [(step, combined(end, begin, -1)) for (step, begin), (_, end) in pairwise(marks)]

    def add_log_time(self, us: float) -> None:
        """Add host time in microseconds that log entries and the record took between steps."""
        self._portions.log_us += us

    def steady(self) -> RunTiming:
        """Figures of all steps that count, without their distribution: for log entries."""
        return self._counted.of(self.counters())

    def timing(
        self,
        *,
        steps: int,
        before_first_s: float,
        wall_s: float,
        workers: int = 0,
        ledger: LedgerClock | None = None,
    ) -> RunTiming:
        """All that is known of the run's steps; of a run of warm-up steps only, of those.

        Args:
            steps: how many have ended.
            before_first_s: from the start of fit to that of its first step.
            wall_s: from the start of fit to now, or to the end of training.
            workers: how many processes each new iterator of the loader starts.
            ledger: names parts of slow steps, and the parts inside the step.
        """
        shown = next((some for some in (self._counted, self._warmup) if some.counters.steps), self._first)
        counted = self._counted.counters.steps
        warmup, recorded, stalled = self._left_out.values()
        timing = shown.timing(self.counters() if shown is self._counted else None, workers)
        first_ms, long_parts = self._beside.first_ms, {} if ledger is None else ledger.long_parts()
        return replace(
            timing,
            all_steps=steps,
            only_warmup=not counted,
            left_out=LeftOutSteps(
                warmup=warmup,
                recorded=recorded,
                stalled=stalled,
                untimed=max(steps - counted - warmup - recorded - stalled, 0),
                stalls=tuple(self.stalls[-_SHOWN:]),
                excluded_ms=dict(self._excluded_ms),
                recorded_tokens=dict(self._recorded_tokens),
            ),
            end_to_end=EndToEnd(
                samples=self._samples,
                first_step_s=None if self._first_step_s is None else before_first_s + self._first_step_s,
                wall_s=wall_s,
            ),
            slowest=tuple(_slow_step(slow, long_parts.get(slow.step, {}), ledger) for slow in self._slowest.steps),
            drift=step_drift([*first_ms], [*first_ms.values()]),
            window_effect=window_effect(self._beside.before_ms, self._beside.after_ms),
            **self._by_part(Marks() if ledger is None else ledger.marks()),
        )

    def _by_part(self, parts: Marks[Mapping[str, int]]) -> dict[str, Any]:
        """The fields of a timing that have each region and each part of the ledger over blocks of steps."""
        every = max(self._marks.every, parts.every)
        blocks = self.blocks(every)
        if len(blocks) < FEWEST_PIECES:
            return {}
        ends = [(parts.at(step) or {}, parts.at(step + every) or {}) for step, _ in blocks]
        names = dict.fromkeys(name for _, after in ends for name in after)
        parts_ms = {
            name: [(after.get(name, 0) - before.get(name, 0)) / 1e6 for before, after in ends] for name in names
        }
        counters = [block for _, block in blocks]
        whole, steps = [*map(step_total_ms, counters)], [block.steps for block in counters]
        regions = region_pieces(counters)
        regions_ms = {name: [one.get(name, 0.0) for one in regions] for name in REGIONS}
        regions_ms[OWN_WORK] = [own_ms(one) for one in regions]
        step_ms = [ms / count for ms, count in zip(whole, steps, strict=True)]
        grows = {
            name: part_growth([ms / count for ms, count in zip(times, steps, strict=True)], step_ms)
            for name, times in parts_ms.items()
            if name not in {STEPS, PROFILER, HANG}
        }
        of_regions = region_growth(self._counted.split_steps(), step_ms)
        return {
            "intervals": share_intervals({**parts_ms, **regions_ms}, whole, steps),
            "grows": of_regions | {name: growth for name, growth in grows.items() if growth is not None},
        }


def _slow_step(slow: TimedStep, parts_s: Mapping[str, float], ledger: LedgerClock | None) -> SlowStep:
    return SlowStep(
        step=slow.step,
        ms=slow.ms,
        end_s=None if ledger is None or not slow.ended_ns else (slow.ended_ns - ledger.began_ns) / 1e9,
        parts_ms={name: 1e3 * seconds for name, seconds in parts_s.items()},
        regions_ms={name: ms for name, ms in region_times(slow.device_ms).items() if name in REGIONS},
    )
