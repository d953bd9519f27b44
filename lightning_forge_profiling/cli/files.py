"""The files that a command's options name: checked before anything is written, and then written."""

import os
import stat
from collections.abc import Iterable, Mapping
from itertools import chain, combinations, product
from pathlib import Path
from tempfile import TemporaryFile

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.safe_files import write_whole

__all__ = ["refuse_bad_outputs", "same_file", "write_output"]


def refuse_bad_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[tuple[str, Path]] = ()) -> None:
    """Refuse what would only fail once the work is done, or would take one of the user's files away.

    Args:
        outputs: the files to write, by the option that names each; None where it was not given.
        inputs: the files that are read, each after the argument that names it.

    Raises:
        ConfigurationError: an output is a folder, or cannot be written, or is an input or another output.
    """
    given = [(name, path) for name, path in outputs.items() if path is not None]
    for _, path in given:
        _refuse_unwritable(path)
    for (first, path), (second, other) in chain(product(inputs, given), combinations(given, 2)):
        if _is_replaced(other) and same_file(path, other):
            raise ConfigurationError(f"{first} and {second} both name {path}: one would overwrite the other")


def same_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, be it there already or not."""
    return _target(path) == _target(other) or (path.exists() and other.exists() and path.samefile(other))


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user has named, complete or not at all.

    Into a pipe or a device it is written as it is, and through a link to the file that it leads to.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    if _is_replaced(path):
        write_whole(_target(path), content)
    else:
        path.write_bytes(content)


def _refuse_unwritable(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path}: there is no folder {path.parent}")
    if _may_be_planted(path):
        raise ConfigurationError(f"{path}: is a link or a pipe of another user, in a folder in which all can write")
    if path.is_dir():
        raise ConfigurationError(f"{path}: is a folder")
    if _is_replaced(path):
        folder = _target(path).parent
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigurationError(f"{path}: no file can be made in {folder}: {error.strerror}") from error


def _may_be_planted(path: Path) -> bool:
    """Whether it is a link or a pipe that neither this user nor the folder's owner has put there."""
    if not os.path.lexists(path):
        return False
    found, folder = path.lstat(), path.parent.stat()
    public = folder.st_mode & stat.S_IWOTH and not stat.S_ISREG(found.st_mode)
    return bool(public) and found.st_uid not in {os.geteuid(), folder.st_uid}


def _target(path: Path) -> Path:
    """Where a path leads through links; unlike `Path.resolve`, also where they go round in a circle."""
    return Path(os.path.realpath(path))


def _is_replaced(path: Path) -> bool:
    """Whether a new file will be put there, where into a pipe or a device is written."""
    return path.is_file() or not path.exists()
