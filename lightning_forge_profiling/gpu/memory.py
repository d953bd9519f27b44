"""PyTorch's memory on a GPU: the allocator's counters, and a snapshot of one step or at an out-of-memory error."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

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


def read_allocator(device_index: int) -> AllocatorReading:
    """Read PyTorch's allocator. Neither waits for the GPU nor resets anything."""
    import torch  # noqa: PLC0415  (this folder is read without torch, too)

    # not memory_stats(), which also flattens and sorts some hundred entries
    return AllocatorReading.of(torch.cuda.memory.memory_stats_as_nested_dict(device_index))


def read_limit(device_index: int, reserved_bytes: int) -> int:
    """What PyTorch may use of a GPU's memory in bytes: all but what others use, and no more than the process may."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info(device_index)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device_index)
    return min(free + reserved_bytes, int(share * total))


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
        import torch  # noqa: PLC0415

        return bool(torch._C._cuda_isHistoryEnabled())  # noqa: SLF001  (as torch._inductor.cudagraph_trees asks)

    def start(self) -> None:
        """Start recording with Python stacks only: C++ stacks take longer to collect, and minutes to write."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)  # noqa: SLF001

    def stop(self) -> None:
        """Stop recording and free the recorded allocations."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def dump(self, path: Path) -> None:
        """Write the file that https://pytorch.org/memory_viz shows."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # noqa: SLF001


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
    import torch  # noqa: PLC0415

    visited: set[int] = set()
    each: BaseException | None = exception
    while each is not None and id(each) not in visited:
        if isinstance(each, torch.OutOfMemoryError):
            return True
        visited.add(id(each))
        each = each.__cause__ or each.__context__
    return False
