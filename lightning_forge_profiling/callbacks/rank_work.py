"""A rank's work over its latest steps, for the other ranks to be compared with."""

from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.results.analysis import RankWork


class LiveWork:
    """Computes the rank's work over its latest steps, in another thread than training."""

    def __init__(self, step_timer: StepTimer, rank: int, host: str) -> None:
        self._step_timer, self._rank, self._host = step_timer, rank, host

    def latest(self) -> RankWork | None:
        """The work over the latest steps; None before enough of them."""
        return None
