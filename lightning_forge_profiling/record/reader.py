"""Reads records: one rank's with its rotated segments, those of all ranks of a run, or the latest of each."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from errno import EBUSY, ENOENT
from io import BytesIO
from itertools import chain, compress, count
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import BinaryIO, Final, TypeVar

from msgspec import structs

from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.names import RECORD_FOLDER, record_name, record_part, segment_name
from lightning_forge_profiling.record.files import HeardFiles, decode_line, read_heard
from lightning_forge_profiling.safe_files import open_regular, read_at_most
from lightning_forge_profiling.schema import (
    Begin,
    End,
    EventLine,
    IntervalLine,
    LastPulse,
    Line,
    RankWork,
    State,
)

_TOTALS: Final = b'{"line":"state"'  # as the writer begins such a line
_MOST_BYTES: Final = 16 << 20  # of a segment, and so of a line. A segment of a run has 1 MB and one line.
KEPT: Final = 50  # latest intervals and latest events that are kept of each rank but the first
_TRIES: Final = 100


class RecordError(ForgeProfilingError):
    """A record is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank."""

    path: Path  # its newest file
    begin: Begin
    lines: tuple[Line, ...]  # oldest first
    problems: tuple[str, ...] = ()  # what could not be read, one sentence each
    work: RankWork | None = None  # None if unknown, and for a single rank
    energy: "RankEnergy | None" = None  # None if unknown

    @property
    def intervals(self) -> tuple[IntervalLine, ...]:
        """All intervals, oldest first."""
        return tuple(line for line in self.lines if isinstance(line, IntervalLine))

    @property
    def events(self) -> tuple[EventLine, ...]:
        """All events, oldest first."""
        return tuple(line for line in self.lines if isinstance(line, EventLine))

    @property
    def state(self) -> State | None:
        """The newest totals; None before the first."""
        return latest(State, self.lines)

    @property
    def end(self) -> End | None:
        """End of the run; None while it runs, and after it was killed."""
        return latest(End, self.lines)


@dataclass(frozen=True, slots=True)
class RankEnergy:
    """Energy of one rank's GPU, by the rank's latest totals."""

    joules: float  # during the fit
    joules_per_sample: float | None  # over the counted steps; None if unknown
    samples: float  # samples of the counted steps on all ranks
    replicas: int  # number of ranks with samples of their own


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of all ranks of one run."""

    folder: Path
    ranks: tuple[RankRecord, ...]  # lowest first; at least one
    problems: tuple[str, ...] = ()
    heard: Mapping[int, LastPulse] = field(default_factory=dict)  # the latest pulse of each rank that was heard

    @property
    def works(self) -> tuple[RankWork, ...]:
        """The work of each rank that has reported it, to its record or as what rank 0 heard last."""
        works = {rank: one.pulse.work for rank, one in self.heard.items() if one.pulse.work is not None}
        known = [(rank, rank.work) for rank in self.ranks if rank.work is not None]
        for rank, work in known:
            first, mine = known[0]
            far = work.host != mine.host
            works[rank.begin.rank] = with_clock(work, ends(rank.lines), ends(first.lines)) if far else work
        return tuple(works[rank] for rank in sorted(works)) if known else ()


_Kind = TypeVar("_Kind")


def latest(kind: type[_Kind], lines: Sequence[Line]) -> _Kind | None:
    """The newest line of a kind; None without one."""
    return next((line for line in reversed(lines) if isinstance(line, kind)), None)


class RankLines:
    """Lines of one rank's record; a further `read` adds those written since."""

    def __init__(self, path: Path, kept: int | None = None) -> None:
        self.path = path
        self.run = ""  # id of the run
        self._kept = kept
        self._inode = self._offset = 0
        self._forget()

    def _forget(self) -> None:
        last = None if self._kept is None else 1
        self._begin: Begin | None = None
        self._ours = False
        self._order = count()
        self._lines: dict[type, deque[tuple[int, Line]]] = {
            IntervalLine: deque(maxlen=self._kept),
            EventLine: deque(maxlen=self._kept),
            State: deque(maxlen=last),
            End: deque(maxlen=last),
        }
        self._problems: list[str] = []
        self._of_totals: tuple[RankWork | None, RankEnergy | None] = None, None
        self._bad = self._number = 0
        self._first_bad, self._rest = "", b""

    def read(self) -> None:
        """Read new lines; after a rotation or replacement all, older segments first. May raise OSError."""
        with ExitStack() as opened:
            with suppress(FileNotFoundError):  # it is being rotated, or the process was killed while rotating
                file = opened.enter_context(open_regular(self.path))
                stat = os.fstat(file.fileno())
                if self._begin and stat.st_ino == self._inode and stat.st_size >= self._offset:
                    file.seek(self._offset)
                    self._read(file)
                    return
            problems: list[str] = []
            files = _segments(self.path, opened, problems)
            if not files:
                raise FileNotFoundError(ENOENT, "it was removed", str(self.path))
            self._forget()
            self._problems = problems
            self.run = next((run for file in reversed(files) if (run := _run_of(file))), "")
            for file in files:
                self._offset = self._number = 0
                self._inode = os.fstat(file.fileno()).st_ino
                self._read(file)

    def _read(self, file: BinaryIO) -> None:
        name, content = Path(file.name).name, read_at_most(file, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            self._problems.append(f"{name} cannot be read: it is larger than {_MOST_BYTES >> 20} MB")
            self._offset = file.seek(0, os.SEEK_END)
            return
        self._rest = b""
        texts = [*BytesIO(content)]
        totals = [place for place, text in enumerate(texts) if text.startswith(_TOTALS) and text.endswith(b"\n")]
        old = set(totals[:-1]) if self._kept is not None else set()  # totals that later ones replace
        for place, text in enumerate(texts):
            if not text.endswith(b"\n"):
                self._rest = text
                break
            self._offset += len(text)
            self._number += 1
            if place in old:
                continue
            try:
                self._enter(decode_line(text))
            except ValueError as exc:
                of = "" if name == self.path.name else f" of {name}"
                self._first_bad = self._first_bad or f"line {self._number}{of}: {exc}"
                self._bad += 1

    def _enter(self, line: Line) -> None:
        if isinstance(line, Begin):
            self._ours = line.run == self.run
            if not self._ours:
                self._problems.append(f"{self.path.name}: segment {line.segment} is of another run")
            elif self._begin is None:
                self._begin = line
        elif self._ours:
            self._lines[type(line)].append((next(self._order), line))

    def record(self, *, totals: bool = True, at_rest: bool = True) -> RankRecord:
        """The lines kept so far, without `totals` none of these; `at_rest`, no line is being written."""
        problems = list(self._problems)
        if self._bad:
            lines = "1 line" if self._bad == 1 else f"{self._bad:,} lines"
            problems.append(f"{self.path.name}: {lines} cannot be read (first: {self._first_bad})")
        if at_rest and self._rest:
            try:
                self._enter(decode_line(self._rest))
            except ValueError:
                problems.append(f"{self.path.name}: the last line is incomplete, as after a crash")
        if self._begin is None:
            why = self._first_bad or next(iter(problems), "it is empty")
            raise RecordError(f"{self.path} cannot be read as a record: {why}")
        part = record_part(self.path.name)
        rank, ranks = self._begin.rank, self._begin.world_size
        if rank >= ranks or (part is not None and part[0] != rank):
            raise RecordError(f"{self.path} cannot be read as a record: it is of rank {rank} of {ranks}")
        state = next((line for _, line in reversed(self._lines[State]) if isinstance(line, State)), None)
        if state is not None:
            self._of_totals = work_of(state, rank), energy_of(state)
        if not totals:
            self._lines[State].clear()
        begin, kept = self._begin, [line for _, line in sorted(chain(*self._lines.values()))]
        if kept and (set_s := getattr(kept[-1], "set_s", 0.0)):  # then the clock of who reads this was set, too
            begin = structs.replace(begin, at=begin.at + set_s)
            kept = [structs.replace(line, at=line.at + set_s) for line in kept]
        return RankRecord(self.path, begin, tuple(kept), tuple(problems), *self._of_totals)


def work_of(state: State | None, rank: int) -> RankWork | None:
    """What a rank's totals say of its own work."""
    if state is None:
        return None
    return next((work for work in state.report.run.ranks.works if work.rank == rank), None)


def energy_of(state: State) -> RankEnergy | None:
    """What a rank's totals say of the energy of its GPU."""
    gpu, report = state.report.run.machine.telemetry, state.report
    if gpu is None or gpu.joules is None:
        return None
    samples = (report.run.timing.samples or 0.0) * report.replicas
    return RankEnergy(gpu.joules, gpu.joules_per_sample, samples, report.replicas)


def with_clock(work: RankWork, ended_at: Mapping[int, float], first_ended_at: Mapping[int, float]) -> RankWork:
    """The work of a rank on another machine than the first rank's, with the offset of its clock if it is known."""
    # ranks that train together end a step within that step. So the clocks of two machines differ by what the same
    # step's end differs, give or take a step.
    ahead_ms = [1e3 * (ended_at[step] - first_ended_at[step]) for step in ended_at.keys() & first_ended_at.keys()]
    if not ahead_ms:
        return work
    clock_ms = median(ahead_ms)
    error_ms = max(work.step_ms, *(abs(ms - clock_ms) for ms in ahead_ms))
    return structs.replace(work, clock_ms=round(clock_ms, 3), clock_error_ms=round(error_ms, 3))


def ends(lines: Iterable[Line]) -> dict[int, float]:
    """By number of steps, when a rank had ended that many: by its intervals."""
    return {line.step: line.at for line in lines if isinstance(line, IntervalLine)}


def _run_of(file: BinaryIO) -> str:
    """Id of the run in the first line; "" if that cannot be read."""
    line: Line | None = None
    with suppress(ValueError):
        line = decode_line(file.readline(_MOST_BYTES))
    file.seek(0)
    return line.run if isinstance(line, Begin) else ""


def _segments(path: Path, opened: ExitStack, problems: list[str]) -> list[BinaryIO]:
    """Files of a rank's record, oldest first, all of one moment: if the newest was not replaced, none was renamed."""
    prefix = path.name.removesuffix("jsonl")
    for left in reversed(range(_TRIES)):
        problems.clear()
        newest: list[BinaryIO] = []
        with suppress(FileNotFoundError):
            newest.append(opened.enter_context(open_regular(path)))
        names = os.listdir(path.parent)  # noqa: PTH208  (ten times as fast for 1,000 ranks)
        parts = (record_part(name) for name in names if name.startswith(prefix))
        older: list[BinaryIO] = []
        for rank, number in sorted((rank, number) for rank, number in filter(None, parts) if number is not None):
            segment = path.with_name(segment_name(rank, number))
            try:
                older.append(opened.enter_context(open_regular(segment)))
            except FileNotFoundError:  # the oldest is removed before a rotation
                continue
            except OSError as exc:
                problems.append(f"{segment.name} cannot be read: {exc.strerror}")
        inodes: list[int] = []
        with suppress(FileNotFoundError):
            inodes.append(path.lstat().st_ino)
        # without a newest, the process was killed while rotating: in all tries, else it is rotating
        if inodes == [os.fstat(file.fileno()).st_ino for file in newest] and (newest or not left):
            return older + newest
        opened.close()
    raise OSError(EBUSY, "it is replaced faster than it can be opened", str(path))


def read_rank(path: Path) -> RankRecord:
    """Read one rank's record, older segments included."""
    # any prefix of a record is valid: an incomplete last line is skipped and reported in `problems`, as are other lines
    # that cannot be read.
    lines = RankLines(path)
    try:
        lines.read()
    except OSError as exc:
        raise RecordError(f"{path} cannot be read: {exc.strerror}") from exc
    return lines.record()


def read_run(folder: Path, *, first_only: bool = False) -> RunRecord:
    """Read the records of all ranks in a folder: of the first rank all lines, of the others the latest."""
    paths = rank_files(folder)
    if first_only and paths[:1] == [folder / record_name(0)]:
        with suppress(RecordError):
            first = read_rank(paths[0])
            return RunRecord(folder, (first,), first.problems, HeardFiles(folder).read(first.begin.run))
    return run_of(folder, (RankLines(path, KEPT if number else None) for number, path in enumerate(paths)))


def rank_files(folder: Path) -> list[Path]:
    """Records in a folder by rank, without older segments."""
    # includes ranks that were killed while rotating, with no newest segment
    parts = (record_part(path.name) for path in folder.iterdir())
    return [folder / record_name(rank) for rank in sorted({part[0] for part in parts if part is not None})]


def run_of(
    folder: Path, ranks: Iterable[RankLines], *, at_rest: bool = True, heard: HeardFiles | None = None
) -> RunRecord:
    """Read the ranks of one run: that of rank 0, else the one with most ranks, or the newest of these."""
    records: list[RankRecord] = []
    problems: list[str] = []
    with_totals = set[str]()  # those of one rank are shown
    for lines in ranks:
        try:
            lines.read()
        except OSError as exc:
            problems.append(f"{lines.path} cannot be read: {exc.strerror}")
            if not lines.run:
                continue
        try:
            rank = lines.record(totals=lines.run not in with_totals, at_rest=at_rest)
        except RecordError as exc:
            problems.append(str(exc))
        else:
            records.append(rank)
            with_totals |= {lines.run} if rank.state is not None else set()
    if not records:
        raise RecordError(problems[0] if problems else f"{folder} has no record of a run")
    number = Counter(rank.begin.run for rank in records)
    first = max(records, key=lambda rank: (rank.begin.rank == 0, number[rank.begin.run], rank.begin.at)).begin
    ours = [rank.begin.run == first.run and rank.begin.rank < first.world_size for rank in records]
    for rank, is_ours in zip(records, ours, strict=True):
        problems += rank.problems if is_ours else [f"{rank.path.name} is of another run"]
    files = heard or HeardFiles(folder)
    return RunRecord(folder, tuple(compress(records, ours)), tuple(problems), files.read(first.run))


def records_at(path: Path) -> tuple[Path, ...]:
    """Folders of all records at `path`, newest first."""
    if path.exists() and not path.is_dir():
        path = path.resolve()
        if record_part(path.name) is None:
            raise RecordError(
                f"{path} is not a record of a run ({RECORD_FOLDER}/rankN.jsonl); for traces use forge-profiling show"
            )
        return (path.parent,)
    if not path.exists():
        raise RecordError(f"{path} does not exist")
    os.scandir(path).close()  # raises here; os.walk skips subfolders that cannot be listed
    newest: dict[Path, float] = {}
    for folder, _, names in os.walk(path):
        records = [Path(folder, name) for name in names if record_part(name) is not None]
        if records and (Path(folder) == path or Path(folder).name.startswith(RECORD_FOLDER)):
            newest[Path(folder)] = max(_written_at(record) for record in records)
    if not newest:
        raise RecordError(f"no record of a run in {path} (a run with ThroughputCallback writes {RECORD_FOLDER}/)")
    return tuple(sorted(newest, key=newest.__getitem__, reverse=True))


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted since it was listed
        return 0.0


_INTERVALS: Final = 400  # as many as a sparkline shows on a wide terminal


class Follower:
    """Tails the record of a run. Each `look` reads only what was written since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[Path, RankLines] = {}
        self._heard = HeardFiles(folder)

    def look(self) -> RunRecord:
        """The run so far: each rank's newest intervals and events, latest totals and end."""
        for path in rank_files(self._folder):
            if path not in self._ranks:
                self._ranks[path] = RankLines(path, KEPT if self._ranks else _INTERVALS)
        ranks = sorted(self._ranks.values(), key=lambda lines: record_part(lines.path.name) or ())
        return run_of(self._folder, ranks, at_rest=False, heard=self._heard)


_TAIL_BYTES: Final = 1 << 17  # of the end of a record, which has the latest totals: a line of them takes some 10 kB

_PERIOD_S: Final = 0.02
_READING_S: Final = 1.0  # of many ranks those are read that can be in this time, whatever the timeout


def read_works(
    folder: Path, mine: RankWork, world_size: int, run: str, steps: int, *, timeout_s: float
) -> tuple[RankWork, ...]:
    """The work of the other ranks: by their latest totals, and by their latest pulses of those without any here."""
    deadline = monotonic() + timeout_s
    works: dict[int, tuple[RankWork, dict[int, float]]] = {}
    left = [rank for rank in range(world_size) if rank != mine.rank]
    while left:
        for rank in [*left]:
            if monotonic() > deadline + _READING_S:
                left.clear()
                break
            lines = _latest_lines(folder / record_name(rank), rank, run)
            state = latest(State, lines or ())
            work = work_of(state, rank)
            if work is not None:
                works[rank] = work, ends(lines or ())
            if lines is None or latest(End, lines) is not None or (state is not None and state.step >= steps):
                left.remove(rank)
        if not left or monotonic() >= deadline:
            break
        sleep(_PERIOD_S)
    for rank, one in read_heard(folder, run).items():
        if rank < world_size and rank != mine.rank and one.pulse.work is not None:
            works.setdefault(rank, (one.pulse.work, {}))
    elsewhere = any(work.host != mine.host for work, _ in works.values())
    first_ended_at = ends(_latest_lines(folder / record_name(mine.rank), mine.rank, run) or ()) if elsewhere else {}
    return tuple(
        work if work.host == mine.host else with_clock(work, ended_at, first_ended_at)
        for _, (work, ended_at) in sorted(works.items())
    )


def _latest_lines(path: Path, rank: int, run: str) -> list[Line] | None:
    """The latest lines of a rank, none if they cannot be read; None without a file."""
    try:
        with open_regular(path) as file:
            begin = decode_line(file.readline(_TAIL_BYTES))
            if not isinstance(begin, Begin) or (begin.run, begin.rank) != (run, rank):
                return []
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, file.tell()))
            texts = read_at_most(file, _TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return []
    lines: list[Line] = []
    for text in texts:
        with suppress(ValueError, RecursionError):  # it may have been cut, or is being written
            lines.append(decode_line(text))
    return lines
