"""PyTorch's caching allocator: what it holds, and what it did since it was last asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["AllocatorInterval", "AllocatorReading", "between", "merged", "read_allocator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReading:
    """What the allocator says at one moment.

    Attributes:
        allocated_bytes: what tensors take.
        reserved_bytes: what it holds of the device's memory, free blocks included.
        peak_bytes: the most that tensors took since somebody last reset that
            (`torch.cuda.reset_peak_memory_stats()`), or ever.
        retries: allocations that failed, upon which it gave its free blocks back to the device and tried again.
        device_allocs: calls of `cudaMalloc`, or of `cuMemMap` with expandable segments.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_bytes: int = 0
    retries: int = 0
    device_allocs: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "AllocatorReading":
        """The figures in what `torch.cuda.memory.memory_stats_as_nested_dict()` returns; 0 for what it lacks.

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
    """What the allocator did between two readings.

    Attributes:
        allocated_bytes: what tensors took at its end.
        reserved_bytes: what the allocator held at its end.
        peak_bytes: the most that tensors took in it, as far as that was seen.
        peak_is_exact: whether that is the very peak; otherwise it was at least that much.
        retries: failed allocations.
        device_allocs: calls of `cudaMalloc` or `cuMemMap`.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_is_exact: bool
    retries: int
    device_allocs: int


def between(before: AllocatorReading, after: AllocatorReading, *, sampled_bytes: float = 0.0) -> AllocatorInterval:
    """What happened between two readings.

    The allocator keeps one peak, and to reset it for every interval would take it from the user, whose
    `torch.cuda.max_memory_allocated()` would then tell of the last interval. So it is only read: where it rose, that
    is the interval's peak. Where it did not, the interval stayed at or below it, and what is told is the most that was
    seen: at either end, or in samples between.

    Args:
        before: at its beginning.
        after: at its end.
        sampled_bytes: the greatest of `allocated_bytes` in samples taken between.

    Example:
        >>> step = between(AllocatorReading(peak_bytes=70), AllocatorReading(peak_bytes=90, device_allocs=2))
        >>> step.peak_bytes, step.peak_is_exact, step.device_allocs
        (90, True, 2)
    """
    rose = after.peak_bytes > before.peak_bytes
    seen = [before.allocated_bytes, after.allocated_bytes, int(sampled_bytes)]
    if after.peak_bytes < before.peak_bytes:  # the user reset it: what it says now has all been since
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
    """Several intervals, in the order of their time, as one.

    Args:
        intervals: at least one.
    """
    last, highest = intervals[-1], max(intervals, key=lambda each: (each.peak_bytes, each.peak_is_exact))
    return replace(
        last,
        peak_bytes=highest.peak_bytes,
        peak_is_exact=highest.peak_is_exact,
        retries=sum(each.retries for each in intervals),
        device_allocs=sum(each.device_allocs for each in intervals),
    )


def _since(before: int, after: int) -> int:
    """The user may have reset a counter, `torch.cuda.reset_accumulated_memory_stats()`."""
    return after - before if after >= before else after


def read_allocator(device_index: int) -> AllocatorReading:
    """Ask PyTorch's allocator. Neither waits for the GPU nor resets anything.

    Args:
        device_index: as in `cuda:0`.
    """
    import torch  # noqa: PLC0415  (this folder is read without torch, too)

    # not memory_stats(), which flattens and sorts some hundred entries
    return AllocatorReading.of(torch.cuda.memory.memory_stats_as_nested_dict(device_index))
