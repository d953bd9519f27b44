"""`forge-profiling compare` on records of runs: which they are, the comparison, its output and exit code."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.output import Progress, write_json
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import RECORD_FOLDER, record_name, record_rank

if TYPE_CHECKING:
    from lightning_forge_profiling.results.run_samples import RunSamples

__all__ = ["compare_records", "has_record"]


def has_record(path: Path) -> bool:
    """Whether `path` is a record, its folder, or a folder above one."""
    if not path.is_dir():
        return record_rank(path.name) is not None
    if (path / record_name(0)).exists():
        return True
    return any(found.parent.name.startswith(RECORD_FOLDER) for found in path.rglob(record_name(0)))


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
    """Compare and print.

    Args:
        before: the runs of one side.
        after: those of the other.
        fail_over: the limit in percent; None for none.
        metrics: what the limit is on.
        scatter_pct: the scatter between processes to allow for with one run a side.
        anyway: whether to compare runs of different hardware, batch size, precision or world size.
        as_json: whether to print JSON.

    Returns:
        The outcome; None without a limit.
    """
    from lightning_forge_profiling.diagnosis.gate import overall  # noqa: PLC0415  (loads NumPy)
    from lightning_forge_profiling.diagnosis.run_comparison import compare_runs, differences  # noqa: PLC0415
    from lightning_forge_profiling.diagnosis.run_gate import run_gate  # noqa: PLC0415

    with Progress() as progress:
        sides = [[_samples(path, progress) for path in paths] for paths in (before, after)]
        differs = differences(*sides)
        if differs and not anyway:
            raise ConfigurationError(f"not comparable: {'; '.join(differs)} (--anyway compares them all the same)")
        progress("resampling")
        comparison = compare_runs(*sides, scatter_pct=scatter_pct, limit_pct=fail_over)
    gates = [] if fail_over is None else [run_gate(comparison, metric, fail_over) for metric in metrics]
    outcome = overall(gates)
    if as_json:
        import msgspec  # noqa: PLC0415

        content = {"outcome": outcome, "gates": gates, "comparison": comparison}
        write_json(msgspec.json.format(msgspec.json.encode(content), indent=2))
    else:
        from lightning_forge_profiling.report.run_comparison import print_run_comparison  # noqa: PLC0415

        print_run_comparison(comparison, gates)
    return outcome


def _samples(path: Path, progress: Progress) -> "RunSamples":
    from lightning_forge_profiling.record.reader import newest_record, read_run  # noqa: PLC0415
    from lightning_forge_profiling.record.run_samples import run_samples  # noqa: PLC0415

    progress(f"reading {path}")
    folder = newest_record(path)
    samples = run_samples(read_run(folder))
    if path.is_file() or path in {folder, folder.parent}:
        return samples
    return replace(samples, problems=("the newest record of the folder", *samples.problems))
