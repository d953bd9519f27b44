"""Reads a record while it is being written: each look reads only new lines, and keeps the newest."""

from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.record.lines import Begin, End, Event, Interval, Line, State, decode_line
from lightning_forge_profiling.record.reader import RankRecord, RunRecord, of_newest_run, older_segments, rank_files

_INTERVALS: Final = 400
"""As many as a sparkline shows on a wide terminal."""
_EVENTS: Final = 50


class Follower:
    """Tails the record of a run. Each `look` reads only what was written since the last one.

    Args:
        folder: a `forge_record` folder that this or another process writes to, possibly on another node.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, _Tail] = {}

    def look(self) -> RunRecord:
        """The run so far: each rank's newest intervals and events, latest totals and end.

        Raises:
            RecordError: there is no record, or none with a complete first line yet.
        """
        problems = []
        for path in rank_files(self._folder):
            tail = self._tails.setdefault(path, _Tail(path))
            try:
                tail.read()
            except FileNotFoundError:
                continue  # being rotated; keep what was read
            except OSError as exc:
                problems.append(f"{path.name} cannot be read: {exc.strerror}")
        ranks = [found for tail in self._tails.values() if (found := tail.record()) is not None]
        return of_newest_run(self._folder, ranks, problems)


class _Tail:
    """One rank's record, read up to the last complete line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0
        self._forget()

    def _forget(self) -> None:
        self._begin: Begin | None = None
        self._intervals: deque[Interval] = deque(maxlen=_INTERVALS)
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._state: State | None = None
        self._end: End | None = None
        self._problems: list[str] = []

    def read(self) -> None:
        """Read new lines. After a rotation or replacement, read everything again, older segments first."""
        with self.path.open("rb") as file:
            found = self.path.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._forget()
                for segment in older_segments(self.path):
                    self._add(segment.read_bytes())
                self._inode, self._offset = found.st_ino, 0
            file.seek(self._offset)
            self._offset += self._add(file.read())

    def _add(self, content: bytes) -> int:
        """Add the complete lines and return their size in bytes."""
        whole = content[: content.rfind(b"\n") + 1]
        for text in whole.splitlines():
            try:
                self._enter(decode_line(text))
            except msgspec.DecodeError as exc:
                self._problems = [f"{self.path.name}: a line cannot be read ({exc})"]
        return len(whole)

    def _enter(self, line: Line) -> None:
        match line:
            case Begin():
                if self._begin is not None and line.run != self._begin.run:
                    self._forget()
                self._begin = self._begin or line
            case Interval():
                self._intervals.append(line)
            case Event():
                self._events.append(line)
            case State():
                self._state = line
            case End():
                self._end = line

    def record(self) -> RankRecord | None:
        """The lines kept so far; None before the first line is complete."""
        if self._begin is None:
            return None
        last = (line for line in (self._state, self._end) if line is not None)
        lines: list[Line] = sorted((*self._intervals, *self._events, *last), key=lambda line: line.at)
        return RankRecord(self.path, self._begin, tuple(lines), tuple(self._problems))
