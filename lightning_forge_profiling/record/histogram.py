"""Histograms of step times, with buckets of a fixed relative width, so they add over steps and ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil, log
from typing import Final

# largest relative error of a value read from a bucket (as in DDSketch: Masson, Rim and Lee 2019, VLDB)
PRECISION: Final = 0.01

_RATIO: Final = (1 + PRECISION) / (1 - PRECISION)
_LOG_RATIO: Final = log(_RATIO)


def bucket(ms: float) -> int:
    """Index of the bucket that a time in milliseconds falls into."""
    # bucket b holds times t with `_RATIO`^(b-1) < t <= `_RATIO`^b in microseconds; bucket 0 those up to 1 µs.
    us = ms * 1e3
    return ceil(log(us) / _LOG_RATIO) if us > 1 else 0


def histogram(times_ms: Iterable[float]) -> dict[int, int]:
    """Count the times in each bucket."""
    return dict(Counter(map(bucket, times_ms)))


def merged(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum of histograms."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def percentile_ms(counts: Mapping[int, int], percent: float) -> float:
    """Percentile of the times in milliseconds, within `PRECISION` of a recorded one."""
    above, index = percent / 100 * (sum(counts.values()) - 1), 0
    for index in sorted(counts):
        above -= counts[index]
        if above < 0:
            break
    return 2 * _RATIO**index / (_RATIO + 1) / 1e3
