"""Sample-quality checks: drift, noise, throttling."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.gpu.clock_watch import ClockSeen, ClockWatch

_FEWEST_KEPT: Final = 10
_BUSY_PCT: Final = 5.0
_LOWERED: Final = 0.97

_DRIFT: Final = 0.05
_DRIFT_SAMPLES: Final = 20
_SLOW_FIRST: Final = 1.5
_Z99: Final = 2.576  # of the normal distribution, two-sided


class Unthrottled(NamedTuple):
    """The samples that were taken at full clock."""

    samples: list[float]
    """All of them if too few are left otherwise."""
    clock: ClockSeen | None
    """What the clock did; None if it was not read."""
    warnings: list[str]
    """One sentence each."""


def unthrottled(samples: list[float], clock_watch: ClockWatch) -> Unthrottled:
    """Drop the samples that were taken while the GPU's clock was held down."""
    kept = [s for s, held in zip(samples, clock_watch.throttled(len(samples)), strict=True) if not held]
    dropped = len(samples) - len(kept)
    clock = clock_watch.seen(dropped)
    if clock is None:
        return Unthrottled(samples, None, ["the GPU's clock could not be read while sampling"])
    why = " and ".join(clock.reasons)
    moved = f"the clock was lowered from {clock.max_mhz} to {clock.min_mhz} MHz ({why})"
    warnings = []
    if dropped and len(kept) < _FEWEST_KEPT:
        kept, clock = samples, clock_watch.seen(0)
        warnings = [f"{moved} during nearly all samples: none was left out"]
    elif dropped:
        warnings = [f"{moved}: {dropped} of {len(samples)} samples were left out"]
    elif clock.reasons and clock.max_mhz < _LOWERED * clock.limit_mhz:
        warnings = [f"the clock was held down all the time ({why}): {clock.max_mhz} of {clock.limit_mhz} MHz"]
    return Unthrottled(kept, clock, warnings)


def sample_warnings(
    samples: Sequence[float], *, steady: bool | None, max_noise: float, waits_pct: float = 0.0
) -> list[str]:
    """What is wrong with the samples, one sentence each."""
    found = []
    if busy := waits_pct >= _BUSY_PCT:
        found.append(
            f"the machine is busy: the call waited for a core {waits_pct:.0f} % of the time; free a core, or take the "
            f"minimum, {min(samples):.3g} µs"
        )
    if steady is False:
        found.append("the warm-up ended before calls took the same time")
    if moved := drift(samples):
        found.append(moved)
    advice = "" if moved or busy else ": raise max_time"  # more samples help neither against drift nor against others
    noise = median_noise(samples)
    if math.isinf(noise):
        found.append(f"too few samples ({len(samples)}) for an interval of the median{advice}")
    elif noise > max_noise:
        found.append(f"it did not converge: the median is known to ±{noise:.1%}, not to ±{max_noise:.1%}{advice}")
    if not median(samples):
        found.append("at least half of the samples are 0: the median is meaningless")
    return found


def drift(samples: Sequence[float]) -> str:
    """Whether the first samples differ from the last, as a sentence; "" if they do not.

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
    """Whether two sorted sets of as many samples differ: their middle halves are disjoint, their ranks differ at 1 %.

    The middle halves of 5 samples each are disjoint by chance in every tenth run; among hundreds of samples, ranks
    alone find differences too small to matter.

    Source: W. J. Conover, Practical Nonparametric Statistics (3rd ed., 1999), section 5.1 (Mann-Whitney test).
    """
    count = len(low)
    if high[count // 4] <= low[-1 - count // 4]:
        return False
    above = sum(bisect_left(low, value) + bisect_right(low, value) for value in high) / 2  # pairs; a tie is half a pair
    return above - count**2 / 2 > _Z99 * math.sqrt(count**2 * (2 * count + 1) / 12)
