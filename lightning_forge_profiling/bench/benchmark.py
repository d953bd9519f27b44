"""`benchmark`: times one function, from its arguments to a `BenchmarkResult`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns, sleep
from typing import Any, Final, NamedTuple, Never

import torch

from lightning_forge_profiling.bench.device import (
    CaptureError,
    CudaDevice,
    EventTimer,
    GpuEffects,
    device_of,
    first_line,
    gpu_effects,
)
from lightning_forge_profiling.bench.methods import (
    Graph,
    HostClock,
    Kernels,
    NoGpuWorkError,
    OneCall,
    Sampler,
    Saturated,
)
from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.bench.sampling import (
    HOST_METHODS,
    Options,
    TimedCall,
    Unthrottled,
    argument_sets,
    collect,
    no_garbage_collection,
    sample_warnings,
    unthrottled,
    warm_up,
)
from lightning_forge_profiling.errors import ClocksUnavailableError, ConfigurationError, ForgeProfilingError
from lightning_forge_profiling.gpu.clocks import ClockWatch
from lightning_forge_profiling.host import CpuTimes, cpu_times, waited_pct

_CURRENT_STREAM_METHODS: Final = frozenset({"graph", "saturated", "events"})


class MethodChoice(NamedTuple):
    """How a function is timed, what a call does on the GPU (None if it does not use it), and warnings about both."""

    sampler: Sampler
    effects: GpuEffects | None
    warnings: tuple[str, ...] = ()


def choose_method(
    call: TimedCall, options: Options, timer: EventTimer, effects: GpuEffects, call_us: float
) -> MethodChoice:
    """Choose the method that was asked for, or the one that suits the function."""
    method = options.method
    _refuse_impossible(method, effects)
    estimated_us = effects.device_us if effects.on_stream else call_us
    kernels = Kernels(call, timer.gpu, estimated_us, flush_l2=options.flush_l2 and effects.on_stream)
    may_be_cpu_only = method in HOST_METHODS and not effects.certainly_on_stream
    problem = None
    if may_be_cpu_only or method == "kernels" or (method == "auto" and not effects.waits):
        problem = kernels.problem()
    on_host = MethodChoice(HostClock(call, timer.clock_ns), effects if effects.allocated_bytes else None)
    if may_be_cpu_only and isinstance(problem, NoGpuWorkError):
        choice = on_host
    elif problem is not None and not effects.on_stream and method in {"auto", "cpu"}:  # "wall" waits for every stream
        choice = on_host._replace(warnings=(f"whether it uses another stream is unknown ({first_line(problem)})",))
    else:
        choice = _on_gpu(call, options, kernels, problem, timer=timer, effects=effects)
    return choice


def _refuse_impossible(method: str, effects: GpuEffects) -> None:
    if method in _CURRENT_STREAM_METHODS and not effects.on_stream:
        raise ConfigurationError(
            f"method={method!r} times the current CUDA stream, and the function launches nothing there: leave method "
            "out, or make the current stream wait for the streams that the function uses."
        )
    if method == "graph" and effects.waits:  # CUDA would break the capture off
        raise ConfigurationError(
            "method='graph' cannot capture a function that waits for the GPU (a synchronization such as .item(), "
            "CUDA_LAUNCH_BLOCKING=1, or more launches than the queue of about 1000 holds): leave method out. To time a "
            "graph that you have captured, call benchmark(graph.replay)."
        )


def _on_gpu(
    call: TimedCall,
    options: Options,
    kernels: Kernels,
    problem: Exception | None,
    *,
    timer: EventTimer,
    effects: GpuEffects,
) -> MethodChoice:
    """The method for a function that uses the GPU."""
    flush_l2 = options.flush_l2
    samplers: dict[str, Callable[[], Sampler]] = {
        "kernels": lambda: kernels,
        "graph": lambda: Graph(call, timer, effects),
        "saturated": lambda: Saturated(call, timer, effects, flush_l2=flush_l2),
        "events": lambda: OneCall("events", call, timer.event_us, flush_l2=flush_l2),
        "wall": lambda: OneCall("wall", call, timer.wall_us, flush_l2=flush_l2),
        "cpu": lambda: HostClock(call, timer.clock_ns),
    }
    method, warnings = options.method, []
    if method == "auto":
        method = "wall" if effects.waits and effects.on_stream else "kernels"
    if method == "kernels" and problem is not None:
        if options.method == "kernels":
            raise ForgeProfilingError(
                f"method='kernels' cannot be used: {first_line(problem)}. Leave method out, or take 'graph' or "
                "'saturated', which need no profiler."
            ) from problem
        warnings.append(f"its kernels could not be read from the profiler ({first_line(problem)})")
        # a graph of calls that each keep memory would keep the memory of all of them at once
        method = "saturated" if flush_l2 or effects.kept_bytes > 0 else "graph"
    try:
        sampler = samplers[method]()
    except Exception as error:  # only a capture can fail
        if options.method != "graph":
            warnings.append(f"it cannot be captured into a CUDA graph ({first_line(error)})")
            sampler = samplers["saturated"]()
        elif call.raised and not isinstance(error, CaptureError):
            error.add_note("It cannot be captured into a CUDA graph: choose another method, such as 'saturated'.")
            raise
        else:
            raise ForgeProfilingError(
                f"method='graph' cannot be used: {first_line(error)}. Leave method out, or take 'saturated'."
            ) from error
    if sampler is kernels and not effects.on_stream:
        warnings.append(
            "its kernels were found on other streams, which the current one does not wait for: they were timed without "
            "an L2 flush, and whether the function waits for them is unknown"
        )
    if sampler.method == "graph" and flush_l2:
        warnings.append("a CUDA graph cannot flush the L2 cache between its calls: it was timed hot")
    if sampler.method == "cpu":
        warnings.append("it uses the GPU, and method='cpu' times only the host's part of a call: the launches")
    return MethodChoice(sampler, effects, tuple(warnings))


def benchmark(
    fn: Callable[..., object],
    *args: Any,
    method: str = "auto",
    kwargs: Mapping[str, Any] | None = None,
    inputs: Sequence[tuple[Any, ...]] | None = None,
    flush_l2: bool = True,
    warmup: int | None = None,
    min_time: float | None = None,
    max_time: float | None = None,
    max_noise: float = 0.01,
    device: torch.device | str | int | None = None,
    name: str | None = None,
    watch_clock: bool = True,
    **others: Never,
) -> BenchmarkResult:
    """Time a call of a function.

    The time is the GPU's if the function works on a GPU, otherwise the host's. docs/benchmark.md says what each method
    includes, and how far they differ for the same function.

    Args:
        fn: the function. It is called more often than there are samples.
        *args: its positional arguments.
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
        kwargs: its keyword arguments.
        inputs: several argument tuples instead of `args`, used in turn. A sample is then the mean over one round
            through all of them.
        flush_l2: flush the GPU's L2 cache before each call, outside of the time, so that its inputs come from memory
            (cold); with False the call finds what the previous one left in the cache (hot).
        warmup: the number of calls before the first sample, besides a few that find out what the function does; None
            warms up until the time of a call is steady.
        min_time: sample for at least this many seconds; None for 0.1, or `max_time` if that is less.
        max_time: sample for at most this many seconds; None for 3, or `min_time` if that is more. Warming up and the
            calls that find out what the function does come on top: about a second, or a round through `inputs`.
            However long a call takes, it is called three or four times on a CPU and about six times on a GPU.
        max_noise: between the two, stop once half of the median's 95 % interval is below this fraction of it.
        device: where the function runs; None finds out from its tensors, and from whether a call allocates memory on a
            GPU.
        name: of the result; None for the function's name with its arguments' types and shapes. `compare_benchmarks`
            takes results of one name as runs of one function, so name functions that would otherwise share one: two
            closures of a factory, lambdas made in a loop, two modules of one class.
        watch_clock: read the GPU's clock meanwhile, and leave out samples that were taken while it was held down.
        **others: none; the function's keyword arguments go into `kwargs`.

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
    if others:
        given = min(others)
        raise ConfigurationError(
            f"benchmark has no option {given!r}: keyword arguments of the function go into kwargs={{{given!r}: ...}}."
        )
    call = TimedCall(fn, argument_sets(fn, args, inputs, kwargs), kwargs, name)
    options = Options(
        method=method, flush_l2=flush_l2, warmup=warmup, min_time=min_time, max_time=max_time, max_noise=max_noise
    )
    where = device_of(call, device, method)
    with ExitStack() as stack:
        gpu: CudaDevice | None = None
        clock_watch: ClockWatch | None = None
        no_clock = ""
        if where.type == "cuda":
            stack.enter_context(torch.cuda.device(where))
            gpu = CudaDevice(where)
            if watch_clock:
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
            choice = choose_method(call, options, timer, gpu_effects(call, timer, warmed.call_us), warmed.call_us)
        sampler, effects = choice.sampler, choice.effects
        if effects is None:  # nothing reaches the GPU
            gpu = clock_watch = None
            no_clock = ""
        mean_of = call.sets if sampler.calls % call.sets else 1  # samples of one call each, over a round
        samples = collect(sampler, options, clock_ns, mean_of, clock_watch=clock_watch, rest=rest if gpu else None)
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
        calls_per_sample=sampler.calls * mean_of,
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
