"""Whether this rank's training thread stands, and where: a watchdog that only reports."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_forge_profiling.results.pulse import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What tells whether training moves, read without stopping it.

    Attributes:
        step: number of steps that ended.
        part: the innermost open part of the ledger, such as `steps` or `validation`.
        changed_ns: when the ledger's part changed last, by `time.perf_counter_ns`.
    """

    step: int
    part: str
    changed_ns: int


class StandingWatch:
    """Looks at the training thread about once a second, from another thread."""

    def __init__(self, progress: Callable[[], Progress], thread_id: int, native_id: int) -> None:
        self._progress, self._thread_id, self._native_id = progress, thread_id, native_id

    def look(self) -> Standing | None:
        """Where the training thread stands; None while it moves."""
        return None

    def stacks(self) -> str:
        """The stacks of all threads, of the moment in which it was found standing; "" before."""
        return ""

    def close(self) -> None:
        """Undo what was set up."""
