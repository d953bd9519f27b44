"""Output files that the user names: checked before the work, written after it."""

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from lightning_forge_profiling.cli.output import warn
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.safe_files import write_whole

if TYPE_CHECKING:
    from lightning_forge_profiling.record.reader import RunRecord


def refuse_bad_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[tuple[str, Path]]) -> None:
    """Refuse outputs that would fail after the work is done, or would overwrite an input."""
    given = [(name, path) for name, path in outputs.items() if path is not None]
    for _, path in given:
        _refuse_unwritable(path)
    for (first, path), (second, other) in chain(product(inputs, given), combinations(given, 2)):
        if _is_replaced(other) and same_file(path, other):
            raise ConfigurationError(f"{first} and {second} both name {path}: one would overwrite the other")


def same_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not exist."""
    return _target(path) == _target(other) or (path.exists() and other.exists() and path.samefile(other))


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user named, whole or not at all; through a link, and straight to a pipe or a device."""
    if _is_replaced(path):
        write_whole(_target(path), content)
    else:
        path.write_bytes(content)


def _refuse_unwritable(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path}: there is no folder {path.parent}")
    if _may_be_planted(path):
        raise ConfigurationError(f"{path}: is a link or a pipe of another user in a world-writable folder")
    if path.is_dir():
        raise ConfigurationError(f"{path}: is a folder")
    if _is_replaced(path):
        folder = _target(path).parent
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot create a file in {folder}: {error.strerror}") from error


def _may_be_planted(path: Path) -> bool:
    """Whether it is a link or a pipe that belongs neither to this user nor to the folder's owner."""
    if not os.path.lexists(path):
        return False
    status, folder = path.lstat(), path.parent.stat()
    public = folder.st_mode & stat.S_IWOTH and not stat.S_ISREG(status.st_mode)
    return bool(public) and status.st_uid not in {os.geteuid(), folder.st_uid}


def _target(path: Path) -> Path:
    """The path with links resolved; unlike `Path.resolve`, it accepts circular links."""
    return Path(os.path.realpath(path))


def _is_replaced(path: Path) -> bool:
    """Whether a new file takes this path; False for a pipe or a device, which is written to."""
    return path.is_file() or not path.exists()


def find_record(path: Path) -> tuple[Path, str]:
    """Folder of the newest record at a path, and its name for messages."""
    from lightning_forge_profiling.record.reader import records_at  # noqa: PLC0415  (loads msgspec)

    newest, *others = records_at(path)
    return newest, f"{newest} (newest of {len(others) + 1} records)" if others else str(newest)


def warn_of_problems(record: "RunRecord") -> None:
    """Print what could not be read, as one line on standard error."""
    if record.problems:
        warn("; ".join(record.problems))


def copy_each(
    copies: Sequence[tuple[Path, Path]], write: Callable[[Path, Path], object], progress: Callable[[str], None]
) -> list[tuple[Path, Path, str]]:
    """Write a copy of each trace to its target; returns those that cannot be read. Raises if none can."""
    for (source, _), (_, target) in product(copies, copies):
        if same_file(source, target):
            raise ConfigurationError(f"{source}: the copy would replace the trace; give --out another folder")
    failures = []
    for source, target in copies:
        progress(f"copying {source}")
        try:
            write(source, target)
        except TraceError as exc:
            failures.append((source, target, str(exc)))
    if len(failures) == len(copies):
        raise TraceError.of([why for _, _, why in failures])
    return failures


def copies_in(folder: Path, number: int) -> str:
    """How many copies there are, and where."""
    return f"{number} {'copy' if number == 1 else 'copies'} in {folder}"
