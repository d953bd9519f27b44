"""Gate on two sides of runs: whether they got slower by more than a limit, and how many runs or steps decide it."""

from typing import Final

from lightning_forge_profiling.diagnosis.block_bootstrap import FEWEST_INTERVALS
from lightning_forge_profiling.diagnosis.gate import Gate
from lightning_forge_profiling.diagnosis.log_ratio import Ratio, runs_needed, steps_needed, tolerable_scatter
from lightning_forge_profiling.diagnosis.run_comparison import RunComparison
from lightning_forge_profiling.diagnosis.run_metrics import RunMetric
from lightning_forge_profiling.errors import ConfigurationError

_REPEATS: Final = 3
"""Runs a side to begin with: two leave two degrees of freedom instead of four, and an interval twice as wide."""


def run_gate(comparison: RunComparison, metric: str, limit_pct: float) -> Gate:
    """Decide on one metric. An inconclusive gate says what would decide it."""
    found = comparison.metrics.get(metric)
    if found is None or found.ratio is None or found.outcome is None:
        having = ", ".join(name for name, other in comparison.metrics.items() if other.ratio is not None)
        raise ConfigurationError(f"no values of {metric!r} on both sides; available: {having}")
    why = {
        "slower": f"worse by more than {limit_pct:g} %",
        "faster": "better",
        "same": f"not worse by more than {limit_pct:g} %",
        "inconclusive": f"undecided whether it is worse by more than {limit_pct:g} %",
    }[found.outcome]
    missing = what_would_tell(comparison, found, limit_pct) if found.outcome == "inconclusive" else ""
    text = f"{metric}: {interval_words(found.ratio)}: {why}"
    return Gate(metric=metric, limit_pct=limit_pct, outcome=found.outcome, text=text, missing=missing)


def change_pct(ratio: float) -> str:
    """A ratio as a change in percent."""
    return f"{100 * (ratio - 1):+.1f} %"


def interval_words(ratio: Ratio) -> str:
    """The change with its 95 % interval."""
    if ratio.low is None or ratio.high is None:
        return f"{change_pct(ratio.ratio)}, no interval"
    low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
    return f"{change_pct(ratio.ratio)}, 95 % interval {low:+.1f} to {high:+.1f} %"


def what_would_tell(comparison: RunComparison, metric: RunMetric, limit_pct: float) -> str:
    """How many repeats or steps decide a limit in four of five comparisons of equal runs."""
    ratio, runs = metric.ratio, min(len(comparison.a.steps), len(comparison.b.steps))
    if ratio is None or ratio.log_error is None or ratio.scatter is None:
        return f"Too short: {FEWEST_INTERVALS} intervals a side are needed, each a logged row or about half a second"
    if not limit_pct:
        return "More repeats narrow the interval"
    if comparison.assumed_scatter_pct is None:
        return _more_runs(ratio.scatter, runs, limit_pct)
    enough = 100 * tolerable_scatter(_REPEATS, limit_pct)
    text = (
        f"Repeat each side {_REPEATS} times: that decides a limit of {limit_pct:g} % where equal runs differ by "
        f"{enough:.1f} % or less (one standard deviation)"
    )
    text += f"; with {100 * ratio.scatter:.1f} %, as assumed here, it needs {_runs(ratio.scatter, limit_pct)}"
    steps = min(*comparison.a.steps, *comparison.b.steps)
    needed = steps_needed(ratio, steps, limit_pct)
    if needed is not None and needed > steps:
        text += f", or train about {needed:,} steps a side"
    return text


def _runs(scatter: float, limit_pct: float) -> str:
    needed = runs_needed(scatter, limit_pct)
    return "over 100" if needed is None else f"{needed}"


def _more_runs(scatter: float, runs: int, limit_pct: float) -> str:
    needed = runs_needed(scatter, limit_pct)
    text = (
        f"Runs of a side scatter by {100 * scatter:.1f} %: a limit of {limit_pct:g} % needs "
        f"{_runs(scatter, limit_pct)} a side"
    )
    return (
        text
        if needed is None or needed > runs
        else f"{text}; the difference is close to the limit, so more repeats are needed"
    )
