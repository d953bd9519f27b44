"""PyTorch's caching allocator: memory that it holds, and its activity between two readings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReading:
    """The allocator's counters at one moment.

    Attributes:
        allocated_bytes: memory of tensors.
        reserved_bytes: device memory that the allocator holds, free blocks included.
        peak_bytes: the highest `allocated_bytes` since the last `torch.cuda.reset_peak_memory_stats()`, or ever.
        retries: allocations that failed at first, so that the allocator freed its cached blocks and tried again.
        device_allocs: calls of `cudaMalloc`, or of `cuMemMap` with expandable segments.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_bytes: int = 0
    retries: int = 0
    device_allocs: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "AllocatorReading":
        """Build a reading from `torch.cuda.memory.memory_stats_as_nested_dict()`; missing counters are 0.

        Example:
            >>> AllocatorReading.of({"allocated_bytes": {"all": {"current": 512, "peak": 2048}}}).peak_bytes
            2048
        """

        def bytes_of(name: str, value: str) -> int:
            return int(stats.get(name, {}).get("all", {}).get(value, 0))

        return cls(
            allocated_bytes=bytes_of("allocated_bytes", "current"),
            reserved_bytes=bytes_of("reserved_bytes", "current"),
            peak_bytes=bytes_of("allocated_bytes", "peak"),
            retries=int(stats.get("num_alloc_retries", 0)),
            device_allocs=int(stats.get("num_device_alloc", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorInterval:
    """The allocator's activity between two readings.

    Attributes:
        allocated_bytes: memory of tensors at the end.
        reserved_bytes: device memory that the allocator held at the end.
        peak_bytes: the highest known memory of tensors.
        peak_is_exact: whether `peak_bytes` is the peak; otherwise it is a lower bound.
        retries: allocations that failed at first.
        device_allocs: calls of `cudaMalloc` or `cuMemMap`.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_is_exact: bool
    retries: int
    device_allocs: int


def between(before: AllocatorReading, after: AllocatorReading, *, sampled_bytes: float = 0.0) -> AllocatorInterval:
    """The allocator's activity between two readings.

    The allocator has one peak. Resetting it for each interval would change what the user's
    `torch.cuda.max_memory_allocated()` returns, so it is only read. If it rose, it is the interval's peak. If not, the
    interval stayed at or below it, and the highest known value is returned: of either end, or of a sample between.

    Example:
        >>> step = between(AllocatorReading(peak_bytes=70), AllocatorReading(peak_bytes=90, device_allocs=2))
        >>> step.peak_bytes, step.peak_is_exact, step.device_allocs
        (90, True, 2)
    """
    rose = after.peak_bytes > before.peak_bytes
    seen = [before.allocated_bytes, after.allocated_bytes, int(sampled_bytes)]
    if after.peak_bytes < before.peak_bytes:  # the user reset it in this interval: all of it is since then
        seen.append(after.peak_bytes)
    return AllocatorInterval(
        allocated_bytes=after.allocated_bytes,
        reserved_bytes=after.reserved_bytes,
        peak_bytes=after.peak_bytes if rose else max(seen),
        peak_is_exact=rose,
        retries=_since(before.retries, after.retries),
        device_allocs=_since(before.device_allocs, after.device_allocs),
    )


def merged(intervals: Sequence[AllocatorInterval]) -> AllocatorInterval:
    """Join consecutive intervals."""
    last, highest = intervals[-1], max(intervals, key=lambda each: (each.peak_bytes, each.peak_is_exact))
    return replace(
        last,
        peak_bytes=highest.peak_bytes,
        peak_is_exact=highest.peak_is_exact,
        retries=sum(each.retries for each in intervals),
        device_allocs=sum(each.device_allocs for each in intervals),
    )


def _since(before: int, after: int) -> int:
    """The counter's increase; the user may have reset it with `torch.cuda.reset_accumulated_memory_stats()`."""
    return after - before if after >= before else after


def read_allocator(device_index: int) -> AllocatorReading:
    """Read PyTorch's allocator. Neither waits for the GPU nor resets anything."""
    import torch  # noqa: PLC0415  (this folder is read without torch, too)

    # not memory_stats(), which also flattens and sorts some hundred entries
    return AllocatorReading.of(torch.cuda.memory.memory_stats_as_nested_dict(device_index))
