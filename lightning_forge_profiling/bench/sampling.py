"""Warming up and taking samples until enough is known."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from statistics import median
from typing import Final, Self, TypeGuard

from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError

__all__ = ["Limits", "WarmUp", "collect", "no_garbage_collection", "warm_up"]

_MIN_TIME_S: Final = 0.1
_MAX_TIME_S: Final = 3.0
_MOST_FAILURES: Final = 20  # what comes down from 1000 calls to one by halves fails 10 times

_STEADY_BLOCKS: Final = 3
_STEADY: Final = 0.05
_BLOCK_NS: Final = 1_000_000
_LEAST_WARM_UP_NS: Final = 50_000_000  # a GPU that was idle takes tens of milliseconds to its full clock

# An H200 that multiplies matrices without a pause meets its power cap after some 35 ms, and takes 13 % longer from
# then on (benchmarks/microbench.py). At a quarter of the time it does not.
_REST: Final = 3.0
_LONGEST_REST_S: Final = 0.005
_MOST_WARM_UP_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop.

    Attributes:
        min_time_s: sample for at least so long.
        max_time_s: and no longer than this, but for one sample: none is begun that would end later.
        max_noise: between the two, until half of the median's 95 % interval is below this share of it.
    """

    min_time_s: float
    max_time_s: float
    max_noise: float

    def __post_init__(self) -> None:
        for name, value in (("max_time", self.max_time_s), ("min_time", self.min_time_s)):
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} ({value!r}) is no time: give seconds, 0 or more.")
        if self.min_time_s > self.max_time_s:
            raise ConfigurationError(f"min_time ({self.min_time_s}) exceeds max_time ({self.max_time_s}).")
        if not _is_number(self.max_noise) or not self.max_noise > 0:
            raise ConfigurationError(f"max_noise ({self.max_noise!r}) is no positive number: 0.01 is 1 %.")

    @classmethod
    def between(cls, min_time_s: float | None, max_time_s: float | None, max_noise: float) -> Self:
        """Limits of which those that are not given suit those that are.

        Args:
            min_time_s: None for 0.1, or the other where that is less.
            max_time_s: None for 3, or the other where that is more.
            max_noise: as it is.

        Raises:
            ConfigurationError: they cannot be.

        Example:
            >>> Limits.between(None, 0.05, 0.01)
            Limits(min_time_s=0.05, max_time_s=0.05, max_noise=0.01)
            >>> Limits.between(5, None, 0.01).max_time_s
            5
        """
        if max_time_s is None:
            max_time_s = max(_MAX_TIME_S, min_time_s) if _is_number(min_time_s) else _MAX_TIME_S
        if min_time_s is None:
            min_time_s = min(_MIN_TIME_S, max_time_s) if _is_number(max_time_s) else _MIN_TIME_S
        return cls(min_time_s=min_time_s, max_time_s=max_time_s, max_noise=max_noise)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


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
    first: Callable[[], None],
    run: Callable[[int], None],
    calls: int | None,
    clock_ns: Callable[[], int],
    rest: Callable[[float], None] | None = None,
    *,
    sets: int = 1,
    max_time_s: float = math.inf,
) -> WarmUp:
    """Call until three blocks in a row take the same time within 5 %, for 0.05 to 1 second after the first call.

    Args:
        first: makes the first call, which may compile for a minute, and waits for its end.
        run: makes so many calls and waits for their end.
        calls: exactly how many instead, the first among them, which is made in any case.
        clock_ns: the host clock, in nanoseconds.
        rest: lets the device idle for so many seconds between the blocks; None to go on without.
        sets: how many argument sets there are; a block is whole rounds through them.
        max_time_s: no block is begun after so long either, 0.05 seconds at least.
    """
    most_ns = max(min(max_time_s * 1e9, _MOST_WARM_UP_NS), _LEAST_WARM_UP_NS)
    began = clock_ns()
    first()
    if calls is not None:
        more = max(calls - 1, 0)
        if more:
            began = clock_ns()
            run(more)
        return WarmUp((clock_ns() - began) / 1e3 / max(more, 1), None)
    began, size, blocks = clock_ns(), sets, [0.0]
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
        if (steady and end - began >= _LEAST_WARM_UP_NS) or end - began >= most_ns:
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

    Raises:
        ForgeProfilingError: there was none to be had.
    """
    samples: list[float] = []
    next_check, failures = 1.0, 0
    began = clock_ns()
    look(0)
    while True:
        start = clock_ns()
        samples += take()
        look(len(samples))
        _pause(rest, clock_ns() - start)
        now = clock_ns()
        passed_s, took_s = (now - began) / 1e9, (now - start) / 1e9
        if not samples:
            failures += 1
            if failures > _MOST_FAILURES and passed_s >= limits.max_time_s:
                raise ForgeProfilingError(f"no sample was to be had within max_time ({limits.max_time_s} s)")
            continue
        if passed_s < limits.min_time_s:
            continue
        if passed_s + took_s > limits.max_time_s:
            return samples
        if len(samples) >= next_check:
            if median_noise(samples) <= limits.max_noise:
                return samples
            next_check = len(samples) * 1.1  # each check sorts them all


def _pause(rest: Callable[[float], None] | None, after_ns: int) -> None:
    """Rest for three times as long as was worked, so that the power cap is not met; not for long."""
    if rest is not None:
        rest(min(_REST * after_ns / 1e9, _LONGEST_REST_S))


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
