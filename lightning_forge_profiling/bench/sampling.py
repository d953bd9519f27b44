"""What is timed, a function with its arguments, and taking samples of it until the median is known well enough."""

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from numbers import Real
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import torch

from lightning_forge_profiling.bench.result import median_noise
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError
from lightning_forge_profiling.gpu.clocks import ClockSummary, ClockWatch

_LONGEST_VALUE: Final = 24
_LONGEST_SETTING: Final = 80
_WRITES_TO_ARGUMENTS: Final = (
    "it writes to its arguments (x.add_() or the like): each call starts from what the previous one left, and values "
    "that grow or vanish can change its time"
)


class TimedCall:
    """A function with its argument sets."""

    def __init__(
        self,
        fn: Callable[..., object],
        sets: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"name must be a str, got {type(name).__name__}.")
        self.name = default_name(fn, sets[0], kwargs, len(sets)) if name is None else name
        self.sets = len(sets)
        self.values = (fn, *sets, kwargs)
        self.raised = False  # whether one of the calls has
        self._fn = partial(fn, **kwargs) if kwargs else fn
        self._next = cycle(sets).__next__

    def call_first(self) -> list[str]:
        """Make the first call, which may compile for a minute, and check what it returns and changes."""
        arguments = self._next()
        before = list(_versions(arguments))
        returned = self._fn(*arguments)
        if isinstance(returned, Generator | AsyncGenerator | Coroutine):
            if isinstance(returned, Coroutine):
                returned.close()  # or Python warns that it was never awaited
            raise ConfigurationError(
                f"The function returns a {type(returned).__name__}: calling it runs nothing of its body. Time a call "
                "that runs it to the end, such as lambda: list(fn(x)) or lambda: asyncio.run(fn(x))."
            )
        return [_WRITES_TO_ARGUMENTS] if list(_versions(arguments)) != before else []

    def call(self) -> None:
        """Call it once. What it returns is released before the next call."""
        self.call_many(1)

    def call_many(self, calls: int) -> None:
        """Call it `calls` times."""
        fn, arguments = self._fn, self._next
        try:
            for _ in repeat(None, calls):
                fn(*arguments())
        except BaseException:
            self.raised = True
            raise


def _versions(value: object) -> Iterator[int]:
    """How often each tensor in the arguments has been written to, as autograd counts it."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():  # those have no count
            yield value._version  # noqa: SLF001  (documented in PyTorch's notes on autograd, but for the underscore)
    elif isinstance(value, Mapping):
        yield from _versions(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _versions(item)


def argument_sets(fn: object, args: tuple[Any, ...], inputs: object, kwargs: object = None) -> list[tuple[Any, ...]]:
    """The argument tuples of `TimedCall`, from what `benchmark` was given."""
    if not callable(fn):
        raise ConfigurationError(
            f"fn must be callable, got {type(fn).__name__}: pass the function and its arguments separately, as in "
            "benchmark(torch.softmax, x, -1)."
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        given = "keys of other types" if isinstance(kwargs, Mapping) else type(kwargs).__name__
        raise ConfigurationError(f"kwargs must be a dict with str keys, such as {{'dim': -1}}, got {given}.")
    if inputs is None:
        return [args]
    if args:
        raise ConfigurationError("inputs replaces positional arguments: put them into each of its tuples.")
    if not isinstance(inputs, list | tuple) or not inputs:
        given = "an empty one" if isinstance(inputs, list | tuple) else type(inputs).__name__
        raise ConfigurationError(f"inputs must be a list of argument tuples, such as [(x1,), (x2,)], got {given}.")
    for number, one in enumerate(inputs):
        if not isinstance(one, list | tuple):
            raise ConfigurationError(
                f"inputs[{number}] must be a tuple of arguments, as in inputs=[(x1,), (x2,)], got {type(one).__name__}."
            )
    return [tuple(one) for one in inputs]


def default_name(
    fn: Callable[..., object], arguments: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, sets: int = 1
) -> str:
    """The function's name with the types and shapes of its arguments."""
    named = dict(kwargs or {})
    while isinstance(fn, partial):
        arguments, named, fn = fn.args + arguments, {**fn.keywords, **named}, fn.func
    texts = [_short(argument) for argument in arguments]
    texts += [f"{name}={_short(value)}" for name, value in named.items()]
    return f"{_function_name(fn)}({', '.join(texts)}){f' over {sets} inputs' if sets > 1 else ''}"


def _function_name(fn: Callable[..., object]) -> str:
    if isinstance(fn, torch.nn.Module):
        eager = getattr(fn, "_orig_mod", None)  # of torch.compile(module); module.compile() keeps the module
        compiled = eager is not None or getattr(fn, "_compiled_call_impl", None) is not None
        module: torch.nn.Module = fn if eager is None else eager
        setting = _cut(module.extra_repr(), _LONGEST_SETTING)
        return f"{'compiled ' if compiled else ''}{type(module).__name__}{f'({setting})' if setting else ''}"
    eager = getattr(fn, "_torchdynamo_orig_callable", None)  # of torch.compile(function)
    if eager is not None:
        return f"compiled {_function_name(eager)}"
    name = getattr(fn, "__qualname__" if getattr(fn, "__closure__", None) else "__name__", None) or type(fn).__name__
    code = getattr(fn, "__code__", None)
    if name.endswith("<lambda>") and code is not None:
        return f"<lambda {Path(code.co_filename).name}:{code.co_firstlineno}>"
    owner = getattr(fn, "__self__", None)
    return f"{type(owner).__name__}.{name}" if isinstance(owner, torch.Tensor | torch.nn.Module) else str(name)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, int | float | str | bool | None):
        return _cut(repr(value), _LONGEST_VALUE)
    return type(value).__name__


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")

HOST_METHODS: Final = ("auto", "cpu", "wall")
"""Those that need no GPU. On a CPU all three are the same."""

_MIN_TIME_S: Final = 0.1
_MAX_TIME_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `benchmark` that do not describe the call, checked."""

    method: str = "auto"
    flush_l2: bool = True
    warmup: int | None = None
    min_time: float | None = None
    max_time: float | None = None
    max_noise: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if not isinstance(self.flush_l2, bool):
            raise ConfigurationError(f"flush_l2 must be True or False, got {self.flush_l2!r}.")
        if self.warmup is not None and (type(self.warmup) is not int or self.warmup < 0):
            raise ConfigurationError(
                f"warmup must be a number of calls, 0 or more, got {self.warmup!r}. Leave it out to warm up until the "
                "time of a call is steady."
            )
        for name, value in (("max_time", self.max_time), ("min_time", self.min_time)):
            if value is not None and not (_is_number(value) and 0 <= value < math.inf):
                raise ConfigurationError(f"{name} must be a number of seconds, 0 or more, got {value!r}.")
        if self.min_time_s > self.max_time_s:
            raise ConfigurationError(f"min_time ({self.min_time_s} s) is longer than max_time ({self.max_time_s} s).")
        if not _is_number(self.max_noise) or not self.max_noise > 0:
            raise ConfigurationError(
                f"max_noise must be a number greater than 0, such as 0.01 for 1 %, got {self.max_noise!r}."
            )

    @property
    def min_time_s(self) -> float:
        """`min_time`, by default 0.1 s or `max_time`, whichever is less."""
        default = _MIN_TIME_S if self.max_time is None else min(_MIN_TIME_S, self.max_time)
        return default if self.min_time is None else self.min_time

    @property
    def max_time_s(self) -> float:
        """`max_time`, by default 3 s or `min_time`, whichever is more."""
        default = _MAX_TIME_S if self.min_time is None else max(_MAX_TIME_S, self.min_time)
        return default if self.max_time is None else self.max_time


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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
    """What warming up showed."""

    call_us: float  # wall time at its end
    steady: bool | None  # whether blocks of calls took the same time; None if the caller chose the number of calls
    warnings: list[str]  # of the first call


def warm_up(
    call: TimedCall,
    options: Options,
    clock_ns: Callable[[], int],
    *,
    synchronize: Callable[[], None] = lambda: None,
    rest: Callable[[float], None] | None = None,
) -> WarmUp:
    """Call the function until three blocks of calls in a row take the same time within 5 %, for 0.05 to 1 s.

    A block is whole rounds through the argument sets.
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
    mean_of: int = 1,
    *,
    clock_watch: ClockWatch | None = None,
    rest: Callable[[float], None] | None = None,
) -> list[float]:
    """Take samples, each the mean of so many that are taken, until the options say stop."""
    samples: list[float] = []
    taken: list[float] = []  # for the next mean
    next_check, failures = 1.0, 0
    began = start = clock_ns()
    if clock_watch is not None:
        clock_watch.read(0)
    while True:
        new = take()
        failures += not new
        taken += new
        whole = len(taken) // mean_of * mean_of
        samples += [fmean(taken[first : first + mean_of]) for first in range(0, whole, mean_of)]
        del taken[:whole]
        if clock_watch is not None and whole:
            clock_watch.read(len(samples))
        _pause(rest, clock_ns() - start)
        now = clock_ns()
        passed_s, took_s = (now - began) / 1e9, (now - start) / 1e9
        start = now if whole else start
        if not samples:
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


_FEWEST_KEPT: Final = 10
_BUSY_PCT: Final = 5.0
_LOWERED: Final = 0.97

_DRIFT: Final = 0.05
_DRIFT_SAMPLES: Final = 20
_SLOW_FIRST: Final = 1.5
_Z99: Final = 2.576  # of the normal distribution, two-sided


class Unthrottled(NamedTuple):
    """The samples that were taken at full clock, or all of them if too few are left otherwise."""

    samples: list[float]
    clock: ClockSummary | None
    warnings: list[str]


def unthrottled(samples: list[float], clock_watch: ClockWatch) -> Unthrottled:
    """Drop the samples that were taken while the GPU's clock was held down."""
    kept = [s for s, held in zip(samples, clock_watch.throttled(len(samples)), strict=True) if not held]
    dropped = len(samples) - len(kept)
    clock = clock_watch.summary(dropped)
    if clock is None:
        return Unthrottled(samples, None, ["the GPU's clock could not be read while sampling"])
    why = " and ".join(clock.reasons)
    moved = f"the clock was lowered from {clock.max_mhz} to {clock.min_mhz} MHz ({why})"
    warnings = []
    if dropped and len(kept) < _FEWEST_KEPT:
        kept, clock = samples, clock_watch.summary(0)
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
    texts = []
    if busy := waits_pct >= _BUSY_PCT:
        texts.append(
            f"the machine is busy: the call waited for a core {waits_pct:.0f} % of the time; free a core, or take the "
            f"minimum, {min(samples):.3g} µs"
        )
    if steady is False:
        texts.append("the warm-up ended before calls took the same time")
    if moved := drift(samples):
        texts.append(moved)
    advice = "" if moved or busy else ": raise max_time"  # more samples help neither against drift nor against others
    noise = median_noise(samples)
    if math.isinf(noise):
        texts.append(f"too few samples ({len(samples)}) for an interval of the median{advice}")
    elif noise > max_noise:
        texts.append(f"it did not converge: the median is known to ±{noise:.1%}, not to ±{max_noise:.1%}{advice}")
    if not median(samples):
        texts.append("at least half of the samples are 0: the median is meaningless")
    return texts


def drift(samples: Sequence[float]) -> str:
    """Whether the first samples differ from the last, as a sentence; "" if they do not."""
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
    """Whether two sorted sets of as many samples differ: disjoint middle halves, and different ranks at 1 %."""
    # The middle halves of 5 samples each are disjoint by chance in every tenth run; among hundreds of samples, ranks
    # alone find differences too small to matter. Source: W. J. Conover, Practical Nonparametric Statistics (3rd ed.,
    # 1999), section 5.1 (Mann-Whitney test).
    count = len(low)
    if high[count // 4] <= low[-1 - count // 4]:
        return False
    above = sum(bisect_left(low, value) + bisect_right(low, value) for value in high) / 2  # pairs; a tie is half a pair
    return above - count**2 / 2 > _Z99 * math.sqrt(count**2 * (2 * count + 1) / 12)
