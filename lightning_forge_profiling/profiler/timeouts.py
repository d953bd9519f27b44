"""Limits every wait of ours while a run fails."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["PATIENCE_S", "ctrl_c_ends", "patience_s"]

PATIENCE_S: Final = 4.0


def patience_s(world_size: int) -> float:
    """Seconds for each wait; 0 with several ranks, since Lightning kills all within 5 s of the first one's end.

    Args:
        world_size: number of processes in the run.
    """
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
