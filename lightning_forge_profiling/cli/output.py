"""What commands share of writing to the terminal."""

import sys
import threading
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

__all__ = ["Progress", "stdout_console", "write_json"]


class Progress:
    """Says on a stream what is being done, once that has taken a while. A context manager, and called with each text.

    Args:
        stream: where to, standard error by default.
        after_s: how long to stay silent, in seconds.

    Example:
        >>> with Progress() as progress:
        ...     progress("reading rank 0")  # took less than a second, and so nothing is written
    """

    def __init__(self, stream: TextIO | None = None, *, after_s: float = 1.0) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._silent = True
        self._latest = ""
        self._timer = threading.Timer(after_s, self._speak)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._silent = True

    def __call__(self, text: str) -> None:
        """Take note of what is being done now."""
        with self._lock:
            self._latest = text
            self._write()

    def _speak(self) -> None:
        with self._lock:
            self._silent = False
            self._write()

    def _write(self) -> None:
        if self._latest and not self._silent:
            self._stream.write(f"{self._latest}\n")
            self._stream.flush()


def stdout_console() -> "Console":
    """A console on standard output, with colours where that is a terminal."""
    from rich.console import Console  # noqa: PLC0415  (start fast)

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which here means a failed gate
            raise BrokenPipeError

    return _Console()


def write_json(content: bytes) -> None:
    """Write JSON on standard output, and nothing else."""
    sys.stdout.buffer.write(content if content.endswith(b"\n") else content + b"\n")
