"""`forge-profiling watch`: a run live on the terminal, read from its record."""

import argparse
import io
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.arguments import seconds
from lightning_forge_profiling.cli.output import say

if TYPE_CHECKING:
    from lightning_forge_profiling.record.follow import Follower
    from lightning_forge_profiling.record.reader import RunRecord

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
    from lightning_forge_profiling.cli.records import warn_of_problems  # noqa: PLC0415  (loads msgspec)

    follower, where = _found(args.run_path, args.every, waits=args.wait)
    if args.once:
        record = follower.look()
        sys.stdout.write(_frame(record, where))
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        record = _live(follower, where, args.every)
    else:
        record = _appended(follower, where, args.every)
    warn_of_problems(record)
    return 0


def _found(path: Path, every_s: float, *, waits: bool) -> "tuple[Follower, str]":
    """The run to watch, and its name. With `waits`, wait for one that has not ended."""
    from lightning_forge_profiling.cli.records import find_record  # noqa: PLC0415
    from lightning_forge_profiling.record.follow import Follower  # noqa: PLC0415
    from lightning_forge_profiling.record.reader import RecordError  # noqa: PLC0415

    said = False
    while True:
        try:
            folder, where = find_record(path)
            follower = Follower(folder)
            if not (waits and _ended(follower.look())):
                return follower, where
        except RecordError:
            if not waits:
                raise
        if not said:
            say(f"waiting for a run in {path}")
            sys.stdout.flush()
        said = True
        time.sleep(every_s)


def _ended(record: "RunRecord") -> bool:
    from lightning_forge_profiling.monitor.standing import run_standing  # noqa: PLC0415

    return run_standing(record, time.time()).outcome in {"finished", "failed"}


def _live(follower: "Follower", where: str, every_s: float) -> "RunRecord":
    """Redraw the terminal until the run ends; then print its table."""
    from lightning_forge_profiling.cli.live_screen import live_screen  # noqa: PLC0415  (signals)
    from lightning_forge_profiling.monitor.run_summary import print_summary  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    record = follower.look()
    if not _ended(record):
        with live_screen(sys.stdout) as screen:
            while not _ended(record):
                screen.draw(_frame(record, where))
                screen.wait(every_s)
                record = follower.look()
    print_summary(record, where, time.time(), Screen())
    return record


def _appended(follower: "Follower", where: str, every_s: float) -> "RunRecord":
    """Print a frame whenever there are new lines, until the run ends; for a pipe or a file."""
    from lightning_forge_profiling.monitor.run_summary import print_summary  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    shown = None
    while not _ended(record := follower.look()):
        newest = [rank.lines[-1:] for rank in record.ranks]
        if newest != shown:
            sys.stdout.write(_frame(record, where) + "\n")
            sys.stdout.flush()
            shown = newest
        time.sleep(every_s)
    print_summary(record, where, time.time(), Screen())
    return record


def _frame(record: "RunRecord", where: str) -> str:
    """One frame, in the colours and characters that standard output supports."""
    from lightning_forge_profiling.monitor.live_view import print_frame  # noqa: PLC0415
    from lightning_forge_profiling.report.screen import Screen  # noqa: PLC0415

    encoding = sys.stdout.encoding
    text = io.TextIOWrapper(buffer := io.BytesIO(), encoding=encoding, errors="replace", newline="")
    real = Screen(sys.stdout)
    print_frame(record, where, time.time(), Screen(text, wrap=sys.stdout.isatty(), colours=real.colours))
    text.flush()
    return buffer.getvalue().decode(encoding)
