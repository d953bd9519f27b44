"""Which method suits a function, and what takes its samples."""

from statistics import median
from typing import Final, NamedTuple

from lightning_forge_profiling.bench.cuda import first_line
from lightning_forge_profiling.bench.gpu_effects import Probe
from lightning_forge_profiling.bench.methods import (
    BehindQueue,
    Events,
    HostClock,
    Kernels,
    NoGpuWorkError,
    Rounds,
    Sampler,
    Wall,
    calls_for,
)
from lightning_forge_profiling.bench.plan import ON_CPU, Plan
from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.timed_call import Subject
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError

__all__ = ["Choice", "choose"]

_QUEUED_CALLS: Final = 200  # of one kernel each; the launch queue holds about 1000
_GRAPH_CALLS: Final = 1000
_OF_THIS_STREAM: Final = frozenset({"graph", "saturated", "events"})
_HOST_PART: Final = "it works on the GPU, and method='cpu' reads the host's part of a call alone: the launching"
_ELSEWHERE: Final = (
    "its kernels were found on other streams, which the current one does not wait for: they were timed hot, and "
    "whether it waits for them was not seen"
)


class Choice(NamedTuple):
    """How a function is timed."""

    method: str
    """One of `METHODS`, and not `"auto"`."""
    sampler: Sampler
    """Takes the samples."""
    notes: tuple[str, ...] = ()
    """What is to be said about the choice, in sentences."""
    cold: bool = False
    """Whether the L2 is emptied before each call."""
    on_cpu: bool = False
    """Whether nothing was seen to reach the GPU."""


def choose(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe, call_us: float) -> Choice:
    """Take the method that was asked for, or the one that suits.

    Args:
        subject: the function.
        plan: what was asked for.
        stopwatch: of its device.
        seen: what the function does besides computing.
        call_us: wall time of a call, in microseconds.

    Raises:
        ForgeProfilingError: the method that was asked for by name does not work with this function.
        Exception: what the function raises.
    """
    # Calls of the CPU that differ in length look like work, or like waiting for it, but take no GPU memory.
    surely_works = seen.works and (seen.given_bytes > 0 or seen.saturated)
    if plan.method in ON_CPU and not surely_works:
        choice = _by_trace(subject, plan, stopwatch, seen, call_us)
    elif plan.method in _OF_THIS_STREAM and not seen.works:
        raise ConfigurationError(
            f"method={plan.method!r} times the current CUDA stream, and the function puts nothing there: leave method "
            "out, or have the current stream wait for the streams that it works on."
        )
    else:
        choice = _with_work(subject, plan, stopwatch, seen, call_us)
    if choice.sampler.calls % subject.sets:
        choice = choice._replace(sampler=Rounds(choice.sampler, subject.sets))
    return choice


def _with_work(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe, call_us: float) -> Choice:
    method, cold = plan.method, plan.flush_l2
    if method == "auto":
        method = "wall" if seen.waits else "kernels"
    match method:
        case "graph":
            return _graph(subject, plan, stopwatch, seen)
        case "saturated":
            return _saturated(subject, plan, stopwatch, seen)
        case "events":
            return Choice(method, Events(subject, stopwatch, flush_l2=cold), cold=cold)
        case "kernels":
            return _kernels(subject, plan, stopwatch, seen, call_us)
        case "wall":
            return Choice(method, Wall(subject, stopwatch.gpu, stopwatch.clock_ns, flush_l2=cold), cold=cold)
    return Choice("cpu", HostClock(subject, stopwatch.clock_ns), (_HOST_PART,))


def _by_trace(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe, call_us: float) -> Choice:
    """What suits a function of which the current stream does not tell whether it works on the GPU."""
    on_host = Choice("cpu", HostClock(subject, stopwatch.clock_ns), on_cpu=not seen.given_bytes)
    try:
        kernels = Kernels(subject, stopwatch.gpu, call_us, flush_l2=False)
    except NoGpuWorkError:
        return on_host
    except Exception as error:
        if subject.failed:  # its own error, not the profiler's
            raise
        if not seen.works and plan.method != "wall":  # which waits for every stream
            note = f"whether it works on another stream was not seen ({first_line(error)})"
            return on_host._replace(notes=(note,))
    else:
        if not seen.works and plan.method == "auto":
            return Choice("kernels", kernels, (_ELSEWHERE,))
    return _with_work(subject, plan, stopwatch, seen, call_us)


def _kernels(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe, call_us: float) -> Choice:
    cold = plan.flush_l2 and seen.works
    about_us = seen.device_us if seen.works else call_us
    notes = () if seen.works else (_ELSEWHERE,)
    try:
        return Choice("kernels", Kernels(subject, stopwatch.gpu, about_us, flush_l2=cold), notes, cold)
    except Exception as error:
        if subject.failed:
            raise
        if plan.method == "kernels":
            raise ForgeProfilingError(
                f"method='kernels' cannot be used: {first_line(error)}. Leave method out, or take 'graph' or "
                "'saturated', which do without the profiler."
            ) from error
        note = f"its kernels could not be read from the profiler ({first_line(error)})"
    # a graph of calls that each keep memory would keep it all at once
    hot = not cold and seen.grown_bytes <= 0
    choice = (_graph if hot else _saturated)(subject, plan, stopwatch, seen)
    return choice._replace(notes=(note, *choice.notes))


def _graph(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe) -> Choice:
    asked = plan.method == "graph"
    if asked and seen.waits:  # CUDA would break the capture off
        raise ConfigurationError(
            "method='graph' cannot capture a function that waits for the GPU inside (a synchronization such as "
            ".item(), CUDA_LAUNCH_BLOCKING=1, or more launches than the queue of about 1000 holds): leave method out. "
            "A graph that you have captured yourself is timed by benchmark(graph.replay)."
        )
    calls = calls_for(seen.device_us, _GRAPH_CALLS, subject.sets)
    try:
        replay = stopwatch.gpu.capture(subject.call_many, calls)
    except Exception as error:
        if asked:
            if isinstance(error, ForgeProfilingError):
                raise ForgeProfilingError(
                    f"method='graph' cannot be used: {first_line(error)}. Leave method out, or take 'saturated'."
                ) from error
            error.add_note("It cannot be captured into a CUDA graph: choose another method, such as 'saturated'.")
            raise
        note = f"it cannot be captured into a CUDA graph ({first_line(error)})"
        return _saturated(subject, plan, stopwatch, seen)._replace(notes=(note,))
    replay()
    enqueue_us = median(stopwatch.enqueue_us(replay) for _ in range(3))
    hot = ("a replayed graph is timed hot: the L2 was not flushed",) if asked and plan.flush_l2 else ()
    return Choice("graph", BehindQueue(stopwatch, lambda _: replay(), calls, enqueue_us, least=None), hot)


def _saturated(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe) -> Choice:
    cold, sets = plan.flush_l2, subject.sets
    calls = 1 if cold else calls_for(seen.device_us, _QUEUED_CALLS, sets)
    least = None if cold else sets
    ahead_us = calls * seen.enqueue_us
    sampler = BehindQueue(stopwatch, subject.call_many, calls, ahead_us, flush_l2=cold, least=least)
    return Choice("saturated", sampler, cold=cold)
