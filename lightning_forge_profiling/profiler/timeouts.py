"""Limits every wait of this package while a run ends or fails."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Final

PATIENCE_S: Final = 4.0
RANKS_S: Final = 2.0
"""For the other ranks' last lines: ranks end together, but the disk of another node may show them later, or never."""


def patience_s(world_size: int) -> float:
    """Seconds for each wait; 0 with several ranks, since Lightning kills all within 5 s of the first one's end."""
    return PATIENCE_S if world_size == 1 else 0.0


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Let Ctrl-C end the wait inside and nothing else, also after the first one, when Lightning ignores it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    ignored = in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        if ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def problems_within(limit_s: float, works: Sequence[Callable[[], object]]) -> list[Exception | None]:
    """Do several things at once, each in a thread, and say what became of each.

    A thread that does not end in time is left alone; it does not keep the process alive.

    Example:
        >>> problems_within(60.0, [lambda: 1, lambda: 1 // 0])
        [None, ZeroDivisionError('integer division or modulo by zero')]
    """
    late: list[Exception | None] = [TimeoutError(f"not done within {max(limit_s, 0):g} s")] * len(works)
    if limit_s <= 0:
        return late
    found = list(late)

    def run(place: int, work: Callable[[], object]) -> None:
        try:
            work()
            found[place] = None
        except Exception as exc:
            found[place] = exc

    threads = [threading.Thread(target=run, args=work, daemon=True) for work in enumerate(works)]
    for thread in threads:
        thread.start()
    deadline = monotonic() + limit_s
    with ctrl_c_ends():
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0.0))
    return list(found)
