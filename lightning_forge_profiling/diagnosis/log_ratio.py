"""Ratio of two sides of runs with its 95 % interval, and the number of runs or steps that a limit needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean
from typing import Final

import numpy as np

from lightning_forge_profiling.diagnosis.block_bootstrap import RunValue

_MOST_RUNS: Final = 100

# Student's t by degrees of freedom, interpolated linearly in their inverse: within 0.2 % from one degree on
_DEGREES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, inf)
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.306, 2.228, 2.131, 2.086, 2.042, 2.000, 1.960)
_T_80: Final = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.889, 0.879, 0.866, 0.860, 0.854, 0.848, 0.842)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of the second side to the first.

    Attributes:
        ratio: ratio of the geometric means over the runs.
        low: lower end of the 95 % interval; None if unknown.
        high: upper end of the interval; None if unknown.
        log_error: standard error of the logarithm; None if unknown.
        scatter: standard deviation of the logarithm between equal runs: measured with repeats, assumed without.
    """

    ratio: float
    low: float | None = None
    high: float | None = None
    log_error: float | None = None
    scatter: float | None = None


def ratio_of(a: Sequence[RunValue], b: Sequence[RunValue], scatter: float) -> Ratio:
    """Compare the runs of two sides.

    With three or more runs in all, the interval is Student's t of the difference of the mean logarithms. The variance
    is pooled over both sides, so two runs on one side are enough. It includes the errors from a run's own steps, which
    also scatter from run to run. With one run a side, the difference between processes is unknown: the assumed scatter
    is added to the errors from the runs' own steps.

    A bootstrap of runs is too narrow: with 2, 3 and 5 equal runs a side, it called them different in 26, 19 and 8 % of
    400 simulated comparisons at a nominal 5 %; this interval did in 4, 6 and 5 %
    (`python -m benchmarks.compare_false_alarms`).
    """
    logs = [[log(found.value) for found in side] for side in (a, b)]
    difference = fmean(logs[1]) - fmean(logs[0])
    degrees = float(len(a) + len(b) - 2)
    if degrees:
        scatter = runs_scatter(a, b) or 0.0
        error = scatter * sqrt(1 / len(a) + 1 / len(b))
    else:
        own = [found.log_error for found in (*a, *b) if found.log_error is not None]
        if len(own) < len(a) + len(b):
            return Ratio(ratio=exp(difference))
        error = sqrt(sum(each**2 for each in own) + 2 * scatter**2)
        degrees = _welch(error, (*a, *b))
    reach = _quantile(_T_975, degrees) * error
    return Ratio(
        ratio=exp(difference),
        low=exp(difference - reach),
        high=exp(difference + reach),
        log_error=error,
        scatter=scatter,
    )


def runs_scatter(a: Sequence[RunValue], b: Sequence[RunValue]) -> float | None:
    """Standard deviation of the logarithm from run to run, pooled over both sides; None with one run a side."""
    degrees = len(a) + len(b) - 2
    if not degrees:
        return None
    squares = 0.0
    for side in (a, b):
        logs = [log(found.value) for found in side]
        squares += sum((each - fmean(logs)) ** 2 for each in logs)
    return sqrt(squares / degrees)


def runs_needed(scatter: float, limit_pct: float) -> int | None:
    """Number of runs a side with which equal runs pass a limit in four of five comparisons; None for over 100.

    Example:
        >>> [runs_needed(scatter, 5) for scatter in (0.01, 0.03, 0.10)]
        [3, 8, 67]
    """
    limit = log(1 + limit_pct / 100)
    return next((runs for runs in range(2, _MOST_RUNS + 1) if _shown(runs) * scatter <= limit), None)


def tolerable_scatter(runs: int, limit_pct: float) -> float:
    """The largest scatter between runs for which this many runs a side are enough."""
    return log(1 + limit_pct / 100) / _shown(runs)


def steps_needed(found: Ratio, steps: int, limit_pct: float) -> int | None:
    """Number of steps a side with which equal runs pass a limit in four of five comparisons; None if no number does."""
    between = 2 * (found.scatter or 0.0) ** 2
    room = (log(1 + limit_pct / 100) / (_T_975[-1] + _T_80[-1])) ** 2 - between
    if found.log_error is None or room <= 0:
        return None
    return round(steps * (found.log_error**2 - between) / room)


def _shown(runs: int) -> float:
    """The difference that this many runs a side detect in four of five cases, in units of their scatter."""
    degrees = 2 * runs - 2
    return (_quantile(_T_975, degrees) + _quantile(_T_80, degrees)) * sqrt(2 / runs)


def _welch(error: float, runs: Sequence[RunValue]) -> float:
    """Degrees of freedom of an error to which each run's steps contribute (B. L. Welch, 1947)."""
    uncertain = sum((found.log_error or 0.0) ** 4 / max(found.blocks - 1, 0.5) for found in runs)
    return max(1.0, error**4 / uncertain) if uncertain else inf


def _quantile(table: Sequence[float], degrees: float) -> float:
    return float(np.interp(-1 / degrees, [-1 / each for each in _DEGREES], table))
