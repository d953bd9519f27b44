"""Opens files of others to read, writes files that appear complete or not at all, and makes folders of this user.

It is safe where other users can write: a planted link, pipe or device is neither read, waited for, nor written to. A
file is written under a random name and then replaces whatever has the final name.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final


def _flags(*names: str) -> int:
    """Flags of `os.open`, of which Windows has one and other systems have the rest."""
    return sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_CLOEXEC", *names))


_READ: Final = os.O_RDONLY | _flags("O_NONBLOCK", "O_NOCTTY")
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flags()
_READ_WRITE: Final = 0o666
_PIECE: Final = 1 << 16

MOST_BYTES: Final = 1 << 28  # Of a file that is read whole. No summary or report comes near it.


def open_regular(path: Path, *, owners: Container[int] | None = None) -> BinaryIO:
    """Open a file to read, without waiting. All files that this package reads are opened here."""

    def opened(name: str, _: int) -> int:
        try:
            descriptor = os.open(name, _READ)
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise OSError(exc.errno, "it is a link, which is not followed", name) from exc
            raise
        status = os.fstat(descriptor)
        problem = "" if stat.S_ISREG(status.st_mode) else "it is not a regular file"
        if owners is not None and status.st_uid not in owners:
            problem = "it belongs to another user"
        if problem:
            os.close(descriptor)
            raise OSError(errno.EINVAL, problem, name)
        return descriptor

    return BufferedReader(FileIO(os.fspath(path), opener=opened))


def read_regular(path: Path, most: int = MOST_BYTES, *, owners: Container[int] | None = None) -> bytes:
    """Read a whole file with `open_regular`. Raises OSError also for a file of more than `most` bytes."""
    with open_regular(path, owners=owners) as file:
        content = read_at_most(file, most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Read the rest of a file, up to `most` bytes. `file.read(most)` would allocate that much first."""
    content = bytearray()
    while len(content) < most and (piece := file.read(min(_PIECE, most - len(content)))):
        content += piece
    return bytes(content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which appears at `path`, with the mode of one it replaces, once the context ends well."""
    part = path.with_name(f".{token_hex(8)}.tmp")  # cannot be guessed
    before = _existing_file(path)
    try:
        # never readable by more users than the file it replaces, not even while it is written
        with os.fdopen(
            os.open(part, NEW_FILE, _READ_WRITE if before is None else before.st_mode & _READ_WRITE), "wb"
        ) as file:
            _keep_mode(file.fileno(), before)
            yield file
        part.replace(path)
    except OSError as exc:
        if exc.filename in {None, str(part)} and exc.errno is not None:  # name the file that was asked for
            raise OSError(exc.errno, exc.strerror, str(path)) from exc
        raise
    finally:
        with suppress(OSError):  # it has been moved, or was never created
            part.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file_by_name(path: Path) -> Iterator[Path]:
    """`whole_file` for code that takes a path instead of an open file."""
    before = _existing_file(path)
    with TemporaryDirectory(prefix=".", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True) as private:
        part = Path(private) / f"part{path.suffix}"
        yield part
        with open_regular(part) as file:
            _keep_mode(file.fileno(), before)
        part.replace(path)


@contextmanager
def name_for_kineto(path: Path) -> Iterator[str]:
    """A name for a file that Kineto, which refuses, changes and drops characters, writes into the JSON unchanged."""
    if json.dumps(str(path)) == f'"{path}"' or sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def make_own_folder(folder: Path) -> None:
    """Make a folder in which other users cannot write; one that this user owns is taken as it is."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o775)
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise FileExistsError(f"{folder} exists and is not a folder")
    try:
        # not compared with this process's user id: a network file system may map it to another
        with TemporaryDirectory(prefix=".", suffix=".tmp", dir=folder, ignore_cleanup_errors=True) as probe:
            own = Path(probe).stat().st_uid
    except PermissionError:
        own = None
    if status.st_uid != own:
        raise FileExistsError(f"{folder} belongs to another user")


def discard_with_folders(raw: Path) -> None:
    """Remove a raw trace, Kineto's partial file beside it (after a full disk), and the two folders above if empty."""
    with suppress(OSError):  # the window's folder stays while it has files of other ranks
        raw.unlink(missing_ok=True)
        raw.with_name(raw.name + ".tmp").unlink(missing_ok=True)
        raw.parent.rmdir()
        raw.parents[1].rmdir()


def _existing_file(path: Path) -> os.stat_result | None:
    """The status of the file that a new one will replace; None without one."""
    with suppress(OSError):
        status = path.lstat()
        return status if stat.S_ISREG(status.st_mode) else None
    return None


def _keep_mode(descriptor: int, before: os.stat_result | None) -> None:
    """Give a new file the mode of the one that it replaces; if that is another user's, only narrow it."""
    if before is None:
        return
    now = os.fstat(descriptor)
    kept = before.st_mode if before.st_uid == now.st_uid else before.st_mode & now.st_mode
    if hasattr(os, "fchmod"):  # Windows has it from Python 3.13 on
        os.fchmod(descriptor, kept & 0o777)


def own_user() -> int:
    """The user whom this process's files belong to, as `os.stat` says it: on Windows 0 for all."""
    return os.geteuid() if hasattr(os, "geteuid") else 0
