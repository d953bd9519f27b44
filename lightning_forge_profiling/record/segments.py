"""Files of a rank's record: appends lines, starts a new file past a size, deletes the oldest."""

import os
from errno import ENOENT
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.names import record_name, segment_name
from lightning_forge_profiling.record.lines import Begin, Line, State, encode_line
from lightning_forge_profiling.safe_files import make_own_folder

SEGMENT_BYTES: Final = 1_000_000
SEGMENTS: Final = 4

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Segments:
    """Appends lines to `rankN.jsonl`. Past a size it is renamed to `rankN.K.jsonl`, and the oldest segment is deleted.

    Each segment starts with a `begin` and the newest `state`, so deleting one loses no totals. Writes are not buffered:
    appended lines survive the end of the process.
    """

    def __init__(
        self, folder: Path, begin: Begin, *, segment_bytes: int = SEGMENT_BYTES, segments: int = SEGMENTS
    ) -> None:
        self.begun = 0
        """Number of segments started."""
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
        self._path.rename(self._path.with_name(segment_name(rank, self.begun)))
        self._file.close()
        self._file = _new_file(self._path)
        self._start()


def _new_file(path: Path) -> FileIO:
    """Create a file without a buffer; fail if it exists."""
    return FileIO(path, "xb", opener=lambda name, _: os.open(name, _NEW, 0o666))
