"""Nesting of ranges on a thread: parents, depths, and sums and masks over ancestors.

All functions take time linear in the number of ranges (sorting aside), however deep they nest: traces are not trusted.
An outer range precedes those in it, so one pass over `parent` visits ancestors first.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.kineto.trace import Ints, Spans

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
