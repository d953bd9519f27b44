"""The trace files below a path, and the rank of each."""

import os
import re
from collections.abc import Callable, Iterable
from errno import EINVAL, ELOOP
from pathlib import Path
from typing import Final

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import other_format, unpacked
from lightning_forge_profiling.names import (
    RANK_SUMMARY,
    RECORD_FOLDER,
    SUMMARY_JSON,
    TENSORBOARD_FOLDER,
    rank_summary_path,
)

_TRACE: Final = re.compile(r".+\.(?:pt\.)?trace\.json(?:\.gz)?", re.DOTALL)  # a name may hold a line break
_ANY_JSON: Final = re.compile(rf"(?!{re.escape(SUMMARY_JSON)}|.+{re.escape(RANK_SUMMARY)}).+\.json(?:\.gz)?", re.DOTALL)
_PACKED: Final = r"(?:zip|zst|xz|bz2|lz4|tar|tar\.gz|tgz)"
_TRACE_IN_ANOTHER_FORMAT: Final = re.compile(
    rf".*trace.*\.{_PACKED}|.+\.json\.{_PACKED}|.+\.(?:pftrace|perfetto-trace)", re.DOTALL
)
_WORKER: Final = re.compile(r"(.+)\.(\d{10,})\.pt\.trace\.json(?:\.gz)?", re.DOTALL)
_PLUGIN_COPY: Final = re.compile(r"rank\d+\.pt\.trace\.json\.gz")
_RANK: Final = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)

_MOST_NAMED: Final = 5  # unreadable files that a note names; the rest is counted


def find_traces(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The traces of a file or folder, and notes."""
    return _found(path, traces_among, "trace in this folder (looked for *.trace.json, *.trace.json.gz and *.json)")


def find_ranks(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The traces of a file or folder, and for ranks without one what its analysis left; notes."""
    return _found(
        path, ranks_among, "trace in this folder (looked for *.trace.json, *.trace.json.gz, *.json and *.summary.json)"
    )


def find_rank_summaries(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """What the analyses of single ranks left, of a file or folder; notes."""
    return _found(path, rank_summaries_among, "result of a rank in this folder (looked for *.summary.json)")


def is_rank_summary(file: Path) -> bool:
    """Whether a file is what the analysis of a rank left, by its name."""
    return file.name.endswith(RANK_SUMMARY)


_Among = Callable[[Path, Iterable[str]], tuple[Path, ...]]


def _found(path: Path, among: _Among, looked_for: str) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    if path.is_file():
        return (path.resolve() if path.is_symlink() else path,), ()
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise TraceError(f"{path}: neither a file nor a folder")
    unreadable: list[OSError] = []
    names, folders = _listed(path, unreadable)
    if files := among(path, names):
        return files, _notes(path, unreadable)
    below = _windows_below(folders, unreadable, among)
    notes = _notes(path, unreadable)
    if not below:
        raise TraceError("; ".join([f"{path}: no {looked_for}", *notes]))
    folder = max(below, key=lambda folder: below[folder][0])
    if len(below) > 1:
        chosen = f"{path} has {len(below)} windows; this is the newest, {folder.relative_to(path)}"
        notes = (chosen, *notes)
    return below[folder][1], notes


def rank_in_name(file: Path) -> int | None:
    """The rank in a file's name; None if there is none."""
    match = _RANK.search(file.name)
    return int(match[1]) if match else None


def windows_by_rank(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """The files grouped by rank, one file per window.

    Files of one rank share the rank in their name, or the worker name of PyTorch's `tensorboard_trace_handler`.
    """
    groups: dict[object, list[Path]] = {}
    for file in files:
        worker = _WORKER.fullmatch(file.name)
        key = rank_in_name(file)
        groups.setdefault(key if key is not None else worker[1] if worker else file, []).append(file)
    return [tuple(group) for group in groups.values()]


def exported_ns(name: str) -> int | None:
    """When `tensorboard_trace_handler` wrote a file, by its name: nanoseconds since 1970; None for other names."""
    worker = _WORKER.fullmatch(name)
    return None if worker is None else int(worker[2])


def _windows_below(
    folders: Iterable[Path], unreadable: list[OSError], among: _Among
) -> dict[Path, tuple[float, tuple[Path, ...]]]:
    """All folders with traces at any depth: the time of the newest trace, and the traces."""
    below = {}
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        if folder.name.startswith(RECORD_FOLDER):  # its JSON files are no traces
            continue
        try:
            names, folders = _listed(folder, unreadable)
            if files := among(folder, names):
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
                    if _TRACE_IN_ANOTHER_FORMAT.fullmatch(entry.name) and (other := _other_format(Path(entry.path))):
                        unreadable.append(OSError(EINVAL, other, entry.path))
                elif entry.is_dir():
                    folders.append(folder / entry.name)
                elif entry.is_symlink() and _TRACE.fullmatch(entry.name):
                    unreadable.append(OSError(ELOOP, "a link, which is not followed", entry.path))
            except OSError as exc:  # a link to a folder without permission
                unreadable.append(exc)
    return names, folders


def _other_format(path: Path) -> str:
    try:
        return other_format(next(unpacked(path, []), b""))
    except TraceError:
        return ""


def _notes(path: Path, unreadable: Iterable[OSError]) -> tuple[str, ...]:
    skipped = sorted(f"{Path(exc.filename).relative_to(path)} ({exc.strerror})" for exc in unreadable)
    if not skipped:
        return ()
    more = f" and {len(skipped) - _MOST_NAMED} more" if len(skipped) > _MOST_NAMED else ""
    return (f"{path}: skipped, cannot be read: {', '.join(skipped[:_MOST_NAMED])}{more}",)


def traces_among(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """The traces among the files of a folder."""
    return _matching(folder, names, _TRACE, _ANY_JSON)


def _matching(folder: Path, names: Iterable[str], *patterns: re.Pattern[str]) -> tuple[Path, ...]:
    """The files of the first pattern that has any."""
    names = sorted(names)
    for pattern in patterns:
        matching = {name for name in names if pattern.fullmatch(name)}
        files = [folder / name for name in names if name in matching and not _is_there_twice(name, matching)]
        if files:
            return _in_order(files)
    return ()


def _is_there_twice(name: str, names: set[str]) -> bool:
    """Whether a raw file lies beside its compressed copy, or a copy for TensorBoard's plugin beside its trace."""
    copied = name.replace(".pt.trace.json", ".trace.json") if _PLUGIN_COPY.fullmatch(name) else name
    return f"{name}.gz" in names or (copied != name and not names.isdisjoint({copied, copied.removesuffix(".gz")}))


def rank_summaries_among(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """What the analyses of single ranks left, among the files of a folder."""
    return _in_order(folder / name for name in names if name.endswith(RANK_SUMMARY))


def ranks_among(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """The traces among the files of a folder, and what the analyses of other ranks left."""
    names = tuple(names)
    summaries = rank_summaries_among(folder, names)
    traces = _matching(folder, names, _TRACE) if summaries else traces_among(folder, names)
    of_traces = {rank_summary_path(trace) for trace in traces}
    return _in_order([*traces, *(file for file in summaries if file not in of_traces)])


def _in_order(files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(files, key=lambda file: (rank_in_name(file) is None, rank_in_name(file), in_order(file.name))))


def in_order(name: str) -> list[tuple[int, str]]:
    """Sort key of names that orders numbers by value: step9 before step10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
