"""A terminal that frames are drawn on and keys are read from; restored however the command ends."""

import os
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from types import FrameType
from typing import Any, Final, TextIO

from lightning_forge_profiling.report.screen import shown_width

try:
    import termios
    import tty
except ImportError:  # Windows: no keys
    _HAS_TERMIOS = False
else:
    _HAS_TERMIOS = True

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, lines cut instead of wrapped
_RESTORE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING: Final = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_SLICE_S: Final = 0.1  # longest time until a resized terminal is redrawn


_KEY: Final = re.compile(r"\x1b[\[O]([AB])|([qs0-9])", re.IGNORECASE)
_ARROWS: Final = {"A": "up", "B": "down"}


class LiveScreen:
    """Shows one frame at a time on a terminal and reads keys; created by `live_screen`."""

    def __init__(self, stream: TextIO, keyboard: TextIO | None) -> None:
        self._stream = stream
        self._size = shutil.get_terminal_size()
        self._input = _terminal_of(keyboard)
        self._before: list[Any] | None = None

    @property
    def has_keys(self) -> bool:
        """Whether keys are read."""
        return self._before is not None

    def draw(self, text: str, footer: str = "") -> None:
        """Replace the frame. Lines that do not fit are left out; a line says how many. The footer is always shown."""
        columns, height = self._size = shutil.get_terminal_size()
        lines, below = text.rstrip("\n").split("\n"), [footer] if footer else []
        rows, room = [_rows(line, columns) for line in lines], max(height, 2 + len(below)) - len(below)
        kept = len(lines)
        if sum(rows) > room:
            while kept and sum(rows[:kept]) > room - 1:
                kept -= 1
            lines[kept:] = [f"… {len(lines) - kept} more lines"]
        elif below:
            lines += [""] * (room - sum(rows))
        # in place, line by line: clearing the screen first would flicker
        self.write("\x1b[H" + "\n".join(_drawn(line, columns) for line in (*lines, *below)) + "\x1b[J")

    def wait(self, seconds: float) -> Sequence[str]:
        """Wait for some seconds, a new size or keys: returns those of `q`, `s`, `0` to `9`, `up` and `down`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and shutil.get_terminal_size() == self._size:
            if keys := self._keys(min(left, _SLICE_S)):
                return keys
        return ()

    def _keys(self, seconds: float) -> list[str]:
        """Keys that are pressed within some seconds."""
        if not self.has_keys or self._input is None:
            time.sleep(seconds)
            return []
        if not select.select([self._input], [], [], seconds)[0]:
            return []
        typed = os.read(self._input, 1024)
        if not typed:  # the terminal is gone, and SIGHUP comes
            self._before = None
        found = _KEY.finditer(typed.decode(errors="replace"))
        return [_ARROWS[each[1].upper()] if each[1] else each[2].lower() for each in found]

    def write(self, text: str) -> None:
        """Write text and terminal codes at once."""
        self._stream.write(text)
        self._stream.flush()

    def enter(self) -> None:
        """Switch to the alternate screen, and have keys reported as they are pressed, without an echo."""
        if self._input is not None:
            with suppress(termios.error):
                self._before = termios.tcgetattr(self._input)
                tty.setcbreak(self._input, termios.TCSADRAIN)
        self.write(_ENTER)

    def restore(self) -> None:
        """Switch back to the normal screen."""
        if self._input is not None and self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        with suppress(OSError, ValueError):  # the terminal may be gone
            self.write(_RESTORE)


def _terminal_of(keyboard: TextIO | None) -> int | None:
    """The descriptor of a terminal that keys are read from; None if it is none."""
    with suppress(OSError, ValueError):
        if _HAS_TERMIOS and keyboard is not None and keyboard.isatty():
            return keyboard.fileno()
    return None


def _rows(line: str, columns: int) -> int:
    return max(1, ceil(shown_width(line) / columns))


def _drawn(line: str, columns: int) -> str:
    """A line with what clears its row. The terminal wraps a longer one, which is a path, so that it can be copied."""
    if _rows(line, columns) == 1:
        return f"\x1b[K{line}"
    rest = "\x1b[K" if shown_width(line) % columns else ""
    return f"\x1b[K\x1b[?7h{line}{rest}\x1b[?7l"


@contextmanager
def live_screen(stream: TextIO, keyboard: TextIO | None = None) -> Iterator[LiveScreen]:
    """Context in which frames are drawn on a terminal. Restores it at the end, on a signal, and while stopped."""
    screen = LiveScreen(stream, keyboard)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(_: int, __: FrameType | None) -> None:  # Ctrl-Z: restore the screen for the shell
        screen.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.enter()

    handlers = dict.fromkeys(_ENDING, end) | {"SIGTSTP": stop}
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        screen.enter()
        yield screen
    finally:
        screen.restore()
        for number, handler in before.items():
            signal.signal(number, handler)
