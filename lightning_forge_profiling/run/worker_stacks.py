"""The lines that a loader's worker spends its time in: it samples itself, and the training process reads that."""

import multiprocessing
import os
from contextlib import suppress
from types import FrameType
from typing import Any, Final

import msgspec
from torch.utils.data._utils import worker

from lightning_forge_profiling.run.stack_sampler import PlaceTimes, ThreadTime, find_place, sampled_lines
from lightning_forge_profiling.run.stack_timer import StackTimer, stack_timer
from lightning_forge_profiling.run.worker_batches import forget_batches, time_batches
from lightning_forge_profiling.schema import SampledLine

_WORKER_ID: Final = 10  # the position of the worker's number among the arguments of torch's worker loop (2.4 to 2.13)
_WRITTEN_EVERY: Final = 25

_torchs_loop = worker._worker_loop  # noqa: SLF001
_watched: "WorkerStacks | None" = None  # what a forked worker inherits


class WorkerStacks:
    """Lets the first worker that is forked from here on sample itself, by a replaced worker loop, and reads that.

    Args:
        validation: whether the loaders are those that the fit validates on.
    """

    def __init__(self, *, validation: bool = False) -> None:
        self.file = -1
        self.validation = validation

    def watch(self) -> None:
        """Replace the loop. Does nothing where workers are not forked: they would have to import this package."""
        global _watched  # noqa: PLW0603  (a process has one worker loop)
        start = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if start == "fork" and hasattr(os, "memfd_create") and worker._worker_loop is _torchs_loop:  # noqa: SLF001
            if self.file < 0:
                self.file = os.memfd_create("forge-worker-stacks")
                forget_batches(validation=self.validation)
            _watched = self
            worker._worker_loop = _sampled_loop  # type: ignore[assignment]  # noqa: SLF001

    def release(self) -> None:
        """Restore torch's loop. Workers that run go on."""
        if _watched is self and worker._worker_loop is _sampled_loop:  # noqa: SLF001
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
        except msgspec.DecodeError:  # written just now
            return ()


def _sampled_loop(*arguments: Any) -> None:
    with suppress(Exception):  # the batches come first; a spawned worker inherits no file
        if _watched is not None and arguments[_WORKER_ID] == 0:
            time_batches(validation=_watched.validation)
            if os.fstat(_watched.file).st_size == 0:
                _Worker(_watched.file).start()
    _torchs_loop(*arguments)


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
