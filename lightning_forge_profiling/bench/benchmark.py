"""`benchmark`: warms a function up, and samples it until the median is known well enough."""

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any, Final, NamedTuple

import torch

from lightning_forge_profiling.bench.call import TimedCall, device_of
from lightning_forge_profiling.bench.device import CudaDevice, EventTimer, gpu_effects
from lightning_forge_profiling.bench.methods import HOST_METHODS, METHODS, HostClock, MethodChoice, choose_method
from lightning_forge_profiling.bench.result import BenchmarkResult, median_noise
from lightning_forge_profiling.errors import ClocksUnavailableError, ConfigurationError, ForgeProfilingError
from lightning_forge_profiling.gpu.clocks import ClockSummary, ClockWatch
from lightning_forge_profiling.host import CpuTimes, cpu_times, waited_pct


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a call is timed; `benchmark` describes the first three."""

    method: str = "auto"
    flush_l2: bool = True
    max_time: float = 3.0
    min_time: float = 0.1  # sample for at least this long, or `max_time` if that is less
    max_noise: float = 0.01  # between the two, stop once half of the median's 95 % interval is below this share of it
    one_call_warms_up: bool = False  # as of a call that takes seconds


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
    steady: bool | None  # whether blocks of calls took the same time; None of a single call
    warnings: list[str]  # of the first call


def warm_up(
    call: TimedCall,
    options: Options,
    clock_ns: Callable[[], int],
    *,
    synchronize: Callable[[], None] = lambda: None,
    rest: Callable[[float], None] | None = None,
) -> WarmUp:
    """Call the function until three blocks of calls in a row take the same time within 5 %, for 0.05 to 1 s."""

    def timed_us(calls: int) -> float:
        began = clock_ns()
        call.call_many(calls)
        synchronize()
        return (clock_ns() - began) / 1e3

    began = clock_ns()
    warnings = call.call_first()
    synchronize()
    if options.one_call_warms_up:
        return WarmUp((clock_ns() - began) / 1e3, None, warnings)
    most_ns = max(min(options.max_time * 1e9, _MOST_WARM_UP_NS), _LEAST_WARM_UP_NS)
    began, size, blocks = clock_ns(), 1, [0.0]
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
    clock_watch: ClockWatch | None = None,
    rest: Callable[[float], None] | None = None,
) -> list[float]:
    """Take samples until the options say stop."""
    samples: list[float] = []
    next_check, failures = 1.0, 0
    began = start = clock_ns()
    if clock_watch is not None:
        clock_watch.read(0)
    while True:
        new = take()
        failures += not new
        samples += new
        if clock_watch is not None and new:
            clock_watch.read(len(samples))
        _pause(rest, clock_ns() - start)
        now = clock_ns()
        passed_s, took_s = (now - began) / 1e9, (now - start) / 1e9
        start = now if new else start
        if not samples:
            if failures > _MOST_FAILURES and passed_s >= options.max_time:
                raise ForgeProfilingError(f"Could not collect a sample within max_time ({options.max_time} s).")
            continue
        if passed_s < min(options.min_time, options.max_time):
            continue
        if passed_s + took_s > options.max_time:
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


def benchmark(
    fn: Callable[..., object],
    *args: Any,
    method: str = "auto",
    flush_l2: bool = True,
    max_time: float = 3.0,
    device: torch.device | str | int | None = None,
    name: str | None = None,
) -> BenchmarkResult:
    """Time a call of a function.

    The time is the GPU's if the function works on a GPU, otherwise the host's. The methods answer different questions:
    an addition of a million floats takes an H200 2 µs by its kernels, and 13 µs by events around one call.

    Args:
        fn: the function. It is called more often than there are samples.
        *args: its positional arguments. For others time a `functools.partial`.
        method: `"auto"`, or one of

            - `"kernels"`: the union of the call's own kernels, as the profiler records them. The choice of auto.
            - `"graph"`: replays of a CUDA graph of many calls, always with a hot L2 cache. The choice of auto with
              `flush_l2=False` if the profiler cannot be used.
            - `"saturated"`: events around calls that are queued before the GPU reaches them. The choice of auto if
              neither of those can be used.
            - `"events"`: events around one call on an idle GPU, which includes the launch.
            - `"wall"`: the host clock around a call and a synchronization. The choice of auto for a function that
              waits for the GPU itself.
            - `"cpu"`: the host clock alone. The choice of auto on a CPU, or if nothing reaches the GPU.
        flush_l2: flush the GPU's L2 cache before each call, outside of the time, so that its inputs come from memory
            (cold); with False the call finds what the previous one left in the cache (hot).
        max_time: sample for at most this many seconds; less once half of the median's 95 % interval is below 1 % of it.
            Warming up and the calls that find out what the function does come on top: about a second.
            However long a call takes, it is called three or four times on a CPU and about
            six times on a GPU.
        device: where the function runs; None finds out from its tensors, and from whether a call allocates memory on a
            GPU.
        name: of the result; None for the function's name with its arguments' types and shapes. `compare_benchmarks`
            takes results of one name as runs of one function, so name functions that would otherwise share one: two
            closures of a factory, lambdas made in a loop, two modules of one class.

    Returns:
        The result: print it, or pass several to `compare_benchmarks`.

    Raises:
        ConfigurationError: an argument cannot work.
        ForgeProfilingError: the method that was asked for cannot time this function.
        Exception: whatever the function raises.

    Examples:
        >>> result = benchmark(torch.add, torch.ones(1000), 1, max_time=0.2)
        >>> result.name, result.method
        ('add(float32[1000], 1)', 'cpu')
        >>> 0.1 < result.median_us < 1000
        True
    """
    if not (isinstance(max_time, int | float) and 0 <= max_time < math.inf):
        raise ConfigurationError(f"max_time must be a number of seconds, 0 or more, got {max_time!r}.")
    if method not in METHODS:
        raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    return time_on(device, TimedCall(fn, args, name), Options(method=method, flush_l2=flush_l2, max_time=max_time))


def time_on(device: torch.device | str | int | None, call: TimedCall, options: Options) -> BenchmarkResult:
    """Time a call on its device; None finds it out."""
    where = device_of(call, device)
    if where.type == "cpu" and options.method not in HOST_METHODS:
        raise ConfigurationError(
            f"method={options.method!r} needs a CUDA device, and the function seems to run on the CPU: leave method "
            "out, move its tensors to the GPU, or pass device='cuda' if it does run there."
        )
    with ExitStack() as stack:
        gpu: CudaDevice | None = None
        clock_watch: ClockWatch | None = None
        no_clock = ""
        if where.type == "cuda":
            stack.enter_context(torch.cuda.device(where))
            gpu = CudaDevice(where)
            try:
                clock_watch = stack.enter_context(ClockWatch(gpu.uuid, where.index))
            except ClocksUnavailableError as error:
                no_clock = str(error)
        return time_call(
            call, options, gpu, clock_watch=clock_watch, no_clock=no_clock, cpu=partial(cpu_times, threads="")
        )


def time_call(
    call: TimedCall,
    options: Options,
    gpu: CudaDevice | None = None,
    *,
    clock_watch: ClockWatch | None = None,
    no_clock: str = "",
    clock_ns: Callable[[], int] = perf_counter_ns,
    rest: Callable[[float], None] = sleep,
    cpu: Callable[[], CpuTimes] | None = None,
) -> BenchmarkResult:
    """Warm up, choose the method, take samples, and check them."""
    before = None if cpu is None else cpu()
    with no_garbage_collection():
        if gpu is None:
            warmed = warm_up(call, options, clock_ns)
            choice = MethodChoice(HostClock(call, clock_ns), effects=None)
        else:
            warmed = warm_up(call, options, clock_ns, synchronize=gpu.synchronize, rest=rest)
            timer = EventTimer(gpu, clock_ns)
            choice = choose_method(
                call,
                options.method,
                timer,
                gpu_effects(call, timer, warmed.call_us),
                warmed.call_us,
                flush_l2=options.flush_l2,
            )
        sampler, effects = choice.sampler, choice.effects
        if effects is None:  # nothing reaches the GPU
            gpu = clock_watch = None
            no_clock = ""
        samples = collect(sampler, options, clock_ns, clock_watch=clock_watch, rest=rest if gpu else None)
    waits_pct = 0.0 if cpu is None or before is None or effects is not None else waited_pct(before, cpu())
    if clock_watch is None:
        checked = Unthrottled(samples, None, [no_clock] if no_clock else [])
    else:
        checked = unthrottled(samples, clock_watch)
    on_host = sampler.method == "cpu"
    return BenchmarkResult(
        name=call.name,
        method=sampler.method,
        device="cpu" if gpu is None else gpu.name,
        flush_l2=sampler.flush_l2,
        samples_us=tuple(checked.samples),
        calls_per_sample=sampler.calls,
        enqueue_us=effects.enqueue_us if effects and not on_host else None,
        queued_us=effects.queued_us if effects and not on_host else None,
        allocated_bytes=effects.allocated_bytes if effects else None,
        waits_for_gpu=effects is not None and effects.waits,
        threads=torch.get_num_threads() if on_host else None,
        clock=checked.clock,
        warnings=(
            *warmed.warnings,
            *(effects.warnings(wait_expected=options.method == "wall") if effects else ()),
            *choice.warnings,
            *sampler.warnings(),
            *checked.warnings,
            *sample_warnings(checked.samples, steady=warmed.steady, max_noise=options.max_noise, waits_pct=waits_pct),
        ),
    )
