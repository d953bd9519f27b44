"""The totals of a run: which steps count, which are left out and why, and their sums."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from lightning_forge_profiling.names import BETWEEN_EPOCHS, EXCLUDED, REGIONS, WHOLE
from lightning_forge_profiling.schema import Rates, RunRegion, RunSummary, TimedStep
from lightning_forge_profiling.timing.rates import StepTiming, StepWork
from lightning_forge_profiling.timing.steps import StepTimes
from lightning_forge_profiling.timing.sums import StepSums, Typical, added

_MOST: Final = 5
_SHOWN: Final = 3
_LATEST: Final = 64


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


_MAX_BLOCKS: Final = 64
_UNKNOWN_WORK: Final = StepWork()


@dataclass(slots=True)
class StepBlock:
    """Sums over the counted steps of one block."""

    steps: int = 0
    ms: float = 0.0
    split_steps: int = 0
    split_ms: float = 0.0
    samples: float | None = 0.0  # None if unknown
    tokens: float | None = 0.0
    histogram: Counter[int] = field(default_factory=Counter)
    region_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    part_ms: Mapping[str, float] = field(default_factory=dict)  # by part of the ledger

    def add(self, other: "StepBlock") -> None:
        """Add the sums of another block."""
        self.steps += other.steps
        self.ms += other.ms
        self.split_steps += other.split_steps
        self.split_ms += other.split_ms
        self.samples = added(self.samples, other.samples)
        self.tokens = added(self.tokens, other.tokens)
        self.histogram.update(other.histogram)
        for region, ms in other.region_ms.items():
            self.region_ms[region] += ms


class StepBlocks:
    """Adds steps to blocks of as many step numbers each; blocks double in length when they become too many."""

    def __init__(self, bucket: Callable[[float], int] | None = None) -> None:
        self._bucket = bucket
        self._length = 1
        self._blocks: dict[int, StepBlock] = {}

    def add(self, step: int, took_ms: float, region_ms: Mapping[str, float], work: StepWork = _UNKNOWN_WORK) -> None:
        """Add a counted step, with its times by region if they are known."""
        block = self._blocks.get(step // self._length)
        if block is None:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks, self._length = _merged(self._blocks, 2), 2 * self._length
            block = self._blocks.setdefault(step // self._length, StepBlock())
        block.steps += 1
        block.ms += took_ms
        block.samples = added(block.samples, work.samples)
        block.tokens = added(block.tokens, work.tokens)
        if self._bucket is not None:
            block.histogram[self._bucket(took_ms)] += 1
        if region_ms:
            block.split_steps += 1
            block.split_ms += took_ms
            for region, ms in region_ms.items():
                block.region_ms[region] += ms

    def read(self, parts: "PartMarks | None" = None) -> tuple[StepBlock, ...]:
        """The blocks in order."""
        parts = parts or PartMarks()
        length = max(self._length, parts.every)
        # a copy: another thread may be adding a block
        blocks = sorted(_merged(dict(self._blocks), length // self._length).items())
        for number, block in blocks:
            before, after = parts.at(number * length), parts.at((number + 1) * length)
            block.part_ms = {name: (ns - before.get(name, 0)) / 1e6 for name, ns in after.items()}
        return tuple(block for _, block in blocks)


class PartMarks:
    """Time so far in counted steps by part of the ledger, at up to 64 steps that are a power of 2 apart."""

    def __init__(self) -> None:
        self.every = 1  # in steps of which number times so far are kept
        self._marks: dict[int, Mapping[str, int]] = {}

    def add(self, step: int, counted_ns: Mapping[str, int]) -> None:
        """Add nanoseconds by part, before a step that `every` divides or after the last one."""
        if len(self._marks) >= _MAX_BLOCKS:
            self.every *= 2
            self._marks = {at: ns for at, ns in self._marks.items() if not at % self.every}
        self._marks[step] = counted_ns

    def until(self, step: int, counted_ns: Mapping[str, int]) -> "PartMarks":
        """These marks and the latest one, which a later step replaces."""
        ended = PartMarks()
        ended.every, ended._marks = self.every, {**self._marks, step: counted_ns}
        return ended

    def at(self, step: int) -> Mapping[str, int]:
        """Nanoseconds by part before a step; empty before the first that counts."""
        return self._marks.get(max((at for at in self._marks if at <= step), default=-1), {})


def _merged(blocks: Mapping[int, StepBlock], times: int) -> dict[int, StepBlock]:
    merged: dict[int, StepBlock] = {}
    for number, block in blocks.items():
        merged.setdefault(number // times, StepBlock()).add(block)
    return merged


LeftOut = Literal["warm-up", "recorded", "stood"]

# steps at the start of a fit, and right after a window, that say nothing about the others' pace
SETTLING_STEPS: Final = 5
_BESIDE_WINDOW: Final = 256  # how many steps before a window and after it are kept, to compare them
_FIRST: Final = 512  # how many of the first counted steps are kept, to see whether their time drifts
_FIRST_ENOUGH: Final = 128  # a window ends that; if there were fewer, it begins anew behind the window


class RunTotals:
    """Sums up the steps of a run: those that count, and those that are left out with the reason."""

    def __init__(self, regions: tuple[str, ...] = REGIONS, bucket: Callable[[float], int] | None = None) -> None:
        self._sums = partial(StepSums, regions, bucket, (Typical(), Typical()))
        self._steady = self._sums()
        self._since_last_record = self._steady if bucket is None else self._sums()
        self._since_last_log = self._sums()
        self._cycle = self._sums()
        self._cycle_is_broken = False
        self._warmup = self._sums()
        self._first = self._sums()
        self._left_out: dict[str, int] = {"warm-up": 0, "recorded": 0, "stood": 0}
        self._excluded_ms = dict.fromkeys(EXCLUDED, 0.0)
        self._samples: float | None = 0.0
        self._first_step_s: float | None = None
        self._recorded_tokens: dict[int, float] = {}
        self._first_ms: tuple[dict[int, float], dict[int, float]] = {}, {}  # accumulating, changing the weights
        self._first_left = _FIRST
        self._window_ended = 0
        self._before_window: deque[float] = deque(maxlen=_BESIDE_WINDOW)
        self._after_window: list[float] = []
        self._slowest = SlowestSteps()
        self.stood: list[str] = []  # what is said of steps in which training stood still
        self.blocks = StepBlocks(bucket)  # the steps that count
        # the latest of them whose regions were timed by choice, and whether the GPU waited; read in another thread
        self.latest: deque[tuple[StepTimes, bool | None]] = deque(maxlen=_LATEST)

    def add(self, times: StepTimes, work: StepWork, left_out: LeftOut | None, timing: StepTiming | None = None) -> None:
        """Enter one step."""
        timing = timing or StepTiming()
        self._samples = added(self._samples, work.samples)
        if len(times.device_ms) > 1 or times.split:  # else it is one piece, with nothing beside it
            self.add_excluded(times)
        took_ms = times.step_ms
        if times.step == 0:
            self._first_step_s = (
                sum(times.device_ms.get(name, 0.0) for name in (*REGIONS, *BETWEEN_EPOCHS, WHOLE, *EXCLUDED)) / 1e3
            )
        if left_out not in {"recorded", "stood"}:
            self._add_beside_window(times.step, took_ms)
        if left_out is None:
            self._add_counted(times, took_ms, work, timing)
            return
        self.skip(work)
        self._left_out[left_out] += 1
        if left_out == "recorded":
            self._window_ended = times.step + 1
            enough = _FIRST - self._first_left >= _FIRST_ENOUGH
            self._first_left = 0 if enough else _FIRST
            if not enough:
                self._first_ms = {}, {}
            if work.tokens is not None:
                self._recorded_tokens[times.step] = work.tokens
        if left_out == "warm-up":
            (self._warmup if times.step else self._first).add(times, took_ms, work, timing)

    def _add_counted(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        self._add_first(times.step, took_ms, work)
        if took_ms > self._slowest.least_ms:
            by_region = times.device_ms if times.split else {}
            self._slowest.add(TimedStep(took_ms, times.step, timing.ended_ns, by_region))
        self._count(times, took_ms, work, timing)
        # a step that had to be split, as after validation, is unlike those that it would stand for
        chosen = times.split and timing.chosen
        self.blocks.add(times.step, took_ms, times.device_ms if chosen else {}, work)
        if chosen:
            self.latest.append((times, timing.gpu_starved))

    @property
    def slowest(self) -> tuple[TimedStep, ...]:
        """The slowest steps that count, the slowest first."""
        return self._slowest.steps

    def _count(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        """Enter a step that counts, with the others of its accumulation cycle if all of them count."""
        cycle = self._cycle
        if self._cycle_is_broken:
            self._since_last_record.add(times, took_ms, work, timing)
            self._cycle_is_broken = not work.ends_cycle
        elif work.ends_cycle and not cycle.steps:  # as every step does without accumulation
            self._since_last_log.add(times, took_ms, work, timing)
        else:
            cycle.add(times, took_ms, work, timing)
            if work.ends_cycle:
                self._since_last_log.merge(cycle)
                self._cycle = self._sums()

    def skip(self, work: StepWork) -> None:
        """Drop the accumulation cycle of a step that does not count from the log entries."""
        self._cycle_is_broken = not work.ends_cycle
        if self._cycle.steps:
            self._since_last_record.merge(self._cycle)
            self._cycle = self._sums()

    def _add_beside_window(self, step: int, took_ms: float) -> None:
        if not self._window_ended:
            if step >= SETTLING_STEPS:
                self._before_window.append(took_ms)
        elif step >= self._window_ended + SETTLING_STEPS and len(self._after_window) < _BESIDE_WINDOW:
            self._after_window.append(took_ms)

    def _add_first(self, step: int, took_ms: float, work: StepWork) -> None:
        if self._first_left and step >= (self._window_ended and self._window_ended + SETTLING_STEPS):
            self._first_left -= 1
            self._first_ms[work.optimizer_steps > 0][step] = took_ms

    def add_excluded(self, times: StepTimes) -> None:
        """Enter validation, checkpoints and the profiler's stalls, which are not part of a step."""
        for name in EXCLUDED:
            if name in times.device_ms:
                self._excluded_ms[name] += times.device_ms[name]

    def take(self) -> Rates:
        """Sums over the counted steps since the last call, in whole accumulation cycles."""
        taken, self._since_last_log = self._since_last_log, self._sums()
        self._since_last_record.merge(taken)
        return taken.read()

    def take_interval(self, *, last: bool = False) -> tuple[Rates, dict[int, int]]:
        """Sums over the counted steps since the last call but for those that `take` has still to return."""
        # together these are all counted steps, those of broken accumulation cycles included.
        taken, self._since_last_record = self._since_last_record, self._sums()
        if last:
            taken.merge(self._since_last_log)
            taken.merge(self._cycle)
            self._since_last_log, self._cycle = self._sums(), self._sums()
        self._steady.merge(taken)
        return taken.read(), dict(taken.histogram)

    def histogram(self) -> dict[int, int]:
        """The histogram of the times of all steps that count."""
        return dict(self._all().histogram)

    def add_log_time(self, us: float) -> None:
        """Add host time in microseconds that log entries and the record took between steps."""
        self._since_last_log.log_entries_us += us

    def steady(self) -> Rates:
        """Sums over all steps that count."""
        return self._all(single_steps=False).read()

    def _all(self, *, single_steps: bool = True) -> StepSums:
        others = (self._since_last_record, self._since_last_log, self._cycle)
        later = [sums for sums in others if sums.steps and sums is not self._steady]
        if not later:
            return self._steady
        all_ = self._sums()
        for sums in (self._steady, *later):
            all_.merge(sums, single_steps=single_steps)
        return all_

    def summary(self, *, steps: int, before_first_s: float, wall_s: float) -> RunSummary:
        """The totals of the run."""
        steady = self._all()
        counted = steady.steps
        only_warmup = not counted
        warmup, recorded, stood = self._left_out.values()
        shown = next((sums for sums in (steady, self._warmup) if sums.steps), self._first)
        accumulating, changing = self._first_ms
        rates, percentiles = shown.read(), shown.region_percentiles()
        step_ms, typical_mean_ms = shown.distribution(rates.mean_ms("step"))
        return RunSummary(
            steps=steps,
            steady=rates,
            only_warmup=only_warmup,
            step_ms=step_ms,
            typical_mean_ms=typical_mean_ms,
            regions={
                name: _run_region(rates, name, percentiles.get(name))
                for name in (*rates.regions, *rates.user_regions)
                if rates.split_steps
            },
            gpu_starved_pct=shown.gpu_starved_pct,
            warmup_steps=warmup,
            recorded_steps=recorded,
            stood_steps=stood,
            stood=tuple(self.stood[-_SHOWN:]),
            untimed_steps=max(steps - counted - warmup - recorded - stood, 0),
            excluded_ms=dict(self._excluded_ms),
            samples=self._samples,
            first_step_s=None if self._first_step_s is None else before_first_s + self._first_step_s,
            wall_s=wall_s,
            recorded_tokens=dict(self._recorded_tokens),
            before_window_ms=tuple(self._before_window) if self._window_ended else (),
            after_window_ms=tuple(self._after_window),
            first_ms=dict(accumulating if len(accumulating) > len(changing) else changing),
            slowest=self._slowest.steps,
        )


def _run_region(rates: Rates, name: str, of_latest: tuple[float, float | None] | None) -> RunRegion:
    p50, p95 = of_latest or (None, None)
    return RunRegion(device_ms=rates.mean_ms(name), host_ms=rates.mean_host_ms(name), p50_ms=p50, p95_ms=p95)
