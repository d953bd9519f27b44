"""Ratio of two sides of runs with its 95 % interval, and what it decides."""

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean
from typing import Final

import numpy as np

from lightning_forge_profiling.schema import Outcome, Ratio
from lightning_forge_profiling.timing.bootstrap import Estimate

SAME_WITHIN_PCT: Final = 5.0  # without a limit, sides are the same if the whole interval is within this percentage
# equal runs differ by less than this factor: a larger ratio is a difference, also where no error is known
PLAUSIBLE: Final = 2.0
_MOST_RUNS: Final = 100

# Student's t by degrees of freedom, interpolated linearly in their inverse: within 0.2 % from one degree on
_DEGREES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, inf)
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.306, 2.228, 2.131, 2.086, 2.042, 2.000, 1.960)
_T_80: Final = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.889, 0.879, 0.866, 0.860, 0.854, 0.848, 0.842)


def ratio_of(a: Sequence[Estimate], b: Sequence[Estimate], scatter: float, *, in_turns: bool = False) -> Ratio:
    """Compare the runs of two sides; `in_turns` if the runs of both sides are in order and each follows its partner.

    With four or more runs in all, or one against three, the interval is Student's t of the difference of the mean
    logarithms, with the variance pooled over both sides: two runs on one side are enough. Runs made in turns are also
    compared pair by pair, which takes out what changes on the machine meanwhile; the narrower interval counts. With
    fewer runs the scatter between them is assumed, and added to the errors from their own steps.
    """
    logs = [np.log([run.value for run in side]) for side in (a, b)]
    difference = float(logs[1].mean() - logs[0].mean())
    per_run = 1 / len(a) + 1 / len(b)
    errors = [[run.log_error for run in side if run.log_error is not None] for side in (a, b)]
    own = sqrt(sum(sum(error**2 for error in side) / len(side) ** 2 for side in errors if side))
    degrees = float(len(a) + len(b) - 2)
    if degrees < 2:  # noqa: PLR2004  (with one degree of freedom, t is 12.7)
        if [len(side) for side in errors] != [len(a), len(b)]:
            return Ratio(ratio=exp(difference))
        error = sqrt(own**2 + scatter**2 * per_run)
        return _interval(difference, error, _welch(error, a, b), scatter)
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in logs)
    scatter = sqrt(squares / degrees)
    # runs may agree by chance, but no better than their own steps tell
    unpaired = _interval(difference, max(scatter * sqrt(per_run), own), degrees, scatter)
    if not in_turns:
        return unpaired
    between_pairs = float((logs[1] - logs[0]).std(ddof=1))
    error = max(between_pairs / sqrt(len(a)), own)
    paired = _interval(difference, error, len(a) - 1.0, between_pairs / sqrt(2), paired=True)
    return min(unpaired, paired, key=lambda ratio: ratio.high or inf)


def _interval(difference: float, error: float, degrees: float, scatter: float, *, paired: bool = False) -> Ratio:
    reach = _quantile(_T_975, degrees) * error
    return Ratio(
        ratio=exp(difference),
        low=exp(difference - reach),
        high=exp(difference + reach),
        log_error=error,
        scatter=scatter,
        paired=paired,
    )


def decide(
    ratio: Ratio, limit_pct: float | None, *, more_is_better: bool = False, plausible: float = PLAUSIBLE
) -> Outcome:
    """Outcome that a ratio supports, by one-sided tests at 2.5 % against the limit and against no difference.

    Without an interval, a factor above `plausible` decides.
    """
    limit = 1 + (limit_pct or 0.0) / 100
    if ratio.low is None or ratio.high is None:
        worse = 1 / ratio.ratio if more_is_better else ratio.ratio
        if worse > plausible * limit:
            return "slower"
        return "faster" if worse < 1 / plausible else "too short"
    low, high = (1 / ratio.high, 1 / ratio.low) if more_is_better else (ratio.low, ratio.high)
    if low > limit:
        return "slower"
    if high < 1:
        return "faster"
    within = 1 + SAME_WITHIN_PCT / 100
    same = high <= limit if limit_pct is not None else 1 / within <= low and high <= within
    return "same" if same else "too noisy"


def runs_needed(scatter: float, limit_pct: float) -> int | None:
    """Number of runs a side with which equal runs pass a limit in four of five comparisons; None for over 100."""
    limit = log(1 + limit_pct / 100)
    return next((runs for runs in range(2, _MOST_RUNS + 1) if _detected(runs) * scatter <= limit), None)


def steps_needed(ratio: Ratio, steps: int, limit_pct: float) -> int | None:
    """Number of steps a side with which equal runs pass a limit in four of five comparisons; None if no number does."""
    between = 2 * (ratio.scatter or 0.0) ** 2
    room = (log(1 + limit_pct / 100) / (_T_975[-1] + _T_80[-1])) ** 2 - between
    if ratio.log_error is None or room <= 0:
        return None
    return round(steps * (ratio.log_error**2 - between) / room)


def _detected(runs: int) -> float:
    """The difference that this many runs a side detect in four of five cases, in units of their scatter."""
    degrees = 2 * runs - 2
    return (_quantile(_T_975, degrees) + _quantile(_T_80, degrees)) * sqrt(2 / runs)


def _welch(error: float, a: Sequence[Estimate], b: Sequence[Estimate]) -> float:
    """Degrees of freedom of an error to which each run's steps contribute (B. L. Welch, 1947)."""
    uncertain = sum(
        ((run.log_error or 0.0) / len(side)) ** 4 / max(run.blocks - 1, 0.5) for side in (a, b) for run in side
    )
    return max(1.0, error**4 / uncertain) if uncertain else inf


def _quantile(table: Sequence[float], degrees: float) -> float:
    return float(np.interp(-1 / degrees, [-1 / each for each in _DEGREES], table))


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of a metric over runs; 0 if it is 0 in one of them."""
    return 0.0 if min(values) <= 0 else exp(fmean(map(log, values)))
