"""The ways to time a call. Each takes samples: microseconds of one call."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from lightning_forge_profiling.bench.gpu import Gpu
from lightning_forge_profiling.bench.kernels import kernel_times_us
from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.subject import Subject

__all__ = ["BehindQueue", "Events", "HostClock", "Kernels", "Sampler", "Wall", "calls_for"]

_SAMPLE_US: Final = 1000.0  # what is once in a sample, a few microseconds, is then well under 1 % of it
_HOST_SAMPLE_US: Final = 200.0  # a reading of the host clock takes some 50 ns
_PROFILED_CALLS: Final = 50
_PROFILED_US: Final = 10_000.0  # bursts this short do not make an H200 lower its clock
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


class HostClock(Sampler):
    """`cpu`: the host clock around as many calls as make a sample."""

    def __init__(self, subject: Subject, clock_ns: Callable[[], int], call_us: float) -> None:
        self._subject = subject
        self._clock_ns = clock_ns
        self.calls = calls_for(call_us, 10**6, subject.sets, _HOST_SAMPLE_US)

    def __call__(self) -> Sequence[float]:
        """One sample."""
        began = self._clock_ns()
        self._subject.call_many(self.calls)
        return [(self._clock_ns() - began) / 1e3 / self.calls]


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
        divisible: whether fewer calls can be made, where the launch queue does not hold so many.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        run: Callable[[int], object],
        calls: int,
        enqueue_us: float,
        *,
        flush_l2: bool = False,
        divisible: bool = True,
    ) -> None:
        self.calls = calls
        self.ran_dry = False
        """Whether samples had to be taken that waited for the host."""
        self._stopwatch = stopwatch
        self._run = run
        self._ahead_us = 2 * enqueue_us + _AHEAD_US
        self._flush_l2 = flush_l2
        self._divisible = divisible
        self._short = 0

    def __call__(self) -> Sequence[float]:
        """One sample; none when the queue turned out not to hold so many calls."""
        for attempt in range(1 if self.ran_dry else _ATTEMPTS):
            reading = self._stopwatch.between(
                lambda: self._run(self.calls), flush_l2=self._flush_l2, ahead_us=self._ahead_us * 2**attempt
            )
            if reading.saturated:
                self._short = self._short + 1 if attempt else 0
                if self._short > 1:  # not the scheduler's whim: the calls do take longer
                    self._ahead_us *= 2
                return self._per_call(reading.us)
        if self._divisible and self.calls > 1:
            self.calls //= 2
            return []
        self.ran_dry = True
        return self._per_call(reading.us)

    def _per_call(self, us: float) -> Sequence[float]:
        return [max(us - self._stopwatch.empty_us, 0.0) / self.calls]


class Kernels(Sampler):
    """`kernels`: for each call, the time in which any of its kernels, copies or fills ran, as the profiler has it.

    Raises:
        ForgeProfilingError: the profiler cannot be used, or sees nothing of the function.
    """

    def __init__(self, subject: Subject, gpu: Gpu, device_us: float, *, flush_l2: bool) -> None:
        self._subject = subject
        self._gpu = gpu
        self._flush_l2 = flush_l2
        self._batch = calls_for(device_us, _PROFILED_CALLS, 1, _PROFILED_US)
        kernel_times_us(subject.call, 1, gpu, flush_l2=flush_l2)  # a process's first trace takes seconds to set up

    def __call__(self) -> Sequence[float]:
        """A sample for each of some calls under one profiler."""
        return kernel_times_us(self._subject.call, self._batch, self._gpu, flush_l2=self._flush_l2)
