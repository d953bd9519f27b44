"""`forge-profiling compare`: differences between two sides of runs, and a gate for CI."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.shared import Progress, percentage, write_as_json
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.safe_files import open_regular, read_regular

if TYPE_CHECKING:
    from lightning_forge_profiling.comparison.source import Source

_AGAINST = "against"
_EXIT_CODES: dict[str | None, int] = {"slower": 1, "too noisy": 3, "too short": 3}
_MOST_RANKS = 64  # of more ranks, only the first is read: a run of 1,000 ranks needs some 150 MB
_START_BYTES = 4096
_MOST_BYTES = 64 << 20

_METRICS = """\
metrics of runs (default: step): step, median, p95, samples, tokens, a region (data, transfer, forward, backward,
optimizer, other), last_fifth, validation, checkpoint, startup, goodput, rank1, rank2, ...
metrics of traces (default: step): step, busy, idle, matmul, comm, memory, other
metric of results of benchmark(): call"""

_EXAMPLES = f"""\
examples:
  forge-profiling compare main/ branch/
  forge-profiling compare main/ branch/ --fail-over 5
  forge-profiling compare a1 a2 a3 --against b1 b2 b3 --fail-over 5 --metric median
  forge-profiling compare main.json.gz branch.json.gz --fail-over 10 --metric comm --metric step
  forge-profiling compare main/ branch/ --format github > benchmark.json

exit codes of --fail-over: 0 same or faster, 1 slower by more than the limit, 2 bad input, 3 too noisy or too short to
decide (1 with --fail-undecided)

{_METRICS}

Runs are compared by all of their counted steps, read from the records that ThroughputCallback writes (the newest in a
folder). With one run a side, the scatter between equal runs is assumed (--scatter); repeats measure it, best in turns.
Traces are compared by the medians of their whole steps, of which each side needs five.
"""


def _metric(name: str) -> str:
    if re.search(rf"\b{re.escape(name)}\b", _METRICS) is None and re.fullmatch(r"rank\d+", name) is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not a metric; {_METRICS}")
    return name


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        help="compare two runs, and fail if the second is slower",
        description="Compare runs by their records, traces, or results of benchmark(): which is faster, and where.",
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
        help="exit with 1 if a metric is worse by more than PCT percent, with 3 if that is undecided",
    )
    parser.add_argument("--fail-undecided", action="store_true", help="exit with 1 instead of 3 if that is undecided")
    parser.add_argument(
        "--metric",
        action="append",
        type=_metric,
        metavar="NAME",
        help="metric of --fail-over; may be repeated; see below",
    )
    parser.add_argument(
        "--scatter",
        type=percentage,
        metavar="PCT",
        help="scatter between equal runs to assume where repeats do not measure it, as a standard deviation in percent "
        "(default: 4 if one run followed the other, else 6; 0 for traces)",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="compare runs of different hardware, batch size, precision or world size",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="text, the comparison as JSON, or the second side's times as github-action-benchmark reads them "
        "(customSmallerIsBetter)",
    )
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from lightning_forge_profiling.comparison.compare import compare, differences  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.comparison.outcome import (  # noqa: PLC0415
        gate,
        github_benchmark,
        overall,
        print_comparison,
    )

    paths = _sides(args)
    if args.fail_undecided and args.fail_over is None:
        args.parser.error("--fail-undecided takes --fail-over PCT")
    with Progress() as progress:
        before, after = _sources(paths, progress)
        differs = differences(before, after)
        if differs and before[0].kind != "trace" and not args.anyway:
            raise ConfigurationError(f"not comparable: {'; '.join(differs)} (--anyway compares them)")
        comparison = compare(before, after, scatter_pct=args.scatter, limit_pct=args.fail_over)
    asked = args.metric or ["call" if comparison.kind == "benchmark" else "step"]
    gates = [gate(comparison, metric, args.fail_over) for metric in dict.fromkeys(asked)]
    outcome = overall(gates)
    if args.format == "json":
        write_as_json({"outcome": outcome, "gates": gates, "comparison": comparison})
    elif args.format == "github":
        write_as_json(github_benchmark(comparison))
    else:
        print_comparison(comparison, gates)
    code = _EXIT_CODES.get(outcome, 0) if args.fail_over is not None else 0
    return min(code, 1) if args.fail_undecided else code


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
        args.parser.error("two runs are needed: compare BEFORE AFTER, or compare BEFORE... --against AFTER...")
    return paths[:1], paths[1:]


def _sources(sides: Sequence[Sequence[Path]], progress: Progress) -> "tuple[list[Source], list[Source]]":
    """Both sides, of the kind that all paths have: benchmark results, else records, else traces."""
    paths = [path for side in sides for path in side]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing}: no such file or folder")
    read = _read_trace
    if all(map(_is_benchmark, paths)):
        read = _read_benchmark
    elif all(map(_has_record, paths)):
        read = _read_record
    else:
        _refuse_two_kinds(paths)
    before, after = ([read(path, progress) for path in side] for side in sides)
    return before, after


def _refuse_two_kinds(paths: Sequence[Path]) -> None:
    """Raise if a path has nothing, or only a record or a benchmark result, and another has not."""
    for path in paths:
        if path.is_dir() and not _has_record(path) and not _has_trace(path):
            raise ConfigurationError(f"no record of a run and no trace in {path}")
        if _is_benchmark(path):
            other = next(other for other in paths if not _is_benchmark(other))
            raise ConfigurationError(f"{path} is a result of benchmark(), and {other} is not: compare two of a kind")
        if _has_record(path) and not _has_trace(path):
            other = next(other for other in paths if not _has_record(other))
            raise ConfigurationError(
                f"{path} has the record of a run, and {other} has none: compare two records, or two traces"
            )


def _has_record(path: Path) -> bool:
    """Whether `path` is a record, its folder, or a folder above one."""
    from lightning_forge_profiling.record.reader import RecordError, records_at  # noqa: PLC0415

    try:
        return bool(records_at(path))
    except RecordError:
        return False


def _has_trace(path: Path) -> bool:
    """Whether `path` is a folder with a trace in it."""
    from lightning_forge_profiling.kineto.files import find_traces  # noqa: PLC0415

    try:
        return path.is_dir() and bool(find_traces(path)[0])
    except TraceError:
        return False


def _is_benchmark(path: Path) -> bool:
    """Whether the file begins as `BenchmarkResult.to_json` does."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with open_regular(path) as file:
        start = file.read(_START_BYTES)
    return b'"name"' in start and b'"method"' in start


def _read_benchmark(path: Path, progress: Progress) -> "Source":
    from lightning_forge_profiling.bench.result import BenchmarkResult  # noqa: PLC0415
    from lightning_forge_profiling.comparison.source import benchmark_source  # noqa: PLC0415

    progress(f"reading {path}")
    try:
        return benchmark_source(str(path), BenchmarkResult.from_json(read_regular(path, _MOST_BYTES).decode()))
    except ValueError as exc:  # ConfigurationError among them
        raise ConfigurationError(f"{path}: {exc}") from exc


def _read_record(path: Path, progress: Progress) -> "Source":
    from lightning_forge_profiling.comparison.source import record_source  # noqa: PLC0415
    from lightning_forge_profiling.record.reader import rank_files, read_run, records_at  # noqa: PLC0415

    progress(f"reading {path}")
    newest, *others = records_at(path)
    source = record_source(read_run(newest, first_only=len(rank_files(newest)) > _MOST_RANKS))
    notes = (f"the newest of {len(others) + 1} records in the folder",) if others else ()
    return replace(source, notes=(*notes, *source.notes))


def _read_trace(path: Path, progress: Progress) -> "Source":
    from lightning_forge_profiling.comparison.source import trace_source  # noqa: PLC0415
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415

    # all kernels, so that one that dropped out of the top does not look removed
    return trace_source(analyze(path, top=sys.maxsize, progress=progress, with_run=False).analysis)
