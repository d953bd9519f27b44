"""What samples say against themselves."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Final

from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.bench.sampling import Limits
from lightning_forge_profiling.gpu.clock_watch import ClockWatch

__all__ = ["about_samples", "drift", "unthrottled"]

_FEWEST_KEPT: Final = 10
_LOWERED: Final = 0.97

_DRIFT: Final = 0.05
_DRIFT_SAMPLES: Final = 20
_SLOW_FIRST: Final = 1.5
_Z99: Final = 2.576  # of the normal distribution, both sides


def unthrottled(samples: list[float], watch: ClockWatch) -> tuple[list[float], list[str]]:
    """The samples for which the clock was not held down, and what is to be said about it.

    Args:
        samples: in the order they were taken.
        watch: looked at the clock meanwhile.
    """
    held = watch.throttled(len(samples))
    kept = [sample for sample, down in zip(samples, held, strict=True) if not down]
    clock = watch.seen(len(samples) - len(kept))
    if clock is None:
        return samples, ["the GPU's clock could not be read meanwhile"]
    why = " and ".join(clock.reasons)
    if len(kept) == len(samples):
        if clock.reasons and clock.max_mhz < _LOWERED * clock.limit_mhz:
            return samples, [f"the clock was held down all the time ({why}): {clock.max_mhz} of {clock.limit_mhz} MHz"]
        return samples, []
    moved = f"from {clock.max_mhz} down to {clock.min_mhz} MHz ({why})"
    if len(kept) < _FEWEST_KEPT:
        return samples, [f"the clock was taken {moved} for nearly all of the samples: none was left out"]
    return kept, [f"the clock was taken {moved}: {len(samples) - len(kept)} of {len(samples)} samples were left out"]


def about_samples(samples: Sequence[float], *, steady: bool | None, limits: Limits) -> list[str]:
    """What the samples themselves say against them, in sentences.

    Args:
        samples: in the order they were taken.
        steady: whether the warm-up ended with calls that took the same time; None where it was not to.
        limits: what was asked for.
    """
    found = []
    if steady is False:
        found.append("the warm-up ended before calls took the same time")
    if moved := drift(samples):
        found.append(moved)
    more = "" if moved else ": raise max_time"  # more samples of what moves do not help
    noise = median_noise(samples)
    if noise == float("inf"):
        found.append(f"too few samples ({len(samples)}) to say how well the median is known{more}")
    elif noise > limits.max_noise:
        found.append(f"it did not converge: the median is known to {noise:.1%}, not to {limits.max_noise:.1%}{more}")
    if not median(samples):
        found.append("half of the samples or more are 0: the median says nothing")
    return found


def drift(samples: Sequence[float]) -> str:
    """Whether the first samples differ from the last, in a sentence; "" when they do not.

    Args:
        samples: in the order they were taken.

    Example:
        >>> drift([30.0] + [10.0] * 29)
        'not warmed up: the first sample took 3.0 times the median'
        >>> drift([10.0] * 30)
        ''
    """
    if len(samples) < _DRIFT_SAMPLES:
        return ""
    middle = median(samples)
    quarter = len(samples) // 4
    if samples[0] >= max(samples) > max(samples[-quarter:]) and samples[0] > _SLOW_FIRST * middle:
        return f"not warmed up: the first sample took {samples[0] / middle:.1f} times the median"
    first, last = sorted(samples[:quarter]), sorted(samples[-quarter:])
    ratio = median(first) / median(last) if median(last) > 0 else 1.0
    if ratio > 1 + _DRIFT and _lie_apart(last, first):
        return f"not warmed up: the first quarter of the samples took {ratio:.3g} times as long as the last"
    if ratio < 1 - _DRIFT and _lie_apart(first, last):
        return f"getting slower: the last quarter of the samples took {1 / ratio:.3g} times as long as the first"
    return ""


def _lie_apart(low: Sequence[float], high: Sequence[float]) -> bool:
    """Whether the middle halves of two equally many samples, in order, do, and not by chance: their ranks at 1 %.

    The middle halves of 5 samples each do by chance in every tenth run. Of hundreds, ranks tell differences that are
    none to a reader.

    Source: W. J. Conover, Practical Nonparametric Statistics (3rd ed., 1999), section 5.1 (Mann-Whitney test).
    """
    count = len(low)
    if high[count // 4] <= low[-1 - count // 4]:
        return False
    above = sum(bisect_left(low, value) + bisect_right(low, value) for value in high) / 2  # pairs; a tie is half a one
    return above - count**2 / 2 > _Z99 * math.sqrt(count**2 * (2 * count + 1) / 12)
