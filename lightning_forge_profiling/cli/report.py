"""`forge-profiling report`: a whole run as one web page."""

import argparse
import time
from pathlib import Path

from lightning_forge_profiling.cli.files import find_record, refuse_bad_outputs, warn_of_problems, write_output
from lightning_forge_profiling.cli.output import say

_EXAMPLES = """\
examples:
  forge-profiling report lightning_logs/ --html run.html
  forge-profiling report lightning_logs/version_3/forge_record --html run.html
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="write a whole run as one web page",
        description="Write a run as one web page that works offline: verdict, split of the step and of the run, step "
        "time, rates and GPU over time, events, ranks, and the recorded window if there is one.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument("--html", type=Path, metavar="FILE", required=True, help="the file to write")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.record.reader import read_run  # noqa: PLC0415
    from lightning_forge_profiling.report.run_page import run_page  # noqa: PLC0415

    folder, where = find_record(args.run_path)
    record = read_run(folder)
    refuse_bad_outputs({"--html": args.html}, [(str(args.run_path), rank.path) for rank in record.ranks])
    page = run_page(record, time.time())
    write_output(args.html, page.encode(errors="replace"))
    say(f"{args.html}: {where}")
    warn_of_problems(record)
    return 0
