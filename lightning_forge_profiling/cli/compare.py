"""`forge-profiling compare`: differences between two runs, and a gate for CI."""

import argparse
import sys
from pathlib import Path

from lightning_forge_profiling.cli.arguments import percentage
from lightning_forge_profiling.cli.output import Progress, write_json

__all__ = ["METRICS", "add_to"]

METRICS = ("step", "busy", "idle", "matmul", "comm", "memory", "other")
"""The metrics of `diagnosis.compare`, repeated so that `--help` does not import it."""

_EXIT_CODES: dict[str | None, int] = {"slower": 1, "inconclusive": 3}

_EXAMPLES = """\
examples:
  forge-profiling compare before/ after/
  forge-profiling compare main.json.gz branch.json.gz --fail-over 5
  forge-profiling compare before/ after/ --fail-over 10 --metric comm --metric step

exit codes of --fail-over: 0 same or faster, 1 slower by more than the limit, 2 bad input, 3 inconclusive

The outcome is inconclusive if the 95 % interval of the difference of medians contains the limit, or with fewer than
five whole steps on a side. With step times that vary by 1 %, five steps a side detect a difference of 2.2 %, eight
1.8 %, twenty 1.1 %.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        help="compare two runs, and fail if the second is slower",
        description="Compare two traces or folders of ranks: step, busy and idle time, kinds and kernels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, metavar="A", help="the baseline: a trace or a folder")
    parser.add_argument("after", type=Path, metavar="B", help="the trace or folder to compare with it")
    parser.add_argument(
        "--fail-over",
        type=percentage,
        metavar="PCT",
        help="exit with 1 if a metric is worse by more than PCT percent, with 3 if that is inconclusive",
    )
    parser.add_argument(
        "--metric",
        action="append",
        choices=METRICS,
        help="metric of --fail-over, in milliseconds per step (default: step); may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON and nothing else")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.diagnosis.compare import compare  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.diagnosis.gate import gate, overall  # noqa: PLC0415
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415

    with Progress() as progress:
        # all kernels, so that one that dropped out of the top does not look removed
        before, after = (
            analyze(path, top=sys.maxsize, progress=progress).analysis for path in (args.before, args.after)
        )
        comparison = compare(before, after)
    limit = args.fail_over
    metrics = dict.fromkeys(args.metric or ["step"])
    gates = [] if limit is None else [gate(comparison, metric, limit) for metric in metrics]
    outcome = overall(gates)
    if args.json:
        import msgspec  # noqa: PLC0415

        content = {"outcome": outcome, "gates": gates, "comparison": comparison}
        write_json(msgspec.json.format(msgspec.json.encode(content), indent=2))
    else:
        from lightning_forge_profiling.report.comparison import print_comparison  # noqa: PLC0415

        print_comparison(comparison, gates)
    return _EXIT_CODES.get(outcome, 0)
