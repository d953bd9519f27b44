"""What the other ranks have written to their records about themselves, read on one rank at the end of a fit."""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from lightning_forge_profiling.names import record_name
from lightning_forge_profiling.record.lines import Begin, End, Line, State, decode_line
from lightning_forge_profiling.record.pulses import read_heard
from lightning_forge_profiling.record.reader import ends, latest, with_clock, work_of
from lightning_forge_profiling.safe_files import open_regular, read_at_most
from lightning_forge_profiling.schema import RankWork

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
            lines = _latest(folder / record_name(rank), rank, run)
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
    first_ended_at = ends(_latest(folder / record_name(mine.rank), mine.rank, run) or ()) if elsewhere else {}
    return tuple(
        work if work.host == mine.host else with_clock(work, ended_at, first_ended_at)
        for _, (work, ended_at) in sorted(works.items())
    )


def _latest(path: Path, rank: int, run: str) -> list[Line] | None:
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
