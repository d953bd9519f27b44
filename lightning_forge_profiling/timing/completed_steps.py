"""Steps that have ended on the host, until the GPU has completed them and their times enter the run's totals."""

from collections import deque
from typing import Final, NamedTuple, TypeAlias

from lightning_forge_profiling.timing.budget import TimingBudget
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import StepAssembler, StepTimes, StepTiming, StepWork

# reading completed steps some at a time asks the GPU less often and runs the same few lines while they are warm
_DELIVER_EVERY: Final = 64

# and at least once a second, for who watches
DELIVER_NS: Final = 10**9

# so many intervals are read at once at the most: a region in each layer of a large model makes hundreds a step
DELIVER_ABOVE: Final = 1024

# of a step of which only the end is timed: its number, work, how long it took, what timing took and when it ended, all
# by the host's clock in nanoseconds, whether every event in it could be recorded; a tuple is made in a fifth of a
# NamedTuple's time
PlainStep: TypeAlias = tuple[int, StepWork, int, int, int, bool]


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    step: int  # its number, which is the tag of its intervals
    work: StepWork
    left_out: LeftOut | None
    timing: StepTiming
    complete: bool  # whether every event in it could be recorded


class CompletedSteps:
    """Assembles the intervals that the GPU has completed into steps.

    Plain steps, of which only the end is timed, are collected and entered some at a time: the lines that do so are then
    in the caches. In a run that the host sets the pace of, each line of Python in a step costs several times what it
    takes in a loop.
    """

    def __init__(self, timers: CUDATimerCollection, totals: RunTotals, budget: TimingBudget) -> None:
        self.plain: list[PlainStep] = []
        self.plain_until = 0  # the first step that is not plain, as far as is known
        self.due_ns = 0  # when completed steps are to be read, by the host's clock
        self.due_step = _DELIVER_EVERY  # likewise, by the number of the step
        self.dropped = 0  # number of intervals that could not be recorded until the latest step's end
        self._timers, self._totals, self._budget = timers, totals, budget
        self._assembler = StepAssembler()
        self._ended: deque[EndedStep] = deque(maxlen=4096)
        self._unread = 0

    def expect(self, ended: EndedStep) -> None:
        """Add a step that has ended on the host, and whose times will follow."""
        self._ended.append(ended)

    def plan(self, step: int, ledger: LedgerClock, *, plain: bool) -> None:
        """Find out how many steps are plain from this one on: those whose next is not split."""
        last = self.due_step - 1 if plain else step
        while step < last and not self._budget.splits(step + 1) and not ledger.marks_at(step + 1):
            step += 1
        self.plain_until = step

    def settle(self, ledger: LedgerClock, *, own_counts: bool) -> None:
        """Enter plain steps; `own_counts` is whether the host's time counts to what timing costs the run."""
        ended, self.plain = self.plain, []
        for step, work, step_ns, own_ns, ended_ns, complete in ended:
            timing = StepTiming(timing_us=own_ns / 1e3, ended_ns=ended_ns)
            self._ended.append(EndedStep(step, work, None, timing, complete))
            self._budget.add(step_ns=step_ns, own_ns=own_ns if own_counts else 0, split=False)
            ledger.move_own(own_ns)

    def deliver(self, step: int, now_ns: int) -> None:
        """Enter what the GPU has completed before this step. Never waits."""
        self.due_step, self.due_ns = step + _DELIVER_EVERY, now_ns + DELIVER_NS
        timers = self._timers
        intervals = timers.harvest()
        if timers.unread != self._unread:  # some fell out: of which of the steps that wait is not known
            self._unread = timers.unread
            self._ended = deque((ended._replace(complete=False) for ended in self._ended), self._ended.maxlen)
        for interval in intervals:
            times = self._assembler.add(interval)
            if times is not None:
                self._enter(times)
        # a step that has ended on the host and has left nothing to wait for is complete without a later one behind it
        if self._ended and self._ended[-1].step == self._assembler.step and not timers.backlog:
            last = self._assembler.flush()
            if last is not None:
                self._enter(last)

    def flush(self, unfinished: int) -> None:
        """Enter what is left at the end of the run."""
        last = self._assembler.flush()
        if last is not None:
            self._enter(last)
            if last.step == unfinished:
                self._totals.add_excluded(last)

    def _enter(self, times: StepTimes) -> None:
        while self._ended and self._ended[0].step <= times.step:
            ended = self._ended.popleft()
            if ended.step == times.step and ended.complete:
                shown = times if ended.timing.saw_all else times.whole()
                self._totals.add(shown, ended.work, ended.left_out, ended.timing)
            else:
                self._totals.skip(ended.work)
