"""The confidence interval of the difference of two medians, by a bootstrap."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FEWEST_VALUES: Final = 5
"""How many values each side needs for an interval that means something.

The chance that all of n values lie above the true median is 2^-n. Only from five on is that under 5 %; with fewer, even
the lowest sample is no reliable lower bound.
"""

_RESAMPLES = 2000
_CONFIDENCE_PCT = 95.0


def bootstrap_difference(
    before: Sequence[float], after: Sequence[float], *, block: int = 1, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the difference of two medians.

    Both sides are resampled from their own steps, with replacement, and the medians subtracted, many times over; the
    middle 95 % of the outcomes are the interval. Drawn are blocks of steps in a row, which keep what such steps have in
    common, as a machine's pace for a while: with a drift that is longer than a block the true interval is wider.

    Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), sections 8.3 (two samples), 8.6
    (moving blocks) and 13.3 (percentile interval). Blocks go round from the last step to the first, so that each is
    drawn as often as any other (D. N. Politis and J. P. Romano, A circular block-resampling procedure, 1992).

    Example:
        >>> low, high = bootstrap_difference([10.0, 10.1, 9.9, 10.0, 10.2], [12.0, 12.1, 11.9, 12.0, 12.2])
        >>> 1.6 < low < 2 < high < 2.4
        True
    """
    random = np.random.default_rng(seed)
    draws = (_drawn(np.asarray(side), block, resamples, random) for side in (before, after))
    first, second = (np.median(draw, axis=1) for draw in draws)
    tail = (100 - _CONFIDENCE_PCT) / 2
    low, high = np.percentile(second - first, [tail, 100 - tail])
    return float(low), float(high)


def _drawn(
    side: npt.NDArray[np.float64], block: int, resamples: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    blocks = -(-len(side) // block)
    first = random.integers(len(side), size=(resamples, blocks, 1))
    places = (first + np.arange(block)) % len(side)
    drawn: npt.NDArray[np.float64] = side[places.reshape(resamples, -1)[:, : len(side)]]
    return drawn
