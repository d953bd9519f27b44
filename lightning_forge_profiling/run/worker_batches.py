"""How long a batch takes to make in a DataLoader's first worker, which writes that to memory that both share."""

import mmap
from collections.abc import Callable
from struct import Struct
from time import perf_counter_ns
from typing import Any, Final

from torch.utils.data.dataloader import _DatasetKind

from lightning_forge_profiling.host import ThreadClock

_SUMS: Final = Struct("qq")  # batches, and the nanoseconds that they took
# which forked workers inherit: of the loaders that are trained on, and then of those that are validated on
_memory: Final = mmap.mmap(-1, 2 * _SUMS.size)


def time_batches(*, validation: bool) -> None:
    """In a worker that is about to begin: add up what its batches take. Takes some microseconds a batch."""
    create_fetcher = _DatasetKind.create_fetcher

    def create_timed(*arguments: Any) -> Any:
        fetcher = create_fetcher(*arguments)  # type: ignore[no-untyped-call]
        fetcher.fetch = _timed(fetcher.fetch, validation * _SUMS.size)
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_timed)  # type: ignore[method-assign]  # of this process alone


def _timed(fetch: Callable[[Any], Any], place: int) -> Callable[[Any], Any]:
    clock, first = ThreadClock(), True

    def fetch_timed(indices: Any) -> Any:
        nonlocal first
        began_ns, waited_ns = perf_counter_ns(), clock.ns()[1]
        batch = fetch(indices)
        # without the waits for a core, of which another number of processes would have others, and without a worker's
        # first batch, for which it opens files and copies pages
        took_ns = perf_counter_ns() - began_ns - (clock.ns()[1] - waited_ns)
        if not first:
            batches, sum_ns = _SUMS.unpack_from(_memory, place)
            _SUMS.pack_into(_memory, place, batches + 1, sum_ns + took_ns)
        first = False
        return batch

    return fetch_timed


def forget_batches(*, validation: bool) -> None:
    """A fit begins."""
    _SUMS.pack_into(_memory, validation * _SUMS.size, 0, 0)


def batch_ms(*, validation: bool = False) -> float | None:
    """The mean so far, of the workers that came one after the other; None where no worker has said it."""
    batches, sum_ns = _SUMS.unpack_from(_memory, validation * _SUMS.size)
    return sum_ns / batches / 1e6 if batches else None
