"""The lines that a loader's worker spends its time in: it samples itself, and the training process reads that."""

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from pkgutil import resolve_name
from types import FrameType
from typing import Any, Final

import msgspec
from torch.utils.data._utils import worker

from lightning_forge_profiling.run.stack_sampler import PlaceTimes, ThreadTime, find_place, sampled_lines
from lightning_forge_profiling.run.stack_timer import StackTimer, stack_timer
from lightning_forge_profiling.run.worker_batches import forget_batches, nameless_file, sums_file, time_batches
from lightning_forge_profiling.schema import SampledLine

_WORKER_ID: Final = 10  # the position of the worker's number among the arguments of torch's worker loop (2.4 to 2.14)
_WRITTEN_EVERY: Final = 25

_TORCHS: Final = f"{worker.__name__}:_worker_loop"
_torchs_loop = worker._worker_loop  # noqa: SLF001


class WorkerStacks:
    """Lets the first worker that starts from here on sample itself, by a replaced worker loop, and reads that.

    Args:
        validation: whether the loaders are those that the fit validates on.
    """

    def __init__(self, *, validation: bool = False) -> None:
        self.file = -1
        self.validation = validation
        self._loop: _SampledLoop | None = None

    def watch(self) -> None:
        """Replace the loop. Does nothing on Windows, where a process is not given a file so, nor without a file."""
        if not hasattr(os, "pread") or worker._worker_loop is not _torchs_loop:  # noqa: SLF001
            return
        with suppress(OSError):
            if self.file < 0:
                self.file = nameless_file()
                forget_batches(validation=self.validation)
            self._loop = _SampledLoop(self.file, sums_file(), validation=self.validation)
            worker._worker_loop = self._loop  # type: ignore[assignment]  # noqa: SLF001

    def release(self) -> None:
        """Restore torch's loop. Workers that run go on."""
        if self._loop is not None and worker._worker_loop is self._loop:  # noqa: SLF001
            worker._worker_loop = _torchs_loop  # noqa: SLF001

    def close(self) -> None:
        """Restore torch's loop and forget what was read."""
        self.release()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def lines(self) -> tuple[SampledLine, ...]:
        """The lines that the worker spends most time in, of those that make batches."""
        if self.file < 0:
            return ()
        try:
            return msgspec.json.decode(os.pread(self.file, 1 << 20, 0) or b"[]", type=tuple[SampledLine, ...])
        except (OSError, msgspec.DecodeError):  # written just now
            return ()


class _SampledLoop:
    """torch's worker loop, timed and sampled in the first worker. A forked one inherits it, another one is sent it."""

    def __init__(self, lines: int, sums: int, *, validation: bool) -> None:
        self._lines, self._sums, self._validation = lines, sums, validation
        self._sent = False
        self._files = self._identities()

    def _identities(self) -> list[tuple[int, int]]:
        return [(status.st_dev, status.st_ino) for status in map(os.fstat, (self._lines, self._sums))]

    def __call__(self, *arguments: Any) -> None:
        with suppress(Exception):  # the batches come first
            if arguments[_WORKER_ID] == 0:
                time_batches(self._sums, validation=self._validation)
                if os.fstat(self._lines).st_size == 0:
                    _Worker(self._lines).start()
        _torchs_loop(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # only the first imports this package to get it, which takes a worker 0.1 s
        if not self._sent and get_spawning_popen() is not None:
            from multiprocessing.reduction import DupFd  # noqa: PLC0415  (Windows has none)

            with suppress(OSError):  # a script may have closed all files, and others may have their numbers
                if self._identities() == self._files:
                    self._sent = True
                    return _received, (DupFd(self._lines), DupFd(self._sums), self._validation)
        return resolve_name, (_TORCHS,)


def _received(lines: Any, sums: Any, validation: bool) -> _SampledLoop:
    return _SampledLoop(lines.detach(), sums.detach(), validation=validation)


class _Worker:
    """Samples the thread of a worker that makes batches, and writes what it found twice a second."""

    def __init__(self, written_to: int) -> None:
        self._written_to = written_to
        self._times, self._samples, self._longest = PlaceTimes(), 0, 2
        self._thread = ThreadTime()
        self._timer: StackTimer | None = None
        os.pwrite(written_to, b"[]", 0)

    def start(self) -> None:
        """Begin, for as long as the worker lives."""
        self._timer = stack_timer(self._look)
        if self._timer is not None:
            self._timer.start()

    def _look(self, frame: FrameType) -> None:
        """Add a sample to its place, unless the worker waits for a request."""
        took = self._thread.take()
        place, region = find_place(frame, in_loop=True)
        if self._timer is not None and (place.code is not None or region == "data"):
            self._times.add("data", place, took, self._timer.looks.stands_for_ns(took.now_ns))
        self._samples += 1
        if self._samples % _WRITTEN_EVERY == 0:
            written = msgspec.json.encode(sampled_lines(self._times.by_part.get("data", {})))
            self._longest = max(self._longest, len(written))
            os.pwrite(self._written_to, written.ljust(self._longest), 0)  # over all of what was written before
