"""Chooses the steps that are split into regions, so that timing stays within a declared share of the run."""

from collections import deque
from math import inf
from statistics import fmean, median
from typing import Final

DEFAULT_SHARE: Final = 0.005  # half a percent of the step: far below what runs differ by anyway

# multiples of an irrational number, modulo 1, fill the unit interval evenly, and so do those of each k-th step for any
# k (Weyl's equidistribution theorem). So steps chosen by them cover each phase of an accumulation cycle or a log
# interval alike, and no random number is drawn from the run's own. Of the square roots up to 400 this one does so
# soonest, over cycles of 2 to 100 steps, without choosing steps in a row.
_STRIDE: Final = 218**0.5 % 1

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
