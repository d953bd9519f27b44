"""The timing methods. Each takes samples: microseconds of one call."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from lightning_forge_profiling.bench.device import CudaDevice, EventTimer
from lightning_forge_profiling.bench.gpu_effects import GpuEffects
from lightning_forge_profiling.bench.timed_call import TimedCall
from lightning_forge_profiling.errors import ForgeProfilingError

CALL: Final = "forge.benchmark.call"
"""The name of a call's span in the trace."""

_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})
_UNCOUNTED: Final = 3  # meanwhile the profiler still sets up its buffers


def kernel_times_us(call: Callable[[], None], count: int, gpu: CudaDevice, *, flush_l2: bool) -> list[float]:
    """Profile some calls."""

    def run() -> None:
        gpu.sleep(1)  # a profiler that works records this, whatever the function does
        for number in range(-_UNCOUNTED, count):
            if count == 1 and number < 0:  # calls are long, and any work sets the buffers up
                gpu.sleep(1)
                continue
            if flush_l2:
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
    """The union of the kernels, copies and fills of each call, in order; 0 for a call without any.

    Work belongs to the call during which the host launched it, on any thread: autograd launches the backward pass from
    its own threads while the caller waits.
    """
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
    by_call: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for start, end, correlation in work:
        at = launched.get(correlation)
        if at is None:
            continue
        number = bisect_right(starts, at) - 1
        if number >= 0 and at <= spans[number][1]:
            by_call[number].append((start, end))
    return [_union(by_call[number]) for number in range(len(spans))]


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


_SAMPLE_US: Final = 1000.0  # a constant part of a few microseconds is then well under 1 % of a sample
_HOST_SAMPLE_US: Final = 200.0  # at least; reading the host clock takes some 50 ns
_MOST_CALLS: Final = 10**6  # for a clock that stands still
_QUEUED_CALLS: Final = 200  # of one kernel each; the launch queue holds about 1000
_GRAPH_CALLS: Final = 1000
_GRAPH_LAUNCHES: Final = 3
_PROFILED_CALLS: Final = 50
_PROFILED_US: Final = 10_000.0  # bursts this short do not make an H200 lower its clock
_FIRST_PROFILE_CALLS: Final = 10
_AHEAD_US: Final = 20.0
_ATTEMPTS: Final = 4


def calls_for(call_us: float, most: int, sets: int, sample_us: float = _SAMPLE_US) -> int:
    """How many calls make a sample.

    Example:
        >>> calls_for(2.5, 1000, 1), calls_for(2.5, 1000, 3), calls_for(5000.0, 1000, 1)
        (400, 402, 1)
    """
    calls = min(most, max(1, math.ceil(sample_us / max(call_us, 1e-3))))
    return calls if sets == 1 else math.ceil(calls / sets) * sets


class Sampler:
    """Takes samples by one method.

    Attributes:
        method: its name for the user.
        calls: a sample is the mean over this many calls.
        flush_l2: whether the L2 cache is flushed before each call.
    """

    method: str
    calls = 1
    flush_l2 = False

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
        self._call = call
        self._clock_ns = clock_ns
        self.calls = call.sets

    def __call__(self) -> Sequence[float]:
        """One sample. If it is too short, the number of calls is doubled for good."""
        while True:
            began = self._clock_ns()
            self._call.call_many(self.calls)
            us = (self._clock_ns() - began) / 1e3
            if us >= _HOST_SAMPLE_US or self.calls >= _MOST_CALLS:
                return [us / self.calls]
            self.calls *= 2


class Wall(Sampler):
    """The host clock around one call and a synchronization, from an idle GPU."""

    method = "wall"

    def __init__(self, call: TimedCall, gpu: CudaDevice, clock_ns: Callable[[], int], *, flush_l2: bool) -> None:
        self._call = call
        self._gpu = gpu
        self._clock_ns = clock_ns
        self.flush_l2 = flush_l2

    def __call__(self) -> Sequence[float]:
        """One sample."""
        if self.flush_l2:
            self._gpu.flush_l2()
        self._gpu.synchronize()
        began = self._clock_ns()
        self._call.call()
        self._gpu.synchronize()
        return [(self._clock_ns() - began) / 1e3]


class Events(Sampler):
    """Two events around one call on an idle GPU. The GPU's waits for the host are included."""

    method = "events"

    def __init__(self, call: TimedCall, timer: EventTimer, *, flush_l2: bool) -> None:
        self._call = call
        self._timer = timer
        self.flush_l2 = flush_l2

    def __call__(self) -> Sequence[float]:
        """One sample."""
        return [self._timer.between(self._call.call, flush_l2=self.flush_l2).us]


class _FullQueue(Sampler):
    """Two events around work that is queued before the GPU reaches the first of them.

    A spinning kernel keeps the GPU busy meanwhile. Whether it ran long enough is checked once the second event is
    queued; if not, the sample is taken again. The time between two events without work is subtracted.
    """

    def __init__(
        self,
        timer: EventTimer,
        run: Callable[[int], object],
        calls: int,
        enqueue_us: float,
        *,
        step: int,
        flush_l2: bool = False,
    ) -> None:
        self.calls = calls
        self.flush_l2 = flush_l2
        self._timer = timer
        self._run = run
        self._ahead_us = 2 * enqueue_us + _AHEAD_US
        self._step = step
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
                return self._per_call(timing.us)
        if self.calls > self._step:
            self.calls = max(self.calls // 2 // self._step, 1) * self._step
            return []
        self._queue_ran_empty = True
        return self._per_call(timing.us)

    def warnings(self) -> Sequence[str]:
        """Whether some samples include a wait for the host."""
        if not self._queue_ran_empty:
            return []
        return ["the GPU had to wait for the host although the queue was filled ahead: the time includes that wait"]

    def _per_call(self, us: float) -> Sequence[float]:
        return [max(us - self._timer.empty_us, 0.0) / self.calls]


class Saturated(_FullQueue):
    """Calls launched into a full queue; one call per sample if the L2 cache is flushed."""

    method = "saturated"

    def __init__(self, call: TimedCall, timer: EventTimer, effects: GpuEffects, *, flush_l2: bool) -> None:
        calls = 1 if flush_l2 else calls_for(effects.device_us, _QUEUED_CALLS, call.sets)
        step = 1 if flush_l2 else call.sets
        super().__init__(timer, call.call_many, calls, calls * effects.enqueue_us, step=step, flush_l2=flush_l2)


class Graph(_FullQueue):
    """Replays of a CUDA graph of many calls, which leaves no place for an L2 flush."""

    method = "graph"

    def __init__(self, call: TimedCall, timer: EventTimer, effects: GpuEffects) -> None:
        calls = calls_for(effects.device_us, _GRAPH_CALLS, call.sets)
        replay = timer.gpu.capture(call.call_many, calls)
        replay()
        enqueue_us = median(timer.enqueue_us(replay) for _ in range(_GRAPH_LAUNCHES))
        super().__init__(timer, lambda _: replay(), calls, enqueue_us, step=calls)


class NoGpuWorkError(ForgeProfilingError):
    """The profiler saw no GPU work of the function."""


class Kernels(Sampler):
    """The time in which any kernel, copy or fill of a call ran, as the profiler records them."""

    method = "kernels"

    def __init__(self, call: TimedCall, gpu: CudaDevice, call_us: float, *, flush_l2: bool) -> None:
        self.flush_l2 = flush_l2
        self._call = call
        self._gpu = gpu
        self._batch = calls_for(call_us, _PROFILED_CALLS, 1, _PROFILED_US)
        self._taken = self._without_work = 0

    def check(self) -> None:
        """Profile a few calls, which takes seconds the first time."""
        if not any(self._profile(min(self._batch, _FIRST_PROFILE_CALLS))):
            raise NoGpuWorkError("the profiler saw no GPU work of the function")

    def __call__(self) -> Sequence[float]:
        """A sample for each of several calls under one profiler."""
        found = self._profile(self._batch)
        self._taken += len(found)
        self._without_work += found.count(0.0)
        return found

    def warnings(self) -> Sequence[str]:
        """Whether there were calls without work."""
        if not self._without_work:
            return []
        return [f"the profiler saw no GPU work in {self._without_work} of {self._taken} calls: they count as 0"]

    def _profile(self, calls: int) -> list[float]:
        return kernel_times_us(self._call.call, calls, self._gpu, flush_l2=self.flush_l2)


class Rounds(Sampler):
    """Another sampler's samples of one call each, averaged over each round through the argument sets."""

    def __init__(self, sampler: Sampler, sets: int) -> None:
        self.method = sampler.method
        self.calls = sets
        self.flush_l2 = sampler.flush_l2
        self._sampler = sampler
        self._left: list[float] = []

    def __call__(self) -> Sequence[float]:
        """A sample for each round, at least one."""
        while len(self._left) < self.calls:
            self._left += self._sampler()
        rounds = len(self._left) // self.calls
        means = [fmean(self._left[number * self.calls :][: self.calls]) for number in range(rounds)]
        self._left = self._left[rounds * self.calls :]
        return means

    def warnings(self) -> Sequence[str]:
        """Those of the other sampler."""
        return self._sampler.warnings()
