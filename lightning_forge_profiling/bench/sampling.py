"""Warming up, and taking samples until the median is known well enough."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_forge_profiling.bench.options import Options
from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.bench.timed_call import TimedCall
from lightning_forge_profiling.errors import ForgeProfilingError

_MOST_FAILURES: Final = 20  # halving from 1000 calls to one fails 10 times

_STEADY_BLOCKS: Final = 3
_STEADY: Final = 0.05
_BLOCK_NS: Final = 1_000_000
_LEAST_WARM_UP_NS: Final = 50_000_000  # an idle GPU needs tens of milliseconds to reach its full clock
_MOST_WARM_UP_NS: Final = 1_000_000_000

# An H200 that multiplies matrices without a pause reaches its power cap after some 35 ms, and is 13 % slower from then
# on (benchmarks/microbench.py). Busy a quarter of the time, it does not.
_REST: Final = 3.0
_LONGEST_REST_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warming up showed.

    Attributes:
        call_us: wall time of a call at its end.
        steady: whether blocks of calls took the same time at its end; None if the caller chose the number of calls.
        warnings: of the first call, one sentence each.
    """

    call_us: float
    steady: bool | None
    warnings: list[str]


def warm_up(
    call: TimedCall,
    options: Options,
    clock_ns: Callable[[], int],
    *,
    synchronize: Callable[[], None] = lambda: None,
    rest: Callable[[float], None] | None = None,
) -> WarmUp:
    """Call the function until three blocks of calls in a row take the same time within 5 %.

    That takes 0.05 to 1 s after the first call, or no longer than `max_time` if that is in between. A block is a whole
    number of rounds through the argument sets. With `options.warmup` it is that number of calls, and at least one.
    """

    def timed_us(calls: int) -> float:
        began = clock_ns()
        call.call_many(calls)
        synchronize()
        return (clock_ns() - began) / 1e3

    began = clock_ns()
    warnings = call.call_first()
    synchronize()
    if options.warmup is not None:
        more = options.warmup - 1
        first_us = (clock_ns() - began) / 1e3
        return WarmUp(timed_us(more) / more if more > 0 else first_us, None, warnings)
    most_ns = max(min(options.max_time_s * 1e9, _MOST_WARM_UP_NS), _LEAST_WARM_UP_NS)
    began, size, blocks = clock_ns(), call.sets, [0.0]
    while True:
        block_us = timed_us(size)
        passed_ns = clock_ns() - began
        blocks.append(block_us / size)
        _pause(rest, block_us * 1e3)
        last = blocks[-_STEADY_BLOCKS:]
        if block_us * 1e3 < _BLOCK_NS:
            size, blocks = size * 2, blocks[-1:]
            steady = False
        else:
            steady = len(blocks) > _STEADY_BLOCKS and max(last) <= (1 + _STEADY) * min(last)
        if (steady and passed_ns >= _LEAST_WARM_UP_NS) or passed_ns >= most_ns:
            return WarmUp(median(last), steady, warnings)


def collect(
    take: Callable[[], Sequence[float]],
    options: Options,
    clock_ns: Callable[[], int],
    *,
    on_samples: Callable[[int], None] = lambda _: None,
    rest: Callable[[float], None] | None = None,
) -> list[float]:
    """Take samples until the options say stop."""
    samples: list[float] = []
    next_check, failures = 1.0, 0
    began = clock_ns()
    on_samples(0)
    while True:
        start = clock_ns()
        samples += take()
        on_samples(len(samples))
        _pause(rest, clock_ns() - start)
        now = clock_ns()
        passed_s, took_s = (now - began) / 1e9, (now - start) / 1e9
        if not samples:
            failures += 1
            if failures > _MOST_FAILURES and passed_s >= options.max_time_s:
                raise ForgeProfilingError(f"Could not collect a sample within max_time ({options.max_time_s} s).")
            continue
        if passed_s < options.min_time_s:
            continue
        if passed_s + took_s > options.max_time_s:
            return samples
        if len(samples) >= next_check:
            if median_noise(samples) <= options.max_noise:
                return samples
            next_check = len(samples) * 1.1  # each check sorts them all


def _pause(rest: Callable[[float], None] | None, after_ns: float) -> None:
    """Rest for three times as long as the device worked, 5 ms at most, so that it stays below its power cap."""
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
