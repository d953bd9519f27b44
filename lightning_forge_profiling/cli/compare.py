"""`forge-profiling compare`."""

import argparse
import sys
from pathlib import Path

from lightning_forge_profiling.cli.arguments import percentage
from lightning_forge_profiling.cli.output import Progress, write_json

__all__ = ["METRICS", "add_to"]

METRICS = ("step", "busy", "idle", "matmul", "comm", "memory", "other")
"""Those of `analysis.compare`, named here too so that `--help` need not load it."""

_EXIT_CODES: dict[str | None, int] = {"slower": 1, "inconclusive": 3}

_EXAMPLES = """\
examples:
  forge-profiling compare before/ after/
  forge-profiling compare main.json.gz branch.json.gz --fail-over 5
  forge-profiling compare before/ after/ --fail-over 10 --metric comm --metric step

exit codes of the gate: 0 same or faster, 1 slower by more than the limit, 2 bad input, 3 inconclusive

It is inconclusive where the 95 % interval of the median's difference contains the limit, or with fewer than five
whole steps on a side. With steps that vary by 1 %, five steps a side show a difference of 2.2 %, eight of 1.8 %,
twenty of 1.1 %.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "compare",
        help="compare two runs, and fail if the second is slower",
        description="Compare two traces or folders of ranks: step, busy and idle time, kinds and kernels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, metavar="A", help="the trace or folder of before")
    parser.add_argument("after", type=Path, metavar="B", help="the trace or folder of now")
    parser.add_argument(
        "--fail-over",
        type=percentage,
        metavar="PCT",
        help="exit with 1 where a metric is worse by more than this, with 3 where the steps leave that open",
    )
    parser.add_argument(
        "--metric",
        action="append",
        choices=METRICS,
        help="what --fail-over is about, in milliseconds per step (default: step); may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON and nothing else")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.diagnosis.compare import compare  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.diagnosis.gate import gate, overall  # noqa: PLC0415
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415

    with Progress() as progress:
        # All kernels, so that one that left the top of the list does not look as if it were gone.
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
