"""Which files of a folder are traces, and of which rank."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lightning_forge_profiling.errors import TraceError

__all__ = ["find_traces", "rank_in_name", "windows_by_rank"]

_TRACE: Final = re.compile(r".+\.(?:pt\.)?trace\.json(?:\.gz)?")
_ANY_JSON: Final = re.compile(r"(?!summary\.json).+\.json(?:\.gz)?")
_COPIES: Final = "tensorboard"  # beneath the traces that they are copies of
_WORKER: Final = re.compile(r"(.+)\.\d{10,}\.pt\.trace\.json(?:\.gz)?")
_RANK: Final = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)


def find_traces(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The traces of a file or folder.

    Args:
        path: a trace, or a folder with the traces of the ranks. In a folder of folders the newest window is taken.

    Returns:
        The files, and what there is to say about the choice.

    Raises:
        TraceError: there are none.
    """
    if path.is_file():
        return (path,), ()
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise TraceError(f"{path}: neither a file nor a folder")
    files = _traces_in(path)
    if files:
        return files, ()
    folders = [folder for folder in sorted(path.rglob("*")) if folder.is_dir()]
    below = {folder: found for folder in folders if (found := _traces_in(folder))}
    for folder in list(below):
        below.pop(folder / _COPIES, None)
    if not below:
        raise TraceError(f"{path}: no trace in this folder (looked for *.trace.json, *.trace.json.gz and *.json)")
    folder, files = max(below.items(), key=lambda entry: max(file.stat().st_mtime for file in entry[1]))
    others = len(below) - 1
    notes = (f"{path} holds {len(below)} windows; this is the newest, {folder.relative_to(path)}",) if others else ()
    return files, notes


def rank_in_name(file: Path) -> int | None:
    """The rank that a file's name gives.

    Example:
        >>> rank_in_name(Path("rank3.trace.json.gz")), rank_in_name(Path("host_42.1700000000.pt.trace.json"))
        (3, None)
    """
    match = _RANK.search(file.name)
    return int(match[1]) if match else None


def windows_by_rank(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """The files of each rank: one a window.

    Files of one rank have its number in their names, or what PyTorch's `tensorboard_trace_handler` calls a worker.

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


def _traces_in(folder: Path) -> tuple[Path, ...]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for pattern in (_TRACE, _ANY_JSON):
        found = [file for file in files if pattern.fullmatch(file.name)]
        # the raw file beside its compressed self
        found = [file for file in found if file.suffix == ".gz" or file.with_name(file.name + ".gz") not in found]
        if found:
            return tuple(sorted(found, key=lambda file: (rank_in_name(file) is None, rank_in_name(file), _order(file))))
    return ()


def _order(file: Path) -> list[tuple[int, str]]:
    """The name with its numbers as numbers: step9 before step10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", file.name)]
