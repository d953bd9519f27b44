"""Plain steps, of which only the end is timed: a few lines of Python in each, and their accounting in bulk."""

from typing import TypeAlias

from lightning_forge_profiling.callbacks.completed_steps import CompletedSteps, EndedStep
from lightning_forge_profiling.timing.budget import TimingBudget
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import StepTiming, StepWork

# number, work, how long it took and what timing it took and when it ended, all by the host's clock in nanoseconds,
# whether every event in it could be recorded; a tuple is made in a fifth of a NamedTuple's time
PlainStep: TypeAlias = tuple[int, StepWork, int, int, int, bool]


class PlainSteps:
    """Collects steps that have ended, and enters them some at a time: the lines that do so are then in the caches.

    In a run that the host sets the pace of, each line of Python in a step costs several times what it takes in a loop.
    """

    def __init__(self, completed: CompletedSteps, budget: TimingBudget, ledger: LedgerClock) -> None:
        self._completed, self._budget, self._ledger = completed, budget, ledger
        self.until = 0  # the first step that is not plain, as far as is known
        self.ended: list[PlainStep] = []

    def plan(self, step: int, last: int) -> None:
        """Find out how many steps are plain: from this one on those whose next is not split, but `last` at the most."""
        while step < last and not self._budget.splits(step + 1) and not self._ledger.marks_at(step + 1):
            step += 1
        self.until = step

    def settle(self, *, own_counts: bool) -> None:
        """Enter them; `own_counts` is whether the host's time counts to what timing costs the run."""
        ended, self.ended = self.ended, []
        for step, work, step_ns, own_ns, ended_ns, complete in ended:
            timing = StepTiming(timing_us=own_ns / 1e3, ended_ns=ended_ns)
            self._completed.expect(EndedStep(step, work, None, timing, complete))
            self._budget.add(step_ns=step_ns, own_ns=own_ns if own_counts else 0, split=False)
            self._ledger.move_own(own_ns)
