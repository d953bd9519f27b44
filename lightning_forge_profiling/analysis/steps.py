"""Step boundaries on the host and on the GPU, and time measured per step."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.launches import LAUNCHES, Links, launched_before, named
from lightning_forge_profiling.kineto.trace import Ints, Spans, Trace
from lightning_forge_profiling.names import EXCLUDED, MARK_PREFIX

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
    marks = trace.annotations.at(named(trace, trace.annotations, lambda name: name.startswith(MARK_PREFIX)))
    return replace(marks, thread=np.zeros(len(marks), np.int64))


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
    for at, key in reversed([*enumerate(zip(recording.tolist(), thread.tolist(), number.tolist(), strict=True))]):
        places.setdefault(key, []).append(at)
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
        mark = np.searchsorted(start, table.start, side="right") - 1
        inside = (mark >= 0) & (table.start < end[mark]) & (table.thread == trace.annotations.thread[marks[0]])
        done += int(inside.sum())
    return done


_NO_STEP: Final = tuple(MARK_PREFIX + name for name in EXCLUDED)
"""Validation and checkpoints as the callbacks mark them: between two batches, and so inside the next `ProfilerStep`."""

_PER_STEP: Final = ("number", "host_start", "host_end", "start", "end", "whole")

_BEGINS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)StreamBeginCapture(?:_\w+)?")
_ENDS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)StreamEndCapture(?:_\w+)?")

_LAUNCHES_DONE: Final = 0.9
"""A step is whole if at least this share of its launches has GPU work."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps in order of time. Arrays have one entry per step, except those of the scopes."""

    number: Ints  # the N of `ProfilerStep#N`
    host_start: Ints  # start of the step on the host, nanoseconds
    host_end: Ints  # its end on the host, which is the start of the next step
    start: Ints  # start of its window on the GPU: the GPU has completed the previous step
    end: Ints  # end of its window on the GPU: the GPU has completed this step's work
    whole: NDArray[np.bool_]  # False for a step that is cut off
    scope: Intervals  # the windows on the GPU without validation and checkpoints, disjoint and ascending
    scope_step: Ints  # for each interval of the scope the position of its step
    host_scope: Intervals  # the steps on the host without validation and checkpoints
    host_scope_step: Ints  # for each interval of the host scope the position of its step
    marks: Ints  # rows of `Trace.annotations` that mark the steps; empty if the whole recording is one step

    def __len__(self) -> int:
        return len(self.number)

    def measure(self, covered: Intervals) -> Ints:
        """Total length of the intervals within each step's window on the GPU, in nanoseconds."""
        return self._sum(covered, self.scope, self.scope_step)

    def measure_host(self, covered: Intervals) -> Ints:
        """Total length of the intervals within each step on the host."""
        return self._sum(covered, self.host_scope, self.host_scope_step)

    def length(self) -> Ints:
        """Length of each step's window on the GPU, without validation and checkpoints."""
        return self.measure(self.scope)

    def host_length(self) -> Ints:
        """Length of each step on the host, without validation and checkpoints."""
        return self.measure_host(self.host_scope)

    def of_host(self, time: Ints) -> Ints:
        """The step of each instant on the host; -1 for none, and for validation and checkpoints."""
        return _belongs(time, self.host_scope, self.host_scope_step)

    def of_gpu(self, time: Ints) -> Ints:
        """The step whose window on the GPU each instant lies in; -1 for none."""
        return _belongs(time, self.scope, self.scope_step)

    def only(self, chosen: NDArray[np.bool_]) -> Self:
        """Some of the steps."""
        place = np.cumsum(chosen) - 1
        scope, host_scope = chosen[self.scope_step], chosen[self.host_scope_step]
        return replace(
            self,
            **{name: getattr(self, name)[chosen] for name in _PER_STEP},
            scope=Intervals(self.scope.start[scope], self.scope.end[scope]),
            scope_step=place[self.scope_step[scope]],
            host_scope=Intervals(self.host_scope.start[host_scope], self.host_scope.end[host_scope]),
            host_scope_step=place[self.host_scope_step[host_scope]],
        )

    def _sum(self, covered: Intervals, scope: Intervals, step: Ints) -> Ints:
        return np.bincount(step, covered.within(scope.start, scope.end), len(self)).astype(np.int64)


def find_steps(trace: Trace, links: Links) -> Steps:
    """Find the steps of a trace.

    A step on the host lasts from its `ProfilerStep#N` to the next. GPU work belongs to the step in which the host
    launched it. The window of a step on the GPU begins when the previous step's work completes and ends when its own
    does.
    """
    rows = chosen_marks(trace)
    if len(rows):
        number = step_numbers(trace, rows)
        host_start, host_end = trace.annotations.start[rows], trace.annotations.end[rows]
        recording = np.searchsorted(trace.begins, host_start, side="right")
        # a step may have been marked more than once
        first = np.concatenate(([True], (number[1:] != number[:-1]) | (recording[1:] != recording[:-1])))
        number, host_start, host_end, recording = number[first], host_start[first], host_end[first], recording[first]
        same = recording[1:] == recording[:-1]
        host_end[:-1] = np.where(same, host_start[1:], host_end[:-1])
    else:
        first_event, last_event = trace.extent
        number, host_start, host_end = np.array([0]), np.array([first_event]), np.array([last_event])
        same = np.zeros(0, bool)
    start, end = _windows(trace, links, host_start, host_end, same)
    whole = _whole(trace, links, host_start, host_end)
    not_host, not_gpu = _no_step(trace, links)
    scope, scope_step = _scope(start, end, not_gpu)
    host_scope, host_scope_step = _scope(host_start, host_end, not_host)
    return Steps(number, host_start, host_end, start, end, whole, scope, scope_step, host_scope, host_scope_step, rows)


def _windows(
    trace: Trace, links: Links, host_start: Ints, host_end: Ints, same: NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """The steps' windows on the GPU; the steps on the host if no GPU work has a known launch."""
    steps = len(host_start)
    linked = np.flatnonzero(links.linked)
    if not len(linked):
        return host_start.copy(), host_end.copy()
    step = np.searchsorted(host_start, links.time[linked], side="right") - 1
    inside = (step >= 0) & (links.time[linked] < host_end[step])
    completed = np.full(steps, np.iinfo(np.int64).min)
    np.maximum.at(completed, step[inside], trace.gpu.end[linked[inside]])
    first = np.full(steps, np.iinfo(np.int64).max)
    np.minimum.at(first, step[inside], trace.gpu.start[linked[inside]])
    # work of a warm-up step, even if it overlaps work of the first step on another stream
    warm_up = launched_before(trace, links)
    warm_until = np.zeros(len(trace.begins) + 1, np.int64)
    of_work = np.searchsorted(trace.begins, trace.gpu.start, side="right")
    np.maximum.at(warm_until, of_work[warm_up], trace.gpu.end[warm_up])
    recording = np.searchsorted(trace.begins, host_start, side="right")
    # work of unknown launch that began before the step's own
    unknown = ~warm_up
    unknown[linked[inside]] = False
    begun, busy_until = trace.gpu.start[unknown], np.maximum.accumulate(trace.gpu.end[unknown])
    before = np.searchsorted(begun, np.minimum(first, host_end), side="left")
    left_over = np.where(before > 0, np.append(busy_until, 0)[before - 1], 0)
    start, end = np.empty(steps, np.int64), np.empty(steps, np.int64)
    for number in range(steps):
        if number and same[number - 1]:
            start[number] = end[number - 1]
        else:
            start[number] = max(host_start[number], left_over[number], warm_until[recording[number]])
        done = completed[number] if first[number] < np.iinfo(np.int64).max else host_end[number]
        end[number] = max(start[number], done)
    return start, end


def _whole(trace: Trace, links: Links, host_start: Ints, host_end: Ints) -> NDArray[np.bool_]:
    """Mask of the steps whose GPU work is all in the trace, by their kernel launches.

    Other calls do not show it: a small memset or copy may leave no GPU work, and neither does a launch while a CUDA
    graph is captured.
    """
    launched = np.zeros(len(trace.calls), bool)
    launched[links.call[links.call >= 0]] = True
    kinds = np.unique(trace.calls.name[launched])
    launching = named(trace, trace.calls, LAUNCHES) & np.isin(trace.calls.name, kinds)
    launches = np.flatnonzero(launching & ~_captures(trace).contains(trace.calls.start))
    step = np.searchsorted(host_start, trace.calls.start[launches], side="right") - 1
    inside = (step >= 0) & (trace.calls.start[launches] < host_end[step])
    asked = np.bincount(step[inside], minlength=len(host_start))
    done = np.bincount(step[inside], launched[launches[inside]], len(host_start))
    recording = np.maximum(np.searchsorted(trace.begins, host_start, side="right") - 1, 0)
    # a file that is cut off has all events before its last one only if they are in order of time
    until = [cut and (cut.time if cut.in_order else -1) for cut in trace.cuts]
    ends = np.array([np.iinfo(np.int64).max if end is None else end for end in until])[recording]
    enough = np.where([cut is None for cut in trace.cuts], _LAUNCHES_DONE, 1)[recording]
    whole: NDArray[np.bool_] = (done >= enough * asked) & (host_end < ends)
    return whole


def _captures(trace: Trace) -> Intervals:
    """When CUDA graphs are captured: launches of any thread then go into the graph."""
    calls = trace.calls
    begins = calls.start[named(trace, calls, _BEGINS_CAPTURE)]
    ends = np.append(np.sort(calls.end[named(trace, calls, _ENDS_CAPTURE)]), np.iinfo(np.int64).max)
    return Intervals.of(begins, ends[np.searchsorted(ends, begins, side="right")])


def _no_step(trace: Trace, links: Links) -> tuple[Intervals, Intervals]:
    """The time of validation and checkpoints, on the host and on the GPU."""
    if not len(trace.annotations):
        return Intervals.of([], []), Intervals.of([], [])
    annotations = trace.annotations
    marks = np.array([name in _NO_STEP for name in trace.names])[annotations.name]
    host = Intervals.of(annotations.start[marks], annotations.end[marks])
    # on the GPU such a range begins once the host has reached it and earlier work is complete, and ends likewise
    order = np.argsort(links.time, kind="stable")
    order = order[links.linked[order]]
    time, completed = links.time[order], np.maximum.accumulate(trace.gpu.end[order])
    begin = np.maximum(host.start, _completed(time, completed, host.start))
    end = np.maximum(host.end, _completed(time, completed, host.end))
    return host, Intervals.of(begin, end)


def _completed(launch: Ints, completed: Ints, time: Ints) -> Ints:
    """When all work launched before each instant is complete."""
    number = np.searchsorted(launch, time, side="left") - 1
    return np.where(number >= 0, np.append(completed, 0)[number], time)


def _scope(start: Ints, end: Ints, without: Intervals) -> tuple[Intervals, Ints]:
    some = end > start
    # adjacent windows must not be merged, so no union here
    scope = Intervals(start[some], end[some]) - without
    return scope, np.flatnonzero(some)[np.searchsorted(start[some], scope.start, side="right") - 1]


def _belongs(time: Ints, scope: Intervals, step: Ints) -> Ints:
    number = np.searchsorted(scope.start, time, side="right") - 1
    inside = (number >= 0) & (time < np.append(scope.end, 0)[number])
    return np.where(inside, np.append(step, -1)[number], -1)
