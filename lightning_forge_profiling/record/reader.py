"""Reads records: one rank's with its rotated segments, or those of all ranks of a run."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import RECORD_FOLDER, record_rank
from lightning_forge_profiling.record.lines import Begin, End, Event, Interval, Line, State, decode_line


class RecordError(ForgeProfilingError):
    """A record is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank.

    Attributes:
        path: its newest file.
        begin: its first line.
        lines: all later lines, oldest first.
        problems: what could not be read, one sentence each.
    """

    path: Path
    begin: Begin
    lines: tuple[Line, ...]
    problems: tuple[str, ...] = ()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """All intervals, oldest first."""
        return tuple(line for line in self.lines if isinstance(line, Interval))

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, oldest first."""
        return tuple(line for line in self.lines if isinstance(line, Event))

    @property
    def state(self) -> State | None:
        """The newest totals; None before the first."""
        return _last(State, self.lines)

    @property
    def end(self) -> End | None:
        """End of the run; None while it runs, and after it was killed."""
        return _last(End, self.lines)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of all ranks of one run.

    Attributes:
        folder: folder of the records.
        ranks: the ranks, lowest first; at least one.
        problems: what could not be read.
    """

    folder: Path
    ranks: tuple[RankRecord, ...]
    problems: tuple[str, ...] = ()


_Kind = TypeVar("_Kind")


def _last(kind: type[_Kind], lines: tuple[Line, ...]) -> _Kind | None:
    return next((line for line in reversed(lines) if isinstance(line, kind)), None)


def read_rank(path: Path) -> RankRecord:
    """Read one rank's record, older segments included.

    Any prefix of a record is valid: an incomplete last line is skipped and reported in `problems`.

    Args:
        path: `rankN.jsonl`.

    Raises:
        RecordError: the file cannot be read, or its first line is not a `begin` of a known layout.
    """
    begin: Begin | None = None
    lines: list[Line] = []
    problems: list[str] = []
    older = older_segments(path)
    for segment in (*older, path):
        if older and not segment.exists():
            continue  # being rotated, or the process was killed while rotating
        for found in _lines(segment, problems):
            if not isinstance(found, Begin):
                lines.append(found)
            elif begin is None or found.run == begin.run:
                begin = begin or found
            else:  # the segments before it are from an older run
                begin, lines = found, []
    if begin is None:
        raise RecordError(f"{path} is not a record of a run: {problems[0] if problems else 'it is empty'}")
    return RankRecord(path, begin, tuple(lines), tuple(problems))


def older_segments(path: Path) -> list[Path]:
    """Rotated segments of a rank's record, oldest first."""
    rank = record_rank(path.name)
    if rank is None:
        return []
    numbers = {found: found.suffixes[0][1:] for found in path.parent.glob(f"rank{rank}.*.jsonl")}
    return sorted((found for found, number in numbers.items() if number.isdigit()), key=lambda one: int(numbers[one]))


def _lines(path: Path, problems: list[str]) -> Iterator[Line]:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise RecordError(f"{path} cannot be read: {exc.strerror}") from exc
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        try:
            yield decode_line(text)
        except msgspec.DecodeError as exc:
            torn = not text.endswith(b"\n")
            what = "the last line is incomplete, as after a crash" if torn else f"line {number} cannot be read ({exc})"
            problems.append(f"{path.name}: {what}")


def read_run(folder: Path) -> RunRecord:
    """Read the records of all ranks in a folder.

    Args:
        folder: a `forge_record` folder.

    Raises:
        RecordError: the folder has no readable record.
    """
    ranks, problems = [], []
    for path in rank_files(folder):
        try:
            ranks.append(read_rank(path))
        except RecordError as exc:
            problems.append(str(exc))
    return of_newest_run(folder, ranks, problems)


def rank_files(folder: Path) -> list[Path]:
    """Records in a folder, one per rank, without older segments."""
    # includes ranks that were killed while rotating, with no newest segment
    names = {re.sub(r"\.\d+(?=\.jsonl$)", "", path.name) for path in folder.glob("rank*.jsonl")}
    return [folder / name for name in sorted(names) if record_rank(name) is not None]


def of_newest_run(folder: Path, ranks: Iterable[RankRecord], problems: Iterable[str] = ()) -> RunRecord:
    """The ranks of the newest run among `ranks`.

    Args:
        folder: folder of the records.
        ranks: the records that were read.
        problems: what could not be read.

    Raises:
        RecordError: there is no rank.
    """
    ranks, problems = list(ranks), list(problems)
    if not ranks:
        raise RecordError(problems[0] if problems else f"{folder} has no record of a run")
    newest = max(ranks, key=lambda rank: rank.begin.at).begin.run
    ranks = sorted((rank for rank in ranks if rank.begin.run == newest), key=lambda rank: rank.begin.rank)
    return RunRecord(folder, tuple(ranks), (*problems, *(text for rank in ranks for text in rank.problems)))


def newest_record(path: Path) -> Path:
    """Folder of the newest record at `path`: a record, its folder, or any folder above it.

    Raises:
        RecordError: there is none.
        OSError: the folder cannot be listed.
    """
    return records_at(path)[0]


def records_at(path: Path) -> tuple[Path, ...]:
    """Folders of all records at `path`, newest first.

    Args:
        path: a record, its folder, or any folder above it.

    Returns:
        At least one folder.

    Raises:
        RecordError: there is none.
        OSError: the folder cannot be listed.
    """
    if path.is_file():
        if not _is_record(path.name):
            raise RecordError(
                f"{path} is not a record of a run ({RECORD_FOLDER}/rankN.jsonl); for traces use forge-profiling analyze"
            )
        return (path.parent,)
    if not path.exists():
        raise RecordError(f"{path} does not exist")
    os.scandir(path).close()  # raises here; os.walk skips subfolders that cannot be listed
    found: dict[Path, float] = {}
    for folder, _, names in os.walk(path):
        records = [Path(folder, name) for name in names if _is_record(name)]
        if records and (Path(folder) == path or Path(folder).name.startswith(RECORD_FOLDER)):
            found[Path(folder)] = max(_written_at(record) for record in records)
    if not found:
        raise RecordError(f"no record of a run in {path} (a run with ThroughputCallback writes {RECORD_FOLDER}/)")
    return tuple(sorted(found, key=found.__getitem__, reverse=True))


def _is_record(name: str) -> bool:
    """Whether a file name is that of a rank's record or of an older segment."""
    return re.fullmatch(r"rank\d+(\.\d+)?\.jsonl", name) is not None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted since it was listed
        return 0.0
