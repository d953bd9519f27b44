"""The timing methods, each taking samples (microseconds of one call), and which of them suits a function."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.bench.call import TimedCall
from lightning_forge_profiling.bench.device import CaptureError, CudaDevice, EventTimer, GpuEffects, first_line
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError

METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")
HOST_METHODS: Final = ("auto", "cpu", "wall")
"""Those that need no GPU. On a CPU all three are the same."""
_CURRENT_STREAM_METHODS: Final = frozenset({"graph", "saturated", "events"})

CALL: Final = "forge.benchmark.call"  # a call's span in the trace
_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})

_SAMPLE_US: Final = 1000.0  # a constant part of a few microseconds is then well under 1 % of a sample
_HOST_SAMPLE_US: Final = 200.0  # at least; reading the host clock takes some 50 ns
_MOST_CALLS: Final = 10**6  # for a clock that stands still
_QUEUED_CALLS: Final = 200  # of one kernel each; the launch queue holds about 1000
_GRAPH_CALLS: Final = 1000
_GRAPH_LAUNCHES: Final = 3
_PROFILED_CALLS: Final = 50
_PROFILED_US: Final = 10_000.0  # bursts this short do not make an H200 lower its clock
_FIRST_PROFILE_CALLS: Final = 10
_UNCOUNTED_CALLS: Final = 3  # meanwhile the profiler still sets up its buffers
_AHEAD_US: Final = 20.0
_ATTEMPTS: Final = 4


def calls_for(call_us: float, most: int, sample_us: float = _SAMPLE_US) -> int:
    """How many calls make a sample."""
    return min(most, max(1, math.ceil(sample_us / max(call_us, 1e-3))))


class Sampler:
    """Takes samples of a call by one method; a sample is the mean over `calls` calls."""

    method: str

    def __init__(self, call: TimedCall, *, calls: int = 1, flush_l2: bool = False) -> None:
        self.calls = calls
        self.flush_l2 = flush_l2
        self._call = call

    def __call__(self) -> Sequence[float]:
        """Take some samples; none if that failed and is worth another try."""
        raise NotImplementedError

    def warnings(self) -> Sequence[str]:
        """What is wrong with the samples so far, one sentence each."""
        return ()


class HostClock(Sampler):
    """The host clock around as many calls as a sample takes."""

    method = "cpu"

    def __init__(self, call: TimedCall, clock_ns: Callable[[], int]) -> None:
        super().__init__(call)
        self._clock_ns = clock_ns

    def __call__(self) -> Sequence[float]:
        """One sample. If it is too short, the number of calls is doubled for good."""
        while True:
            began = self._clock_ns()
            self._call.call_many(self.calls)
            us = (self._clock_ns() - began) / 1e3
            if us >= _HOST_SAMPLE_US or self.calls >= _MOST_CALLS:
                return [us / self.calls]
            self.calls *= 2


class OneCall(Sampler):
    """One call a sample, from an idle GPU, timed by the host's clock ("wall") or by two events ("events")."""

    def __init__(self, method: str, call: TimedCall, timer: EventTimer, *, flush_l2: bool) -> None:
        super().__init__(call, flush_l2=flush_l2)
        self.method = method
        self._timer = timer

    def __call__(self) -> Sequence[float]:
        """One sample."""
        if self.method == "wall":
            return [self._timer.host_us(self._call.call, flush_l2=self.flush_l2, waits=True)]
        return [self._timer.between(self._call.call, flush_l2=self.flush_l2).us]


class Saturated(Sampler):
    """Two events around calls that are queued before the GPU reaches the first of them.

    A spinning kernel keeps the GPU busy meanwhile. Whether it ran long enough is checked once the second event is
    queued; if not, the sample is taken again. The time between two events without work is subtracted.
    """

    method = "saturated"

    def __init__(self, call: TimedCall, timer: EventTimer, effects: GpuEffects, *, flush_l2: bool = False) -> None:
        calls = 1 if flush_l2 else calls_for(effects.device_us, _QUEUED_CALLS)
        super().__init__(call, calls=calls, flush_l2=flush_l2)
        self._run: Callable[[int], object] = call.call_many
        self._timer = timer
        self._ahead_us = 2 * calls * effects.enqueue_us + _AHEAD_US
        self._retried = 0
        self._queue_ran_empty = False

    def __call__(self) -> Sequence[float]:
        """One sample; none if the queue turned out not to hold so many calls."""
        for attempt in range(1 if self._queue_ran_empty else _ATTEMPTS):
            timing = self._timer.between(
                lambda: self._run(self.calls), flush_l2=self.flush_l2, ahead_us=self._ahead_us * 2**attempt
            )
            if timing.saturated:
                self._retried = self._retried + 1 if attempt else 0
                if self._retried > 1:  # not a hiccup of the scheduler: the calls do take longer
                    self._ahead_us *= 2
                break
        else:
            if self.calls > 1:
                self.calls //= 2
                return []
            self._queue_ran_empty = True
        return [max(timing.us - self._timer.empty_us, 0.0) / self.calls]

    def warnings(self) -> Sequence[str]:
        """Whether some samples include a wait for the host."""
        if not self._queue_ran_empty:
            return []
        return ["the GPU had to wait for the host although the queue was filled ahead: the time includes that wait"]


class Graph(Saturated):
    """Replays of a CUDA graph of many calls, which leaves no place for an L2 flush."""

    method = "graph"

    def __init__(self, call: TimedCall, timer: EventTimer, effects: GpuEffects) -> None:
        super().__init__(call, timer, effects)
        self.calls = calls_for(effects.device_us, _GRAPH_CALLS)
        replay = timer.gpu.capture(call.call_many, self.calls)
        replay()
        self._run = lambda _: replay()
        self._ahead_us = 2 * median(timer.host_us(replay) for _ in range(_GRAPH_LAUNCHES)) + _AHEAD_US


class NoGpuWorkError(ForgeProfilingError):
    """The profiler saw no GPU work of the function."""


class Kernels(Sampler):
    """The time in which any kernel, copy or fill of a call ran, as the profiler records them."""

    method = "kernels"

    def __init__(self, call: TimedCall, gpu: CudaDevice, call_us: float, *, flush_l2: bool) -> None:
        super().__init__(call, flush_l2=flush_l2)
        self._gpu = gpu
        self._batch = calls_for(call_us, _PROFILED_CALLS, _PROFILED_US)
        self._taken = self._without_work = 0

    def problem(self) -> Exception | None:
        """Why the function's kernels cannot be read; None if they can. Takes seconds the first time."""
        try:
            if not any(self._profile(min(self._batch, _FIRST_PROFILE_CALLS))):
                return NoGpuWorkError("the profiler saw no GPU work of the function")
        except Exception as error:
            if self._call.raised:  # the function's own error
                raise
            return error
        return None

    def __call__(self) -> Sequence[float]:
        """A sample for each of several calls under one profiler."""
        samples = self._profile(self._batch)
        self._taken += len(samples)
        self._without_work += samples.count(0.0)
        return samples

    def warnings(self) -> Sequence[str]:
        """Whether there were calls without work."""
        if not self._without_work:
            return []
        return [f"the profiler saw no GPU work in {self._without_work} of {self._taken} calls: they count as 0"]

    def _profile(self, calls: int) -> list[float]:
        gpu, call = self._gpu, self._call.call

        def run() -> None:
            gpu.sleep(1)  # a profiler that works records this, whatever the function does
            for number in range(-_UNCOUNTED_CALLS, calls):
                if calls == 1 and number < 0:  # calls are long, and any work sets the buffers up
                    gpu.sleep(1)
                    continue
                if self.flush_l2:
                    gpu.flush_l2()
                if number < 0:
                    call()
                else:
                    with gpu.mark(CALL):
                        call()

        events = gpu.trace(run)
        if not any(event.get("cat") in _WORK for event in events):
            raise ForgeProfilingError("the profiler saw no GPU work at all (is nsys or ncu attached?)")
        return busy_us_per_call(events)


def busy_us_per_call(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The union of the kernels, copies and fills of each call, in order; 0 for a call without any."""
    # Work belongs to the call during which the host launched it, on any thread: autograd launches the backward pass
    # from its own threads while the caller waits.
    spans: list[tuple[float, float]] = []
    launched: dict[int, float] = {}
    work: list[tuple[float, float, int]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, start = event.get("cat"), float(event["ts"])
        correlation = event.get("args", {}).get("correlation")
        if kind == "user_annotation" and event["name"] == CALL:
            spans.append((start, start + float(event["dur"])))
        elif kind in _LAUNCHES and correlation is not None:
            launched[correlation] = start
        elif kind in _WORK:
            work.append((start, start + float(event["dur"]), correlation))
    spans.sort()
    starts = [start for start, _ in spans]
    busy, reached = [0.0] * len(spans), [-math.inf] * len(spans)
    for start, end, correlation in sorted(work, key=itemgetter(0, 1)):
        at = launched.get(correlation, -math.inf)
        number = bisect_right(starts, at) - 1
        if number >= 0 and at <= spans[number][1]:
            busy[number] += max(end - max(start, reached[number]), 0.0)
            reached[number] = max(reached[number], end)
    return busy


class MethodChoice(NamedTuple):
    """How a function is timed, what a call does on the GPU (None if it does not use it), and warnings about both."""

    sampler: Sampler
    effects: GpuEffects | None
    warnings: tuple[str, ...] = ()


def choose_method(
    call: TimedCall, method: str, timer: EventTimer, effects: GpuEffects, call_us: float, *, flush_l2: bool
) -> MethodChoice:
    """Choose the method that was asked for, or the one that suits the function."""
    _refuse_impossible(method, effects)
    estimated_us = effects.device_us if effects.on_stream else call_us
    kernels = Kernels(call, timer.gpu, estimated_us, flush_l2=flush_l2 and effects.on_stream)
    may_be_cpu_only = method in HOST_METHODS and not effects.certainly_on_stream
    problem = None
    if may_be_cpu_only or method == "kernels" or (method == "auto" and not effects.waits):
        problem = kernels.problem()
    on_host = MethodChoice(HostClock(call, timer.clock_ns), effects if effects.allocated_bytes else None)
    if may_be_cpu_only and isinstance(problem, NoGpuWorkError):
        return on_host
    if problem is not None and not effects.on_stream and method in {"auto", "cpu"}:  # "wall" waits for every stream
        return on_host._replace(warnings=(f"whether it uses another stream is unknown ({first_line(problem)})",))
    return _on_gpu(call, method, kernels, problem, timer=timer, effects=effects, flush_l2=flush_l2)


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
    asked: str,
    kernels: Kernels,
    problem: Exception | None,
    *,
    timer: EventTimer,
    effects: GpuEffects,
    flush_l2: bool,
) -> MethodChoice:
    """The method for a function that uses the GPU."""
    samplers: dict[str, Callable[[], Sampler]] = {
        "kernels": lambda: kernels,
        "graph": lambda: Graph(call, timer, effects),
        "saturated": lambda: Saturated(call, timer, effects, flush_l2=flush_l2),
        "events": lambda: OneCall("events", call, timer, flush_l2=flush_l2),
        "wall": lambda: OneCall("wall", call, timer, flush_l2=flush_l2),
        "cpu": lambda: HostClock(call, timer.clock_ns),
    }
    method, warnings = asked, []
    if method == "auto":
        method = "wall" if effects.waits and effects.on_stream else "kernels"
    if method == "kernels" and problem is not None:
        if asked == "kernels":
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
        if asked != "graph":
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
