"""`forge-profiling summary`: the table of a run that is running, has ended or was killed."""

import argparse
import time
from pathlib import Path

from lightning_forge_profiling.cli.files import find_record, warn_of_problems
from lightning_forge_profiling.cli.output import wraps, write_as_json

_EXAMPLES = """\
examples:
  forge-profiling summary lightning_logs/
  forge-profiling summary lightning_logs/version_3 --json | jq '.metrics["time/step_ms"]'
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "summary",
        help="print the table of a run that is running, has ended or was killed",
        description="Print the status of a run and its table, from the record that it writes during training.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="a record, its folder, or any folder above it")
    parser.add_argument("--json", action="store_true", help="print only JSON, with the same content")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
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
