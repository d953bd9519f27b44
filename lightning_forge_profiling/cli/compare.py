"""`forge-profiling compare`: differences between two runs, and a gate for CI."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_forge_profiling.cli.arguments import percentage
from lightning_forge_profiling.cli.compare_runs import compare_records, has_record, has_trace
from lightning_forge_profiling.cli.output import Progress, write_as_json
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS

METRICS = ("step", "busy", "idle", "matmul", "comm", "memory", "other")
"""The metrics of `diagnosis.compare`, repeated so that `--help` does not import it."""

RUN_METRICS = ("step", "median", "samples", "tokens", *REGIONS)
"""The metrics of `diagnosis.run_metrics`, repeated likewise."""

_AGAINST = "against"
SCATTER_PCT = 7.0
"""With it, under 5 % of simulated comparisons of equal runs are `slower` at 5 %, up to a scatter of 10 %."""

_EXIT_CODES: dict[str | None, int] = {"slower": 1, "inconclusive": 3}

_EXAMPLES = """\
examples:
  forge-profiling compare main/ branch/
  forge-profiling compare main/ branch/ --fail-over 5
  forge-profiling compare a1 a2 a3 --against b1 b2 b3 --fail-over 5 --metric median
  forge-profiling compare main.json.gz branch.json.gz --fail-over 10 --metric comm --metric step

exit codes of --fail-over: 0 same or faster, 1 slower by more than the limit, 2 bad input, 3 inconclusive

Runs are compared by all of their counted steps, read from the records that ThroughputCallback writes (the newest in a
folder). With one run a side, the interval allows for differences between processes (--scatter); repeats measure them.

Traces are compared by their recorded steps: inconclusive if the 95 % interval of the difference of medians contains
the limit, or with fewer than five whole steps on a side. With step times that vary by 1 %, five steps a side detect a
difference of 2.2 %, eight 1.8 %, twenty 1.1 %.
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        help="compare two runs, and fail if the second is slower",
        description="Compare two runs by their records, or two traces: step, regions, wall time, findings; "
        "of traces busy and idle time, kinds and kernels.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="the baseline A and the run B to compare with it: records, traces, or folders; "
        "with --against, the repeats of the baseline",
    )
    parser.add_argument(
        "--against", nargs="+", type=Path, metavar="RUN", help="the repeats to compare with the baseline"
    )
    parser.add_argument(
        "--fail-over",
        type=percentage,
        metavar="PCT",
        help="exit with 1 if a metric is worse by more than PCT percent, with 3 if that is inconclusive",
    )
    parser.add_argument(
        "--metric",
        action="append",
        choices=tuple(dict.fromkeys((*RUN_METRICS, *METRICS))),
        help=f"metric of --fail-over (default: step); may be repeated. Of runs: {', '.join(RUN_METRICS)}; "
        f"of traces: {', '.join(METRICS)}",
    )
    parser.add_argument(
        "--scatter",
        type=percentage,
        default=SCATTER_PCT,
        metavar="PCT",
        help="scatter between processes of equal runs to assume with one run a side, "
        f"as a standard deviation in percent (default: {SCATTER_PCT:g})",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="compare runs of different hardware, batch size, precision or world size",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON and nothing else")
    parser.set_defaults(run=_run, usage_error=parser.error)


def _run(args: argparse.Namespace) -> int:
    before, after = _sides(args)
    metrics = tuple(dict.fromkeys(args.metric or ["step"]))
    if _of_runs((*before, *after)):
        _refuse_metrics(metrics, RUN_METRICS, "records of runs")
        outcome = compare_records(
            before,
            after,
            fail_over=args.fail_over,
            metrics=metrics,
            scatter_pct=args.scatter,
            anyway=args.anyway,
            as_json=args.json,
        )
    else:
        if len(before) > 1 or len(after) > 1:
            raise ConfigurationError(
                "traces cannot have repeats: compare one trace with one, or runs with a record each"
            )
        _refuse_metrics(metrics, METRICS, "traces")
        outcome = _compare_traces(before[0], after[0], args.fail_over, metrics, as_json=args.json)
    return _EXIT_CODES.get(outcome, 0)


def _of_runs(paths: Sequence[Path]) -> bool:
    """Whether to compare records: all paths have one. False if none has, or if those that have one also have traces."""
    having = [path for path in paths if has_record(path)]
    without = [path for path in paths if path not in having]
    missing = next((path for path in without if not path.exists()), None)
    if having and missing is not None:
        raise ConfigurationError(f"{missing}: no such file or folder")
    if having and without:
        bare = next((path for path in having if not has_trace(path)), None)
        if bare is not None:
            raise ConfigurationError(
                f"{bare} has the record of a run, and {without[0]} has none: compare two records, or two traces"
            )
    return not without


def _sides(args: argparse.Namespace) -> tuple[Sequence[Path], Sequence[Path]]:
    """The two sides: of `A B`, of `A... --against B...`, or of `A... against B...`."""
    paths: list[Path] = args.paths
    if args.against is not None:
        return paths, args.against
    if Path(_AGAINST) in paths:
        middle = paths.index(Path(_AGAINST))
        if 0 < middle < len(paths) - 1:
            return paths[:middle], paths[middle + 1 :]
    if len(paths) != 2:  # noqa: PLR2004
        args.usage_error(f"two runs, or repeats on both sides of {_AGAINST!r}: got {len(paths)} without it")
    return paths[:1], paths[1:]


def _refuse_metrics(asked: Sequence[str], known: Sequence[str], of: str) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ConfigurationError(f"--metric {unknown[0]} is not one of {of}, which have {', '.join(known)}")


def _compare_traces(
    before: Path, after: Path, limit: float | None, metrics: Sequence[str], *, as_json: bool
) -> str | None:
    from lightning_forge_profiling.diagnosis.compare import compare  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.diagnosis.gate import gate, overall  # noqa: PLC0415
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415

    with Progress() as progress:
        # all kernels, so that one that dropped out of the top does not look removed
        first, second = (analyze(path, top=sys.maxsize, progress=progress).analysis for path in (before, after))
        comparison = compare(first, second)
    gates = [] if limit is None else [gate(comparison, metric, limit) for metric in metrics]
    outcome = overall(gates)
    if as_json:
        write_as_json({"outcome": outcome, "gates": gates, "comparison": comparison})
    else:
        from lightning_forge_profiling.report.comparison import print_comparison  # noqa: PLC0415

        print_comparison(comparison, gates)
    return outcome
