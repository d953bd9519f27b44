"""What a path on the command line leads to: a record, or traces, also where fsspec reads; or a file to write."""

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from lightning_forge_profiling.cli.shared import Progress, warn
from lightning_forge_profiling.errors import ConfigurationError, ForgeProfilingError, TraceError
from lightning_forge_profiling.json_layout import PACKAGE, read_rank_result
from lightning_forge_profiling.kineto.files import find_ranks, rank_summaries_among, ranks_among, traces_among
from lightning_forge_profiling.record.reader import RecordError, RunRecord, records_at
from lightning_forge_profiling.safe_files import own_user

if TYPE_CHECKING:
    from lightning_forge_profiling.pipeline import AnalysisResult

_T = TypeVar("_T")


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


def any_at(find: Callable[[Path], Sequence[_T]], path: Path) -> Sequence[_T]:
    """What there is at a path; nothing if it cannot be read."""
    try:
        return find(path)
    except ForgeProfilingError:
        return ()


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


def refuse_bad_output(output: Path | None, sources: Iterable[Path]) -> None:
    """Refuse a file that could not be written once the work is done, or that would replace what it is made of."""
    if output is None:
        return
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output}: there is no folder {output.parent}")
    if _may_be_planted(output):
        raise ConfigurationError(f"{output}: is a link or a pipe of another user in a world-writable folder")
    if output.is_dir():
        raise ConfigurationError(f"{output}: is a folder")
    if output.exists() and not output.is_file():
        return  # a pipe or a device
    folder = Path(os.path.realpath(output)).parent
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{output}: cannot create a file in {folder}")
    for path in sources:
        if same_file(path, output):
            raise ConfigurationError(f"PATH and --save both name {path}: one would overwrite the other")


def same_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not exist."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)  # unlike `Path.resolve`, it accepts circular links


def _may_be_planted(path: Path) -> bool:
    """Whether it is a link or a pipe that belongs neither to this user nor to the folder's owner."""
    if not os.path.lexists(path):
        return False
    status, folder = path.lstat(), path.parent.stat()
    public = folder.st_mode & stat.S_IWOTH and not stat.S_ISREG(status.st_mode)
    return bool(public) and status.st_uid not in {own_user(), folder.st_uid}
