"""Warming up and taking samples until enough is known."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.errors import ConfigurationError

__all__ = ["Limits", "WarmUp", "collect", "drift", "no_garbage_collection", "warm_up"]

_STEADY_BLOCKS: Final = 3
_STEADY: Final = 0.05
_BLOCK_NS: Final = 1_000_000
_LEAST_WARM_UP_NS: Final = 50_000_000  # a GPU that was idle takes tens of milliseconds to its full clock

# An H200 that multiplies matrices without a pause meets its power cap after some 35 ms, and takes 13 % longer from
# then on (benchmarks/microbench.py). At a quarter of the time it does not.
_REST: Final = 3.0
_LONGEST_REST_S: Final = 0.005
_MOST_WARM_UP_NS: Final = 1_000_000_000

_DRIFT: Final = 0.05
_DRIFT_SAMPLES: Final = 20
_SLOW_FIRST: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop.

    Attributes:
        min_time_s: sample for at least so long.
        max_time_s: and no longer than this, one sample more or less.
        max_noise: between the two, until half of the median's 95 % interval is below this share of it.
    """

    min_time_s: float
    max_time_s: float
    max_noise: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_time_s <= self.max_time_s:
            raise ConfigurationError(
                f"min_time ({self.min_time_s}) must be between 0 and max_time ({self.max_time_s}), in seconds."
            )
        if not self.max_noise > 0:
            raise ConfigurationError(f"max_noise ({self.max_noise}) must be positive: 0.01 is 1 %.")


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warming up showed.

    Attributes:
        call_us: wall time of a call at its end.
        steady: whether blocks of calls took the same time at its end; None where the user said how many calls.
    """

    call_us: float
    steady: bool | None


def warm_up(
    run: Callable[[int], None],
    calls: int | None,
    clock_ns: Callable[[], int],
    rest: Callable[[float], None] | None = None,
) -> WarmUp:
    """Call until three blocks in a row take the same time within 5 %, for 0.05 to 1 second after the first call.

    Args:
        run: makes so many calls and waits for their end.
        calls: exactly how many instead.
        clock_ns: the host clock, in nanoseconds.
        rest: lets the device idle for so many seconds between the blocks; None to go on without.
    """
    if calls is not None:
        run(calls)
        began = clock_ns()
        run(1)
        return WarmUp((clock_ns() - began) / 1e3, None)
    run(1)  # may compile for a minute
    began, size, blocks = clock_ns(), 1, [0.0]
    while True:
        start = clock_ns()
        run(size)
        end = clock_ns()
        blocks.append((end - start) / size / 1e3)
        _pause(rest, end - start)
        last = blocks[-_STEADY_BLOCKS:]
        if end - start < _BLOCK_NS:
            size, blocks = size * 2, blocks[-1:]
            steady = False
        else:
            steady = len(blocks) > _STEADY_BLOCKS and max(last) <= (1 + _STEADY) * min(last)
        if (steady and end - began >= _LEAST_WARM_UP_NS) or end - began >= _MOST_WARM_UP_NS:
            return WarmUp(median(last), steady)


def collect(
    take: Callable[[], Sequence[float]],
    limits: Limits,
    clock_ns: Callable[[], int],
    *,
    look: Callable[[int], None] = lambda _: None,
    rest: Callable[[float], None] | None = None,
) -> list[float]:
    """Take samples until the limits say so.

    Args:
        take: takes some samples, none if it failed to.
        limits: when to stop.
        clock_ns: the host clock, in nanoseconds.
        look: called before the first and after each with how many samples there are.
        rest: lets the device idle for so many seconds after each; None to go on without.

    Returns:
        At least one sample.
    """
    samples: list[float] = []
    next_check = 1.0
    began = clock_ns()
    look(0)
    while True:
        start = clock_ns()
        samples += take()
        look(len(samples))
        _pause(rest, clock_ns() - start)
        passed_s = (clock_ns() - began) / 1e9
        if not samples or passed_s < limits.min_time_s:
            continue
        if passed_s >= limits.max_time_s:
            return samples
        if len(samples) >= next_check:
            if median_noise(samples) <= limits.max_noise:
                return samples
            next_check = len(samples) * 1.1  # each check sorts them all


def _pause(rest: Callable[[float], None] | None, after_ns: int) -> None:
    """Rest for three times as long as was worked, so that the power cap is not met; not for long."""
    if rest is not None:
        rest(min(_REST * after_ns / 1e9, _LONGEST_REST_S))


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
    if samples[0] >= max(samples) and samples[0] > _SLOW_FIRST * middle:
        return f"not warmed up: the first sample took {samples[0] / middle:.1f} times the median"
    quarter = len(samples) // 4
    first, last = sorted(samples[:quarter]), sorted(samples[-quarter:])
    ratio = median(first) / median(last) if median(last) > 0 else 1.0
    # their middle halves lie apart
    if ratio > 1 + _DRIFT and first[quarter // 4] > last[-1 - quarter // 4]:
        return f"not warmed up: the first quarter of the samples took {ratio:.3g} times as long as the last"
    if ratio < 1 - _DRIFT and first[-1 - quarter // 4] < last[quarter // 4]:
        return f"getting slower: the last quarter of the samples took {1 / ratio:.3g} times as long as the first"
    return ""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's cyclic collector from running inside a sample."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
