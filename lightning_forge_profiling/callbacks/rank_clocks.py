"""Each rank's step times by its own clock, and its ledger, passed to rank 0 through files in the window's folder.

There is no collective: on a path that not every rank takes it would hang the others.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import msgspec

from lightning_forge_profiling.names import clock_path
from lightning_forge_profiling.results.analysis import RankClock, RunLedger
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.timing.rates import Rates

_PATIENCE_S: Final = 1.0
"""The ranks of a run come to its end together; one on another node may write where this one cannot read."""


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What a rank reports to rank 0 as it leaves the training loop.

    Attributes:
        clock: its step times.
        ledger: where its wall time went up to then.
    """

    clock: RankClock
    ledger: RunLedger | None = None


def rank_clock(rank: int, rates: Rates) -> RankClock:
    """The steady steps of one rank by its own clock.

    Args:
        rank: the rank.
        rates: over its steady steps.
    """
    between_ms = rates.before_fetch_ms / rates.split_steps if rates.split_steps else 0.0
    return RankClock(
        rank=rank,
        step_ms=rates.mean_ms("step"),
        host_ms=rates.mean_host_ms("step") - between_ms,
        between_ms=between_ms,
    )


def write_figures(folder: Path, figures: RankFigures) -> None:
    """Write this rank's figures for `read_figures`. May raise OSError."""
    write_whole(clock_path(folder, figures.clock.rank), msgspec.json.encode(figures))


def read_figures(folder: Path, ranks: Sequence[int], *, patience_s: float = _PATIENCE_S) -> tuple[RankFigures, ...]:
    """Read and remove the figures that the ranks have written.

    Args:
        folder: the window's folder.
        ranks: the ranks to expect; a single one has nothing to be compared with.
        patience_s: how long to wait for those that are missing.

    Returns:
        The figures found, in order of rank.
    """
    if not ranks[1:]:
        return ()
    deadline = monotonic() + patience_s
    paths = [clock_path(folder, rank) for rank in ranks]
    while not all(path.is_file() for path in paths) and monotonic() < deadline:
        sleep(0.01)
    found = []
    for path in filter(Path.is_file, paths):
        with suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(read_regular(path), type=RankFigures))
            path.unlink()
    return tuple(found)
