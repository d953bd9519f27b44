"""`forge-profiling compare` on records of runs: finds them, compares them, prints the result."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.output import Progress, write_as_json
from lightning_forge_profiling.errors import ConfigurationError, TraceError

if TYPE_CHECKING:
    from lightning_forge_profiling.results.run_samples import RunSamples


def has_record(path: Path) -> bool:
    """Whether `path` is a record, its folder, or a folder above one."""
    from lightning_forge_profiling.record.reader import RecordError, records_at  # noqa: PLC0415

    try:
        return bool(records_at(path))
    except RecordError:
        return False


def has_trace(path: Path) -> bool:
    """Whether `path` is a folder with a trace in it."""
    from lightning_forge_profiling.kineto.files import find_traces  # noqa: PLC0415

    try:
        return path.is_dir() and bool(find_traces(path)[0])
    except TraceError:
        return False


def compare_records(
    before: Sequence[Path],
    after: Sequence[Path],
    *,
    fail_over: float | None,
    metrics: Sequence[str],
    scatter_pct: float,
    anyway: bool,
    as_json: bool,
) -> "str | None":
    """Compare two sides of runs and print the result."""
    from lightning_forge_profiling.diagnosis.gate import overall  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.diagnosis.run_comparison import compare_runs, differences  # noqa: PLC0415
    from lightning_forge_profiling.diagnosis.run_gate import run_gate  # noqa: PLC0415

    with Progress() as progress:
        sides = [[_samples(path, progress) for path in paths] for paths in (before, after)]
        differs = differences(*sides)
        if differs and not anyway:
            raise ConfigurationError(f"not comparable: {'; '.join(differs)} (--anyway compares them)")
        progress("resampling")
        comparison = compare_runs(*sides, scatter_pct=scatter_pct, limit_pct=fail_over)
    gates = [] if fail_over is None else [run_gate(comparison, metric, fail_over) for metric in metrics]
    outcome = overall(gates)
    if as_json:
        write_as_json({"outcome": outcome, "gates": gates, "comparison": comparison})
    else:
        from lightning_forge_profiling.report.run_comparison import print_run_comparison  # noqa: PLC0415

        print_run_comparison(comparison, gates)
    return outcome


def _samples(path: Path, progress: Progress) -> "RunSamples":
    from lightning_forge_profiling.record.reader import read_run, records_at  # noqa: PLC0415
    from lightning_forge_profiling.record.run_samples import run_samples  # noqa: PLC0415

    progress(f"reading {path}")
    newest, *others = records_at(path)
    samples = run_samples(read_run(newest, first_only=True))
    notes = (f"the newest of {len(others) + 1} records in the folder",) if others else ()
    return replace(samples, problems=(*notes, *samples.problems))
