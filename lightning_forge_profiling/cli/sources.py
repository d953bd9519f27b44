"""What a path on the command line leads to: the record of a run, or traces, also where fsspec reads."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from msgspec import structs

from lightning_forge_profiling.cli.shared import Progress, refuse_bad_output, warn
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.json_layout import PACKAGE, read_rank_result
from lightning_forge_profiling.kineto.files import find_ranks, rank_summaries_among, ranks_among, traces_among
from lightning_forge_profiling.record.reader import RecordError, RunRecord, records_at

if TYPE_CHECKING:
    from lightning_forge_profiling.pipeline import AnalysisResult


def find_record(path: Path) -> tuple[Path, str]:
    """Folder of the newest record at a path, and its name for messages."""
    newest, *others = records_at(path)
    return newest, f"{newest} (newest of {len(others) + 1} records)" if others else str(newest)


def record_or_traces(place: str) -> tuple[Path, str] | None:
    """The newest record at a place, as of `find_record`; None if there are traces alone. Raises if there is neither."""
    if _is_url(place):
        return None
    path = Path(place)
    try:
        return find_record(path)
    except RecordError as no_record:
        if path.suffix == ".jsonl":
            raise
        try:
            find_ranks(path)
        except TraceError as no_trace:
            raise (TraceError(f"{no_record}; {no_trace}") if path.is_dir() else no_trace) from None
    return None


def warn_of_problems(record: RunRecord) -> None:
    """Print what could not be read, as one line on standard error."""
    if record.problems:
        warn("; ".join(record.problems))


def analyze_place(place: str, output: Path | None = None, **options: Any) -> "tuple[AnalysisResult, Path]":
    """The analysis of the traces at a place, and their folder; refuses an output that would replace one."""
    from lightning_forge_profiling.pipeline import analyze  # noqa: PLC0415  (loads NumPy)

    with Progress() as progress, ExitStack() as undo:
        path = Path(place)
        if _is_url(place):
            folder = Path(undo.enter_context(TemporaryDirectory(prefix="forge-profiling-")))
            path = _fetched(place, folder, progress, with_traces=bool(options))
        files, _ = find_ranks(path)
        refuse_bad_output(output, files)
        result = analyze(path, progress=progress, **options)
    if _is_url(place):
        result = replace(result, analysis=structs.replace(result.analysis, source=place))
    return result, files[0].parent


def _is_url(place: str) -> bool:
    return "://" in place


def _fetched(url: str, folder: Path, progress: Callable[[str], None], *, with_traces: bool) -> Path:
    """Copy a remote file, or the files of a folder, as far as `analyze` needs them.

    Without `with_traces`, a result of this version that lies there is taken in place of its trace.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415  (only for a URL)

    def fetch(file: Path) -> Path:
        progress(f"fetching {file}")
        system.get_file(str(file), str(folder / file.name))
        return folder / file.name

    try:
        system, root = url_to_fs(url)
        if system.isfile(root):
            return fetch(Path(root))
        sizes = {Path(entry["name"]).name: entry["size"] for entry in system.ls(root, detail=True)}
        results = () if with_traces else tuple(map(fetch, rank_summaries_among(Path(root), sizes)))
        known = {trace for result in results for trace in _traces_of(result)}
        files = (traces_among if with_traces else ranks_among)(Path(root), sizes)
        for file in files:
            if (file.name, sizes[file.name]) not in known and not (folder / file.name).exists():
                fetch(file)
    except Exception as exc:  # each kind of storage has its own
        raise TraceError(f"{url}: cannot be read: {type(exc).__name__}: {exc}") from exc
    if not files:
        raise TraceError(f"{url}: no trace in this folder")
    return folder


def _traces_of(result: Path) -> set[tuple[str, int]]:
    """Names and sizes of the traces that a stored result of this version stands for."""
    try:
        stored = read_rank_result(result)
    except ValueError:
        return set()
    return {(trace.name, trace.bytes) for trace in stored.traces} if stored.package == PACKAGE else set()
