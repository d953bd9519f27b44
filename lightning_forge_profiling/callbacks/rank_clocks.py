"""Each rank's own clock, handed to the rank that prints through files in the window's folder.

No collective: on a path that not every rank takes it would hang the others.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import msgspec

from lightning_forge_profiling.names import clock_path
from lightning_forge_profiling.results.analysis import RankClock
from lightning_forge_profiling.safe_files import write_whole
from lightning_forge_profiling.timing.rates import Rates

__all__ = ["rank_clock", "read_clocks", "write_clock"]

_PATIENCE_S: Final = 1.0
"""The ranks of a run come to its end together; one on another node may write where this one cannot read."""


def rank_clock(rank: int, rates: Rates) -> RankClock:
    """What the steps that count took on one rank.

    Args:
        rank: its number.
        rates: over those steps.
    """
    between_ms = rates.before_fetch_ms / rates.split_steps if rates.split_steps else 0.0
    return RankClock(
        rank=rank,
        step_ms=rates.mean_ms("step"),
        host_ms=rates.mean_host_ms("step") - between_ms,
        between_ms=between_ms,
    )


def write_clock(folder: Path, clock: RankClock) -> None:
    """Put this rank's clock where `read_clocks` looks. May raise OSError."""
    write_whole(clock_path(folder, clock.rank), msgspec.json.encode(clock))


def read_clocks(folder: Path, ranks: Sequence[int], *, patience_s: float = _PATIENCE_S) -> tuple[RankClock, ...]:
    """The clocks that ranks have left, which are removed.

    Args:
        folder: the window's.
        ranks: which to expect; with one alone there is nothing to compare.
        patience_s: how long to wait for those that are not there yet.

    Returns:
        Those that came, in order of rank.
    """
    if not ranks[1:]:
        return ()
    deadline = monotonic() + patience_s
    paths = [clock_path(folder, rank) for rank in ranks]
    while not all(path.is_file() for path in paths) and monotonic() < deadline:
        sleep(0.01)
    clocks = []
    for path in filter(Path.is_file, paths):
        with suppress(OSError, msgspec.MsgspecError):
            clocks.append(msgspec.json.decode(path.read_bytes(), type=RankClock))
            path.unlink()
    return tuple(clocks)
