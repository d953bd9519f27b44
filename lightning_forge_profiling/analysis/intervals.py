"""Interval arithmetic on nanoseconds: union, intersection, difference, and length within other intervals."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.kineto.trace import Ints


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
