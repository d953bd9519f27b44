"""`forge-profiling compare` and `what-if`: two sides of runs and a gate for CI; a step predicted with changes."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_forge_profiling.analysis import fixes
from lightning_forge_profiling.analysis.fixes import Change
from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.cli.shared import Progress, any_at, say, warn, write_as_json
from lightning_forge_profiling.comparison import compare as comparing
from lightning_forge_profiling.comparison.outcome import gates, github_benchmark, print_comparison
from lightning_forge_profiling.comparison.source import Source, record_source, trace_source
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.kineto.files import find_traces
from lightning_forge_profiling.names import SUMMARY_JSON
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.record.reader import rank_files, read_run, records_at
from lightning_forge_profiling.safe_files import open_regular, read_regular
from lightning_forge_profiling.schema import Conditions
from lightning_forge_profiling.what_if import Prediction, predict

_AGAINST = "against"
_EXIT_CODES: dict[str, int] = {"slower": 1, "too noisy": 3, "too short": 3}
_MOST_RANKS = 64  # of more ranks, only the first is read: a run of 1,000 ranks needs some 150 MB
_START_BYTES = 4096
_MOST_BYTES = 64 << 20


def compare(args: argparse.Namespace) -> int:
    """Compare two sides."""
    paths = _sides(args)
    if args.fail_undecided and args.fail_over is None:
        args.parser.error("--fail-undecided takes --fail-over PCT")
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


def _sources(sides: Sequence[Sequence[Path]], progress: Progress) -> tuple[list[Source], list[Source]]:
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
    return bool(any_at(records_at, path))


def _has_trace(path: Path) -> bool:
    """Whether `path` is a folder with a trace in it."""
    return path.is_dir() and bool(any_at(find_traces, path))


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
        result = BenchmarkResult.from_json(read_regular(path, _MOST_BYTES).decode())
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


_SCALED = 0.99  # of the recorded step


def what_if(args: argparse.Namespace) -> int:
    """Play the steps again."""
    changes = dict(_changes(args))
    if args.equal_ranks:
        changes["equal ranks"] = lambda steps: steps
    if not changes:
        raise ConfigurationError(
            "nothing is changed: name what, such as --without syncs, --graphs forward,backward or --scale matmul=0.5"
        )
    with Progress() as progress:
        progress(f"playing {args.path}")
        live_ms = _live_ms(args.path) if args.live_ms is None else args.live_ms
        found = predict(
            args.path, list(changes.values()), equal_ranks=args.equal_ranks, rank=args.rank, live_ms=live_ms
        )
    if args.json:
        write_as_json(_as_json(found, list(changes)))
    else:
        for line in _lines(found, list(changes)):
            say(line)
    return 0


def _live_ms(path: Path) -> float | None:
    """The mean step of the run, if its measurements lie beside the traces."""
    summary = find_traces(path)[0][0].parent / SUMMARY_JSON
    try:
        run = read_summary(summary).run if summary.is_file() else None
    except (OSError, ValueError) as exc:  # written by another program, or by another version of this one
        warn(f"{summary} cannot be read, so the steps are played as recorded: {exc}")
        return None
    return None if run is None else run.timing.step_ms.mean


def _changes(args: argparse.Namespace) -> Iterator[tuple[str, Change]]:
    kinds = {
        "syncs": fixes.without_syncs,
        "reads": fixes.without_reads,
        "allocations": fixes.without_allocations,
        "data": fixes.without_region("data"),
        "pageable": fixes.from_pinned_memory,
    }
    words = {"data": "waits for data", "pageable": "pageable memory"}
    for name in args.drop:
        yield f"without {name}", fixes.without_operators(name)
    for name in args.without:
        yield f"without {words.get(name, name)}", kinds[name]
    if args.graphs:
        yield f"{', '.join(args.graphs)} as CUDA graphs", fixes.as_graphs(*args.graphs)
    for kind, factor in args.scale:
        if [each for each, _ in args.scale].count(kind) > 1:
            raise ConfigurationError(f"--scale {kind} is given twice")
        yield f"{kind} x {factor:g}", fixes.scaled([kind], factor)
    if args.bf16:
        yield "in bf16", fixes.in_bf16
    if args.fuse:
        yield "kernels fused", fixes.fused
    if args.overlap_comm:
        yield "communication overlapped", fixes.overlapped


_FIGURES = (
    *("steps", "ranks", "recorded_ms", "replayed_ms", "live_ms", "hosts", "before_ms", "error_pct", "after_ms"),
    *("low_ms", "high_ms"),
)


def _as_json(found: Prediction, changes: list[str]) -> dict[str, object]:
    return {
        "changes": changes,
        **{name: getattr(found, name) for name in _FIGURES},
        "verdict": None if found.analysis is None else found.analysis.verdict,
        "verdict_text": _verdict(found),
        "notes": found.notes,
        "source": found.source,
        "recorded_steps": found.numbers,
    }


def _verdict(found: Prediction) -> str:
    """What would bound the step then, without advice: it may be what has just been done."""
    if found.analysis is None:
        return "not known: what communication hides behind once nothing waits for it is not in the trace"
    first = next((one for one in found.analysis.findings if one.code == found.analysis.verdict), None)
    return found.analysis.verdict_text if first is None else f"{first.code}: {first.title}"


def _live(found: Prediction) -> str:
    """How the steps are played that recording slowed."""
    if len(found.hosts) > 1:
        return (
            "the GPU sets the pace, which hides how fast the host is without recording: played with "
            f"{max(found.hosts):g} to {min(found.hosts):g} of its recorded time"
        )
    if found.live_ms is None:
        return "unknown, so the host is played as recorded, which slows it: give --live-ms"
    live = f"{found.live_ms:.2f} ms a step without recording"
    if found.before_ms < _SCALED * found.replayed_ms:
        return f"{live}: the host is played as much faster"
    if found.live_ms >= _SCALED * found.replayed_ms:
        return f"{live}, no less than recorded: played as recorded"
    return f"{live}, which a faster host does not explain: played as recorded"


def _lines(found: Prediction, changes: list[str]) -> Iterator[str]:
    saved_ms = found.before_ms - found.after_ms
    ranks = "" if found.ranks == 1 else f" on each of {found.ranks} ranks"
    numbers = f"step {found.numbers[0]}" if found.steps == 1 else f"steps {found.numbers[0]} to {found.numbers[-1]}"
    yield f"trace      {found.source}, {numbers}"
    replayed = f"played again unchanged {found.replayed_ms:.2f} ms"
    yield f"recorded   {found.recorded_ms:.2f} ms a step, mean of {found.steps}{ranks}; {replayed}"
    yield f"live       {_live(found)}"
    yield f"changed    {'; '.join(changes)}"
    for note in found.notes:
        yield f"note       {note}"
    why = "by the scatter of the steps and by the host" if len(found.hosts) > 1 else "by the scatter of the steps"
    scatter = f" ({found.low_ms:.2f} to {found.high_ms:.2f} {why})" if found.steps > 1 else ""
    yield (
        f"then       {found.after_ms:.2f} ms{scatter} instead of {found.before_ms:.2f}, {abs(saved_ms):.2f} ms "
        f"{'less' if saved_ms >= 0 else 'more'} ({abs(100 * saved_ms / found.before_ms):.0f} %)"
    )
    yield f"and then   {_verdict(found)}"
