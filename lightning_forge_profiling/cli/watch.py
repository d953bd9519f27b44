"""`forge-profiling watch` and `trace`: a run, live, by its record; has it record some steps."""

import argparse
import io
import os
import re
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

from lightning_forge_profiling.cli.shared import Progress, say, wraps
from lightning_forge_profiling.cli.sources import find_record, warn_of_problems
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import REPORT_HTML, trace_name
from lightning_forge_profiling.record.files import read_plan, withdraw_request, write_request
from lightning_forge_profiling.record.reader import Follower, RecordError, RunRecord, read_run
from lightning_forge_profiling.report.live_view import View, print_frame, print_summary
from lightning_forge_profiling.report.ranks import ranks_of
from lightning_forge_profiling.report.run_status import status_of
from lightning_forge_profiling.report.screen import Screen, Text, shown_width
from lightning_forge_profiling.schema import RunStatus, WindowPlan, WindowRequest

_ANSWER_S: Final = 10.0  # rank 0 looks once a second
_LOOK_S: Final = 0.2
_ENDED_S: Final = 30.0  # for the reports, after the end of the run


def watch(args: argparse.Namespace) -> int:
    """Show a run live."""
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


def _run_to_watch(path: Path, every_s: float, *, waits: bool) -> tuple[Follower, str]:
    """The run to watch, and its name. With `waits`, wait for one that has not ended."""
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


def _ended(record: RunRecord) -> bool:
    return status_of(record, time.time()).ended


def _redrawn(follower: Follower, where: str, every_s: float) -> RunRecord:
    """Redraw the terminal until the run ends, or the user quits."""
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


def _appended(follower: Follower, where: str, every_s: float) -> RunRecord:
    """Print a frame whenever there are new lines, or training comes to a standstill; for a pipe or a file."""
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


def _frame(record: RunRecord, where: str, view: View | None = None) -> str:
    """One frame, in the colours and characters that standard output supports."""
    return _printed(lambda screen: print_frame(record, where, time.time(), screen, view or View()))


def _styled(keys: str) -> str:
    return _printed(lambda screen: screen.line(Text(keys, "dim"))).rstrip("\n")


def _printed(print_on: Callable[[Screen], None]) -> str:
    """What is printed on a screen like standard output."""
    encoding = sys.stdout.encoding
    text = io.TextIOWrapper(buffer := io.BytesIO(), encoding=encoding, errors="replace", newline="")
    print_on(Screen(text, wrap=wraps(), colours=Screen(sys.stdout).colours))
    text.flush()
    return buffer.getvalue().decode(encoding)


def trace(args: argparse.Namespace) -> int:
    """Ask a run for a window."""
    folder, where = find_record(args.run_path)
    if _ended(read_run(folder)):
        raise ForgeProfilingError(f"{where}: the run has ended, and only a live one can record steps")
    request = WindowRequest(id=secrets.token_hex(8), steps=args.steps, ranks=args.ranks)
    with Progress() as progress:
        plan = _answer(folder, request, progress)
        if plan is None:
            raise ForgeProfilingError(
                f"{where} did not answer within {_ANSWER_S:.0f} s. It is {_status(folder).text}. If it still runs, it "
                "records no steps on demand: for that it needs ThroughputCallback, which writes the record, with "
                "window='on-demand' or beside ForgeProfilerCallback"
            )
        progress("the ranks agree on a step, which is not beside a validation, a checkpoint or an epoch's end")
        plan = _plan(folder, plan, {"planned"})
    _refuse(plan)
    if plan.state == "planned":
        raise ForgeProfilingError(f"{where} recorded nothing: {_status(folder).text}")
    who = f"ranks {', '.join(map(str, plan.ranks))} record" if plan.ranks else "all ranks record"
    who, last = f"rank {plan.ranks[0]} records" if len(plan.ranks) == 1 else who, plan.start + plan.steps - 1
    say(f"{who} {f'step {last}' if plan.steps == 1 else f'steps {plan.start} to {last}'}: {plan.folder}")
    if args.wait:
        with Progress() as progress:
            progress("waiting for the steps and their report")
            _wait(folder, plan)
    return 0


def _answer(folder: Path, request: WindowRequest, progress: Progress) -> WindowPlan | None:
    """The first answer to a request, which may wait for windows that others asked for; None if there is none."""
    is_left, until_s = False, time.monotonic() + _ANSWER_S
    try:
        while time.monotonic() < until_s:
            is_left = is_left or write_request(folder, request)
            plan = read_plan(folder)
            if plan is not None and plan.request == request.id:
                return plan
            if plan is not None and plan.state in {"planned", "agreed"} and _runs(folder):
                progress(f"another window comes first: steps {plan.start} to {plan.start + plan.steps - 1}")
                until_s = time.monotonic() + _ANSWER_S
            time.sleep(_LOOK_S)
    finally:
        withdraw_request(folder, request)
    return None


def _wait(folder: Path, agreed: WindowPlan) -> None:
    """Wait for the traces and the report, and say where they are."""
    plan = _plan(folder, agreed, {"planned", "agreed"})
    _refuse(plan)
    if plan.text:
        say(plan.text)
    traces = Path(plan.folder)
    wanted = traces / (REPORT_HTML if plan.analyzed else trace_name(min(plan.ranks, default=0)))
    ended_s = None
    while not wanted.is_file():
        if ended_s is None and not _runs(folder):
            ended_s = time.monotonic()
        if ended_s is not None and time.monotonic() > ended_s + _ENDED_S:
            raise ForgeProfilingError(f"the run is {_status(folder).text}, and there is no {wanted}")
        time.sleep(_LOOK_S)
    say(f"{'report' if plan.analyzed else 'trace'}: {wanted}")


def _plan(folder: Path, plan: WindowPlan, passing: Container[str]) -> WindowPlan:
    """The plan once it is past these states, or as it was last if the run ends or goes on to a later request."""
    while plan.state in passing and _runs(folder):
        time.sleep(_LOOK_S)
        now = read_plan(folder)
        if now is not None and now.request != plan.request:
            break
        plan = now or plan
    return plan


def _refuse(plan: WindowPlan) -> None:
    if plan.state == "refused":
        raise ForgeProfilingError(f"no steps are recorded: {plan.text}")


def _runs(folder: Path) -> bool:
    return _status(folder).outcome == "running"


def _status(folder: Path) -> RunStatus:
    return status_of(read_run(folder), time.time())


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
