"""Writes a rank's record from a background thread, so that training never waits for the disk; what it begins with."""

import os
import re
import stat
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from errno import ENOENT
from io import FileIO
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Final

import msgspec

from lightning_forge_profiling.names import RECORD_FOLDER, record_name, segment_name
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.record.files import decode_line, encode_line
from lightning_forge_profiling.safe_files import NEW_FILE, make_own_folder, open_regular, own_user, read_regular
from lightning_forge_profiling.schema import Begin, Line, State

SEGMENT_BYTES: Final = 1_000_000
SEGMENTS: Final = 4

_NEW: Final = NEW_FILE | os.O_APPEND


class Segments:
    """Appends lines to `rankN.jsonl`. Past a size it is renamed to `rankN.K.jsonl`, and the oldest segment is deleted.

    Each segment starts with a `begin` and the newest `state`, so deleting one loses no totals. Writes are not buffered:
    appended lines survive the end of the process.
    """

    def __init__(
        self, folder: Path, begin: Begin, *, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        self.begun = 0  # number of segments started
        self._path = folder / record_name(begin.rank)
        self._begin = begin
        self._segment_bytes, self._segments = segment_bytes, segments
        self._state = b""
        self._size = 0
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(folder)
        self._file = _new_file(self._path)
        try:
            self._start()
        except OSError:
            self._file.close()
            raise

    def append(self, line: Line) -> None:
        """Append a line."""
        text = encode_line(line)
        if isinstance(line, State):
            self._state = text
        self._write(text)
        if self._size > self._segment_bytes:
            self._rotate()

    def check(self) -> None:
        """Raise FileNotFoundError if the newest segment was deleted, since lines would be lost."""
        if not self._path.exists():
            raise FileNotFoundError(ENOENT, "it was removed", str(self._path))

    def sync(self) -> None:
        """Flush appended lines to the disk (`fsync`)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _start(self) -> None:
        self._size = 0
        self._write(encode_line(msgspec.structs.replace(self._begin, segment=self.begun)) + self._state)
        self.begun += 1

    def _write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._size += len(text)

    def _rotate(self) -> None:
        rank = self._begin.rank
        self._path.with_name(segment_name(rank, self.begun - self._segments + 1)).unlink(missing_ok=True)
        self._file.close()  # Windows renames no open file
        self._path.rename(self._path.with_name(segment_name(rank, self.begun)))
        self._file = _new_file(self._path)
        self._start()


def _new_file(path: Path) -> FileIO:
    """Create a file without a buffer; fail if it exists."""
    return FileIO(path, "xb", opener=lambda name, _: os.open(name, _NEW, 0o666))


_log = plain_logger(__name__)

# longest time in seconds that a line waits in memory. Waking the thread for each line would cost training more.
FLUSH_S: Final = 1.0

MOST_WAITING: Final = 256  # longest queue, in lines. Only a stalled disk fills it.


class RecordWriter:
    """Queues lines from the training thread; a daemon thread encodes and writes them.

    Only `close` blocks, and no method raises. A failure, such as a full disk, is logged once; then the thread ends and
    further lines are refused.
    """

    def __init__(self, open_files: Callable[[], Segments], *, flush_s: float = FLUSH_S) -> None:
        self.segments = 0  # number of segments started. Each new one should get a fresh `state`.
        self._open_files = open_files
        self._flush_s = flush_s
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self._wake = Event()
        self._syncs = self._closes = self._ended = False
        self._thread = Thread(target=self._run, name="forge-record", daemon=True)
        self._thread.start()

    @property
    def takes(self) -> bool:
        """Whether `write` would accept a line: the thread is alive, and the queue is not full."""
        return not self._ended and self._lines.qsize() < MOST_WAITING

    def write(self, line: Line) -> bool:
        """Queue a line, which must not change afterwards."""
        if not self.takes:
            return False
        self._lines.put(line)
        if self._lines.qsize() > MOST_WAITING // 2:
            self._wake.set()
        return True

    def sync(self) -> None:
        """Have the thread write the queued lines now and flush them to the disk."""
        self._syncs = True
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Write the remaining lines and end the thread."""
        if self._thread.is_alive():  # not in a forked process, where what wakes it may be locked
            self._closes = self._syncs = True
            self._wake.set()
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            files = self._open_files()
            try:
                while not self._closes:
                    self._write_waiting(files)
                    self._wake.wait(self._flush_s)
                    self._wake.clear()
                self._write_waiting(files)
            finally:
                files.close()
        except Exception as exc:
            _log.warning("The run's record ends here (%s: %s); training continues.", type(exc).__name__, exc)
            _log.debug("", exc_info=exc)
        finally:
            self._ended = True

    def _write_waiting(self, files: Segments) -> None:
        syncs, self._syncs = self._syncs, False
        try:
            while True:
                files.append(self._lines.get_nowait())
        except Empty:
            files.check()
        self.segments = files.begun
        if syncs:
            files.sync()


_OPTION: Final = re.compile(r"--[A-Za-z][\w.-]*|-[A-Za-z]", re.ASCII)
_SECRET: Final = re.compile(r"key|token|secret|pass|pw|auth|cred|cookie|bearer", re.IGNORECASE)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HEAD_BYTES: Final = 1 << 16
_PACKED_BYTES: Final = 1 << 26


def command_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The name of the script and those of its options: values may be secrets."""
    kept = [os.path.basename(argument) for argument in argv[:1]]  # noqa: PTH119  (keeps "-c" and "")
    secret = False
    for argument in takewhile(lambda each: each != "--", argv[1:]):
        name, equals, _ = argument.partition("=")
        if secret or not _OPTION.fullmatch(name):
            secret = False  # a value, whatever it looks like
            continue
        kept.append(name)
        secret = not equals and _SECRET.search(name) is not None
    return tuple(kept)


def git_commit(folder: Path) -> str:
    """The checked-out commit, read from git's files; "" outside a repository."""
    # as in git, a repository of another user than this one and root does not count.
    owners = {own_user(), 0}
    with suppress(OSError):
        for parent in (folder, *folder.parents):
            if os.path.lexists(parent / ".git"):
                return _head(parent / ".git", owners)
    return ""


def _head(git: Path, owners: Container[int]) -> str:
    """The commit of a `.git`, which is a folder or, in a worktree or a submodule, a file with the path of one."""
    if stat.S_ISREG(git.lstat().st_mode):
        git = git.parent / (_text(git, owners).removeprefix("gitdir:").strip() or git.name)
    common = git / (_text(git / "commondir", owners) or ".")
    if any(not stat.S_ISDIR(each.lstat().st_mode) or each.lstat().st_uid not in owners for each in (git, common)):
        return ""
    head = _text(git / "HEAD", owners)
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    ref = head.removeprefix("ref:").strip()
    packed = re.search(rf"^(\w+) {re.escape(ref)}$", _text(common / "packed-refs", owners), re.MULTILINE)
    within = ((each.resolve() / "refs", (each / ref).resolve()) for each in (git, common))
    values = [_text(path, owners) for folder, path in within if path.is_relative_to(folder)]
    return next(filter(_COMMIT.fullmatch, [*values, packed[1] if packed else ""]), "")


def record_of_checkpoint(checkpoint: Path, *, but: Path) -> str:
    """The record of the run that wrote a checkpoint."""
    # that is the last one begun before the checkpoint was saved, in the closest parent folder that has records.
    if not os.path.exists(checkpoint):  # noqa: PTH110
        return ""
    saved_at = checkpoint.stat().st_mtime
    for parent in checkpoint.absolute().parents:
        begins = {folder: _began_at(folder) for folder in parent.glob(f"{RECORD_FOLDER}*") if folder != but}
        known = {folder: at for folder, at in begins.items() if at is not None}
        if known:  # a copy without its mtime may look older than every record
            before = {folder: at for folder, at in known.items() if at <= saved_at} or known
            return str(max(before, key=before.__getitem__))
    return ""


def _began_at(folder: Path) -> float | None:
    paths = [folder / record_name(0), *sorted(folder.glob("rank*.jsonl"))]
    for path in paths:
        with suppress(OSError, ValueError), open_regular(path) as file:
            first = decode_line(file.readline(_HEAD_BYTES))
            if isinstance(first, Begin):
                return first.at
    return None


def _text(path: Path, owners: Container[int]) -> str:
    with suppress(OSError):
        return read_regular(path, _PACKED_BYTES, owners=owners).decode(errors="replace").strip()
    return ""
