"""Interval arithmetic on nanoseconds: union, intersection, difference, and length within other intervals."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.kineto.trace import Ints, Spans


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Half-open intervals that are disjoint, not empty and in ascending order.

    Attributes:
        start: start of each.
        end: end of each.

    Example:
        >>> busy = Intervals.of([0, 5, 20], [10, 12, 25])
        >>> busy.start.tolist(), busy.end.tolist(), busy.total
        ([0, 20], [12, 25], 17)
        >>> busy.within([0, 11], [11, 30]).tolist()
        [11, 6]
    """

    start: Ints
    end: Ints

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
        return (number >= 0) & (time < np.append(self.end, 0)[number])

    def _before(self, time: Ints) -> Ints:
        """Total length before each instant."""
        if not len(self):
            return np.zeros(len(time), np.int64)
        length = self.end - self.start
        done = np.cumsum(length) - length
        number = np.searchsorted(self.start, time, side="right") - 1
        inside = np.clip(time - self.start[number], 0, length[number])
        return np.where(number < 0, 0, done[number] + inside)


_MOST = 2**63 - 1


def parents(spans: Spans) -> Ints:
    """The innermost range around each range on its thread.

    Example:
        >>> start, end = np.array([0, 1, 2, 6]), np.array([9, 5, 3, 8])
        >>> parents(Spans(start=start, end=end, thread=np.zeros(4, int))).tolist()
        [-1, 0, 1, 0]
    """
    parent = [-1] * len(spans)
    start, end, thread = spans.start.tolist(), spans.end.tolist(), spans.thread.tolist()
    around: list[int] = []
    before = -1
    for row in np.argsort(spans.thread, kind="stable").tolist():
        if thread[row] != before:
            around, before = [], thread[row]
        while around and end[around[-1]] <= start[row]:
            around.pop()
        if around:
            parent[row] = around[-1]
        around.append(row)
    return np.array(parent, np.int64)


def enclosing(spans: Spans, parent: Ints, time: Ints, thread: Ints) -> Ints:
    """The innermost range around each instant on its thread."""
    found = [-1] * len(time)
    if not len(spans):
        return np.array(found, np.int64)
    count = len(spans)
    threads, times = np.concatenate((spans.thread, thread)), np.concatenate((spans.start, time))
    order = np.lexsort((np.arange(len(times)) >= count, times, threads))  # a range before an instant that it begins at
    at, of, end, around = times.tolist(), threads.tolist(), spans.end.tolist(), parent.tolist()
    row = before = -1
    for place in order.tolist():
        if of[place] != before:
            row, before = -1, of[place]
        if place < count:
            row = place
            continue
        while row >= 0 and end[row] < at[place]:
            row = around[row]
        found[place - count] = row
    return np.array(found, np.int64)


def depths(parent: Ints) -> Ints:
    """The number of ranges around each range.

    Example:
        >>> depths(np.array([-1, 0, 1, 0])).tolist()
        [0, 1, 2, 1]
    """
    depth = [-1] * (len(parent) + 1)  # here and below, the last entry is the parent (-1) of the outermost
    for row, above in enumerate(parent.tolist()):
        depth[row] = depth[above] + 1
    return np.array(depth[:-1], np.int64)


def sum_into_ancestors(parent: Ints, values: Ints) -> Ints:
    """The sum of the values of each range and all ranges in it.

    Example:
        >>> sum_into_ancestors(np.array([-1, 0, 1, 0]), np.array([1, 10, 100, 1000])).tolist()
        [1111, 110, 100, 1000]
    """
    total, around = [*values.tolist(), 0], parent.tolist()
    for row in range(len(parent) - 1, -1, -1):
        total[around[row]] += total[row]
    return np.array([max(min(value, _MOST), -_MOST) for value in total[:-1]], np.int64)


def least_around(parent: Ints, values: Ints) -> Ints:
    """The minimum of the values of each range and all ranges around it.

    Example:
        >>> least_around(np.array([-1, 0, 1, 0]), np.array([5, 7, 3, 9])).tolist()
        [5, 5, 3, 5]
    """
    least = [*values.tolist(), _MOST]
    for row, above in enumerate(parent.tolist()):
        least[row] = min(least[row], least[above])
    return np.array(least[:-1], np.int64)


def outermost_marked(parent: Ints, marked: NDArray[np.bool_]) -> Ints:
    """The outermost marked range around each range, itself included; -1 without one.

    Example:
        >>> outermost_marked(np.array([-1, 0, 1, 0]), np.array([False, True, True, False])).tolist()
        [-1, 1, 1, -1]
    """
    found = [*np.where(marked, np.arange(len(parent)), -1).tolist(), -1]
    if marked.any():
        for row, above in enumerate(parent.tolist()):
            if found[above] >= 0:
                found[row] = found[above]
    return np.array(found[:-1], np.int64)


def innermost_marked(parent: Ints, marked: NDArray[np.bool_]) -> Ints:
    """The innermost marked range around each range, itself included; -1 without one.

    Example:
        >>> innermost_marked(np.array([-1, 0, 1, 0]), np.array([True, False, True, False])).tolist()
        [0, 0, 2, 0]
    """
    found = [*np.where(marked, np.arange(len(parent)), -1).tolist(), -1]
    if marked.any():
        for row, above in enumerate(parent.tolist()):
            if found[row] < 0:
                found[row] = found[above]
    return np.array(found[:-1], np.int64)


def in_namesake(spans: Spans, parent: Ints) -> NDArray[np.bool_]:
    """Mask of the ranges that lie in another of the same name, so that counting both would count twice."""
    found = np.zeros(len(spans), bool)
    names, above = spans.name.tolist(), parent.tolist()
    around: list[int] = []
    times: defaultdict[int, int] = defaultdict(int)  # number of ranges around by name
    for row in np.argsort(spans.thread, kind="stable").tolist():
        while around and around[-1] != above[row]:
            times[names[around.pop()]] -= 1
        found[row] = times[names[row]] > 0
        around.append(row)
        times[names[row]] += 1
    return found
