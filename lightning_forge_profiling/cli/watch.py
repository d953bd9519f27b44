"""`forge-profiling watch` and `summary`: a run, live on the terminal or so far, read from its record."""

import argparse
import io
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

from lightning_forge_profiling.cli.shared import find_record, say, seconds, warn_of_problems, wraps, write_as_json
from lightning_forge_profiling.report.screen import shown_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_forge_profiling.record.reader import Follower, RunRecord
    from lightning_forge_profiling.report.live_view import View
    from lightning_forge_profiling.report.screen import Screen

_WATCH_EXAMPLES = """\
examples:
  forge-profiling watch lightning_logs/           quit with q
  forge-profiling watch lightning_logs/ --wait    start before the training
  forge-profiling watch lightning_logs/version_3 --once
"""


def add_watch_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "watch",
        help="show a run live, from another terminal or node",
        description="Show a run live, from the record that it writes during training: step time, regions, rates, GPU, "
        "causes of lost time, ranks, events. Exits when the run ends, and prints its table.",
        epilog=_WATCH_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--every", type=seconds, metavar="S", default=1.0, help="seconds between frames (default: 1)")
    parser.add_argument("--wait", action="store_true", help="wait until there is a run that has not ended")
    parser.set_defaults(run=_watch)


def _watch(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.report.live_view import print_summary  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    follower, where = _run_to_watch(args.run_path, args.every, waits=args.wait)
    if args.once:
        record = follower.look()
        sys.stdout.write(_frame(record, where))
    else:
        redraws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        record = (_redrawn if redraws else _appended)(follower, where, args.every)
        if _ended(record):
            print_summary(record, where, time.time(), Screen(wrap=wraps()))
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
    """Redraw the terminal until the run ends, or the user quits."""
    from lightning_forge_profiling.report.live_view import View  # noqa: PLC0415

    record, view = follower.look(), View()
    if not _ended(record):
        with live_screen(sys.stdout, sys.stdin) as screen:
            while not _ended(record):
                screen.draw(_frame(record, where, view), _styled(view.keys(record)) if screen.has_keys else "")
                keys = screen.wait(every_s)
                if "q" in keys:
                    break
                for key in keys:
                    view = view.after(key, record, time.time())
                record = follower.look()
    return record


def _appended(follower: "Follower", where: str, every_s: float) -> "RunRecord":
    """Print a frame whenever there are new lines, or training comes to a standstill; for a pipe or a file."""
    from lightning_forge_profiling.report.ranks import ranks_of  # noqa: PLC0415

    shown = None
    while not _ended(record := follower.look()):
        ranks = ranks_of(record, time.time())
        newest = ranks.hang is not None, bool(ranks.where), [rank.lines[-1:] for rank in record.ranks]
        if newest != shown:
            sys.stdout.write(_frame(record, where) + "\n")
            sys.stdout.flush()
            shown = newest
        time.sleep(every_s)
    return record


def _frame(record: "RunRecord", where: str, view: "View | None" = None) -> str:
    """One frame, in the colours and characters that standard output supports."""
    from lightning_forge_profiling.report.live_view import View, print_frame  # noqa: PLC0415

    return _printed(lambda screen: print_frame(record, where, time.time(), screen, view or View()))


def _styled(keys: str) -> str:
    from lightning_forge_profiling.report.blocks import Text  # noqa: PLC0415

    return _printed(lambda screen: screen.line(Text(keys, "dim"))).rstrip("\n")


def _printed(print_on: "Callable[[Screen], None]") -> str:
    """What is printed on a screen like standard output."""
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    encoding = sys.stdout.encoding
    text = io.TextIOWrapper(buffer := io.BytesIO(), encoding=encoding, errors="replace", newline="")
    print_on(Screen(text, wrap=wraps(), colours=Screen(sys.stdout).colours))
    text.flush()
    return buffer.getvalue().decode(encoding)


_SUMMARY_EXAMPLES = """\
examples:
  forge-profiling summary lightning_logs/
  forge-profiling summary lightning_logs/version_3 --json | jq '.metrics["time/step_ms"]'
"""


def add_summary_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "summary",
        help="print the table of a run that is running, has ended or was killed",
        description="Print the status of a run and its table, from the record that it writes during training.",
        epilog=_SUMMARY_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument("--json", action="store_true", help="print only JSON, with the same content")
    parser.set_defaults(run=_summary)


def _summary(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.record.reader import read_run  # noqa: PLC0415
    from lightning_forge_profiling.report.live_view import print_summary, run_summary  # noqa: PLC0415

    folder, where = find_record(args.run_path)
    record = read_run(folder)
    if args.json:
        write_as_json(run_summary(record, time.time()))
    else:
        from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

        print_summary(record, where, time.time(), Screen(wrap=wraps()))
    warn_of_problems(record)
    return 0


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
