"""PyTorch's memory on a GPU: the allocator's counters, steady growth, and snapshots of allocations."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.safe_files import make_own_folder, whole_file_by_name

_log = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReading:
    """The allocator's counters at one moment, or between two."""

    allocated_bytes: int = 0  # memory of tensors
    reserved_bytes: int = 0  # device memory that the allocator holds, free blocks included
    # the highest `allocated_bytes` since the last `torch.cuda.reset_peak_memory_stats()`, or ever; between two
    # readings, the highest known
    peak_bytes: int = 0
    retries: int = 0  # allocations that failed at first, so that the allocator freed its cached blocks and tried again
    device_allocs: int = 0  # calls of `cudaMalloc`, or of `cuMemMap` with expandable segments

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> "AllocatorReading":
        """Build a reading from `torch.cuda.memory.memory_stats_as_nested_dict()`; missing counters are 0."""

        def bytes_of(name: str, value: str) -> int:
            return int(stats.get(name, {}).get("all", {}).get(value, 0))

        return cls(
            allocated_bytes=bytes_of("allocated_bytes", "current"),
            reserved_bytes=bytes_of("reserved_bytes", "current"),
            peak_bytes=bytes_of("allocated_bytes", "peak"),
            retries=int(stats.get("num_alloc_retries", 0)),
            device_allocs=int(stats.get("num_device_alloc", 0)),
        )

    def since(self, before: "AllocatorReading", *, sampled_bytes: float = 0.0) -> "AllocatorReading":
        """The allocator's activity since an earlier reading."""
        # The allocator has one peak. A reset for each interval would change what the user's own
        # `torch.cuda.max_memory_allocated()` returns, so it is only read. If it rose, it is the interval's peak. If
        # not, the highest known value is a lower bound: that of either end, or of a sample between.
        known = [before.allocated_bytes, self.allocated_bytes, int(sampled_bytes)]
        if self.peak_bytes < before.peak_bytes:  # the user reset it in this interval: all of it is since then
            known.append(self.peak_bytes)
        return replace(
            self,
            peak_bytes=self.peak_bytes if self.peak_bytes > before.peak_bytes else max(known),
            retries=_increase(before.retries, self.retries),
            device_allocs=_increase(before.device_allocs, self.device_allocs),
        )

    def plus(self, later: "AllocatorReading") -> "AllocatorReading":
        """The activity in this interval and a later one."""
        return replace(
            later,
            peak_bytes=max(self.peak_bytes, later.peak_bytes),
            retries=self.retries + later.retries,
            device_allocs=self.device_allocs + later.device_allocs,
        )


def _increase(before: int, after: int) -> int:
    """A counter's increase; the user may have reset it with `torch.cuda.reset_accumulated_memory_stats()`."""
    return after - before if after >= before else after


def _torch() -> Any:
    import torch  # noqa: PLC0415  (this folder is read without it, too)

    return torch


def read_allocator(device_index: int) -> AllocatorReading:
    """Read PyTorch's allocator. Neither waits for the GPU nor resets anything."""
    # not memory_stats(), which also flattens and sorts some hundred entries
    return AllocatorReading.of(_torch().cuda.memory.memory_stats_as_nested_dict(device_index))


def read_limit(device_index: int, reserved_bytes: int) -> int:
    """What PyTorch may use of a GPU's memory in bytes: all but what others use, and no more than the process may."""
    torch = _torch()
    free, total = torch.cuda.mem_get_info(device_index)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device_index)
    return int(min(free + reserved_bytes, share * total))


SnapshotStep: TypeAlias = Literal["oom"] | int

# number of newest allocations and frees that are kept: with their Python stacks at most some hundred MB of host memory,
# and a few steps of a large model
MAX_ENTRIES: Final = 100_000


def validate_snapshot_step(step: object) -> None:
    """Check the `memory_snapshot` argument."""
    if step != "oom" and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise ConfigurationError(f'memory_snapshot must be "oom" or the number of a step from 0 on, got {step!r}.')


class MemoryHistory:
    """Records allocations with `torch.cuda.memory`."""

    def recording(self) -> bool:
        """Whether PyTorch records; it does not report with which options."""
        return bool(_torch()._C._cuda_isHistoryEnabled())  # noqa: SLF001  (as torch._inductor.cudagraph_trees asks)

    def start(self) -> None:
        """Start recording with Python stacks only: C++ stacks take longer to collect, and minutes to write."""
        _torch().cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)  # noqa: SLF001

    def stop(self) -> None:
        """Stop recording and free the recorded allocations."""
        _torch().cuda.memory._record_memory_history(None)  # noqa: SLF001

    def dump(self, path: Path) -> None:
        """Write the file that https://pytorch.org/memory_viz shows."""
        _torch().cuda.memory._dump_snapshot(str(path))  # noqa: SLF001


class MemorySnapshot:
    """Records allocations and writes one snapshot. No method raises.

    If the user records already, their recording keeps its options and continues after the snapshot. Otherwise
    recording ends with the snapshot, or with the fit, and so does a recording that the user starts in between: PyTorch
    has one recording, and does not report who started it. Nothing reads the file again: it is a pickle, and loading one
    runs code.
    """

    def __init__(self, when: SnapshotStep, path: Path, history: MemoryHistory | None = None) -> None:
        self.when = when
        self.written: Path | None = None  # the file, once it is written
        self.problem = ""  # why no file was written, although one was due
        self._path = path
        self._history = history or MemoryHistory()
        self._watching = self._ours = False

    def start(self) -> None:
        """Call at the start of the fit, before the model is on the GPU, so that its parameters have stacks."""
        if self.when in {"oom", 0}:
            self._watch()

    def end_step(self, step: int) -> None:
        """Call at the end of each step."""
        if self.when == step and self._watching:
            self._write()
            self.close()
        elif self.when == step + 1:
            self._watch()

    def on_exception(self, exception: BaseException) -> None:
        """Call when the fit ends in an exception; its traceback still holds the tensors of the step."""
        if self._watching and self.when == "oom" and _out_of_memory(exception):
            self._write()
        self.close()

    def close(self) -> None:
        """Restore recording to what it was. Call after the last step."""
        self._watching = False
        if self.when != "oom" and self.written is None and not self.problem:
            self.problem = f"step {self.when} did not complete"
        if self._ours:
            self._ours = False
            try:
                self._history.stop()
            except Exception as exc:
                _log.warning("Recording of allocations could not be stopped: %s: %s", type(exc).__name__, exc)

    def _watch(self) -> None:
        self._watching = True
        try:
            if not self._history.recording():
                self._history.start()
                self._ours = True
        except Exception as exc:
            self._fail(exc)

    def _write(self) -> None:
        folder = self._path.parent
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_own_folder(folder)
            with whole_file_by_name(self._path) as part:
                self._history.dump(part)
            self.written = self._path
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: Exception) -> None:
        self._watching = False
        self.problem = f"{type(exc).__name__}: {exc}"
        _log.warning("No memory snapshot: %s", self.problem)
        _log.debug("", exc_info=exc)


def _out_of_memory(exception: BaseException) -> bool:
    """Whether it is an out-of-memory error, or caused by one, as in compiled code."""
    visited: set[int] = set()
    each: BaseException | None = exception
    while each is not None and id(each) not in visited:
        if isinstance(each, _torch().OutOfMemoryError):
            return True
        visited.add(id(each))
        each = each.__cause__ or each.__context__
    return False


# Growth is looked for in twelve points: single readings, then pairs of them, pairs of pairs, ... By chance, readings
# that vary without a trend lie in four ascending quarters in 1 of 369,600 cases.
POINTS: Final = 12
_QUARTER: Final = POINTS // 4
_LEVELS: Final = 20
_MOST_RISES: Final = POINTS - 2  # of eleven. Batches that vary raise the peak seldom, the longer they do the more so.
_MOST_EVEN: Final = 2.0  # the growth of one half over that of the other
FORESIGHT: Final = 20.0  # what grew in so many steps may be said of so many times as many


class Reading(NamedTuple):
    """The allocator between two steps, in bytes."""

    step: int
    kept: float  # by tensors that are kept from one step to the next; of several readings the least
    peak: float  # the most so far


class Growth(NamedTuple):
    """Bytes that come on top in each step, and the steps by which this is known."""

    what: Literal["kept", "peak"]
    bytes_per_step: float
    from_step: int
    to_step: int


class GrowthWatch:
    """Finds steady growth towards a limit.

    Examples:
        >>> watch, leak = GrowthWatch(), 5
        >>> found = [watch.add(Reading(step, 100 + leak * step, 300 + leak * step), 2000) for step in range(0, 60, 5)]
        >>> found[-1]
        Growth(what='kept', bytes_per_step=5.0, from_step=0, to_step=55)
    """

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(_LEVELS)]
        self._count = 0

    def add(self, reading: Reading, limit_bytes: float) -> Growth | None:
        """Take a reading, and return the growth towards the limit that it shows; None if nothing grows."""
        self._count += 1
        found = None
        for number, level in enumerate(self._levels):
            level.add(reading)
            found = level.growth(limit_bytes - reading.peak) or found  # by later levels, which have seen more
            if self._count % 2 ** (number + 1):
                break
            reading = level.latest_pair()
        return found


class _Level:
    """The latest points, each of one reading or of several."""

    def __init__(self) -> None:
        self._points: deque[Reading] = deque(maxlen=POINTS)
        # of the points before these: that at which most was kept, the least since then, and the point before the latest
        # deep fall
        self._most = self._ridge = Reading(0, 0.0, 0.0)
        self._least = self._fell = 0.0

    def add(self, point: Reading) -> None:
        if len(self._points) == POINTS:
            self._leave(self._points[0])
        self._points.append(point)

    def _leave(self, point: Reading) -> None:
        if point.kept > self._most.kept:
            self._most, self._least = point, point.kept
            return
        self._least = min(self._least, point.kept)
        fell = self._most.kept - self._least
        if 2 * fell >= self._fell:
            self._ridge, self._fell = self._most, fell

    def latest_pair(self) -> Reading:
        earlier, later = self._points[-2], self._points[-1]
        return Reading(later.step, min(earlier.kept, later.kept), later.peak)

    def growth(self, free: float) -> Growth | None:
        """What grows so fast that it takes what is free in at most 20 times the steps of these points."""
        if len(self._points) < POINTS:
            return None
        steps, kept, peak = (list(column) for column in zip(*self._points, strict=True))
        first, last = int(steps[0]), int(steps[-1])
        what: Literal["kept", "peak"]
        if _ascends(kept) and min(kept[-_QUARTER:]) > self._most.kept:
            what, each = "kept", _per_step(steps, kept)
            if self._fell >= kept[-1] - kept[0]:  # as at the end of each epoch: only what is more than before it grows
                each = min(each, (kept[-1] - self._ridge.kept) / (last - self._ridge.step))
        elif _ascends(peak) and sum(later > earlier for earlier, later in pairwise(peak)) >= _MOST_RISES:
            what, each = "peak", _per_step(steps, peak)
            if peak[-1] - peak[0] < 2 * (max(kept) - min(kept)):  # it was what is kept that grew
                return None
        else:
            return None
        return Growth(what, each, first, last) if FORESIGHT * each * (last - first) >= free else None


def _ascends(values: list[float]) -> bool:
    """Whether values go up all along, and about as fast in both halves."""
    quarters = [values[at : at + _QUARTER] for at in range(0, POINTS, _QUARTER)]
    if any(max(lower) >= min(higher) for lower, higher in pairwise(quarters)):
        return False
    low, *middle, high = map(fmean, quarters)
    first, second = fmean(middle) - low, high - fmean(middle)
    return 0 < max(first, second) <= _MOST_EVEN * min(first, second)


def _per_step(steps: list[float], values: list[float]) -> float:
    """The slope between the means of the first and of the last quarter."""
    apart = fmean(steps[-_QUARTER:]) - fmean(steps[:_QUARTER])
    return (fmean(values[-_QUARTER:]) - fmean(values[:_QUARTER])) / apart
