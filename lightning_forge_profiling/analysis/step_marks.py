"""The marks of the steps in a trace: `ProfilerStep#N`, of one profiler or of several at the same time."""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.kineto.trace import Ints, Trace

__all__ = ["chosen_marks", "step_marks", "step_numbers"]

_STEP: Final = re.compile(r"ProfilerStep#\d{1,18}")

_ROUNDING_NS: Final = 2_000
"""A step may seem to begin so much before the end of the last: older traces have whole microseconds."""
_OVERLAP: Final = 4
"""The step with the next number may begin in the last so-manieth part of one."""
_MOST_SETS: Final = 4
_AS_MUCH: Final = 0.9
"""A set with so much of the host's work as the one with most of it is as good: that with more steps is taken."""


def step_marks(trace: Trace) -> NDArray[np.bool_]:
    """Which annotations mark steps, whoever made them."""
    return named(trace, trace.annotations, _STEP)


def step_numbers(trace: Trace, rows: Ints) -> Ints:
    """The N of `ProfilerStep#N`.

    Args:
        trace: the trace.
        rows: those of annotations that mark steps.
    """
    return np.array([int(trace.names[name].partition("#")[2]) for name in trace.annotations.name[rows]], np.int64)


def chosen_marks(trace: Trace) -> Ints:
    """Rows of the annotations that mark the steps, in order of time; empty where nothing does.

    Where two profilers, or threads, mark steps at the same time, each numbering its own, these are those of one of
    them: of the thread that works most.
    """
    rows = np.flatnonzero(step_marks(trace))
    if (trace.annotations.start[rows[1:]] >= trace.annotations.end[rows[:-1]] - _ROUNDING_NS).all():
        return rows
    sets: list[Ints] = []
    while len(rows) and len(sets) < _MOST_SETS:
        sets.append(np.fromiter(_successive(trace, rows), np.int64))
        rows = rows[~np.isin(rows, sets[-1])]
    if len(sets) < 2:  # noqa: PLR2004
        return sets[0] if sets else rows
    work = [_work(trace, marks) for marks in sets]
    enough = _AS_MUCH * max(work)
    return max((marks for marks, done in zip(sets, work, strict=True) if done >= enough), key=len)


def _successive(trace: Trace, rows: Ints) -> Iterator[int]:
    """The first mark, and after each the one with the next number on its thread, or else the next behind its end."""
    start, end, thread = trace.annotations.start[rows], trace.annotations.end[rows], trace.annotations.thread[rows]
    number = step_numbers(trace, rows)
    recording = np.searchsorted(trace.begins, start, side="right")
    places: dict[tuple[int, ...], list[int]] = {}
    for place, key in reversed([*enumerate(zip(recording.tolist(), thread.tolist(), number.tolist(), strict=True))]):
        places.setdefault(key, []).append(place)
    soonest, behind = end - (end - start) // _OVERLAP, np.searchsorted(start, end - _ROUNDING_NS)
    at = 0
    while at < len(rows):
        yield int(rows[at])
        following = places.get((int(recording[at]), int(thread[at]), int(number[at]) + 1), [])
        while following and (following[-1] <= at or start[following[-1]] < soonest[at]):
            following.pop()
        at = following[-1] if following else max(int(behind[at]), at + 1)


def _work(trace: Trace, marks: Ints) -> int:
    """How many operators and calls the marks' thread was in meanwhile."""
    start, end = trace.annotations.start[marks], trace.annotations.end[marks]
    done = 0
    for table in (trace.operators, trace.calls):
        place = np.searchsorted(start, table.start, side="right") - 1
        inside = (place >= 0) & (table.start < end[place]) & (table.thread == trace.annotations.thread[marks[0]])
        done += int(inside.sum())
    return done
