"""Which steps are split into regions, and steps that have ended on the host, until their times enter the totals."""

from collections import deque
from math import inf
from statistics import fmean, median
from typing import Final, NamedTuple, TypeAlias

from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import StepAssembler, StepTimes, StepTiming, StepWork

DEFAULT_SHARE: Final = 0.005  # half a percent of the step: far below what runs differ by anyway

# multiples of an irrational number, modulo 1, fill the unit interval evenly, and so do those of each k-th step for any
# k (Weyl's equidistribution theorem). So steps chosen by them cover each phase of an accumulation cycle or a log
# interval alike, and no random number is drawn from the run's own. The golden ratio is furthest from every fraction:
# at any rate the chosen steps are at most twice as far apart as on average, so the whole run is covered too.
_STRIDE: Final = (5**0.5 - 1) / 2

_LATEST: Final = 64
_DECIDE_EVERY: Final = 16

# switching every step's timing on and off within one run cost 1.3 to 1.9 times what it took by its own clock (H200,
# 2026-11-22, an earlier version): presumably its lines evict others from the caches, which the training then misses
_COUNTED: Final = 2

# where even the ends of steps cost more than the share, regions of some steps are timed all the same
_LOWEST_RATE: Final = 1 / 64

# steps of more than this multiple of the median are long. Where those that were not split take a tenth of the time,
# half of the steps are split until some as long are among them: else nobody knows what they do.
_LONG: Final = 2.0
_MUCH: Final = 0.1
_ENOUGH_LONG: Final = 3
_SEARCH_RATE: Final = 0.5
_AS_LONG: Final = 0.25  # of those that were not split, weighted by their time
_FEW: Final = 2  # so many, as a stall of minutes, will not come again, and are not searched for

# cost of a step timed as a whole relative to a split one, until it is measured: one event of seven, and counts
_UNSPLIT_TO_SPLIT: Final = 0.25


class TimingBudget:
    """Chooses which steps are split into regions.

    Splitting a step costs several events; the others have their end timed only. The fraction of steps that may be split
    follows from the measured cost of both kinds.
    """

    def __init__(self, share: float | None) -> None:
        self.rate = 1.0  # the fraction of steps that are split from here on
        self._share = share
        self._step_ns: deque[int] = deque(maxlen=_LATEST)
        self._split_ns: deque[int] = deque(maxlen=_LATEST)
        self._unsplit_ns: deque[int] = deque(maxlen=_LATEST)
        self._undecided = 0
        self._typical_ns = inf
        self._all_ns = self._missed_ns = 0  # of steps, and of the long ones that were not split
        self._missed: deque[int] = deque(maxlen=_LATEST)  # the latest of those
        self._found: deque[int] = deque(maxlen=_LATEST)  # and of those that were

    def splits(self, step: int) -> bool:
        """Whether the regions of a step are timed."""
        return self.rate >= 1 or step * _STRIDE % 1 < self.rate

    def add(self, *, step_ns: int, own_ns: int, split: bool, chosen: bool = True) -> None:
        """Add the cost of a step, which was split because it was chosen, or had to be."""
        if self._share is None:
            return
        if chosen:
            self._all_ns += step_ns
            if step_ns > _LONG * self._typical_ns:
                self._note_long(step_ns, split=split)
        self._step_ns.append(step_ns)
        (self._split_ns if split else self._unsplit_ns).append(_COUNTED * own_ns)
        self._undecided += 1
        if self._undecided >= _DECIDE_EVERY and self._split_ns:
            self._undecided = 0
            self._typical_ns = median(self._step_ns)
            self.rate = self._affordable(self._share * self._typical_ns)
            if self._misses_long_ones():
                self.rate = max(self.rate, _SEARCH_RATE)

    def _note_long(self, step_ns: int, *, split: bool) -> None:
        (self._found if split else self._missed).append(step_ns)
        self._missed_ns += 0 if split else step_ns

    def _misses_long_ones(self) -> bool:
        """Whether long steps that take much of the time were not split, and too few as long ones were."""
        missed = sorted(self._missed)
        usual, longest = missed[:-_FEW], missed[-_FEW:]
        if not usual or self._missed_ns - sum(longest) <= _MUCH * self._all_ns:
            return False
        as_long_ns = _AS_LONG * sum(ns * ns for ns in usual) / sum(usual)
        return sum(ns >= as_long_ns for ns in self._found) < _ENOUGH_LONG

    def _affordable(self, budget_ns: float) -> float:
        split_ns = fmean(self._split_ns)
        unsplit_ns = fmean(self._unsplit_ns) if self._unsplit_ns else _UNSPLIT_TO_SPLIT * split_ns
        if split_ns <= budget_ns:
            return 1.0
        if unsplit_ns >= budget_ns:
            return _LOWEST_RATE
        return max((budget_ns - unsplit_ns) / (split_ns - unsplit_ns), _LOWEST_RATE)


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
                shown = times if ended.timing.all_boundaries_seen else times.whole()
                self._totals.add(shown, ended.work, ended.left_out, ended.timing)
            else:
                self._totals.skip(ended.work)
