"""The folders that traces are written to, and how a rank claims a place in one."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import TENSORBOARD_FOLDER, plugin_name, raw_folder, trace_name
from lightning_forge_profiling.safe_files import make_own_folder


def local_folder(name: str | os.PathLike[str]) -> Path | None:
    """The absolute path of a folder that a user names, as `~/runs` or `file:///runs`; None for one that is remote."""
    text = re.sub(r"^(file|local):(//)?(?=/)|^(file|local)://", "", os.fspath(name))
    return None if "://" in text else Path(text).expanduser().absolute()


def required_local_folder(name: str | os.PathLike[str]) -> Path:
    """The same where nothing is copied to a remote place, of a folder that can be written to."""
    folder = local_folder(name)
    if folder is None:
        raise ConfigurationError(
            f"trace_dir {os.fspath(name)!r} is not on this machine. Give a local folder, and copy it afterwards."
        )
    if problem := writable_folder_problem(folder):
        raise ConfigurationError(problem)
    return folder


def trace_path(folder: Path, rank: int) -> Path:
    """A rank's trace in the window's folder."""
    return folder / trace_name(rank)


def plugin_path(folder: Path, rank: int) -> Path:
    """The copy for TensorBoard's plugin."""
    return folder / TENSORBOARD_FOLDER / plugin_name(rank)


def claim(folders: Iterable[Path], rank: int) -> Path:
    """Claim the first folder that belongs to this user and has no trace of this rank."""
    why = FileExistsError("no folder is available for the trace")
    for folder in map(Path.absolute, folders):
        folder.parent.mkdir(parents=True, exist_ok=True)
        private = raw_folder(folder, rank)
        try:
            make_own_folder(folder)
            private.mkdir(mode=0o700)
        except FileExistsError as exc:
            why = exc
            continue
        if not trace_path(folder, rank).exists():
            return private / f"{token_hex(8)}.json"
        private.rmdir()
        why = FileExistsError(f"{folder} already holds a trace of rank {rank}")
    raise why


def window_folder(raw: Path) -> Path:
    """The claimed folder of a path that `claim` returned."""
    return raw.parents[1]


def numbered_folders(first: Path) -> Iterator[Path]:
    """`first`, `first.2`, `first.3`, ..."""
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}.{number}")


def writable_folder_problem(folder: Path) -> str:
    """Why a folder, which may not exist yet, cannot be written to; "" if it can. Creates nothing."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    advice = "Give trace_dir a folder that can be written to."
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a broken link"
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is {what}. {advice}"
    try:
        TemporaryFile(dir=existing).close()
    except OSError as exc:
        return f"trace_dir {str(folder)!r}: {str(existing)!r} is not writable ({exc.strerror}). {advice}"
    return ""
