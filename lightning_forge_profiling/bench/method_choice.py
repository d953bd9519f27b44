"""Which timing method a function on the GPU gets: the one asked for, or the most exact one that works for it."""

from collections.abc import Callable
from typing import Final, NamedTuple

from lightning_forge_profiling.bench.cuda import CaptureError, EventTimer, first_line
from lightning_forge_profiling.bench.gpu_effects import GpuEffects
from lightning_forge_profiling.bench.methods import (
    Events,
    Graph,
    HostClock,
    Kernels,
    NoGpuWorkError,
    Rounds,
    Sampler,
    Saturated,
    Wall,
)
from lightning_forge_profiling.bench.options import HOST_METHODS, Options
from lightning_forge_profiling.bench.timed_call import TimedCall
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError

_CURRENT_STREAM_METHODS: Final = frozenset({"graph", "saturated", "events"})


class MethodChoice(NamedTuple):
    """How a function is timed."""

    sampler: Sampler
    effects: GpuEffects | None
    """What a call does on the GPU; None if the function does not use it."""
    warnings: tuple[str, ...] = ()
    """About the choice, one sentence each."""


def choose_method(
    call: TimedCall, options: Options, timer: EventTimer, effects: GpuEffects, call_us: float
) -> MethodChoice:
    """Choose the method that was asked for, or the one that suits the function."""
    method = options.method
    _refuse_impossible(method, effects)
    about_us = effects.device_us if effects.on_stream else call_us
    kernels = Kernels(call, timer.gpu, about_us, flush_l2=options.flush_l2 and effects.on_stream)
    may_be_cpu_only = method in HOST_METHODS and not effects.certainly_on_stream
    problem = None
    if may_be_cpu_only or method == "kernels" or (method == "auto" and not effects.waits):
        problem = _profiler_problem(call, kernels)
    on_host = MethodChoice(HostClock(call, timer.clock_ns), effects if effects.allocated_bytes else None)
    if may_be_cpu_only and isinstance(problem, NoGpuWorkError):
        choice = on_host
    elif problem is not None and not effects.on_stream and method in {"auto", "cpu"}:  # "wall" waits for every stream
        choice = on_host._replace(warnings=(f"whether it uses another stream is unknown ({first_line(problem)})",))
    else:
        choice = _on_gpu(call, options, kernels, problem, timer=timer, effects=effects)
    if choice.sampler.calls % call.sets:
        choice = choice._replace(sampler=Rounds(choice.sampler, call.sets))
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


def _profiler_problem(call: TimedCall, kernels: Kernels) -> Exception | None:
    """Why the function's kernels cannot be read from the profiler; None if they can."""
    try:
        kernels.check()
    except Exception as error:
        if call.raised:  # the function's own error
            raise
        return error
    return None


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
        "events": lambda: Events(call, timer, flush_l2=flush_l2),
        "wall": lambda: Wall(call, timer.gpu, timer.clock_ns, flush_l2=flush_l2),
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
    return MethodChoice(sampler, effects, (*warnings, *_method_warnings(sampler.method, flush_l2, effects)))


def _method_warnings(method: str, flush_l2: bool, effects: GpuEffects) -> list[str]:
    found = []
    if method == "kernels" and not effects.on_stream:
        found.append(
            "its kernels were found on other streams, which the current one does not wait for: they were timed without "
            "an L2 flush, and whether the function waits for them is unknown"
        )
    if method == "graph" and flush_l2:
        found.append("a CUDA graph cannot flush the L2 cache between its calls: it was timed hot")
    if method == "cpu":
        found.append("it uses the GPU, and method='cpu' times only the host's part of a call: the launches")
    return found
