"""Arithmetic on ranges of time: union, intersection and difference of intervals, and how ranges lie in each other."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.kineto.trace import Ints, Spans


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Half-open intervals that are disjoint, not empty and in ascending order."""

    start: Ints  # start of each
    end: Ints  # end of each

    @classmethod
    def of(cls, start: Ints | list[int], end: Ints | list[int]) -> Self:
        """The union of any intervals, which may overlap, be empty and come in any order."""
        start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
        some = end > start
        start, end = start[some], end[some]
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, reached = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > reached[:-1]))
        return cls(start[first], reached[np.concatenate((first[1:], [True]))])

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """Total length."""
        return int((self.end - self.start).sum())

    def __or__(self, other: "Intervals") -> "Intervals":
        return Intervals.of(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))

    def __and__(self, other: "Intervals") -> "Intervals":
        # each of ours meets a run of the others: from the first that ends after our start to the last that starts
        # before our end
        first = np.searchsorted(other.end, self.start, side="right")
        count = np.maximum(np.searchsorted(other.start, self.end, side="left") - first, 0)
        ours = np.repeat(np.arange(len(self)), count)
        theirs = np.arange(len(ours)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        return Intervals(
            np.maximum(self.start[ours], other.start[theirs]), np.minimum(self.end[ours], other.end[theirs])
        )

    def __sub__(self, other: "Intervals") -> "Intervals":
        if not len(self) or not len(other):
            return self
        low, high = min(self.start[0], other.start[0]), max(self.end[-1], other.end[-1])
        start, end = np.concatenate(([low], other.end)), np.concatenate((other.start, [high]))
        some = end > start
        return self & Intervals(start[some], end[some])

    def within(self, start: Ints | list[int], end: Ints | list[int]) -> Ints:
        """Total length within each of the given intervals, which may overlap each other."""
        return self._before(np.asarray(end, np.int64)) - self._before(np.asarray(start, np.int64))

    def contains(self, time: Ints | list[int]) -> NDArray[np.bool_]:
        """Mask of the instants that lie in an interval."""
        time = np.asarray(time, np.int64)
        number = np.searchsorted(self.start, time, side="right") - 1
        return (number >= 0) & (time < take(self.end, number))

    def _before(self, time: Ints) -> Ints:
        """Total length before each instant."""
        if not len(self):
            return np.zeros(len(time), np.int64)
        length = self.end - self.start
        done = np.cumsum(length) - length
        number = np.searchsorted(self.start, time, side="right") - 1
        inside = np.clip(time - self.start[number], 0, length[number])
        return np.where(number < 0, 0, done[number] + inside)


NOTHING: Final = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))

_MOST: Final = 2**63 - 1
_LOWEST: Final = -_MOST

_ROUNDS: Final = 32  # of jumps on columns; a real trace needs some 20, and one of extreme depth is left to a loop


def take(column: Ints, row: Ints) -> Ints:
    """Values of a column at rows; -1 at row -1."""
    return np.append(column, -1)[row]


def summed(row: Ints, values: Ints, rows: int) -> Ints:
    """The sum of the values at each row, exact."""
    total = np.zeros(rows, np.int64)
    np.add.at(total, row, values)
    return total


def places(chosen: NDArray[np.bool_]) -> Ints:
    """The place of each row among the chosen ones; -1 for the others, and at row -1."""
    return np.append(np.where(chosen, np.cumsum(chosen) - 1, -1), -1)


def ascending(instants: Ints, moved: Ints) -> tuple[Ints, Ints]:
    """Instants in order, each once, and to when they are moved, which never goes back: to interpolate between."""
    order = np.lexsort((moved, instants))
    instants, moved = instants[order], np.maximum.accumulate(moved[order])
    kept = np.diff(instants, prepend=instants[0] - 1) > 0
    return instants[kept], moved[kept]


class Nesting:
    """How ranges lie in each other, thread by thread."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._order = np.argsort(spans.thread, kind="stable")  # each range directly before those in it
        before = np.arange(len(spans)) - 1
        before[np.flatnonzero(np.diff(spans.thread[self._order], prepend=_LOWEST))] = -1
        # a range that has ended is around no later one
        around = _climb(before, spans.start[self._order], before, spans.end[self._order])
        # for each range the innermost one around it, which after a clock jump may end before it; -1 for the outermost
        self.parent = np.empty(len(around), np.int64)
        self.parent[self._order] = take(self._order, around)

    @cached_property
    def _behind(self) -> Ints:
        """For each range in `_order` the position behind all in it."""
        position = np.empty(len(self), np.int64)
        position[self._order] = np.arange(len(self))
        parent = take(position, self.parent[self._order])
        last, nested = np.arange(len(self)), np.flatnonzero(parent >= 0)
        last[parent[nested]] = nested  # the last to be written is the last child
        return _follow(last) + 1

    def __len__(self) -> int:
        return len(self.parent)

    def enclosing(self, time: Ints, thread: Ints) -> Ints:
        """The innermost range around each instant on its thread, its end included; -1 without one."""
        begun = np.full(len(time), -1)
        of_thread = self._spans.thread[self._order]
        instants = np.argsort(thread, kind="stable")
        for own in np.split(instants, np.flatnonzero(np.diff(thread[instants])) + 1) if len(instants) else ():
            first, end = np.searchsorted(of_thread, (thread[own[0]], thread[own[0]] + 1))
            rows = self._order[first:end]
            begun[own] = np.append(rows, -1)[np.searchsorted(self._spans.start[rows], time[own], side="right") - 1]
        return _climb(begun, time - 1, self.parent, self._spans.end)

    def depth(self) -> Ints:
        """The number of ranges around each range."""
        depth, above = (np.append(self.parent, -1) >= 0).astype(np.int64), np.append(self.parent, -1)
        while (above >= 0).any():
            depth, above = depth + depth[above], above[above]
        return depth[:-1]

    def sums(self, values: Ints) -> Ints:
        """The sum of the values of each range and all ranges in it."""
        exact = values if np.abs(values).sum(dtype=float) < _MOST / 2 else values.astype(object)
        total = np.zeros(len(self) + 1, exact.dtype)
        np.cumsum(exact[self._order], out=total[1:])
        inside = total[self._behind] - total[:-1]
        sums = np.empty(len(self), np.int64)
        sums[self._order] = np.clip(inside, -_MOST, _MOST, out=inside)
        return sums

    def least_around(self, values: Ints) -> Ints:
        """The minimum of the values of each range and all ranges around it."""
        least, above = np.append(values, _MOST), np.append(self.parent, -1)
        while (above >= 0).any():
            least, above = np.minimum(least, least[above]), above[above]
        return least[:-1]

    def innermost(self, marked: NDArray[np.bool_]) -> Ints:
        """The innermost marked range around each range, itself included; -1 without one."""
        return _follow(np.where(marked, np.arange(len(self)), self.parent))

    def outermost(self, marked: NDArray[np.bool_]) -> Ints:
        """The outermost marked range around each range, itself included; -1 without one."""
        innermost = self.innermost(marked)
        further = take(innermost, self.parent)
        return _follow(np.where(further >= 0, further, innermost))

    def in_namesake(self) -> NDArray[np.bool_]:
        """Mask of the ranges that lie in another of the same name, so that counting both would count twice."""
        name = self._spans.name[self._order]
        by_name = np.argsort(name, kind="stable")
        group = name[by_name] * (len(self) + 1)
        behind = np.maximum.accumulate(group + self._behind[by_name])
        inside = np.zeros(len(self), bool)
        inside[self._order[by_name[1:]]] = behind[:-1] > (group + by_name)[1:]
        return inside


def _climb(row: Ints, time: Ints, above: Ints, end: Ints) -> Ints:
    """Each row's first of itself, the row above it, and so on that ends after a time; -1 without one.

    The result is written to `row`. It may be `above`: then a row above that has ended makes way for its own.
    """
    search = np.arange(len(row))
    for _ in range(_ROUNDS):
        search = search[row[search] >= 0]
        search = search[end[row[search]] <= time[search]]
        if not len(search):
            return row
        row[search] = above[row[search]]
    ends, further = end.tolist(), above.tolist()
    for each in search[np.argsort(time[search], kind="stable")].tolist():
        at, until, passed = int(row[each]), int(time[each]), []
        while at >= 0 and ends[at] <= until:
            passed.append(at)
            at = further[at]
        for ended in passed:  # for later times too
            further[ended] = at
        row[each] = at
    return row


def _follow(jump: Ints) -> Ints:
    """Where jumps from row to row end: at a row that jumps to itself, or at -1."""
    while True:
        further = take(jump, jump)
        if (further == jump).all():
            return further
        jump = further
