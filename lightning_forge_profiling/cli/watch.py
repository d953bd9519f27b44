"""`forge-profiling watch`: a run live on the terminal, read from its record."""

import argparse
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, TextIO

from lightning_forge_profiling.cli.arguments import seconds
from lightning_forge_profiling.cli.files import find_record, warn_of_problems
from lightning_forge_profiling.cli.output import say

if TYPE_CHECKING:
    from lightning_forge_profiling.record.reader import Follower, RunRecord

_EXAMPLES = """\
examples:
  forge-profiling watch lightning_logs/           stop with Ctrl-C
  forge-profiling watch lightning_logs/ --wait    start before the training
  forge-profiling watch lightning_logs/version_3 --once
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "watch",
        help="show a run live, from another terminal or node",
        description="Show a run live, from the record that it writes during training: step time, regions, rates, GPU, "
        "causes of lost time, ranks, events. Exits when the run ends, and prints its table.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--every", type=seconds, metavar="S", default=1.0, help="seconds between frames (default: 1)")
    parser.add_argument("--wait", action="store_true", help="wait until there is a run that has not ended")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.report.live_view import print_summary  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    follower, where = _run_to_watch(args.run_path, args.every, waits=args.wait)
    if args.once:
        record = follower.look()
        sys.stdout.write(_frame(record, where))
    else:
        redraws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        record = (_redrawn if redraws else _appended)(follower, where, args.every)
        print_summary(record, where, time.time(), Screen())
    warn_of_problems(record)
    return 0


def _run_to_watch(path: Path, every_s: float, *, waits: bool) -> "tuple[Follower, str]":
    """The run to watch, and its name. With `waits`, wait for one that has not ended."""
    from lightning_forge_profiling.record.reader import Follower, RecordError  # noqa: PLC0415

    announced = False
    while True:
        try:
            folder, where = find_record(path)
            follower = Follower(folder)
            if not (waits and _ended(follower.look())):
                return follower, where
        except RecordError:
            if not waits:
                raise
        if not announced:
            say(f"waiting for a run in {path}")
            sys.stdout.flush()
        announced = True
        time.sleep(every_s)


def _ended(record: "RunRecord") -> bool:
    from lightning_forge_profiling.report.run_status import run_status  # noqa: PLC0415

    return run_status(record, time.time()).outcome in {"finished", "failed"}


def _redrawn(follower: "Follower", where: str, every_s: float) -> "RunRecord":
    """Redraw the terminal until the run ends."""
    record = follower.look()
    if not _ended(record):
        with live_screen(sys.stdout) as screen:
            while not _ended(record):
                screen.draw(_frame(record, where))
                screen.wait(every_s)
                record = follower.look()
    return record


def _appended(follower: "Follower", where: str, every_s: float) -> "RunRecord":
    """Print a frame whenever there are new lines, until the run ends; for a pipe or a file."""
    shown = None
    while not _ended(record := follower.look()):
        newest = [rank.lines[-1:] for rank in record.ranks]
        if newest != shown:
            sys.stdout.write(_frame(record, where) + "\n")
            sys.stdout.flush()
            shown = newest
        time.sleep(every_s)
    return record


def _frame(record: "RunRecord", where: str) -> str:
    """One frame, in the colours and characters that standard output supports."""
    from lightning_forge_profiling.report.live_view import print_frame  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    encoding = sys.stdout.encoding
    text = io.TextIOWrapper(buffer := io.BytesIO(), encoding=encoding, errors="replace", newline="")
    real = Screen(sys.stdout)
    print_frame(record, where, time.time(), Screen(text, wrap=sys.stdout.isatty(), colours=real.colours))
    text.flush()
    return buffer.getvalue().decode(encoding)


_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, lines cut instead of wrapped
_RESTORE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING: Final = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_SLICE_S: Final = 0.1  # longest time until a resized terminal is redrawn


class LiveScreen:
    """Shows one frame at a time on a terminal, whose attributes stay as they are; created by `live_screen`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size = shutil.get_terminal_size()

    def draw(self, text: str) -> None:
        """Replace the frame. Lines that do not fit are left out; the last line says how many."""
        self._size = shutil.get_terminal_size()
        lines = text.rstrip("\n").split("\n")
        room = max(self._size.lines, 2)
        if len(lines) > room:
            lines[room - 1 :] = [f"… {len(lines) - room + 1} more lines"]
        # in place, line by line: clearing the screen first would flicker
        self.write("\x1b[H" + "\n".join(f"\x1b[K{line}" for line in lines) + "\x1b[J")

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the terminal is resized."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and shutil.get_terminal_size() == self._size:
            time.sleep(min(left, _SLICE_S))

    def write(self, text: str) -> None:
        """Write text and terminal codes at once."""
        self._stream.write(text)
        self._stream.flush()

    def restore(self) -> None:
        """Switch back to the normal screen."""
        with suppress(OSError, ValueError):  # the terminal may be gone
            self.write(_RESTORE)


@contextmanager
def live_screen(stream: TextIO) -> Iterator[LiveScreen]:
    """Context in which frames are drawn on a terminal. Restores it at the end, on a signal, and while stopped."""
    screen = LiveScreen(stream)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(_: int, __: FrameType | None) -> None:  # Ctrl-Z: restore the screen for the shell
        screen.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.write(_ENTER)

    handlers = dict.fromkeys(_ENDING, end) | {"SIGTSTP": stop}
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        screen.write(_ENTER)
        yield screen
    finally:
        screen.restore()
        for number, handler in before.items():
            signal.signal(number, handler)
