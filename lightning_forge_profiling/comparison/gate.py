"""Decides on a comparison, and says it in a sentence."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_forge_profiling.comparison.compare import OF_THE_RUN, REPEATS, Comparison, Metric
from lightning_forge_profiling.comparison.ratio import (
    SAME_WITHIN_PCT,
    Outcome,
    Ratio,
    runs_needed,
    steps_needed,
    tolerable_scatter,
)
from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_PIECES
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.schema import CATEGORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a comparison says of one metric and a limit."""

    metric: str
    limit_pct: float | None
    outcome: Outcome
    text: str
    missing: str = ""  # what would decide it
    needed_runs: int | None = None  # a side; None if unknown, or over 100


def gate(comparison: Comparison, name: str, limit_pct: float | None) -> Gate:
    """Decide on one metric. An undecided gate says what would decide it."""
    metric = comparison.metrics.get(name)
    if metric is None or metric.outcome is None:
        having = ", ".join(name for name, other in comparison.metrics.items() if other.outcome is not None)
        raise ConfigurationError(f"no values of {name!r} on both sides; available: {having}")
    undecided = metric.outcome.startswith("too")
    return Gate(
        metric=name,
        limit_pct=limit_pct,
        outcome=metric.outcome,
        text=change_words(metric),
        missing=_what_would_tell(comparison, metric, limit_pct) if undecided else "",
        needed_runs=_needed_runs(comparison, metric, limit_pct),
    )


def _needed_runs(comparison: Comparison, metric: Metric, limit_pct: float | None) -> int | None:
    """Number of runs a side that decide, if they are more than there are."""
    if metric.outcome != "too noisy" or metric.ratio is None or not metric.ratio.scatter:
        return None
    needed = runs_needed(metric.ratio.scatter, SAME_WITHIN_PCT if limit_pct is None else limit_pct)
    few = min(len(comparison.a.steps), len(comparison.b.steps))
    return needed if needed is not None and needed > few else None


def overall(gates: Iterable[Gate]) -> Outcome | None:
    """The outcome of several gates: the worst, and faster where all of them are; None without any."""
    outcomes = {decided.outcome for decided in gates}
    order: tuple[Outcome, ...] = ("slower", "too noisy", "too short", "same", "faster")
    return next((outcome for outcome in order if outcome in outcomes), None)


def headline(comparison: Comparison, decided: Gate) -> str:
    """What the comparison says of a gate's metric; if it is undecided or the same, which other metric stands out."""
    limit = "" if decided.limit_pct is None else f", limit {decided.limit_pct:g} %"
    if decided.needed_runs is not None:
        limit += f"; about {decided.needed_runs} runs a side would tell"
    other = _standing_out(comparison, decided)
    if other is None or decided.metric != "step":
        return decided.text + limit
    state = "the same" if decided.outcome == "same" else "undecided"
    return f"{change_words(other)}; the {metric_title(decided.metric)} is {state}: {decided.text}{limit}"


def _standing_out(comparison: Comparison, decided: Gate) -> Metric | None:
    """What got slower beyond the limit and what is called the same: the part with the most time, else the median."""
    if decided.outcome in {"slower", "faster"}:
        return None
    beyond = 1 + max(decided.limit_pct or 0.0, SAME_WITHIN_PCT) / 100
    slower = [
        metric
        for metric in comparison.metrics.values()
        if metric.name in {*REGIONS, *CATEGORIES, "median"} and metric.ratio is not None and metric.share_pct >= 1
        if metric.ratio.low is not None and metric.ratio.low > beyond
    ]
    return max(
        slower, key=lambda metric: (metric.name != "median", (metric.b or 0.0) - (metric.a or 0.0)), default=None
    )


def metric_title(name: str) -> str:
    """A metric's name in words."""
    words = {
        "median": "median step",
        "p95": "p95 of the step",
        "samples": "samples/s",
        "tokens": "tokens/s",
        "last_fifth": "last over first fifth",
        "startup": "start-up",
        "checkpoint": "a checkpoint",
        "validation": "a validation",
    }
    return words.get(name, f"step of rank {name.removeprefix('rank')}" if name.startswith("rank") else name)


def change_words(metric: Metric) -> str:
    """The change with its 95 % interval."""
    ratio, name = metric.ratio, metric_title(metric.name)
    if ratio is None:
        return f"{name} {metric.a or 0:.3g} {metric.unit} before, {metric.b or 0:.3g} {metric.unit} now"
    low, high = ratio.low, ratio.high
    if metric.outcome not in {"slower", "faster"}:
        interval = (
            f" ({percent(low)} to {percent(high)} %)" if low is not None and high is not None else ", no interval"
        )
        return f"{name} {percent(ratio.ratio)} %{interval}"
    more = ratio.ratio > 1
    word = ("higher" if more else "lower") if metric.more_is_better else "slower" if more else "faster"
    amount = percent(ratio.ratio).lstrip("+-")
    if low is None or high is None:
        return f"{name} {word} by {amount} %, more than equal runs differ"
    ends = [percent(end).lstrip("+-") if (end > 1) == more else percent(end) for end in (low, high)]
    return f"{name} {word} by {amount} % ({' to '.join(ends if more else reversed(ends))} %)"


def percent(ratio: float) -> str:
    """A ratio as a change in percent: two digits or more, and no more than four."""
    change = 100 * (ratio - 1)
    if change >= 9999.5:  # noqa: PLR2004
        return "+>9999"
    return f"{change:+.1f}" if abs(change) < 9.95 else f"{change:+.0f}"  # noqa: PLR2004


def _what_would_tell(comparison: Comparison, metric: Metric, limit_pct: float | None) -> str:
    """How many repeats or steps decide a limit in four of five comparisons of equal runs."""
    ratio, limit_pct = metric.ratio, SAME_WITHIN_PCT if limit_pct is None else limit_pct
    if ratio is None or ratio.log_error is None or ratio.scatter is None:
        if metric.name in OF_THE_RUN:
            return f"One value a run: repeat each side {REPEATS} times"
        return f"Too few steps for an interval: each side needs {FEWEST_PIECES}, and some 50 of a record"
    if not limit_pct:
        return "More repeats narrow the interval"
    if comparison.assumed_scatter_pct is None:
        return _more_runs(ratio.scatter, min(len(comparison.a.steps), len(comparison.b.steps)), limit_pct)
    return _more_steps(ratio, ratio.scatter, min(*comparison.a.steps, *comparison.b.steps), limit_pct)


def _more_steps(ratio: Ratio, scatter: float, steps: int, limit_pct: float) -> str:
    needed = steps_needed(ratio, steps, limit_pct)
    if not scatter:
        if needed is None or needed <= steps:
            return f"The difference is close to the limit of {limit_pct:g} %: more steps on each side separate them"
        return f"The steps vary: a limit of {limit_pct:g} % needs about {needed:,} steps a side"
    text = (
        f"Repeat each side {REPEATS} times: that decides a limit of {limit_pct:g} % where equal runs differ by "
        f"{100 * tolerable_scatter(REPEATS, limit_pct):.1f} % or less (one standard deviation); if they differ by "
        f"{100 * scatter:.1f} %, as is expected of these, it needs {runs_needed(scatter, limit_pct) or 'over 100'}"
    )
    return f"{text}, or train about {needed:,} steps a side" if needed is not None and needed > steps else text


def _more_runs(scatter: float, runs: int, limit_pct: float) -> str:
    needed = runs_needed(scatter, limit_pct)
    words = f"a limit of {limit_pct:g} % needs {needed or 'over 100'} a side"
    close = needed is not None and needed <= runs
    but = "; the difference is close to the limit, so more repeats are needed" if close else ""
    return f"Runs of a side scatter by {100 * scatter:.1f} %: {words}{but}"
