"""PyTorch's memory snapshot, of one step or at an out-of-memory error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.safe_files import make_own_folder, whole_file_by_name

__all__ = ["MAX_ENTRIES", "MemoryHistory", "MemorySnapshot", "Moment", "TorchMemoryHistory", "refuse_unless_moment"]

Moment: TypeAlias = Literal["oom"] | int

_log = plain_logger(__name__)

MAX_ENTRIES: Final = 100_000
"""Allocations and frees that are remembered, the latest: with their Python stacks some hundred megabytes of the host's
memory at the most, and a few steps of a large model."""


def refuse_unless_moment(when: object) -> None:
    """Check what a user asks for.

    Raises:
        ConfigurationError: it is neither `"oom"` nor a step.
    """
    if when != "oom" and (not isinstance(when, int) or isinstance(when, bool) or when < 0):
        raise ConfigurationError(f'memory_snapshot must be "oom" or the number of a step from 0 on, got {when!r}.')


class MemoryHistory(Protocol):
    """What records allocations."""

    def recording(self) -> bool:
        """Whether somebody records already."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> None:
        """End it."""

    def dump(self, path: Path) -> None:
        """Write what is known now."""


class TorchMemoryHistory:
    """`torch.cuda.memory`'s own."""

    def recording(self) -> bool:
        """PyTorch tells whether it records, though not with which options."""
        import torch  # noqa: PLC0415  (this folder is read without torch, too)

        return bool(torch._C._cuda_isHistoryEnabled())  # noqa: SLF001  (as torch._inductor.cudagraph_trees asks)

    def start(self) -> None:
        """Stacks are Python's alone: those of C++ take longer to collect, and minutes to write."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)  # noqa: SLF001

    def stop(self) -> None:
        """End it and let go of what was recorded."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def dump(self, path: Path) -> None:
        """Write the file that https://pytorch.org/memory_viz shows."""
        import torch  # noqa: PLC0415

        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # noqa: SLF001


class MemorySnapshot:
    """Records allocations and writes one snapshot.

    Where the user records already, their options stay as they are: the snapshot is taken of that, and it goes on
    afterwards. Otherwise recording ends with the snapshot, or with the run, and so does one that the user began in
    between: PyTorch has one recording, and does not tell whose it is. Nothing here raises, and nothing reads such
    a file again: it is a pickle, which runs what it is told to.

    Args:
        when: `"oom"` records from the start of the fit on, and writes when it ends in an out-of-memory error; a number
            records that step, and writes at its end.
        path: the file.
        history: what records.
    """

    def __init__(self, when: Moment, path: Path, history: MemoryHistory | None = None) -> None:
        self.when = when
        self.written: Path | None = None
        """The file, once it is there."""
        self.problem = ""
        """Why there is none, where it should be."""
        self._path = path
        self._history = history or TorchMemoryHistory()
        self._watching = self._ours = False

    def start(self) -> None:
        """The fit begins; best before the model is moved to the GPU, so that its parameters have their stacks."""
        if self.when in {"oom", 0}:
            self._watch()

    def end_step(self, step: int) -> None:
        """A step has ended, and the next one begins."""
        if self.when == step and self._watching:
            self._write()
            self.close()
        elif self.when == step + 1:
            self._watch()

    def on_exception(self, exception: BaseException) -> None:
        """The fit ends in an exception, whose traceback still holds the tensors of the step."""
        if self._watching and self.when == "oom" and _out_of_memory(exception):
            self._write()
        self.close()

    def close(self) -> None:
        """Put recording back as it was. No step comes after this."""
        self._watching = False
        if self.when != "oom" and self.written is None and not self.problem:
            self.problem = f"step {self.when} never came to its end"
        if self._ours:
            self._ours = False
            try:
                self._history.stop()
            except Exception as exc:
                _log.warning("The recording of allocations could not be ended: %s: %s", type(exc).__name__, exc)

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
    """Whether it is one, or was raised because of one, as compiled code does."""
    import torch  # noqa: PLC0415

    return any(isinstance(each, torch.OutOfMemoryError) for each in _chain(exception))


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = exception
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
