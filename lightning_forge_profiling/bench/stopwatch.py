"""Two events around some work, with the queue in front of them filled or not."""

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Final, NamedTuple

from lightning_forge_profiling.bench.cuda import Gpu

__all__ = ["Reading", "Stopwatch"]

_CALIBRATION_CYCLES: Final = 1_000_000  # half a millisecond at 2 GHz
_EMPTY_PAIRS: Final = 31
_EMPTY_AHEAD_US: Final = 50.0  # a record takes the host 1.4 us (H200, torch 2.11)


class Reading(NamedTuple):
    """What one pair of events says."""

    us: float
    """Microseconds between them."""
    saturated: bool
    """Whether the second was queued before the GPU got to the first, so that it never waited for the host."""


class Stopwatch:
    """Reads the time between two events on the current stream.

    Args:
        gpu: the device.
        clock_ns: the host clock, in nanoseconds.
    """

    def __init__(self, gpu: Gpu, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.gpu = gpu
        self.clock_ns = clock_ns
        self._start, self._end = gpu.new_event(), gpu.new_event()
        self._cycles_per_us = 2000.0
        for _ in range(2):  # the first may find a sleeping GPU
            us = self.between(lambda: gpu.sleep(_CALIBRATION_CYCLES)).us
            self._cycles_per_us = _CALIBRATION_CYCLES / us if us > 0 else self._cycles_per_us
        self.empty_us = median(self.between(_nothing, ahead_us=_EMPTY_AHEAD_US).us for _ in range(_EMPTY_PAIRS))
        """What a pair of events with nothing between reads behind a full queue."""

    def between(self, run: Callable[[], object], *, flush_l2: bool = False, ahead_us: float = 0.0) -> Reading:
        """Time what `run` puts on the current stream, and wait for it.

        Args:
            run: the work.
            flush_l2: empty the L2 before, outside of the time.
            ahead_us: for how long to keep the GPU from getting to the first event; 0 for not.
        """
        if flush_l2:
            self.gpu.flush_l2()
            if not ahead_us:
                self.gpu.synchronize()  # or the launch of the work would go by while the GPU flushes
        if ahead_us:
            self.gpu.sleep(int(ahead_us * self._cycles_per_us))
        self._start.record()
        run()
        self._end.record()
        saturated = not self._start.query()
        self._end.synchronize()
        return Reading(self._start.elapsed_time(self._end) * 1e3, saturated)

    def enqueue_us(self, run: Callable[[], object]) -> float:
        """How long the host is busy with `run` when the queue is empty before it, in microseconds."""
        self.gpu.synchronize()
        began = self.clock_ns()
        run()
        return (self.clock_ns() - began) / 1e3


def _nothing() -> None:
    pass
