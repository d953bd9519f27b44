"""Writes PyTorch's memory snapshot of one step, or at an out-of-memory error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.safe_files import make_own_folder, whole_file_by_name

Moment: TypeAlias = Literal["oom"] | int

_log = plain_logger(__name__)

MAX_ENTRIES: Final = 100_000
"""Number of newest allocations and frees that are kept: with their Python stacks at most some hundred MB of host
memory, and a few steps of a large model."""


def refuse_unless_moment(when: object) -> None:
    """Check the `memory_snapshot` argument."""
    if when != "oom" and (not isinstance(when, int) or isinstance(when, bool) or when < 0):
        raise ConfigurationError(f'memory_snapshot must be "oom" or the number of a step from 0 on, got {when!r}.')


class MemoryHistory(Protocol):
    """Records allocations."""

    def recording(self) -> bool:
        """Whether allocations are being recorded."""

    def start(self) -> None:
        """Start recording."""

    def stop(self) -> None:
        """Stop recording."""

    def dump(self, path: Path) -> None:
        """Write the recorded allocations."""


class TorchMemoryHistory:
    """Records allocations with `torch.cuda.memory`."""

    def recording(self) -> bool:
        """Whether PyTorch records; it does not report with which options."""
        import torch  # noqa: PLC0415  (this folder is read without torch, too)

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
    """Records allocations and writes one snapshot.

    If the user records already, their recording keeps its options and continues after the snapshot. Otherwise
    recording ends with the snapshot, or with the fit, and so does a recording that the user starts in between: PyTorch
    has one recording, and does not report who started it. No method raises. Nothing reads the file again: it is a
    pickle, and loading one runs code.
    """

    def __init__(self, when: Moment, path: Path, history: MemoryHistory | None = None) -> None:
        self.when = when
        self.written: Path | None = None
        """The file, once it is written."""
        self.problem = ""
        """Why no file was written, although one was due."""
        self._path = path
        self._history = history or TorchMemoryHistory()
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

    return any(isinstance(each, torch.OutOfMemoryError) for each in _chain(exception))


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = exception
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
