"""Traces, and what analyses of single ranks left, in a place that fsspec reads, such as `s3://bucket/run`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.files import is_rank_summary, rank_summaries_among, ranks_among, traces_among
from lightning_forge_profiling.names import rank_summary_path


def is_remote(place: str) -> bool:
    """Whether a place is a URL."""
    return "://" in place


def fetched(url: str, folder: Path, *, reduce: bool, progress: Callable[[str], None]) -> Path:
    """Copy a remote file, or the files of a folder; returns where the copy lies.

    Args:
        url: a file, or the folder that the files are in.
        folder: an empty folder for the copies.
        reduce: whether to leave out the traces, and copy only what analyses of single ranks left.
        progress: called with the name of each file.

    Raises:
        TraceError: there are none, or the place cannot be read.
    """
    system, place, names = _listed(url)
    both = {*ranks_among(place, names), *rank_summaries_among(place, names)}
    files = sorted(file for file in both if is_rank_summary(file) or not reduce)
    if not files:
        raise TraceError(f"{url}: no {'result of a rank' if reduce else 'trace'} in this folder")
    for file in files:
        progress(f"fetching {file}")
        _get(system, file, folder / file.name)
    return folder / files[0].name if names == [Path(url).name] else folder


def each_trace(url: str, folder: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A copy of each trace in turn, one at a time, and what puts a file beside the trace."""
    system, place, names = _listed(url)
    for file in traces_among(place, names):
        copy = folder / file.name
        _get(system, file, copy)
        yield copy, partial(_put, system, place)
        for used in (copy, rank_summary_path(copy)):
            used.unlink(missing_ok=True)


def _listed(url: str) -> tuple[Any, Path, list[str]]:
    """The file system of a place, the folder in it, and the names of the files there."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415  (only for a URL)

    try:
        system, root = url_to_fs(url)
        if system.isfile(root):
            return system, Path(root).parent, [Path(root).name]
        return system, Path(root), [Path(name).name for name in system.ls(root, detail=False)]
    except Exception as exc:  # each kind of storage has its own
        raise TraceError(f"{url}: cannot be read: {type(exc).__name__}: {exc}") from exc


def _put(system: Any, place: Path, made: Path) -> None:
    try:
        system.put_file(str(made), str(place / made.name))
    except Exception as exc:
        raise TraceError(f"{place}: cannot be written to: {type(exc).__name__}: {exc}") from exc


def _get(system: Any, file: Path, target: Path) -> None:
    try:
        system.get_file(str(file), str(target))
    except Exception as exc:
        raise TraceError(f"{file}: cannot be read: {type(exc).__name__}: {exc}") from exc
