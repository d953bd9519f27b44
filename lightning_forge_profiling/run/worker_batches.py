"""How long a batch takes to make in a DataLoader's first worker, which writes that to memory that both share."""

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from struct import Struct
from tempfile import TemporaryFile
from time import perf_counter_ns
from typing import Any, Final

from torch.utils.data.dataloader import _DatasetKind

from lightning_forge_profiling.host import ThreadClock

_SUMS: Final = Struct("qq")  # batches, and the nanoseconds that they took
_BYTES: Final = 2 * _SUMS.size  # of the loaders that are trained on, and then of those that are validated on


def nameless_file(size: int = 0) -> int:
    """A file of zeros that a process can be given, but not open by a name. Raises OSError."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("forge-workers")
    else:
        with TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.write(file, bytes(size))  # here a full disk is an error; at the first store to a file's memory, a signal
    return file


@cache
def _sums() -> tuple[int, mmap.mmap]:
    """A file that stays open, -1 if there can be none, and its content."""
    try:
        file = nameless_file(_BYTES)
        return file, mmap.mmap(file, _BYTES)
    except OSError:
        return -1, mmap.mmap(-1, _BYTES)


def sums_file() -> int:
    """The file that workers write to; -1 if there is none."""
    return _sums()[0]


def time_batches(file: int, *, validation: bool) -> None:
    """In a worker that is about to begin: add up what its batches take. Takes some microseconds a batch."""
    create_fetcher, memory = _DatasetKind.create_fetcher, mmap.mmap(file, _BYTES)

    def create_timed(*arguments: Any) -> Any:
        fetcher = create_fetcher(*arguments)  # type: ignore[no-untyped-call]
        fetcher.fetch = _timed(fetcher.fetch, memory, validation * _SUMS.size)
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_timed)  # type: ignore[method-assign]  # of this process alone


def _timed(fetch: Callable[[Any], Any], memory: mmap.mmap, place: int) -> Callable[[Any], Any]:
    clock, first = None, True
    with suppress(OSError, ValueError):  # as where there is no /proc
        clock = ThreadClock()
        clock.ns()

    def waits_ns() -> int:
        return 0 if clock is None else clock.ns()[1]

    def fetch_timed(indices: Any) -> Any:
        nonlocal first
        began_ns, waited_ns = perf_counter_ns(), waits_ns()
        batch = fetch(indices)
        # without the waits for a core, of which another number of processes would have others, and without a worker's
        # first batch, for which it opens files and copies pages
        took_ns = perf_counter_ns() - began_ns - (waits_ns() - waited_ns)
        if not first:
            batches, sum_ns = _SUMS.unpack_from(memory, place)
            _SUMS.pack_into(memory, place, batches + 1, sum_ns + took_ns)
        first = False
        return batch

    return fetch_timed


def forget_batches(*, validation: bool) -> None:
    """A fit begins."""
    _SUMS.pack_into(_sums()[1], validation * _SUMS.size, 0, 0)


def batch_ms(*, validation: bool = False) -> float | None:
    """The mean so far, of the workers that came one after the other; None where no worker has said it."""
    batches, sum_ns = _SUMS.unpack_from(_sums()[1], validation * _SUMS.size)
    return sum_ns / batches / 1e6 if batches else None
