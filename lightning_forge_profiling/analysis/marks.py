"""Annotations that mark steps (`ProfilerStep#N`) and the callbacks' built-in regions."""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.kineto.trace import Ints, Spans, Trace
from lightning_forge_profiling.names import MARK_PREFIX

_STEP: Final = re.compile(r"ProfilerStep#\d{1,18}")

_ROUNDING_NS: Final = 2_000
"""A step may seem to begin this much before the end of the previous one: older traces round to microseconds."""
_OVERLAP: Final = 4
"""The step with the next number may begin in the last 1/4 of a step."""
_MOST_SETS: Final = 4
_AS_MUCH: Final = 0.9
"""Among the sets of marks with at least this share of the busiest one's work, the one with the most steps is taken."""


def step_marks(trace: Trace) -> NDArray[np.bool_]:
    """Mask of the annotations that mark steps, of any profiler."""
    return named(trace, trace.annotations, _STEP)


def region_marks(trace: Trace) -> Spans:
    """The callbacks' marks of built-in regions, as if on one thread.

    Autograd's threads launch work while the main thread waits inside a mark.
    """
    annotations = trace.annotations
    rows = np.flatnonzero(named(trace, annotations, lambda name: name.startswith(MARK_PREFIX)))
    return Spans(
        start=annotations.start[rows],
        end=annotations.end[rows],
        name=annotations.name[rows],
        thread=np.zeros(len(rows), np.int64),
    )


def step_numbers(trace: Trace, rows: Ints) -> Ints:
    """The N of `ProfilerStep#N`."""
    return np.array([int(trace.names[name].partition("#")[2]) for name in trace.annotations.name[rows]], np.int64)


def chosen_marks(trace: Trace) -> Ints:
    """Rows of the annotations that mark the steps, in order of time; empty without any.

    If two profilers or threads mark steps at the same time, the marks of the thread with the most work are taken.
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
    """The first mark, and after each the one with the next number on its thread, else the next one after its end."""
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
    """The number of operators and runtime calls within the marks, on their thread."""
    start, end = trace.annotations.start[marks], trace.annotations.end[marks]
    done = 0
    for table in (trace.operators, trace.calls):
        place = np.searchsorted(start, table.start, side="right") - 1
        inside = (place >= 0) & (table.start < end[place]) & (table.thread == trace.annotations.thread[marks[0]])
        done += int(inside.sum())
    return done
