"""Whether this rank stands, and which ranks of its machine are silent: all that a rank says of hangs."""

import os
import threading
from pathlib import Path

from lightning_forge_profiling.host import process_state
from lightning_forge_profiling.names import stacks_name
from lightning_forge_profiling.ranks.neighbours import Life, Neighbours
from lightning_forge_profiling.ranks.stacks import StacksFile
from lightning_forge_profiling.ranks.standing import Progress, StandingWatch
from lightning_forge_profiling.schema import SilentRank, Standing


class HangWatch:
    """Made by the training thread before the fit has loaders; another thread looks about once a second."""

    def __init__(self, folder: Path, run: str, rank: int, world_size: int) -> None:
        self._stacks = StacksFile(folder / stacks_name(rank))
        self._standing = StandingWatch(threading.get_ident(), threading.get_native_id(), self._stacks)
        self._neighbours = Neighbours(folder, run, rank, world_size, memory=self._stacks.memory)
        own = process_state(os.getpid())
        self._life = Life(
            rank=rank,
            pid=os.getpid(),
            started=0 if own is None else own.started,
            training=threading.get_native_id(),
            signal=self._stacks.signal,
        )

    @property
    def where(self) -> tuple[float, str]:
        """For how long no step ended, and the innermost line of the user's code; (0, "") below 30 s."""
        return self._standing.where

    @property
    def at_end(self) -> tuple[float, str]:
        """For how long training stood if the fit ended now, and in which line; (0, "") if it moves."""
        return self._standing.at_end

    def look(self, progress: Progress, *, ended: bool) -> tuple[Standing | None, tuple[SilentRank, ...]]:
        """Where this rank stands, None while it moves; and the ranks of this machine that are silent."""
        standing = None if ended else self._standing.look(progress)
        limit_s, step_limit_s = self._standing.limits_s
        life = self._life._replace(ended=ended, limit_s=limit_s, step_limit_s=step_limit_s)
        return standing, self._neighbours.beat(life)

    def close(self) -> None:
        """Leave neither handler nor socket behind, nor an empty file."""
        self._neighbours.close()
        self._stacks.close()
