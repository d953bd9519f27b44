"""The trace files below a path, and the rank of each."""

import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from errno import ELOOP
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.trace import Ints, Trace
from lightning_forge_profiling.names import SUMMARY_JSON, TENSORBOARD_FOLDER

_TRACE: Final = re.compile(r".+\.(?:pt\.)?trace\.json(?:\.gz)?", re.DOTALL)  # a name may hold a line break
_ANY_JSON: Final = re.compile(rf"(?!{re.escape(SUMMARY_JSON)}).+\.json(?:\.gz)?", re.DOTALL)
_WORKER: Final = re.compile(r"(.+)\.\d{10,}\.pt\.trace\.json(?:\.gz)?", re.DOTALL)
_RANK: Final = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)

_MOST_NAMED: Final = 5  # unreadable files that a note names; the rest is counted


def find_traces(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The traces of a file or folder."""
    if path.is_file():
        return (path.resolve() if path.is_symlink() else path,), ()
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise TraceError(f"{path}: neither a file nor a folder")
    unreadable: list[OSError] = []
    names, folders = _listed(path, unreadable)
    if files := _traces_among(path, names):
        return files, _notes(path, unreadable)
    below = _windows_below(folders, unreadable)
    notes = _notes(path, unreadable)
    if not below:
        looked = f"{path}: no trace in this folder (looked for *.trace.json, *.trace.json.gz and *.json)"
        raise TraceError("; ".join([looked, *notes]))
    folder = max(below, key=lambda folder: below[folder][0])
    if len(below) > 1:
        chosen = f"{path} has {len(below)} windows; this is the newest, {folder.relative_to(path)}"
        notes = (chosen, *notes)
    return below[folder][1], notes


def rank_in_name(file: Path) -> int | None:
    """The rank in a file's name; None if there is none.

    Example:
        >>> rank_in_name(Path("rank3.trace.json.gz")), rank_in_name(Path("host_42.1700000000.pt.trace.json"))
        (3, None)
    """
    match = _RANK.search(file.name)
    return int(match[1]) if match else None


def windows_by_rank(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """The files grouped by rank, one file per window.

    Files of one rank share the rank in their name, or the worker name of PyTorch's `tensorboard_trace_handler`.

    Example:
        >>> files = [Path("a_1.1700000000000.pt.trace.json"), Path("a_1.1700000009000.pt.trace.json"), Path("b.json")]
        >>> [len(group) for group in windows_by_rank(files)]
        [2, 1]
    """
    groups: dict[object, list[Path]] = {}
    for file in files:
        worker = _WORKER.fullmatch(file.name)
        key = rank_in_name(file)
        groups.setdefault(key if key is not None else worker[1] if worker else file, []).append(file)
    return [tuple(group) for group in groups.values()]


def _windows_below(folders: Iterable[Path], unreadable: list[OSError]) -> dict[Path, tuple[float, tuple[Path, ...]]]:
    """All folders with traces at any depth: the time of the newest trace, and the traces."""
    below = {}
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        try:
            names, folders = _listed(folder, unreadable)
            if files := _traces_among(folder, names):
                below[folder] = max(file.stat().st_mtime for file in files), files
        except OSError as exc:
            unreadable.append(exc)
            continue
        if not folder.is_symlink():  # which may lead back up
            waiting += folders
    for folder in list(below):
        below.pop(folder / TENSORBOARD_FOLDER, None)
    return dict(sorted(below.items()))


def _listed(folder: Path, unreadable: list[OSError]) -> tuple[list[str], list[Path]]:
    """The names of a folder's files, and the folders in it."""
    names, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif entry.is_dir():
                    folders.append(folder / entry.name)
                elif entry.is_symlink() and _TRACE.fullmatch(entry.name):
                    unreadable.append(OSError(ELOOP, "a link, which is not followed", entry.path))
            except OSError as exc:  # a link to a folder without permission
                unreadable.append(exc)
    return names, folders


def _notes(path: Path, unreadable: Iterable[OSError]) -> tuple[str, ...]:
    skipped = sorted(f"{Path(exc.filename).relative_to(path)} ({exc.strerror})" for exc in unreadable)
    if not skipped:
        return ()
    more = f" and {len(skipped) - _MOST_NAMED} more" if len(skipped) > _MOST_NAMED else ""
    return (f"{path}: skipped, cannot be read: {', '.join(skipped[:_MOST_NAMED])}{more}",)


def _traces_among(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    names = sorted(names)
    for pattern in (_TRACE, _ANY_JSON):
        found = {name for name in names if pattern.fullmatch(name)}
        # without a raw file that lies beside its compressed copy
        files = [folder / name for name in names if name in found and f"{name}.gz" not in found]
        if files:
            return tuple(sorted(files, key=lambda file: (rank_in_name(file) is None, rank_in_name(file), _order(file))))
    return ()


def _order(file: Path) -> list[tuple[int, str]]:
    """Sort key that orders numbers by value: step9 before step10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", file.name)]


_APART_NS: Final = 10**9
_TABLES: Final = ("gpu", "calls", "operators", "annotations", "frames", "allocations")
_INDEX_OF: Final = {
    "name": "names", "thread": "threads", "lane": "lanes", "signature": "signatures", "collective": "collectives",
}  # fmt: skip
_TIMES: Final = ("start", "end", "time")
_IDS: Final = ("correlation", "external")
_LARGEST_ID: Final = 2**60  # larger than any profiler's; ids beyond it may collide, but must not overflow


def join_traces(traces: Sequence[Trace]) -> Trace:
    """Join windows of one rank, one after the other.

    The time between them is not kept: it belongs to no step, and the files may not share a clock.
    """
    first, *others = traces
    if not others:
        return first
    lists = {name: {value: row for row, value in enumerate(getattr(first, name))} for name in _INDEX_OF.values()}
    largest = {column: max(_largest(first, column), 0) for column in _IDS}
    pieces: dict[str, list[dict[str, Ints]]] = {name: [_columns(getattr(first, name))] for name in _TABLES}
    begins, (_, end) = [*first.begins], first.extent
    cuts = [*first.cuts]
    for trace in others:
        began, ended = trace.extent
        shift = end - began + _APART_NS
        begins.append(began + shift)
        cuts += [cut and replace(cut, time=cut.time + shift) for cut in trace.cuts]
        end = ended + shift
        place = {column: _merged(lists[name], getattr(trace, name)) for column, name in _INDEX_OF.items()}
        for name in _TABLES:
            pieces[name].append(_moved(getattr(trace, name), shift, place, largest))
        for column in _IDS:
            largest[column] = (largest[column] + 1 + max(_largest(trace, column), 0)) % _LARGEST_ID
    joined: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    for name, parts in pieces.items():
        columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        joined[name] = type(getattr(first, name))(**columns)
    return replace(
        first,
        file=f"{first.file} and more",
        begins=tuple(begins),
        cuts=tuple(cuts),
        warnings=tuple(warning for trace in traces for warning in trace.warnings),
        **joined,
    )


def _columns(table: Any) -> dict[str, Ints]:
    return {field.name: getattr(table, field.name) for field in fields(table)}


def _moved(table: Any, shift: int, place: Mapping[str, Ints], largest: Mapping[str, int]) -> dict[str, Ints]:
    """The columns of a later trace, with times, positions and ids moved behind those of the earlier ones."""
    columns = _columns(table)
    for name, values in columns.items():
        if name in _TIMES:
            columns[name] = values + shift
        elif name in place:
            columns[name] = place[name][values]
        elif name in largest:
            columns[name] = np.where(values > 0, values + largest[name] + 1, values)
    return columns


def _merged(place: dict[Hashable, int], values: Sequence[Hashable]) -> Ints:
    """Add new values; returns the position of each value, followed by -1 so that -1 maps to itself."""
    return np.array([*(place.setdefault(value, len(place)) for value in values), -1], np.int64)


def _largest(trace: Trace, column: str) -> int:
    tables: tuple[Any, ...] = (trace.gpu, trace.calls, trace.operators)
    return max((int(getattr(table, column).max(initial=0)) for table in tables if hasattr(table, column)), default=0)
