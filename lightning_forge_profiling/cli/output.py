"""Terminal output of all commands: progress, messages, JSON. Escapes in file names are removed."""

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


class Progress:
    """Context manager that, once work takes a while, shows the latest text on a terminal, or a line each in a file."""

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
        """Set the text of the current stage."""
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
        with suppress(OSError):  # a closed stream must not stop the work
            if self._redraws:
                self._stream.write(f"\r{self._latest[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            elif self._latest:
                self._stream.write(f"{self._latest}\n")
            self._stream.flush()


def wraps() -> bool:
    """Whether sentences on standard output are wrapped: on a terminal, or to a width that `COLUMNS` asks for."""
    columns = os.environ.get("COLUMNS", "")
    return sys.stdout.isatty() or (columns.isdecimal() and int(columns) > 0)


def say(text: str) -> None:
    """Write a line on standard output."""
    sys.stdout.write(f"{plain(text)}\n")


def warn(text: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"forge-profiling: {plain(text)}\n")


def write_json(content: bytes) -> None:
    """Write JSON on standard output, with control and invisible characters escaped."""
    text = re.sub(r"[^\n -~]", _escaped, content.decode())
    sys.stdout.buffer.write(text.removesuffix("\n").encode() + b"\n")


def write_as_json(result: object) -> None:
    """Write a result as indented JSON on standard output."""
    import msgspec  # noqa: PLC0415  (start fast)

    write_json(msgspec.json.format(msgspec.json.encode(result, enc_hook=dict), indent=2))


def _escaped(character: re.Match[str]) -> str:
    return character[0] if plain(character[0]) == character[0] else json.dumps(character[0])[1:-1]
