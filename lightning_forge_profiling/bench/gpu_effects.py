"""What a function does on the GPU besides computing: seen before it is timed."""

from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_forge_profiling.bench.stopwatch import Stopwatch
from lightning_forge_profiling.bench.timed_call import Subject

__all__ = ["WAITS", "Probe", "probe"]

WAITS: Final = (
    "it waits for the GPU inside (a synchronization such as .item(), CUDA_LAUNCH_BLOCKING=1, or more launches than the "
    "queue of about 1000 holds): the GPU idles meanwhile, and the time is the host's too"
)
"""What is said of a function that does."""

_MOST_CALLS: Final = 10
_TIME_US: Final = 20_000.0
_REPEATS: Final = 3
_AHEAD: Final = 2.0
_AHEAD_OF_LONG: Final = 1.5  # it is less off from one to the next, and the spin takes as long again
_MARGIN_US: Final = 1000.0  # the scheduler may take the host away for some of it
_SHORTEST_WORK_US: Final = 0.5  # for two calls or more; the shortest kernel takes about 1 us


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a function was seen to do.

    Attributes:
        enqueue_us: how long the host is busy with a call when the GPU is idle.
        device_us: what a call takes on the GPU's timeline, roughly.
        waits: whether it waits for the GPU.
        works: whether it puts anything on the current stream.
        given_bytes: what a call takes from the caching allocator.
        grown_bytes: what of it a call keeps.
        device_allocations: how often the probing calls had the allocator ask the driver for memory.
        calls: how many probing calls those were.
        saturated: whether `device_us` was read behind a full queue; else some of it may be the host's time.
    """

    enqueue_us: float
    device_us: float
    waits: bool
    works: bool
    given_bytes: int
    grown_bytes: int
    device_allocations: int
    calls: int
    saturated: bool

    def warnings(self) -> list[str]:
        """What of it makes a time less than it seems, in sentences."""
        found = []
        if self.waits:
            found.append(WAITS)
        if not self.works:
            found.append("it puts nothing on the current CUDA stream")
        if self.grown_bytes > 0:
            found.append(
                f"it keeps memory: {self.grown_bytes:,} bytes more after each call, in what it stores or in reference "
                "cycles (Python's cyclic collector is off meanwhile)"
            )
        if self.device_allocations:
            found.append(
                f"it allocates in steady state: {self.device_allocations} calls of cudaMalloc in {self.calls} calls"
            )
        return found


def probe(subject: Subject, stopwatch: Stopwatch, call_us: float) -> Probe:
    """Make some calls and watch. The function should be warm.

    Args:
        subject: the function.
        stopwatch: of its device.
        call_us: wall time of a call, to choose how many calls to make.
    """
    long = call_us > _TIME_US
    calls = 1 if long else min(_MOST_CALLS, max(2, int(_TIME_US / max(call_us, 1.0))))
    before = stopwatch.gpu.memory()
    enqueue_us = median(stopwatch.enqueue_us(subject.call) for _ in range(calls))
    after = stopwatch.gpu.memory()
    ahead = _AHEAD_OF_LONG if long else _AHEAD
    # A call that waits for the GPU cannot return before the GPU is through with what it was given to do first.
    for _ in range(1 if long else _REPEATS):
        reading = stopwatch.between(subject.call, ahead_us=ahead * enqueue_us + _MARGIN_US)
        if reading.saturated:
            break
    waits = not reading.saturated
    if not long:  # several calls, for more than the resolution of events
        reading = stopwatch.between(
            lambda: subject.call_many(calls), ahead_us=0.0 if waits else ahead * calls * enqueue_us + _MARGIN_US
        )
    device_us = max(reading.us - stopwatch.empty_us, 0.0)
    return Probe(
        enqueue_us=enqueue_us,
        device_us=device_us / calls,
        waits=waits,
        works=device_us > _SHORTEST_WORK_US,
        given_bytes=(after.given_bytes - before.given_bytes) // calls,
        grown_bytes=(after.in_use_bytes - before.in_use_bytes) // calls,
        device_allocations=after.device_calls - before.device_calls,
        calls=calls,
        saturated=reading.saturated,
    )
