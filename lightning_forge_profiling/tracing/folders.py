"""Where traces lie on disk, and how one rank gets a place there."""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "claim",
    "clock_path",
    "numbered_folders",
    "plugin_path",
    "report_path",
    "require_whole",
    "summary_path",
    "trace_path",
    "writable_folder_problem",
]


def trace_path(folder: Path, rank: int) -> Path:
    """The canonical trace of a rank. The name must not match the plugin's pattern, `*.pt.trace.json.gz`."""
    return folder / f"rank{rank}.trace.json.gz"


def plugin_path(folder: Path, rank: int) -> Path:
    """The copy for TensorBoard's plugin, out of the way of tools that read every file of the trace's folder."""
    return folder / "tensorboard" / f"rank{rank}.pt.trace.json.gz"


def summary_path(folder: Path) -> Path:
    """What the analysis of all ranks' traces found, for programs."""
    return folder / "summary.json"


def report_path(folder: Path) -> Path:
    """The same for a browser."""
    return folder / "report.html"


def clock_path(folder: Path, rank: int) -> Path:
    """What a rank's steps took by its own clock, until the rank that prints has read it."""
    return folder / f".rank{rank}.clock"


def claim(folders: Iterable[Path], rank: int) -> Path:
    """Take the first folder that holds nothing of this rank.

    Returns:
        An empty hidden file in it, for the raw export; no other process gets the same.

    Raises:
        FileExistsError: all are taken.
    """
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if trace_path(folder, rank).exists():
            continue
        raw = folder / f".rank{rank}.raw.json"
        try:
            os.close(os.open(raw, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return raw
    raise FileExistsError("every folder offered for the trace is taken")


def numbered_folders(first: Path) -> Iterator[Path]:
    """`first`, `first.2`, `first.3`, ..."""
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}.{number}")


def writable_folder_problem(folder: Path) -> str:
    """Why nothing can be written into a folder that may not exist yet; "" when it can. Creates nothing."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    advice = "Give trace_dir a folder that can be written to."
    if not existing.is_dir():
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is a file. {advice}"
    probe = existing / f".forge_probe_{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        probe.unlink()
    except OSError as exc:
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is not writable ({exc.strerror}). {advice}"
    return ""


def require_whole(raw: Path) -> None:
    """Raise OSError unless the exported file ends as a trace does: Kineto does not say when the disk was full."""
    with raw.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 64, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"the trace could not be written whole to {raw.parent} (is the disk full?)")
