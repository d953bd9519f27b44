"""`forge-profiling compare`: two sides of runs, traces or benchmark results, and a gate for CI."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.cli.shared import Progress, write_as_json
from lightning_forge_profiling.cli.sources import any_at, record_or_traces
from lightning_forge_profiling.comparison import compare as comparing
from lightning_forge_profiling.comparison.outcome import gates, github_benchmark, print_comparison
from lightning_forge_profiling.comparison.source import Source, record_source, trace_source
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.record.reader import rank_files, read_run, records_at
from lightning_forge_profiling.safe_files import open_regular, read_regular
from lightning_forge_profiling.schema import Conditions

_EXIT_CODES: dict[str, int] = {"slower": 1, "too noisy": 3, "too short": 3}
_MOST_RANKS = 64  # of more ranks, only the first is read: a run of 1,000 ranks needs some 150 MB
_START_BYTES = 4096
_MOST_BYTES = 64 << 20


def compare(args: argparse.Namespace) -> int:
    """Compare two sides."""
    paths = (args.paths[:1], args.paths[1:]) if args.against is None else (args.paths, args.against)
    if args.against is None and len(args.paths) != 2:  # noqa: PLR2004
        args.parser.error("two runs are needed: compare BEFORE AFTER, or compare BEFORE... --against AFTER...")
    with Progress() as progress:
        before, after = _sources(paths, progress)
        differs = comparing.differences(before, after)
        if differs and before[0].kind != "trace" and not args.anyway:
            raise ConfigurationError(f"not comparable: {'; '.join(differs)} (--anyway compares them)")
        comparison = comparing.compare(before, after, scatter_pct=args.scatter, limit_pct=args.fail_over)
    decided = gates(comparison, args.metric or (), args.fail_over)
    outcome = decided[0].outcome  # the worst
    if args.format == "json":
        write_as_json({"outcome": outcome, "gates": decided, "comparison": comparison})
    elif args.format == "github":
        write_as_json(github_benchmark(comparison))
    else:
        print_comparison(comparison, decided, verbose=args.verbose)
    return _EXIT_CODES.get(outcome, 0) if args.fail_over is not None else 0


def _sources(sides: Sequence[Sequence[Path]], progress: Progress) -> tuple[list[Source], list[Source]]:
    """Both sides, of the kind that all paths have: benchmark results, else records, else traces."""
    paths = [path for side in sides for path in side]
    benchmarks = list(filter(_is_benchmark, paths))
    records = [path for path in paths if path not in benchmarks and record_or_traces(str(path)) is not None]
    read = _read_benchmark if benchmarks else _read_record if len(records) == len(paths) else _read_trace
    if benchmarks and len(benchmarks) < len(paths):
        other = next(path for path in paths if path not in benchmarks)
        raise ConfigurationError(
            f"{benchmarks[0]} is a result of benchmark(), and {other} is not: compare two of a kind"
        )
    for path in records if read is _read_trace else ():
        if not (path.is_dir() and any_at(find_traces, path)):
            other = next(path for path in paths if path not in records)
            raise ConfigurationError(
                f"{path} has the record of a run, and {other} has none: compare two records, or two traces"
            )
    before, after = ([read(path, progress) for path in side] for side in sides)
    return before, after


def _is_benchmark(path: Path) -> bool:
    """Whether the file begins as `BenchmarkResult.to_json` does."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with open_regular(path) as file:
        start = file.read(_START_BYTES)
    return b'"name"' in start and b'"method"' in start


def _read_benchmark(path: Path, progress: Progress) -> Source:
    progress(f"reading {path}")
    try:
        result = BenchmarkResult.from_json(read_regular(path, _MOST_BYTES))
    except ValueError as exc:  # ConfigurationError among them
        raise ConfigurationError(f"{path}: {exc}") from exc
    estimate = result.estimate
    if estimate is None:
        raise ConfigurationError(f"{path}: a benchmark whose median is 0 cannot be compared")
    return Source(
        source=str(path),
        kind="benchmark",
        conditions=Conditions(device=result.device, world_size=1),
        steps=len(result.samples_us),
        metrics={"call": estimate},
        settings={"name": result.name, "method": result.method, "flush_l2": str(result.flush_l2)},
        notes=result.warnings,
    )


def _read_record(path: Path, progress: Progress) -> Source:
    progress(f"reading {path}")
    newest, *others = records_at(path)
    source = record_source(read_run(newest, first_only=len(rank_files(newest)) > _MOST_RANKS))
    notes = (f"the newest of {len(others) + 1} records in the folder",) if others else ()
    return replace(source, notes=(*notes, *source.notes))


def _read_trace(path: Path, progress: Progress) -> Source:
    # all kernels, so that one that dropped out of the top does not look removed
    return trace_source(analyze(path, top=sys.maxsize, progress=progress, with_run=False).analysis)
