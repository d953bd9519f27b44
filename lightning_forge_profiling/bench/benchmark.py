"""Time one function, in the way that suits it."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any, Final

import torch

from lightning_forge_profiling.bench.gpu import Gpu
from lightning_forge_profiling.bench.methods import BehindQueue, Events, HostClock, Kernels, Sampler, Wall, calls_for
from lightning_forge_profiling.bench.probe import Probe, probe
from lightning_forge_profiling.bench.result import BenchmarkResult, median_noise
from lightning_forge_profiling.bench.sampling import Limits, collect, drift, no_garbage_collection, warm_up
from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.subject import Subject, default_name, find_device
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.hardware.clocks import ClocksUnavailableError, ClockWatch

__all__ = ["METHODS", "Plan", "benchmark", "time_on_cpu", "time_on_gpu"]

METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")
_ON_CPU: Final = ("auto", "cpu", "wall")

_QUEUED_CALLS: Final = 200  # of one kernel each; the launch queue holds about 1000
_GRAPH_CALLS: Final = 1000
_FEWEST_KEPT: Final = 10
_LOWERED: Final = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to time.

    Attributes:
        name: of the result.
        method: one of `METHODS`.
        flush_l2: empty the L2 before each call.
        warmup: how many calls; None until steady.
        limits: when to stop.
    """

    name: str
    method: str
    flush_l2: bool
    warmup: int | None
    limits: Limits

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method={self.method!r} is not known: choose one of {', '.join(METHODS)}.")
        if self.warmup is not None and self.warmup < 0:
            raise ConfigurationError(f"warmup ({self.warmup}) is a number of calls, or None for until steady.")


def benchmark(
    fn: Callable[..., object],
    *args: Any,
    method: str = "auto",
    inputs: Sequence[tuple[Any, ...]] | None = None,
    flush_l2: bool = True,
    warmup: int | None = None,
    min_time: float = 0.1,
    max_time: float = 3.0,
    max_noise: float = 0.01,
    device: torch.device | str | int | None = None,
    name: str | None = None,
    watch_clock: bool = True,
) -> BenchmarkResult:
    """Time a call of a function.

    The time is the GPU's where the function works on a GPU, and the host's where not. docs/benchmark.md says which
    method reads what, and how they differ for the same function.

    Args:
        fn: the function. It is called many times, and more often than there are samples.
        *args: what to call it with.
        method: `"auto"`, or one of

            - `"kernels"`: the union of the call's own kernels, as the profiler records them. What auto takes.
            - `"graph"`: replay a CUDA graph of many calls. Hot only. What auto takes with `flush_l2=False` where the
              profiler cannot be used.
            - `"saturated"`: events around calls that are queued before the GPU gets to them. What auto takes where
              neither of those can be used.
            - `"events"`: events around one call as it comes, with the host's launch in it.
            - `"wall"`: the host clock around a call and the wait for its end. What auto takes for a function that waits
              for the GPU itself.
            - `"cpu"`: the host clock alone. What auto takes on a CPU, and where nothing reaches the GPU.
        inputs: several argument tuples instead of `args`; each call takes the next.
        flush_l2: empty the GPU's L2 before each call, outside of the time (cold), or not (hot).
        warmup: calls before the first sample; None goes on until they take the same time.
        min_time: sample for at least so many seconds.
        max_time: and for no more than so many.
        max_noise: in between, until half of the median's 95 % interval is this share of it.
        device: where the function runs; None finds out from its arguments.
        name: of the result; None makes one from the function and its arguments.
        watch_clock: read the GPU's clock meanwhile, and leave out samples for which it was held down.

    Returns:
        What was found. Print it, `svg()` it, or hand several to `compare_benchmarks`.

    Raises:
        ConfigurationError: an argument cannot work.
        Exception: whatever the function raises.

    Example:
        >>> result = benchmark(torch.add, torch.ones(1000), 1, max_time=0.2)
        >>> result.name, result.method
        ('add(float32[1000], 1)', 'cpu')
        >>> 0.1 < result.median_us < 1000
        True
    """
    if inputs is not None and (args or not inputs):
        raise ConfigurationError("inputs is a list of one or more argument tuples, instead of arguments.")
    sets = [args] if inputs is None else [tuple(one) for one in inputs]
    plan = Plan(
        name=default_name(fn, sets[0]) if name is None else name,
        method=method,
        flush_l2=flush_l2,
        warmup=warmup,
        limits=Limits(min_time_s=min_time, max_time_s=max_time, max_noise=max_noise),
    )
    where = find_device([fn, getattr(fn, "__self__", None), *sets], device)
    subject = Subject(fn, sets)
    if where.type == "cpu":
        if method not in _ON_CPU:
            raise ConfigurationError(f"method={method!r} needs a CUDA device, and the function runs on the CPU.")
        return time_on_cpu(subject, plan)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise ConfigurationError(f"device={str(where)!r} cannot be timed here: it takes the CPU or a CUDA device.")
    with torch.cuda.device(where), contextlib.ExitStack() as stack:
        gpu = Gpu(where)
        watch: ClockWatch | str = ""
        if watch_clock:
            try:
                watch = stack.enter_context(ClockWatch(gpu.uuid))
            except ClocksUnavailableError as error:
                watch = str(error)
        return time_on_gpu(subject, plan, gpu, watch=watch)


def time_on_cpu(subject: Subject, plan: Plan, clock_ns: Callable[[], int] = perf_counter_ns) -> BenchmarkResult:
    """Time a function by the host's clock alone.

    Args:
        subject: the function.
        plan: how; its method and `flush_l2` do not matter.
        clock_ns: the host clock, in nanoseconds; for tests.
    """
    with no_garbage_collection():
        warmed = warm_up(subject.call_many, plan.warmup, clock_ns)
        sampler = HostClock(subject, clock_ns, warmed.call_us)
        samples = collect(sampler, plan.limits, clock_ns)
    return BenchmarkResult(
        name=plan.name,
        method="cpu",
        device="cpu",
        samples_us=tuple(samples),
        calls_per_sample=sampler.calls,
        warnings=tuple(_about(samples, steady=warmed.steady, plan=plan)),
    )


def time_on_gpu(
    subject: Subject,
    plan: Plan,
    gpu: Gpu,
    *,
    watch: ClockWatch | str = "",
    clock_ns: Callable[[], int] = perf_counter_ns,
    rest: Callable[[float], None] = sleep,
) -> BenchmarkResult:
    """Time a function on a GPU.

    Args:
        subject: the function.
        plan: how.
        gpu: the device, which is the current one.
        watch: reads the GPU's clock; or why nothing does, "" where nobody wants it.
        clock_ns: the host clock, in nanoseconds; for tests.
        rest: lets so many seconds pass; for tests.
    """

    def run(calls: int) -> None:
        subject.call_many(calls)
        gpu.synchronize()

    with no_garbage_collection():
        warmed = warm_up(run, plan.warmup, clock_ns, rest)
        stopwatch = Stopwatch(gpu, clock_ns)
        seen = probe(subject, stopwatch, warmed.call_us)
        method, sampler, notes = _choose(subject, plan, stopwatch, seen, warmed.call_us)
        look = _look_away if isinstance(watch, str) else watch.look
        samples = collect(sampler, plan.limits, clock_ns, look=look, rest=rest)
    kept, about_clock = (samples, [watch] if watch else []) if isinstance(watch, str) else _unthrottled(samples, watch)
    dry = "the GPU had to wait for the host in spite of a filled queue, and that wait is in the time"
    return BenchmarkResult(
        name=plan.name,
        method=method,
        device=gpu.name,
        flush_l2=plan.flush_l2 and method not in {"graph", "cpu"},
        samples_us=tuple(kept),
        calls_per_sample=sampler.calls,
        enqueue_us=None if method == "cpu" else seen.enqueue_us,
        queued_us=None if method == "cpu" or seen.waits else seen.device_us,
        allocated_bytes=seen.given_bytes,
        clock=None if isinstance(watch, str) else watch.seen(len(samples) - len(kept)),
        warnings=(
            *seen.warnings(),
            *notes,
            *([dry] if isinstance(sampler, BehindQueue) and sampler.ran_dry else []),
            *about_clock,
            *_about(kept, steady=warmed.steady, plan=plan),
        ),
    )


def _choose(
    subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe, call_us: float
) -> tuple[str, Sampler, list[str]]:
    """The method to use, what takes its samples, and what is to be said about it."""
    gpu, clock_ns, flush = stopwatch.gpu, stopwatch.clock_ns, plan.flush_l2
    method = _suitable(seen) if plan.method == "auto" else plan.method
    match method:
        case "graph":
            return _graph(subject, plan, stopwatch, seen)
        case "saturated":
            return method, _saturated(subject, stopwatch, seen, flush_l2=flush), []
        case "events":
            return method, Events(subject, stopwatch, flush_l2=flush), []
        case "kernels":
            return _kernels(subject, plan, stopwatch, seen)
        case "wall":
            return method, Wall(subject, gpu, clock_ns, flush_l2=flush), []
    return "cpu", HostClock(subject, clock_ns, call_us), []


def _suitable(seen: Probe) -> str:
    """What `auto` takes first."""
    if not seen.works:
        return "cpu"
    return "wall" if seen.waits else "kernels"


def _kernels(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe) -> tuple[str, Sampler, list[str]]:
    try:
        return "kernels", Kernels(subject, stopwatch.gpu, seen.device_us, flush_l2=plan.flush_l2), []
    except Exception as error:
        if plan.method == "kernels":
            raise
        notes = [f"its kernels could not be read from the profiler ({_first_line(error)})"]
    # a graph of calls that each keep memory would keep it all at once
    if plan.flush_l2 or seen.grown_bytes > 0:
        return "saturated", _saturated(subject, stopwatch, seen, flush_l2=plan.flush_l2), notes
    method, sampler, more = _graph(subject, plan, stopwatch, seen)
    return method, sampler, notes + more


def _graph(subject: Subject, plan: Plan, stopwatch: Stopwatch, seen: Probe) -> tuple[str, Sampler, list[str]]:
    asked = plan.method == "graph"
    calls = calls_for(seen.device_us, _GRAPH_CALLS, subject.sets)
    try:
        replay = stopwatch.gpu.capture(subject.call_many, calls)
    except Exception as error:
        if asked:
            raise
        note = f"it cannot be captured into a CUDA graph ({_first_line(error)})"
        return "saturated", _saturated(subject, stopwatch, seen, flush_l2=plan.flush_l2), [note]
    replay()
    enqueue_us = median(stopwatch.enqueue_us(replay) for _ in range(3))
    hot = ["a replayed graph is timed hot: the L2 was not flushed"] if asked and plan.flush_l2 else []
    return "graph", BehindQueue(stopwatch, lambda _: replay(), calls, enqueue_us, divisible=False), hot


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def _saturated(subject: Subject, stopwatch: Stopwatch, seen: Probe, *, flush_l2: bool) -> Sampler:
    calls = 1 if flush_l2 else calls_for(seen.device_us, _QUEUED_CALLS, subject.sets)
    return BehindQueue(stopwatch, subject.call_many, calls, calls * seen.enqueue_us, flush_l2=flush_l2)


def _unthrottled(samples: list[float], watch: ClockWatch) -> tuple[list[float], list[str]]:
    """The samples for which the clock was not held down, and what is to be said about it."""
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


def _about(samples: Sequence[float], *, steady: bool | None, plan: Plan) -> list[str]:
    """What the samples themselves say against them."""
    found = []
    if steady is False:
        found.append("the warm-up ended before calls took the same time")
    if moved := drift(samples):
        found.append(moved)
    noise = median_noise(samples)
    if noise == float("inf"):
        found.append(f"{len(samples)} samples are too few to say how well the median is known: raise max_time")
    elif noise > plan.limits.max_noise:
        found.append(
            f"it did not converge: after {plan.limits.max_time_s:g} s the median is known to {noise:.1%}, "
            f"not to {plan.limits.max_noise:.1%}"
        )
    return found


def _look_away(_: int) -> None:
    """Watch no clock."""
