"""Redraws a terminal on its alternate screen, and restores it however the command ends."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, TextIO

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, lines cut instead of wrapped
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING: Final = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_SLICE_S: Final = 0.1
"""Longest time until a resized terminal is redrawn."""


class LiveScreen:
    """Shows one frame at a time on a terminal; created by `live_screen`.

    Only the screen and the cursor are changed, not the terminal's attributes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size = self.size

    @property
    def size(self) -> os.terminal_size:
        """Current columns and lines."""
        return shutil.get_terminal_size()

    def draw(self, text: str) -> None:
        """Replace the frame. Lines that do not fit are left out; the last line says how many."""
        self._size = self.size
        lines = text.rstrip("\n").split("\n")
        room = max(self._size.lines, 2)
        if len(lines) > room:
            lines[room - 1 :] = [f"… {len(lines) - room + 1} more lines"]
        # in place, line by line: clearing the screen first would flicker
        self._stream.write("\x1b[H" + "\n".join(f"\x1b[K{line}" for line in lines) + "\x1b[J")
        self._stream.flush()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the terminal is resized."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self.size == self._size:
            time.sleep(min(left, _SLICE_S))

    def enter(self) -> None:
        """Switch to the alternate screen."""
        self._stream.write(_ENTER)
        self._stream.flush()

    def leave(self) -> None:
        """Switch back to the normal screen."""
        with suppress(OSError, ValueError):  # the terminal may be gone
            self._stream.write(_LEAVE)
            self._stream.flush()


@contextmanager
def live_screen(stream: TextIO) -> Iterator[LiveScreen]:
    """Context in which frames are drawn on a terminal. Restores it at the end, on a signal, and while stopped."""
    screen = LiveScreen(stream)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(_: int, __: FrameType | None) -> None:  # Ctrl-Z: restore the screen for the shell
        screen.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()

    handlers = dict.fromkeys(_ENDING, end) | {"SIGTSTP": stop}
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        screen.enter()
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
