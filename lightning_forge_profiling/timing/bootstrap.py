"""The bootstrap: standard errors and intervals of means, quantiles and shares, from the steps of one run; drift.

Resampled are blocks of neighbouring values, which keep what neighbours have in common, as a machine's pace for a while
(H. R. Künsch, The jackknife and the bootstrap for general stationary observations, 1989). Blocks wrap around from the
last value to the first, so that each is drawn as often as any other (D. N. Politis and J. P. Romano, A circular
block-resampling procedure, 1992).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log10, sqrt
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_forge_profiling.schema import ShareInterval, StepDrift, WindowEffect

FEWEST_PIECES: Final = 5  # with fewer, there are no two blocks of two pieces to compare

_RESAMPLES: Final = 1000
# beyond this number, neighbouring pieces are merged. Blocks stay the same, and memory stays bounded.
_MOST_PIECES: Final = 256

_VALUES_AT_ONCE: Final = 1_000_000  # 8 MB

_SMALL: Final = 0.01  # a smaller share is no cause, and its interval costs 0.1 ms

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A metric of one run."""

    value: float
    log_error: float | None = None  # standard error of the logarithm; None with too few steps
    blocks: float = 0.0  # of steps, behind the error
    log_drift: float = 0.0  # deviation from block to block beyond that of independent steps


def resampled(count: int, block: int, resamples: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices of so many resamples of `count` values, a row each."""
    first = random.integers(count, size=(resamples, ceil(count / block), 1))
    indices: npt.NDArray[np.int64] = ((first + np.arange(block)) % count).reshape(resamples, -1)[:, :count]
    return indices


def resampled_medians(values: Column, block: int, resamples: int, random: np.random.Generator) -> Column:
    """Medians of resamples."""
    at_once = max(1, _VALUES_AT_ONCE // len(values))
    parts = [min(at_once, resamples - first) for first in range(0, resamples, at_once)]
    return np.concatenate([np.median(values[resampled(len(values), block, part, random)], axis=1) for part in parts])


def block_length(values: Sequence[float] | Column) -> int:
    """Number of consecutive values per block that makes blocks nearly independent of each other."""
    # the length minimizes the error of the mean's variance, from the autocorrelations up to the lag at which they
    # vanish: D. N. Politis and H. White, Automatic block-length selection for the dependent bootstrap (2004), for
    # circular blocks with the correction of A. Patton, D. N. Politis and H. White (2009). It is at least the square
    # root of the number of values: simulated with noise that lasts for a few values, a nominal 95 % interval of the
    # difference of two means then contains the true one in 93 to 98 % of cases from 5 values on; with the formula
    # alone, in 79 to 91 %.
    column = np.asarray(values, dtype=float)
    count = len(column)
    fewest = max(1, round(sqrt(count)))
    column = column - column.mean()
    most = min(ceil(sqrt(count)) + _lags_to_vanish(count), count - 1)
    covariance = np.array([column[: count - lag] @ column[lag:] for lag in range(most + 1)]) / count
    if covariance[0] <= 0:
        return fewest
    last = min(2 * max(_last_lag(covariance / covariance[0], count), 1), most)
    lags = np.arange(1, last + 1)
    window = np.minimum(1.0, 2 * (1 - lags / last)) * covariance[1 : last + 1]  # flat-top
    spectrum = covariance[0] + 2 * window.sum()
    slope = 2 * (lags * window).sum()
    best = (1.5 * slope**2 / spectrum**2 * count) ** (1 / 3) if spectrum > 0 else inf
    return max(fewest, int(min(best, count / 3)))


def _lags_to_vanish(count: int) -> int:
    return max(5, ceil(sqrt(log10(count))))


def _last_lag(correlation: Column, count: int) -> int:
    """The lag after which several autocorrelations in a row are within chance."""
    run = _lags_to_vanish(count)
    large = np.abs(correlation) >= 2 * sqrt(log10(count) / count)
    return next(lag for lag in range(len(correlation)) if not large[lag + 1 : lag + 1 + run].any())


class BlockBootstrap:
    """Resamples the pieces of one run, each some steps in a row, with the same draws for each metric.

    The variance of the resamples is multiplied by n / (n - block), because deviations are taken from the run's own
    mean.
    """

    def __init__(self, steps: Sequence[int], step_ms: Sequence[float]) -> None:
        pieces = min(len(steps), _MOST_PIECES)
        self._starts = np.arange(pieces) * len(steps) // pieces
        self.pieces = pieces
        if pieces < FEWEST_PIECES:
            return
        block = block_length(self._merged(step_ms) / self._merged(steps))
        self.blocks = pieces / block
        drawn = resampled(pieces, block, _RESAMPLES, np.random.default_rng(0))
        cells = (drawn + pieces * np.arange(_RESAMPLES)[:, None]).ravel()
        self._times = np.bincount(cells, minlength=_RESAMPLES * pieces).reshape(_RESAMPLES, pieces).astype(float)
        self._widened = sqrt(pieces / (pieces - block))

    def ratio(self, amounts: Sequence[float | None], per: Sequence[float]) -> Estimate | None:
        """The sum of `amounts` over the sum of `per`; None if that is not a positive number."""
        known = [amount is not None for amount in amounts]
        amount = self._merged([amount or 0.0 for amount in amounts])
        base = self._merged([value if is_known else 0.0 for value, is_known in zip(per, known, strict=True)])
        if amount.sum() <= 0 or base.sum() <= 0:
            return None
        value = float(amount.sum() / base.sum())
        if self.pieces < FEWEST_PIECES:
            return Estimate(value=value)
        top, bottom = self._times @ amount, self._times @ base
        drawn = (top > 0) & (bottom > 0)
        independent = float((amount / amount.sum() - base / base.sum()).std()) * sqrt(self.pieces)
        return self._estimate(value, np.log(top[drawn] / bottom[drawn]), independent)

    def share(self, amounts: Sequence[float], per: Sequence[float]) -> tuple[float, float]:
        """The 95 % percentile interval of the sum of `amounts` over the sum of `per`, which may be 0."""
        amount, base = self._merged(amounts), self._merged(per)
        value = amount.sum() / base.sum()
        bottom = self._times @ base
        drawn = (self._times @ amount)[bottom > 0] / bottom[bottom > 0]
        low, high = np.percentile(drawn, [2.5, 97.5])
        return float(max(value + (low - value) * self._widened, 0)), float(value + (high - value) * self._widened)

    def quantile(
        self, histograms: Sequence[Mapping[int, int]], bucket_ratio: float, quantile: float
    ) -> Estimate | None:
        """A quantile of the steps in milliseconds, interpolated in its bucket; None without a step."""
        # the error includes a bucket's width, because steps may not be spread evenly in it.
        buckets = sorted({bucket for counts in histograms for bucket in counts})
        if not buckets:
            return None
        table = np.array([[counts.get(bucket, 0) for bucket in buckets] for counts in histograms], dtype=float)
        table = np.add.reduceat(table, self._starts, axis=0)
        width = log(bucket_ratio)
        edges = width * np.array(buckets, dtype=float)
        value = float(np.exp(_log_quantile(table.sum(axis=0)[None], edges, width, quantile)[0])) / 1e3
        if self.pieces < FEWEST_PIECES:
            return Estimate(value=value)
        error = self._estimate(value, _log_quantile(self._times @ table, edges, width, quantile)).log_error
        uneven = width / sqrt(12)
        return Estimate(value=value, log_error=sqrt((error or 0.0) ** 2 + uneven**2), blocks=self.blocks)

    def _estimate(self, value: float, logs: Column, independent: float = inf) -> Estimate:
        if len(logs) <= _RESAMPLES / 2:
            return Estimate(value=value, blocks=self.blocks)
        error = float(logs.std()) * self._widened
        drift = sqrt(max(error**2 - independent**2, 0.0) * self.blocks)
        return Estimate(value=value, log_error=error, blocks=self.blocks, log_drift=drift)

    def _merged(self, column: Sequence[float] | Column) -> Column:
        merged: Column = np.add.reduceat(np.asarray(column, dtype=float), self._starts)
        return merged


def _log_quantile(counts: Column, edges: Column, width: float, quantile: float) -> Column:
    """Logarithm of a quantile in microseconds, for each row of counts; `edges` are the buckets' upper ends."""
    below = np.cumsum(counts, axis=1)
    target = quantile * below[:, -1:]
    column = np.argmax(below >= target, axis=1)
    rows = np.arange(len(counts))
    logs: Column = edges[column] - width * (below[rows, column] - target[:, 0]) / counts[rows, column]
    return logs


def median_estimate(values: Sequence[float], block: int = 1) -> Estimate | None:
    """The median of single values with its error; None unless it is positive."""
    column = np.asarray(values, dtype=float)
    value = float(np.median(column))
    if value <= 0:
        return None
    if len(column) < FEWEST_PIECES:
        return Estimate(value=value)
    medians = resampled_medians(column, block, _RESAMPLES, np.random.default_rng(0))
    error = float(np.log(medians).std()) * sqrt(len(column) / (len(column) - block)) if medians.min() > 0 else None
    return Estimate(value=value, log_error=error, blocks=len(column) / block)


def bootstrap_difference(before: Sequence[float], after: Sequence[float], *, block: int = 1) -> tuple[float, float]:
    """The 95 % percentile interval of the difference of two medians."""
    # with a drift that is longer than a block the true interval is wider. Source: B. Efron and R. J. Tibshirani, An
    # Introduction to the Bootstrap (1993), sections 8.3 (two samples) and 13.3 (percentile interval).
    random = np.random.default_rng(0)
    first, second = (resampled_medians(np.asarray(side), block, 2 * _RESAMPLES, random) for side in (before, after))
    low, high = np.percentile(second - first, [2.5, 97.5])
    return float(low), float(high)


def share_interval(
    part: Sequence[float], whole: Sequence[float], steps: Sequence[int], bootstrap: BlockBootstrap | None = None
) -> ShareInterval | None:
    """A part's share of the steps, with its interval; None for fewer than five blocks."""
    if len(whole) < FEWEST_PIECES or sum(whole) <= 0:
        return None
    bootstrap = bootstrap or BlockBootstrap(steps, whole)
    low, high = bootstrap.share(part, whole)
    return ShareInterval(pct=100 * sum(part) / sum(whole), low_pct=100 * low, high_pct=100 * min(high, 1.0))


def share_intervals(
    parts: Mapping[str, Sequence[float]], whole: Sequence[float], steps: Sequence[int]
) -> dict[str, ShareInterval]:
    """The shares of parts with their intervals, by name, from the same resamples; not of those under 1 %."""
    large = {name: part for name, part in parts.items() if sum(part) > _SMALL * sum(whole)}
    if not large or len(whole) < FEWEST_PIECES:
        return {}
    bootstrap = BlockBootstrap(steps, whole)
    intervals = {name: share_interval(part, whole, steps, bootstrap) for name, part in large.items()}
    return {name: interval for name, interval in intervals.items() if interval is not None}


# -- drift at the start, and after a window ----------------------------------------------------------------------------

DRIFT_STEPS: Final = 100  # fewest steps to test. With fewer, slow moments of a shared machine look like a warm-up.

# long blocks detect a slow drift despite noise, short ones a warm-up of a dozen steps
_BLOCK_STEPS: Final = (32, 16, 8, 4)
_FEWEST_BLOCKS: Final = 16

# least distance of the first block from the later level, relative to the largest distance of a later block. Noise alone
# reaches it in under 5 % of runs: simulated with a step-to-step autocorrelation of up to 0.9
# (`tests/test_step_drift.py`).
_BEYOND: Final = 2.5

_LEAST: Final = 0.05  # least drift, as a share of the step. Less is not worth a longer warm-up.

_STEADY: Final = 0.02


def step_drift(steps: Sequence[int], times_ms: Sequence[float]) -> StepDrift | None:
    """Drift at the start of the counted steps."""
    # the later half of the steps is the reference. Its median is the level; the largest distance of a block's median
    # from it is the noise. There is a drift if the median of the first block is at least 5 % and 2.5 times the noise
    # away from the level. It lasts while the following blocks are on the same side, further away than the noise and 2 %
    # of the level.
    if len(times_ms) < DRIFT_STEPS:
        return None
    level = median(times_ms[len(times_ms) // 2 :])
    for size in _BLOCK_STEPS:
        blocks = [median(times_ms[at : at + size]) for at in range(0, len(times_ms) - size + 1, size)]
        if len(blocks) < _FEWEST_BLOCKS:
            continue
        half = (len(blocks) + 1) // 2
        noise = max(abs(block - level) for block in blocks[half:])
        side = 1 if blocks[0] > level else -1
        above = [side * (block - level) for block in blocks]
        if above[0] <= max(_BEYOND * noise, _LEAST * level):
            continue
        steady = max(noise, _STEADY * level)
        lasts = next((block for block in range(half) if above[block] <= steady), half)
        return StepDrift(first_ms=blocks[0], steady_ms=level, until_step=steps[lasts * size] if lasts < half else None)
    return None


WINDOW_STEPS: Final = 20  # on each side; with fewer the interval is wider than the effects of interest

# each side is resampled in so many blocks: a shared machine's pace changes within tens of steps, not from one to the
# next
_BLOCKS: Final = 8


def window_effect(before_ms: Sequence[float], after_ms: Sequence[float]) -> WindowEffect | None:
    """Compare the steps after a window with those before it; None with too few on a side."""
    if min(len(before_ms), len(after_ms)) < WINDOW_STEPS or min(*before_ms, *after_ms) <= 0:
        return None
    before, after = median(before_ms), median(after_ms)
    # the difference of logarithms is the logarithm of the ratio
    logarithms = [log(ms) for ms in before_ms], [log(ms) for ms in after_ms]
    low, high = bootstrap_difference(*logarithms, block=min(len(before_ms), len(after_ms)) // _BLOCKS)
    return WindowEffect(
        steps_before=len(before_ms),
        steps_after=len(after_ms),
        before_ms=before,
        after_ms=after,
        change_pct=100 * (after / before - 1),
        low_pct=100 * (exp(low) - 1),
        high_pct=100 * (exp(high) - 1),
    )
