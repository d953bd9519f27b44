"""Times of this thread's garbage collections, taken without running Python code in them."""

import gc
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Final, NamedTuple

FULL: Final = 2
"""The oldest generation: collecting it visits every object that the collector tracks."""

_LATEST: Final = 4096


class Collection(NamedTuple):
    """One garbage collection.

    Attributes:
        generation: the oldest generation that was collected, 0 to 2.
        began_ns: when it began, by `time.perf_counter_ns`.
        ended_ns: when it ended.
    """

    generation: int
    began_ns: int
    ended_ns: int


# Python prints and drops an exception in one of `gc.callbacks`. A signal that arrives in a collection is handled in the
# next Python code to run, a callback's: Ctrl-C would be lost. So these callbacks are
# `setattr(sink, phase, info)` of properties whose setters are C functions, in which no signal is handled.


class _Instants(map):  # type: ignore[type-arg]
    """Advanced by one at each end of a collection."""

    start = stop = property(None, next)


class _Infos(deque[dict[str, int]]):
    """The collector's info on each collection."""

    stop = property(None, deque.append)


class GarbageTimer:
    """Times the garbage collections of the thread that creates it, until `close`; keeps the latest 4096.

    Example:
        >>> timer = GarbageTimer()
        >>> _ = gc.collect()
        >>> timer.close()
        >>> timer.take()[-1].generation
        2
    """

    def __init__(self) -> None:
        self._thread = get_ident()
        self._instants: deque[tuple[int, int]] = deque(maxlen=2 * _LATEST)
        self.pending = _Infos(maxlen=_LATEST)
        """Not empty if there is something to `take`."""
        now = zip(iter(perf_counter_ns, None), iter(get_ident, None), strict=False)
        callbacks = [partial(setattr, sink) for sink in (_Instants(self._instants.append, now), self.pending)]
        gc.callbacks.extend(callbacks)
        self._end = weakref.finalize(self, _remove, callbacks)  # if a fit is abandoned without a hook

    def close(self) -> None:
        """Stop timing."""
        self._end()

    def take(self) -> list[Collection]:
        """The collections of this thread that have ended since the last call."""
        instants, infos = list(self._instants), list(self.pending)
        self._instants.clear()
        self.pending.clear()
        if len(instants) != 2 * len(infos):  # another thread's is under way, or was when this began: drop these few
            return []
        return [
            Collection(info["generation"], began_ns, ended_ns)
            for info, (began_ns, thread), (ended_ns, _) in zip(infos, instants[::2], instants[1::2], strict=True)
            if thread == self._thread
        ]


def _remove(callbacks: Iterable[object]) -> None:
    for callback in callbacks:
        if callback in gc.callbacks:
            gc.callbacks.remove(callback)
