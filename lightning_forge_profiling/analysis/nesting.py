"""Which range lies in which: ranges on a thread nest, as the calls they stand for do."""

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.trace import Ints, Spans

__all__ = ["ancestors", "enclosing", "innermost_marked", "outermost_marked", "parents", "sum_into_ancestors"]


def parents(spans: Spans) -> Ints:
    """The innermost range around each range on its thread.

    Args:
        spans: in order of their start, an outer one before the inner ones that begin with it.

    Returns:
        Positions in `spans`; -1 for the outermost.

    Example:
        >>> start, end = np.array([0, 1, 2, 6]), np.array([9, 5, 3, 8])
        >>> parents(Spans(start=start, end=end, thread=np.zeros(4, int))).tolist()
        [-1, 0, 1, 0]
    """
    parent = np.full(len(spans), -1)
    if not len(spans):
        return parent
    rest = np.argsort(spans.thread, kind="stable")
    # one after the other on one axis, the threads cannot overlap
    shift = spans.thread * (int(spans.end.max()) - int(spans.start.min()) + 1)
    start, end = spans.start + shift, spans.end + shift
    while len(rest):
        # the outermost of those that are left, which the next round leaves out
        reached = np.maximum.accumulate(end[rest])
        outermost = np.concatenate(([True], start[rest][1:] >= reached[:-1]))
        inner = ~outermost
        parent[rest[inner]] = rest[outermost][np.cumsum(outermost)[inner] - 1]
        rest = rest[inner]
    return parent


def enclosing(spans: Spans, parent: Ints, time: Ints, thread: Ints) -> Ints:
    """The innermost range around each instant on its thread.

    Args:
        spans: the ranges.
        parent: as `parents` gives them.
        time: instants.
        thread: the thread of each.

    Returns:
        Positions in `spans`; -1 where there is none.
    """
    found = np.full(len(time), -1)
    if not len(spans):
        return found
    for number in np.unique(thread):
        rows = np.flatnonzero(spans.thread == number)
        if not len(rows):
            continue
        asked = np.flatnonzero(thread == number)
        last = np.searchsorted(spans.start[rows], time[asked], side="right") - 1
        found[asked] = np.where(last >= 0, rows[last], -1)
    while (over := (found >= 0) & (spans.end[found] < time)).any():
        found[over] = parent[found[over]]
    return found


def ancestors(parent: Ints, row: int) -> list[int]:
    """A range and those around it, from the inside out.

    Example:
        >>> ancestors(np.array([-1, 0, 1, 0]), 2)
        [2, 1, 0]
    """
    found = []
    while row >= 0:
        found.append(int(row))
        row = parent[row]
    return found


def sum_into_ancestors(parent: Ints, values: Ints) -> Ints:
    """For each range the sum of the values of itself and all ranges in it.

    Example:
        >>> sum_into_ancestors(np.array([-1, 0, 1, 0]), np.array([1, 10, 100, 1000])).tolist()
        [1111, 110, 100, 1000]
    """
    total = values.copy()
    depth = _depth(parent)
    for level in range(int(depth.max(initial=0)), 0, -1):
        rows = np.flatnonzero(depth == level)
        np.add.at(total, parent[rows], total[rows])
    return total


def outermost_marked(parent: Ints, marked: NDArray[np.bool_]) -> Ints:
    """For each range the outermost marked one around it, itself included; -1 where none is.

    Example:
        >>> outermost_marked(np.array([-1, 0, 1, 0]), np.array([False, True, True, False])).tolist()
        [-1, 1, 1, -1]
    """
    found = np.where(marked, np.arange(len(parent)), -1)
    if not marked.any():
        return found
    depth = _depth(parent)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero(depth == level)
        above = found[parent[rows]]
        found[rows] = np.where(above >= 0, above, found[rows])
    return found


def innermost_marked(parent: Ints, marked: NDArray[np.bool_]) -> Ints:
    """For each range the innermost marked one around it, itself included; -1 where none is.

    Example:
        >>> innermost_marked(np.array([-1, 0, 1, 0]), np.array([True, False, True, False])).tolist()
        [0, 0, 2, 0]
    """
    found = np.where(marked, np.arange(len(parent)), -1)
    depth = _depth(parent)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = np.flatnonzero((depth == level) & ~marked)
        found[rows] = found[parent[rows]]
    return found


def _depth(parent: Ints) -> Ints:
    """How many ranges are around each."""
    depth = np.zeros(len(parent), np.int64)
    rows = np.flatnonzero(parent >= 0)
    above = parent[rows]
    while len(rows):
        depth[rows] += 1
        above = parent[above]
        inside = above >= 0
        rows, above = rows[inside], above[inside]
    return depth
