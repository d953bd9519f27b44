"""Time one function, in the way that suits it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns, sleep
from typing import Any, Final, Never

import torch

from lightning_forge_profiling.bench.cuda import Gpu
from lightning_forge_profiling.bench.gpu_effects import probe
from lightning_forge_profiling.bench.method_choice import choose
from lightning_forge_profiling.bench.methods import HostClock, Sampler
from lightning_forge_profiling.bench.names import Names, default_name
from lightning_forge_profiling.bench.plan import ON_CPU, Plan
from lightning_forge_profiling.bench.quality import about_samples, unthrottled
from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.bench.sampling import Limits, WarmUp, collect, no_garbage_collection, warm_up
from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.timed_call import Subject, argument_sets, cuda_in_use, find_device, gpu_taken_by
from lightning_forge_profiling.errors import ClocksUnavailableError, ConfigurationError
from lightning_forge_profiling.gpu.clock_watch import ClockWatch

__all__ = ["benchmark", "time_on_cpu", "time_on_gpu"]

_NAMES: Final = Names()


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
        kwargs: keyword arguments of every call.
        inputs: several argument tuples instead of `args`; each call takes the next. A sample is then the mean over a
            round through all of them.
        flush_l2: empty the GPU's L2 before each call, outside of the time (cold), or not (hot).
        warmup: calls before the first sample, besides some that look at what the function does; None goes on until
            they take the same time.
        min_time: sample for at least so many seconds; None for 0.1, or `max_time` where that is less.
        max_time: and for no more than so many; None for 3, or `min_time` where that is more. Looking at the function
            and warming it up come on top: a second or so, or a round through `inputs`. However long a call
            takes, it is called three or four times on a CPU and about six times on a GPU.
        max_noise: in between, until half of the median's 95 % interval is this share of it.
        device: where the function runs; None finds out, by its tensors and by whether a call takes memory on a GPU.
        name: of the result; None makes one from the function and its arguments, with a #2 for another function that
            would have the same. A lambda written in a loop is another function each time: give a name.
        watch_clock: read the GPU's clock meanwhile, and leave out samples for which it was held down.
        **others: none; the function's own go into `kwargs`.

    Returns:
        What was found. Print it, `svg()` it, or hand several to `compare_benchmarks`.

    Raises:
        ConfigurationError: an argument cannot work.
        ForgeProfilingError: the method that was asked for cannot time this function.
        Exception: whatever the function raises.

    Example:
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
    sets = argument_sets(fn, args, inputs, kwargs)
    if name is None:
        name = _NAMES.tell_apart(default_name(fn, sets[0], kwargs, len(sets)), fn, sets, kwargs)
    elif not isinstance(name, str):
        raise ConfigurationError(f"name ({name!r}) is no text: give a string, or leave it out.")
    plan = Plan(
        name=name,
        method=method,
        flush_l2=flush_l2,
        warmup=warmup,
        limits=Limits.between(min_time, max_time, max_noise),
    )
    where = find_device([fn, *sets, kwargs], device)
    subject = Subject(fn, sets, kwargs)
    by_chance = where.type == "cpu" and device is None  # a model on the GPU may be given batches on the CPU
    if (by_chance or where.type == "cuda") and cuda_in_use() and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "A CUDA graph is being captured, and nothing can be timed meanwhile: call benchmark outside of the capture."
        )
    if by_chance:
        where = gpu_taken_by(subject) or where
    if where.type == "cpu":
        if method not in ON_CPU:
            raise ConfigurationError(
                f"method={method!r} needs a CUDA device, and the function seems to run on the CPU: leave method out, "
                "move its tensors to the GPU, or give device='cuda' if it works there nevertheless."
            )
        return time_on_cpu(subject, plan)
    with torch.cuda.device(where), contextlib.ExitStack() as stack:
        gpu = Gpu(where)
        watch: ClockWatch | str = ""
        if watch_clock:
            try:
                watch = stack.enter_context(ClockWatch(where.index, uuid=gpu.uuid))
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
    notes: list[str] = []
    with no_garbage_collection():
        warmed = warm_up(
            lambda: notes.extend(subject.call_first()),
            subject.call_many,
            plan.warmup,
            clock_ns,
            sets=subject.sets,
            max_time_s=plan.limits.max_time_s,
        )
        return _on_host(HostClock(subject, clock_ns), plan, warmed, notes, clock_ns)


def _on_host(
    sampler: Sampler, plan: Plan, warmed: WarmUp, notes: Sequence[str], clock_ns: Callable[[], int]
) -> BenchmarkResult:
    """What the host's clock says of a function that does not use the GPU."""
    samples = collect(sampler, plan.limits, clock_ns)
    return BenchmarkResult(
        name=plan.name,
        method="cpu",
        device="cpu",
        samples_us=tuple(samples),
        calls_per_sample=sampler.calls,
        threads=torch.get_num_threads(),
        warnings=(*notes, *about_samples(samples, steady=warmed.steady, limits=plan.limits)),
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
    notes: list[str] = []

    def first() -> None:
        notes.extend(subject.call_first())
        gpu.synchronize()

    def run(calls: int) -> None:
        subject.call_many(calls)
        gpu.synchronize()

    with no_garbage_collection():
        warmed = warm_up(first, run, plan.warmup, clock_ns, rest, sets=subject.sets, max_time_s=plan.limits.max_time_s)
        stopwatch = Stopwatch(gpu, clock_ns)
        seen = probe(subject, stopwatch, warmed.call_us)
        choice = choose(subject, plan, stopwatch, seen, warmed.call_us)
        sampler = choice.sampler
        if choice.on_cpu:
            return _on_host(sampler, plan, warmed, [*notes, *choice.notes], clock_ns)
        look = _look_away if isinstance(watch, str) else watch.look
        samples = collect(sampler, plan.limits, clock_ns, look=look, rest=rest)
    kept, about_clock = (samples, [watch] if watch else []) if isinstance(watch, str) else unthrottled(samples, watch)
    return BenchmarkResult(
        name=plan.name,
        method=choice.method,
        device=gpu.name,
        flush_l2=choice.cold,
        samples_us=tuple(kept),
        calls_per_sample=sampler.calls,
        enqueue_us=None if choice.method == "cpu" else seen.enqueue_us,
        queued_us=None if choice.method == "cpu" or seen.waits or not seen.works else seen.device_us,
        allocated_bytes=seen.given_bytes,
        threads=torch.get_num_threads() if choice.method == "cpu" else None,
        clock=None if isinstance(watch, str) else watch.seen(len(samples) - len(kept)),
        warnings=(
            *notes,
            *seen.warnings(),
            *choice.notes,
            *sampler.doubts(),
            *about_clock,
            *about_samples(kept, steady=warmed.steady, limits=plan.limits),
        ),
    )


def _look_away(_: int) -> None:
    """Watch no clock."""
