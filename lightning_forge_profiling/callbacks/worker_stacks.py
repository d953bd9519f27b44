"""Samples the stack of one forked DataLoader worker: which line of the user's code makes batches."""

import json
import multiprocessing
import os
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from torch.utils.data._utils import worker

from lightning_forge_profiling.callbacks.stack_sampler import Sample, StackThread, add_sample, new_sums, sampled_lines
from lightning_forge_profiling.host import ThreadClock
from lightning_forge_profiling.results.lines import SampledLine

_WORKER_ID: Final = 10
"""The place of the worker's number among the arguments of torch's worker loop (2.4 to 2.13)."""

_WRITTEN_EVERY: Final = 25

_torchs_loop = worker._worker_loop  # noqa: SLF001
_written_to = -1


class WorkerStacks:
    """Lets the first worker that is forked from here on sample itself, and reads what it found.

    While it watches, torch's worker loop is replaced by one that starts the sampler and then calls torch's.
    """

    def __init__(self) -> None:
        self._file = -1

    def watch(self) -> None:
        """Replace the loop. Does nothing where workers are not forked: they would have to import this package."""
        global _written_to  # noqa: PLW0603  (what a forked worker inherits)
        forks = (
            multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        ) == "fork"
        if forks and hasattr(os, "memfd_create") and worker._worker_loop is _torchs_loop:  # noqa: SLF001
            self._file = self._file if self._file >= 0 else os.memfd_create("forge-worker-stacks")
            _written_to = self._file
            worker._worker_loop = _sampled_loop  # type: ignore[assignment]  # noqa: SLF001

    def release(self) -> None:
        """Restore torch's loop. Workers that run go on."""
        if worker._worker_loop is _sampled_loop:  # noqa: SLF001
            worker._worker_loop = _torchs_loop  # noqa: SLF001

    def close(self) -> None:
        """Restore torch's loop and forget what was read."""
        self.release()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def lines(self) -> tuple[SampledLine, ...]:
        """The lines that the worker spends most time in, of those that make batches."""
        if self._file < 0:
            return ()
        try:
            found = json.loads(os.pread(self._file, 1 << 20, 0) or b"[]")
        except ValueError:  # written just now
            return ()
        sums = new_sums()
        for file, line, function, *times in found:
            sums[file, line, function] = times
        return sampled_lines(sums)


def _sampled_loop(*arguments: Any) -> None:
    with suppress(Exception):  # the batches come first; a spawned worker inherits no file
        if _written_to >= 0 and arguments[_WORKER_ID] == 0 and os.fstat(_written_to).st_size == 0:
            _Worker(_written_to).start()
    _torchs_loop(*arguments)


class _Worker(StackThread):
    """Samples the thread of a worker that makes batches, and writes what it found twice a second."""

    def __init__(self, written_to: int) -> None:
        super().__init__(ThreadClock())
        self._written_to = written_to
        self._sums, self._samples = new_sums(), 0
        os.pwrite(written_to, b"[]", 0)

    def add(self, frame: FrameType, sample: Sample) -> None:
        """Add a sample to its line, unless the worker waits for a request."""
        line, region = self.walk(frame)
        if line[0] or region == "data":
            add_sample(self._sums, line, sample)
        self._samples += 1
        if self._samples % _WRITTEN_EVERY == 0:
            rows = [[*line, *times] for line, times in self._sums.items()]
            os.pwrite(self._written_to, json.dumps(rows).encode(), 0)
