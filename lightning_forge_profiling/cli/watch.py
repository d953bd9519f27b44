"""`forge-profiling watch`: a run live on the terminal, read from its record."""

import argparse
import io
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.arguments import seconds
from lightning_forge_profiling.cli.files import find_record, warn_of_problems
from lightning_forge_profiling.cli.output import say, wraps

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_forge_profiling.record.reader import Follower, RunRecord
    from lightning_forge_profiling.report.live_view import View
    from lightning_forge_profiling.report.screen import Screen

_EXAMPLES = """\
examples:
  forge-profiling watch lightning_logs/           quit with q
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
    from lightning_forge_profiling.cli.live_screen import live_screen  # noqa: PLC0415
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
