"""Two analyses side by side: what changed from the first to the second."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_VALUES, bootstrap_difference
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.results.analysis import NO_VERDICT, Analysis
from lightning_forge_profiling.results.rank import CATEGORIES, RankSummary, Step

METRICS: Final = ("step", "busy", "idle", *CATEGORIES)
"""What a gate can be put on. All are milliseconds a step, of which more is worse."""

_DEVIATIONS: Final = 1.4826
"""Standard deviations in the median distance from the median, of normal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One of `METRICS` on both sides: medians over whole steps.

    A step of several ranks takes as long as on its slowest rank, for which the others wait; the
    other metrics of a step are means over the ranks.

    Attributes:
        a_ms: its median before, in milliseconds per step.
        b_ms: its median after.
        difference_ms: after less before.
        pct: the difference in percent of before; None where there was none before and is some now.
        low_ms: lower end of the 95 % interval of `difference_ms`; None with fewer than five steps on a side.
        high_ms: its upper end, None likewise.
        a_steps: over how many whole steps, or over how many cut ones where none is whole.
        b_steps: likewise.
        noise_ms: standard deviation of a side's steps, by their median distance from its median, which single odd
            steps do not move; None where neither side has two.
    """

    a_ms: float
    b_ms: float
    difference_ms: float
    pct: float | None
    low_ms: float | None
    high_ms: float | None
    a_steps: int
    b_steps: int
    noise_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A kind, kernel or cause of idle time on both sides: means over steps and ranks.

    Attributes:
        name: what it is.
        a_ms: milliseconds per step before, 0 where it did not occur.
        b_ms: after.
        difference_ms: after less before.
        pct: the difference in percent of before; None where there was none before.
        a_calls: calls per step before; 0 for causes of idle time.
        b_calls: after.
    """

    name: str
    a_ms: float
    b_ms: float
    difference_ms: float
    pct: float | None
    a_calls: float
    b_calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from `a` to `b`.

    Attributes:
        a: the file or folder of before.
        b: of after.
        metrics: by name, see `METRICS`.
        idle: the idle time by cause, the biggest change first, as in all that follow.
        kinds: the busy time by kernel kind.
        kernels: by kernel.
        notes: what makes the two hard to compare.
    """

    a: str
    b: str
    metrics: Mapping[str, Metric]
    idle: tuple[Change, ...]
    kinds: tuple[Change, ...]
    kernels: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(a: Analysis, b: Analysis, *, seed: int = 0) -> Comparison:
    """Compare two analyses."""
    for analysis in (a, b):
        if not analysis.ranks:
            raise TraceError(f"{analysis.source}: no recorded rank to compare")
        if analysis.verdict == NO_VERDICT:
            raise TraceError(f"{analysis.source}: no whole step to compare. {' '.join(analysis.cut_off)}")
    before, after = _values(a), _values(b)
    return Comparison(
        a=a.source,
        b=b.source,
        metrics={name: _metric(before[name], after[name], seed) for name in METRICS},
        idle=_changes(a, b, _idle_causes),
        kinds=_changes(a, b, _kinds),
        kernels=_changes(a, b, _kernels),
        notes=tuple(_notes(a, b)),
    )


def _metric(before: Sequence[float], after: Sequence[float], seed: int) -> Metric:
    a_ms, b_ms = median(before), median(after)
    enough = min(len(before), len(after)) >= FEWEST_VALUES
    low, high = bootstrap_difference(before, after, seed=seed) if enough else (None, None)
    return Metric(
        a_ms=a_ms,
        b_ms=b_ms,
        difference_ms=b_ms - a_ms,
        pct=_pct(a_ms, b_ms),
        low_ms=low,
        high_ms=high,
        a_steps=len(before),
        b_steps=len(after),
        noise_ms=_noise(before, after),
    )


def _noise(*sides: Sequence[float]) -> float | None:
    distances = [abs(value - median(side)) for side in sides if len(side) > 1 for value in side]
    return _DEVIATIONS * median(distances) if distances else None


def _pct(before: float, after: float) -> float | None:
    if before:
        return 100 * (after - before) / before
    return None if after else 0.0


def _values(analysis: Analysis) -> dict[str, list[float]]:
    """Each metric in milliseconds, step by step, over the steps that count on every rank, or else over all."""
    by_rank = [{step.number: step for step in rank.per_step} for rank in analysis.ranks]
    common = set[int].intersection(*map(set, by_rank))
    if not common:  # the ranks recorded different steps: take the first of each together, and so on
        by_rank = [dict(enumerate(rank.per_step)) for rank in analysis.ranks]
        common = set[int].intersection(*map(set, by_rank))
    together = [[steps[number] for steps in by_rank] for number in sorted(common)]
    if not together:
        raise TraceError(f"{analysis.source}: no recorded step to compare")
    together = [steps for steps in together if all(step.counted for step in steps)] or together
    return {metric: [_of_step(metric, steps) for steps in together] for metric in METRICS}


def _of_step(metric: str, on_ranks: Sequence[Step]) -> float:
    match metric:
        case "step":
            return max(step.ms for step in on_ranks)
        case "busy":
            return mean(step.busy_ms for step in on_ranks)
        case "idle":
            return mean(step.ms - step.busy_ms for step in on_ranks)
    return mean(step.categories_ms.get(metric, 0.0) for step in on_ranks)


_Costs = Mapping[str, tuple[float, float]]
"""Milliseconds and calls per step, by name."""


def _idle_causes(rank: RankSummary) -> _Costs:
    return {cause: (share.ms_per_step, 0.0) for cause, share in rank.idle.items()}


def _kinds(rank: RankSummary) -> _Costs:
    return {name: (kind.ms_per_step, kind.calls_per_step) for name, kind in rank.kinds.items()}


def _kernels(rank: RankSummary) -> _Costs:
    return {kernel.name: (kernel.ms_per_step, kernel.calls_per_step) for kernel in rank.top_kernels}


def _changes(a: Analysis, b: Analysis, costs: Callable[[RankSummary], _Costs]) -> tuple[Change, ...]:
    before, after = (_mean_over_ranks([costs(rank) for rank in side.ranks]) for side in (a, b))
    changes = []
    for name in {**before, **after}:
        (a_ms, a_calls), (b_ms, b_calls) = before.get(name, (0.0, 0.0)), after.get(name, (0.0, 0.0))
        changes.append(
            Change(
                name=name,
                a_ms=a_ms,
                b_ms=b_ms,
                difference_ms=b_ms - a_ms,
                pct=_pct(a_ms, b_ms),
                a_calls=a_calls,
                b_calls=b_calls,
            )
        )
    return tuple(sorted(changes, key=lambda change: -abs(change.difference_ms)))


def _mean_over_ranks(ranks: Sequence[_Costs]) -> dict[str, tuple[float, float]]:
    totals: dict[str, tuple[float, float]] = {}
    for costs in ranks:
        for name, (ms, calls) in costs.items():
            total_ms, total_calls = totals.get(name, (0.0, 0.0))
            totals[name] = total_ms + ms, total_calls + calls
    return {name: (ms / len(ranks), calls / len(ranks)) for name, (ms, calls) in totals.items()}


def _notes(a: Analysis, b: Analysis) -> Iterator[str]:
    devices = [sorted({rank.device for rank in side.ranks if rank.device}) for side in (a, b)]
    if all(devices) and devices[0] != devices[1]:
        yield f"recorded on different devices: {', '.join(devices[0])} before, {', '.join(devices[1])} now"
    if len(a.ranks) != len(b.ranks):
        yield f"a different number of ranks: {len(a.ranks)} before, {len(b.ranks)} now"
    for side in (a, b):
        cut = [step.number for step in side.ranks[0].per_step if not step.whole]
        if cut:
            yield f"{side.source}: not counted in the medians, for they are cut off: steps {', '.join(map(str, cut))}"
        yield from (f"{side.source}: {warning}" for warning in side.warnings)
