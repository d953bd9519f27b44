"""The interval of the difference of two medians, by drawing anew from what was seen."""

from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["FEWEST_VALUES", "bootstrap_difference"]

FEWEST_VALUES: Final = 5
"""How many values each side needs for an interval that means something.

The chance that all of n values lie above the true median is 2^-n. Only from five on is that under 5 %; with fewer, even
the lowest value seen is no lower bound to rely on.
"""

_RESAMPLES = 2000
_CONFIDENCE_PCT = 95.0


def bootstrap_difference(
    before: Sequence[float], after: Sequence[float], *, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the difference of two medians.

    Both sides are drawn anew from their own steps, with replacement, and the medians subtracted, many times over; the
    middle 95 % of the outcomes are the interval. Steps are taken as independent of each other: with a drift within a
    window the true interval is wider.

    Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), sections 8.3 (two samples) and
    13.3 (percentile interval).

    Args:
        before: values of the steps of one side, in any unit.
        after: of the other, in the same unit.
        seed: of the random numbers.
        resamples: how often to draw.

    Returns:
        The interval's ends, in the same unit.

    Example:
        >>> low, high = bootstrap_difference([10.0, 10.1, 9.9, 10.0, 10.2], [12.0, 12.1, 11.9, 12.0, 12.2])
        >>> 1.6 < low < 2 < high < 2.4
        True
    """
    random = np.random.default_rng(seed)
    draws = (random.choice(np.asarray(side), size=(resamples, len(side))) for side in (before, after))
    first, second = (np.median(draw, axis=1) for draw in draws)
    tail = (100 - _CONFIDENCE_PCT) / 2
    low, high = np.percentile(second - first, [tail, 100 - tail])
    return float(low), float(high)
