"""What commands share of writing to the terminal, where no name of a file may steer it."""

import json
import os
import re
import shutil
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TextIO

from lightning_forge_profiling.plain_text import plain

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Progress", "say", "warn", "write_json"]


class Progress:
    """Says on a stream what is being done, once that has taken a while. A context manager, and called with each text.

    A terminal shows the latest text, a file has a line for each.

    Args:
        stream: where to, standard error by default.
        after_s: how long to stay silent, in seconds; 0 for work that always takes long.

    Example:
        >>> with Progress() as progress:
        ...     progress("reading rank 0")  # took less than a second, and so nothing is written
    """

    def __init__(self, stream: TextIO | None = None, *, after_s: float = 1.0) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._silent = after_s > 0
        self._redraws = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._latest = ""
        self._timer = threading.Timer(after_s, self._speak)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if self._silent:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._latest = ""
            if self._redraws:
                self._write()
            self._silent = True

    def __call__(self, text: str) -> None:
        """Take note of what is being done now."""
        with self._lock:
            self._latest = plain(text)
            self._write()

    def _speak(self) -> None:
        with self._lock:
            self._silent = False
            self._write()

    def _write(self) -> None:
        if self._silent:
            return
        with suppress(OSError):  # nobody reads it: no reason to give up the work
            if self._redraws:
                self._stream.write(f"\r{self._latest[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            elif self._latest:
                self._stream.write(f"{self._latest}\n")
            self._stream.flush()


def say(text: str) -> None:
    """Write a line on standard output."""
    sys.stdout.write(f"{plain(text)}\n")


def warn(text: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"forge-profiling: {plain(text)}\n")


def write_json(content: bytes) -> None:
    """Write JSON on standard output, and nothing else; as ASCII what a terminal would obey or not show."""
    text = re.sub(r"[^\n -~]", _escaped, content.decode())
    sys.stdout.buffer.write(text.removesuffix("\n").encode() + b"\n")


def _escaped(character: re.Match[str]) -> str:
    return character[0] if plain(character[0]) == character[0] else json.dumps(character[0])[1:-1]
