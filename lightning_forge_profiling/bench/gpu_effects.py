"""What a call does on the GPU, found by a few calls before sampling: waits, allocations, how long it takes."""

from dataclasses import dataclass
from statistics import median
from typing import Final

from lightning_forge_profiling.bench.device import EventTimer
from lightning_forge_profiling.bench.timed_call import TimedCall

_MOST_CALLS: Final = 10
_TIME_US: Final = 20_000.0
_REPEATS: Final = 3
_AHEAD: Final = 2.0
_AHEAD_OF_LONG: Final = 1.5  # long calls vary less, and the spinning kernel takes as long again
_MARGIN_US: Final = 1000.0  # the scheduler may take the host away for some of it
_SHORTEST_WORK_US: Final = 0.5  # of two calls or more; the shortest kernel takes about 1 us


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEffects:
    """What a call does on the GPU."""

    enqueue_us: float  # how long a call keeps the host busy when the GPU is idle
    device_us: float  # about how long it takes on the GPU's timeline
    waits: bool  # for the GPU
    on_stream: bool  # whether it puts anything on the current stream
    allocated_bytes: int  # from the caching allocator
    kept_bytes: int  # of those
    cuda_mallocs: int  # in `calls` calls
    calls: int
    saturated: bool  # `device_us` was read in a full queue; otherwise some of it may be the host's time

    @property
    def certainly_on_stream(self) -> bool:
        """Whether it surely puts work on the current stream."""
        # Calls of the CPU that differ in length look like work, or like waiting for it, but take no GPU memory.
        return self.on_stream and (self.allocated_bytes > 0 or self.saturated)

    @property
    def queued_us(self) -> float | None:
        """`device_us`, if that is the time in a full queue: None if the call waits, or if nothing is on the stream."""
        return None if self.waits or not self.on_stream else self.device_us

    def warnings(self, *, wait_expected: bool) -> list[str]:
        """What the caller of `benchmark` should know, one sentence each."""
        texts = []
        if self.waits and not wait_expected:
            texts.append(
                "it waits for the GPU (.item(), .cpu(), another synchronization, CUDA_LAUNCH_BLOCKING=1, or more "
                "launches than the queue of about 1000 holds): the GPU idles meanwhile, so the time depends on the host"
            )
        if not self.on_stream:
            texts.append("it launches nothing on the current CUDA stream")
        if self.kept_bytes > 0:
            texts.append(
                f"it keeps memory: {self.kept_bytes:,} bytes more after each call, in what it stores or in reference "
                "cycles (Python's cyclic garbage collector is off while timing)"
            )
        if self.cuda_mallocs:
            texts.append(f"it allocates in steady state: {self.cuda_mallocs} cudaMalloc calls in {self.calls} calls")
        return texts


def gpu_effects(call: TimedCall, timer: EventTimer, call_us: float) -> GpuEffects:
    """Call a warm function a few times to find out what it does on the GPU."""
    long = call_us > _TIME_US
    calls = 1 if long else min(_MOST_CALLS, max(2, int(_TIME_US / max(call_us, 1.0))))
    before = timer.gpu.memory()
    enqueue_us = median(timer.enqueue_us(call.call) for _ in range(calls))
    after = timer.gpu.memory()
    ahead = _AHEAD_OF_LONG if long else _AHEAD
    # A call that waits for the GPU cannot return before the GPU has finished the spinning kernel queued ahead of it.
    for _ in range(1 if long else _REPEATS):
        timing = timer.between(call.call, ahead_us=ahead * enqueue_us + _MARGIN_US)
        if timing.saturated:
            break
    waits = not timing.saturated
    if not long:  # several calls, to exceed the resolution of events
        timing = timer.between(
            lambda: call.call_many(calls), ahead_us=0.0 if waits else ahead * calls * enqueue_us + _MARGIN_US
        )
    device_us = max(timing.us - timer.empty_us, 0.0)
    return GpuEffects(
        enqueue_us=enqueue_us,
        device_us=device_us / calls,
        waits=waits,
        on_stream=device_us > _SHORTEST_WORK_US,
        allocated_bytes=(after.allocated_bytes - before.allocated_bytes) // calls,
        kept_bytes=(after.in_use_bytes - before.in_use_bytes) // calls,
        cuda_mallocs=after.cuda_mallocs - before.cuda_mallocs,
        calls=calls,
        saturated=timing.saturated,
    )
