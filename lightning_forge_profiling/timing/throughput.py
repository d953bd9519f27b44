"""The steps of a run: which count, which are left out and why, and what they come to."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

from lightning_forge_profiling.timing.rates import Rates, Spread, StepTiming, StepWork, step_ms
from lightning_forge_profiling.timing.steps import EXCLUDED, PARTITION, WHOLE, StepTimes

__all__ = ["MEDIAN_OVER", "LeftOut", "RunLedger", "RunSummary"]

LeftOut = Literal["warm-up", "recorded"]

MEDIAN_OVER: Final = 4096
"""The median covers at most this many recent steps, which is what is kept of them."""

_SETTLED: Final = 5
"""Steps at the start of a fit, and right after a window, that say nothing about the others' pace."""
_BESIDE_WINDOW: Final = 256
"""How many steps before a window and after it are kept, to compare them."""


class _Times:
    """Sums of the times of some steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.device_ms: dict[str, float] = {}
        self.host_ms: dict[str, float] = {}

    def add(self, steps: int, device_ms: Mapping[str, float], host_ms: Mapping[str, float]) -> None:
        self.steps += steps
        for sums, added in ((self.device_ms, device_ms), (self.host_ms, host_ms)):
            for region, ms in added.items():
                if region not in EXCLUDED:
                    sums[region] = sums.get(region, 0.0) + ms


class _Sums:
    """Rates and spread under way.

    Steps are of three kinds: chosen ones, whose regions were timed; plain ones, of which only the end was, and for
    which the chosen ones speak; and those that were split because they had to be, as the first after a validation run,
    which speak for themselves alone. Those that change the weights and those that accumulate gradients are kept apart,
    since their regions differ most.
    """

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.regions = regions
        self.latest_ms: deque[float] = deque(maxlen=MEDIAN_OVER)
        self.shortest_ms, self.longest_ms = float("inf"), 0.0
        self.caught_up = self.asked = 0
        self.optimizer_steps = 0
        self.samples: float | None = 0.0
        self.tokens: float | None = 0.0
        self.flops: float | None = 0.0
        self.own_us = self.before_fetch_ms = 0.0
        self.chosen, self.plain = (_Times(), _Times()), (_Times(), _Times())  # accumulating, changing the weights
        self.singular = _Times()

    @property
    def times(self) -> tuple[_Times, ...]:
        return (*self.chosen, *self.plain, self.singular)

    @property
    def steps(self) -> int:
        return sum(times.steps for times in self.times)

    def add(self, times: StepTimes, took_ms: float, work: StepWork, timing: StepTiming) -> None:
        self.latest_ms.append(took_ms)
        self.shortest_ms = min(self.shortest_ms, took_ms)
        self.longest_ms = max(self.longest_ms, took_ms)
        if timing.caught_up is not None:
            self.caught_up += timing.caught_up
            self.asked += 1
        self.optimizer_steps += work.optimizer_steps
        self.samples = _sum(self.samples, work.samples)
        self.tokens = _sum(self.tokens, work.tokens)
        self.flops = _sum(self.flops, work.flops)
        self.own_us += timing.own_us
        self.before_fetch_ms += timing.before_fetch_ms
        changes = work.optimizer_steps > 0
        kind = self.singular if times.split and not timing.chosen else (self.plain, self.chosen)[times.split][changes]
        kind.add(1, times.device_ms, times.host_ms)

    def merge(self, other: "_Sums") -> None:
        self.latest_ms.extend(other.latest_ms)
        self.shortest_ms = min(self.shortest_ms, other.shortest_ms)
        self.longest_ms = max(self.longest_ms, other.longest_ms)
        self.caught_up += other.caught_up
        self.asked += other.asked
        self.optimizer_steps += other.optimizer_steps
        self.samples = _sum(self.samples, other.samples)
        self.tokens = _sum(self.tokens, other.tokens)
        self.flops = _sum(self.flops, other.flops)
        self.own_us += other.own_us
        self.before_fetch_ms += other.before_fetch_ms
        for mine, theirs in zip(self.times, other.times, strict=True):
            mine.add(theirs.steps, theirs.device_ms, theirs.host_ms)

    def read(self) -> Rates:
        singular = self.singular
        kinds = list(zip(self.chosen, self.plain, strict=True))
        if any(plain.steps and not chosen.steps for chosen, plain in kinds):  # nothing speaks for one of them alone
            kinds = [(_merged(self.chosen), _merged(self.plain))]
        atypical = any(plain.steps for plain in self.plain) and not any(chosen.steps for chosen in self.chosen)
        if atypical:
            kinds, singular = [(singular, _merged(self.plain))], _Times()
        whole = _merged([_spoken_for(chosen, plain) for chosen, plain in kinds] + [singular])
        return Rates(
            self.steps,
            self.optimizer_steps,
            self.samples,
            self.tokens,
            whole.device_ms,
            whole.host_ms,
            self.flops,
            self.regions,
            self.steps - sum(plain.steps for plain in self.plain),
            self.own_us,
            self.before_fetch_ms,
            atypical,
        )

    def spread(self) -> Spread:
        return Spread(median(self.latest_ms), self.shortest_ms, self.longest_ms) if self.latest_ms else Spread()

    @property
    def caught_up_pct(self) -> float | None:
        return 100 * self.caught_up / self.asked if self.asked else None


def _merged(several: Iterable[_Times]) -> _Times:
    merged = _Times()
    for times in several:
        merged.add(times.steps, times.device_ms, times.host_ms)
    return merged


def _spoken_for(chosen: _Times, plain: _Times) -> _Times:
    """The times of both: plain steps are taken to divide as the chosen ones do."""
    both = _Times()
    both.add(chosen.steps + plain.steps, _divided(chosen.device_ms, plain.device_ms), {})
    both.add(0, {}, _divided(chosen.host_ms, plain.host_ms))
    return both


def _divided(chosen: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, float]:
    divided_ms, plain_ms = step_ms(chosen), step_ms(plain)
    if not divided_ms:
        return dict(plain)
    factor = 1 + plain_ms / divided_ms
    return {region: factor * ms for region, ms in chosen.items()}


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Where a whole run's time went on this rank.

    Attributes:
        steps: training batches of this fit.
        steady: the steps that count; where the run had nothing but warm-up steps, those without the very first; where
            it had but one step, that.
        only_warmup: whether that was so.
        step_ms: how the times of those steps differ.
        caught_up_pct: in how many percent of them the GPU was done with all but the optimizer's update when the host
            finished the batch: it had nothing queued and waited for the host. None if unknown.
        warmup_steps: how many were left out as warm-up.
        recorded_steps: how many were left out because the profiler ran.
        untimed_steps: how many had to be left out because something in them could not be timed.
        excluded_ms: time between batches that is no part of a step, by `validation`, `checkpoint`, `profiler`.
        samples: samples of all steps, None where a batch size was not found.
        first_step_s: from the start of fit to the end of its first step, None when there was none.
        wall_s: from the start of fit to its end.
        recorded_tokens: tokens of each step that was left out because the profiler ran, where they are counted.
        before_window_ms: times of the latest steps before the recorded window, without the first of the fit.
        after_window_ms: times of the first steps after it, once they are settled.
    """

    steps: int
    steady: Rates
    only_warmup: bool
    step_ms: Spread
    caught_up_pct: float | None
    warmup_steps: int
    recorded_steps: int
    untimed_steps: int
    excluded_ms: Mapping[str, float]
    samples: float | None
    first_step_s: float | None
    wall_s: float
    recorded_tokens: Mapping[int, float] = field(default_factory=dict)
    before_window_ms: tuple[float, ...] = ()
    after_window_ms: tuple[float, ...] = ()


class RunLedger:
    """Keep the books of a run: which steps count, which are left out and why.

    Args:
        regions: the built-in regions that are told apart.
    """

    def __init__(self, regions: tuple[str, ...] = PARTITION) -> None:
        self._regions = regions
        self._steady = _Sums(regions)
        self._untaken = _Sums(regions)
        self._warmup = _Sums(regions)
        self._first = _Sums(regions)
        self._left_out: dict[str, int] = {"warm-up": 0, "recorded": 0}
        self._excluded_ms = dict.fromkeys(EXCLUDED, 0.0)
        self._samples: float | None = 0.0
        self._first_step_s: float | None = None
        self._recorded_tokens: dict[int, float] = {}
        self._window_ended = 0
        self._before_window: deque[float] = deque(maxlen=_BESIDE_WINDOW)
        self._after_window: list[float] = []

    def add(self, times: StepTimes, work: StepWork, left_out: LeftOut | None, timing: StepTiming | None = None) -> None:
        """Enter one step.

        Args:
            times: its times.
            work: what it worked through.
            left_out: why it does not count, if so.
            timing: how it was timed.
        """
        timing = timing or StepTiming()
        self._samples = _sum(self._samples, work.samples)
        self.add_excluded(times)
        took_ms = times.step_ms
        if times.step == 0:
            self._first_step_s = sum(times.device_ms.get(name, 0.0) for name in (*PARTITION, WHOLE, *EXCLUDED)) / 1e3
        if left_out != "recorded":
            self._add_beside_window(times.step, took_ms)
        if left_out is None:
            self._untaken.add(times, took_ms, work, timing)
            return
        self._left_out[left_out] += 1
        if left_out == "recorded":
            self._window_ended = times.step + 1
            if work.tokens is not None:
                self._recorded_tokens[times.step] = work.tokens
        if left_out == "warm-up":
            (self._warmup if times.step else self._first).add(times, took_ms, work, timing)

    def _add_beside_window(self, step: int, took_ms: float) -> None:
        if not self._window_ended:
            if step >= _SETTLED:
                self._before_window.append(took_ms)
        elif step >= self._window_ended + _SETTLED and len(self._after_window) < _BESIDE_WINDOW:
            self._after_window.append(took_ms)

    def add_excluded(self, times: StepTimes) -> None:
        """Enter only what is no part of a step."""
        for name in EXCLUDED:
            if name in times.device_ms:
                self._excluded_ms[name] += times.device_ms[name]

    def take(self) -> Rates:
        """Sums over the steps that count and have come since the last call."""
        taken, self._untaken = self._untaken, _Sums(self._regions)
        self._steady.merge(taken)
        return taken.read()

    def steady(self) -> Rates:
        """Sums over all steps that count."""
        return self._all().read()

    def _all(self) -> _Sums:
        if not self._untaken.steps:
            return self._steady
        both = _Sums(self._regions)
        both.merge(self._steady)
        both.merge(self._untaken)
        return both

    def summary(self, *, steps: int, before_first_s: float, wall_s: float) -> RunSummary:
        """Close the books.

        Args:
            steps: how many steps ended.
            before_first_s: seconds from the start of fit to the start of its first step.
            wall_s: seconds of the whole fit.
        """
        steady = self._all()
        counted = steady.steps
        only_warmup = not counted
        warmup, recorded = self._left_out["warm-up"], self._left_out["recorded"]
        shown = next((sums for sums in (steady, self._warmup) if sums.steps), self._first)
        return RunSummary(
            steps=steps,
            steady=shown.read(),
            only_warmup=only_warmup,
            step_ms=shown.spread(),
            caught_up_pct=shown.caught_up_pct,
            warmup_steps=warmup,
            recorded_steps=recorded,
            untimed_steps=max(steps - counted - warmup - recorded, 0),
            excluded_ms=dict(self._excluded_ms),
            samples=self._samples,
            first_step_s=None if self._first_step_s is None else before_first_s + self._first_step_s,
            wall_s=wall_s,
            recorded_tokens=dict(self._recorded_tokens),
            before_window_ms=tuple(self._before_window) if self._window_ended else (),
            after_window_ms=tuple(self._after_window),
        )
