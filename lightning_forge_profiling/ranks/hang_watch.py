"""Whether this rank stands, and which ranks of its machine are silent: all that a rank says of hangs."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from lightning_forge_profiling.host import process_state
from lightning_forge_profiling.names import stacks_name
from lightning_forge_profiling.ranks.neighbours import Life, Neighbours
from lightning_forge_profiling.ranks.stacks import StacksFile
from lightning_forge_profiling.ranks.standing import Progress, StandingWatch, Thread
from lightning_forge_profiling.results.pulse import SilentRank, Standing


class HangWatch:
    """Looks at a training thread and at neighbours, about once a second, from another thread: the one that makes it."""

    def __init__(
        self, folder: Path, run: str, rank: int, world_size: int, *, training: Thread, progress: Callable[[], Progress]
    ) -> None:
        self._stacks = StacksFile(folder / stacks_name(rank))
        self._standing = StandingWatch(progress, training, self._stacks)
        self._neighbours = Neighbours(folder, run, rank, world_size)
        own = process_state(os.getpid())
        self._life = Life(
            rank=rank,
            pid=os.getpid(),
            started=0 if own is None else own.started,
            training=training.native,
            training_id=training.python,
            watch=threading.get_native_id(),
            signal=self._stacks.signal,
        )

    def look(self, *, ended: bool) -> tuple[Standing | None, tuple[SilentRank, ...]]:
        """Where this rank stands, None while it moves; and the ranks of this machine that are silent."""
        standing = None if ended else self._standing.look()
        return standing, self._neighbours.beat(self._life._replace(ended=ended, limit_s=self._standing.limit_s))

    def close(self) -> None:
        """Leave neither handler nor socket behind, nor an empty file."""
        self._neighbours.close()
        self._stacks.close()
