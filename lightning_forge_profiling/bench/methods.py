"""The ways to time a call. Each takes samples: microseconds of one call."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from lightning_forge_profiling.bench.cuda import Gpu
from lightning_forge_profiling.bench.kernel_time import kernel_times_us
from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.timed_call import Subject
from lightning_forge_profiling.errors import ForgeProfilingError

__all__ = [
    "BehindQueue",
    "Events",
    "HostClock",
    "Kernels",
    "NoGpuWorkError",
    "Rounds",
    "Sampler",
    "Wall",
    "calls_for",
]

_SAMPLE_US: Final = 1000.0  # what is once in a sample, a few microseconds, is then well under 1 % of it
_HOST_SAMPLE_US: Final = 200.0  # at least; a reading of the host clock takes some 50 ns
_MOST_CALLS: Final = 10**6  # for a clock that stands still
_PROFILED_CALLS: Final = 50
_PROFILED_US: Final = 10_000.0  # bursts this short do not make an H200 lower its clock
_TRIED_CALLS: Final = 10
_AHEAD_US: Final = 20.0
_ATTEMPTS: Final = 4


def calls_for(call_us: float, most: int, sets: int, sample_us: float = _SAMPLE_US) -> int:
    """How many calls make a sample.

    Args:
        call_us: what a call takes, roughly.
        most: and no more, but for a whole number of rounds through the argument sets.
        sets: how many argument sets there are.
        sample_us: how long a sample should be.

    Example:
        >>> calls_for(2.5, 1000, 1), calls_for(2.5, 1000, 3), calls_for(5000.0, 1000, 1)
        (400, 402, 1)
    """
    calls = min(most, max(1, math.ceil(sample_us / max(call_us, 1e-3))))
    return calls if sets == 1 else math.ceil(calls / sets) * sets


class Sampler:
    """Takes samples.

    Attributes:
        calls: how many calls a sample is the mean of.
    """

    calls = 1

    def __call__(self) -> Sequence[float]:
        """Take some samples; none where that failed and is worth another try."""
        raise NotImplementedError

    def doubts(self) -> Sequence[str]:
        """What makes the samples less than they seem, in sentences."""
        return ()


class HostClock(Sampler):
    """`cpu`: the host clock around as many calls as make a sample.

    Args:
        subject: the function.
        clock_ns: the host clock, in nanoseconds.
    """

    def __init__(self, subject: Subject, clock_ns: Callable[[], int]) -> None:
        self._subject = subject
        self._clock_ns = clock_ns
        self.calls = subject.sets

    def __call__(self) -> Sequence[float]:
        """One sample. What was too short to be one is taken again with twice as many calls, from then on."""
        while True:
            began = self._clock_ns()
            self._subject.call_many(self.calls)
            us = (self._clock_ns() - began) / 1e3
            if us >= _HOST_SAMPLE_US or self.calls >= _MOST_CALLS:
                return [us / self.calls]
            self.calls *= 2


class Wall(Sampler):
    """`wall`: the host clock around one call and the wait for its end, from an idle GPU."""

    def __init__(self, subject: Subject, gpu: Gpu, clock_ns: Callable[[], int], *, flush_l2: bool) -> None:
        self._subject = subject
        self._gpu = gpu
        self._clock_ns = clock_ns
        self._flush_l2 = flush_l2

    def __call__(self) -> Sequence[float]:
        """One sample."""
        if self._flush_l2:
            self._gpu.flush_l2()
        self._gpu.synchronize()
        began = self._clock_ns()
        self._subject.call()
        self._gpu.synchronize()
        return [(self._clock_ns() - began) / 1e3]


class Events(Sampler):
    """`events`: two events around one call, as it comes. Whatever the GPU waits for the host is in it."""

    def __init__(self, subject: Subject, stopwatch: Stopwatch, *, flush_l2: bool) -> None:
        self._subject = subject
        self._stopwatch = stopwatch
        self._flush_l2 = flush_l2

    def __call__(self) -> Sequence[float]:
        """One sample."""
        return [self._stopwatch.between(self._subject.call, flush_l2=self._flush_l2).us]


class BehindQueue(Sampler):
    """`saturated` and `graph`: two events around work that is queued before the GPU gets to the first of them.

    A kernel that spins keeps the GPU from it. Whether it spun for long enough is seen after the second event has been
    queued, and a sample for which it did not is taken again. What an empty pair of events reads is subtracted.

    Args:
        stopwatch: of the device.
        run: makes so many calls; a graph holds as many as it holds.
        calls: how many.
        enqueue_us: how long the host is busy with all of them.
        flush_l2: empty the L2 before each sample, which is then to be of one call.
        least: to how many calls that can come down where the launch queue does not hold so many, and of how many
            they stay a multiple; None for not at all.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        run: Callable[[int], object],
        calls: int,
        enqueue_us: float,
        *,
        flush_l2: bool = False,
        least: int | None = 1,
    ) -> None:
        self.calls = calls
        self._ran_dry = False
        self._stopwatch = stopwatch
        self._run = run
        self._ahead_us = 2 * enqueue_us + _AHEAD_US
        self._flush_l2 = flush_l2
        self._least = calls if least is None else least
        self._short = 0

    def __call__(self) -> Sequence[float]:
        """One sample; none when the queue turned out not to hold so many calls."""
        for attempt in range(1 if self._ran_dry else _ATTEMPTS):
            reading = self._stopwatch.between(
                lambda: self._run(self.calls), flush_l2=self._flush_l2, ahead_us=self._ahead_us * 2**attempt
            )
            if reading.saturated:
                self._short = self._short + 1 if attempt else 0
                if self._short > 1:  # not the scheduler's whim: the calls do take longer
                    self._ahead_us *= 2
                return self._per_call(reading.us)
        if self.calls > self._least:
            self.calls = max(self.calls // 2 // self._least, 1) * self._least
            return []
        self._ran_dry = True
        return self._per_call(reading.us)

    def doubts(self) -> Sequence[str]:
        """Whether samples had to be taken that waited for the host."""
        dry = "the GPU had to wait for the host in spite of a filled queue, and that wait is in the time"
        return [dry] if self._ran_dry else []

    def _per_call(self, us: float) -> Sequence[float]:
        return [max(us - self._stopwatch.empty_us, 0.0) / self.calls]


class NoGpuWorkError(ForgeProfilingError):
    """The profiler saw no GPU work of the function."""


class Kernels(Sampler):
    """`kernels`: for each call, the time in which any of its kernels, copies or fills ran, as the profiler has it.

    Args:
        subject: the function.
        gpu: the device.
        call_us: what a call takes, roughly.
        flush_l2: empty the L2 before each call.

    Raises:
        NoGpuWorkError: there is nothing to read.
        ForgeProfilingError: the profiler cannot be used.
    """

    def __init__(self, subject: Subject, gpu: Gpu, call_us: float, *, flush_l2: bool) -> None:
        self._subject = subject
        self._gpu = gpu
        self._flush_l2 = flush_l2
        self._batch = calls_for(call_us, _PROFILED_CALLS, 1, _PROFILED_US)
        self._taken = self._empty = 0
        if not any(self._profile(min(self._batch, _TRIED_CALLS))):  # the first takes seconds to set up
            raise NoGpuWorkError("the profiler saw no GPU work of the function")

    def __call__(self) -> Sequence[float]:
        """A sample for each of some calls under one profiler."""
        found = self._profile(self._batch)
        self._taken += len(found)
        self._empty += found.count(0.0)
        return found

    def doubts(self) -> Sequence[str]:
        """Whether there were calls without work."""
        idle = f"in {self._empty} of {self._taken} calls the profiler saw no GPU work: they count as 0"
        return [idle] if self._empty else []

    def _profile(self, calls: int) -> list[float]:
        return kernel_times_us(self._subject.call, calls, self._gpu, flush_l2=self._flush_l2)


class Rounds(Sampler):
    """Another sampler's samples of one call each, put together: the mean over each round through the argument sets.

    Args:
        sampler: takes them.
        sets: how many argument sets there are.
    """

    def __init__(self, sampler: Sampler, sets: int) -> None:
        self.calls = sets
        self._sampler = sampler
        self._left: list[float] = []

    def __call__(self) -> Sequence[float]:
        """A sample for each round, one at least."""
        while len(self._left) < self.calls:
            self._left += self._sampler()
        rounds = len(self._left) // self.calls
        means = [fmean(self._left[number * self.calls :][: self.calls]) for number in range(rounds)]
        self._left = self._left[rounds * self.calls :]
        return means

    def doubts(self) -> Sequence[str]:
        """Those of the other one."""
        return self._sampler.doubts()
