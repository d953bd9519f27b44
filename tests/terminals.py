"""A command on a terminal of its own: what it shows, the keys that are typed, the terminal's size and attributes."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.outcomes import HANGS_S

CODES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


class Terminal:
    """A process on a terminal.

    Attributes:
        process: the process.
        output: all that it wrote so far.
    """

    def __init__(self, command: list[str], columns: int, lines: int, environment: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        self.output = ""

        def take_terminal() -> None:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):  # in the background they may be ignored
                signal.signal(number, signal.SIG_DFL)
            fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=subprocess.PIPE,
            preexec_fn=take_terminal,  # noqa: PLW1509
            env=environment,
        )

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def wait_for(self, condition: Callable[[str], object], since: int = 0) -> str:
        """Read until what was shown from a place on fulfils a condition."""
        deadline = time.monotonic() + HANGS_S
        while not condition(self.output[since:]):
            assert time.monotonic() < deadline, self.output[since:]
            self._read(1.0)
        return self.output[since:]

    def ended(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        deadline = time.monotonic() + HANGS_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        self.output += os.read(self._master, 65536).decode(errors="replace")
        return True

    def is_as_before(self) -> bool:
        """Whether the terminal's attributes are those of the beginning."""
        return termios.tcgetattr(self._slave) == self.before

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._master)
        os.close(self._slave)
        self._master = self._slave = -1

    def close(self) -> None:
        """End the process if it has not ended."""
        self.process.kill()
        self.process.communicate()
        for descriptor in (self._master, self._slave):
            if descriptor >= 0:
                os.close(descriptor)


@contextmanager
def terminal(
    *arguments: object,
    columns: int = 80,
    lines: int = 50,
    environment: dict[str, str],
) -> Iterator[Terminal]:
    """A `forge-profiling` command on a terminal."""
    size = {"COLUMNS", "LINES"}  # which would be the terminal's size, whatever it is
    kept = {name: value for name, value in environment.items() if name not in size}
    command = [sys.executable, "-m", "lightning_forge_profiling", *map(str, arguments)]
    shown = Terminal(command, columns, lines, {"TERM": "xterm-256color", **kept})
    try:
        yield shown
    finally:
        shown.close()


def frames(output: str) -> list[list[str]]:
    """The frames that were drawn, each as lines without codes."""
    return [CODES.sub("", frame).replace("\r", "").split("\n") for frame in output.split("\x1b[H")[1:]]
