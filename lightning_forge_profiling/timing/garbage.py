"""Times of this thread's garbage collections, taken without running Python code in them."""

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

FULL: Final = 2  # the oldest generation: collecting it visits every object that the collector tracks

_LATEST: Final = 4096
_FROZEN_BY_PYTHON: Final = 1000  # Python 3.12 freezes 375 objects when it starts; whoever else freezes, freezes more


class Collection(NamedTuple):
    """One garbage collection."""

    generation: int
    began_ns: int  # by `time.perf_counter_ns`
    ended_ns: int


# Python prints and drops an exception in one of `gc.callbacks`. A signal that arrives in a collection is handled in the
# next Python code to run, a callback's: Ctrl-C would be lost. So these callbacks are
# `setattr(sink, phase, info)` of properties whose setters are C functions, in which no signal is handled.


class GcTimestamps(map):  # type: ignore[type-arg]
    """Takes a time and a thread at each end of a collection, by advancing itself."""

    start = stop = property(None, next)


class GcInfos(deque[dict[str, int]]):
    """The collector's info on each collection."""

    stop = property(None, deque.append)


class GarbageTimer:
    """Times the garbage collections of the thread that creates it, until `close`; keeps the latest 4096."""

    def __init__(
        self, clock_ns: Callable[[], int] = perf_counter_ns, callbacks: list[Callable[..., Any]] = gc.callbacks
    ) -> None:
        self._thread = get_ident()
        self._timestamps: deque[tuple[int, int]] = deque(maxlen=2 * _LATEST)
        self.pending = GcInfos(maxlen=_LATEST)  # not empty if there is something to `take`
        now = zip(iter(clock_ns, None), iter(get_ident, None), strict=False)
        ours = [partial(setattr, sink) for sink in (GcTimestamps(self._timestamps.append, now), self.pending)]
        callbacks.extend(ours)
        self._end = weakref.finalize(self, _remove, ours, callbacks)  # if a fit is abandoned without a hook

    def close(self) -> None:
        """Stop timing."""
        self._end()

    def take(self) -> list[Collection]:
        """The collections of this thread that have ended since the last call."""
        timestamps, infos = list(self._timestamps), list(self.pending)
        self._timestamps.clear()
        self.pending.clear()
        if len(timestamps) != 2 * len(infos):  # another thread's is under way, or was when this began: drop these few
            return []
        return [
            Collection(info["generation"], began_ns, ended_ns)
            for info, (began_ns, thread), (ended_ns, _) in zip(infos, timestamps[::2], timestamps[1::2], strict=True)
            if thread == self._thread
        ]


def count_collections_anew() -> None:
    """Begin the count of collections after which Python collects all garbage, which takes 0.07 to 0.8 s with torch.

    Python does so once there were over ten collections of the middle generation and a quarter more objects have
    survived them. What this package allocates until training begins survives, too, so that the full collection would
    come in a step in which plain training has none: importing it leaves 31,000 objects, of 546,000 of a LoRA fine-tune.
    In 400 steps of that, 2,200 to 3,900 objects survive without this package and 8,100 with it, 1,400 of them for the
    sampler of stacks; a quarter are 136,000 (H100, Python 3.12, torch 2.11, 2026-11-27).

    The young garbage is collected, and `freeze` sets the counts to zero; `unfreeze` puts the objects back. Python 3.14
    collects in small pieces.
    """
    if sys.version_info < (3, 14) and gc.isenabled() and gc.get_freeze_count() < _FROZEN_BY_PYTHON:
        gc.collect(1)
        gc.freeze()
        gc.unfreeze()


def _remove(ours: list[Any], callbacks: list[Any]) -> None:
    for callback in ours:
        if callback in callbacks:
            callbacks.remove(callback)
