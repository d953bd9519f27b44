"""Idle time of the GPU by the runtime call, operator or annotated range on the host."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.idle import IdleTime
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.marks import step_marks
from lightning_forge_profiling.analysis.nesting import least_around, parents
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints, Spans
from lightning_forge_profiling.results.rank import IdlePart

_MOST: Final = 10
_MOST_THREADS: Final = 64
"""Threads that launch work: one or two in practice; the limit bounds the time for hostile traces."""


def idle_parts(recording: Recording, idle: IdleTime) -> tuple[IdlePart, ...]:
    """The longest parts of the idle time, by the activity of the thread that launches the next work."""
    found = [
        part
        for launched, gaps in ((False, idle.for_host), (True, idle.for_launch))
        for thread, own in _by_thread(recording, gaps)
        for part in _parts(recording, own, thread, launched=launched)
    ]
    return tuple(sorted(found, key=lambda part: -part.ms_per_step)[:_MOST])


def _by_thread(recording: Recording, gaps: Intervals) -> Iterator[tuple[int, Intervals]]:
    """The gaps by the thread that launched the work that ends them; by the thread of the step marks if unknown."""
    marks = recording.steps.marks
    steps = int(recording.trace.annotations.thread[marks[0]]) if len(marks) else -1
    thread = np.append(recording.links.thread, -1)[_following(recording, gaps.end)]
    thread = np.where(thread < 0, steps, thread)
    threads, place = np.unique(thread, return_inverse=True)
    waited = np.bincount(place, gaps.end - gaps.start, len(threads))
    for number in threads[np.argsort(-waited, kind="stable")][:_MOST_THREADS].tolist():
        yield number, Intervals(gaps.start[thread == number], gaps.end[thread == number])


def _following(recording: Recording, time: Ints) -> Ints:
    """The row of the first GPU work at or after each instant; one past the last if there is none."""
    return np.searchsorted(recording.trace.gpu.start, time, side="left")


def _parts(recording: Recording, gaps: Intervals, thread: int, *, launched: bool) -> Iterator[IdlePart]:
    trace = recording.trace
    spans, operator = _activities(recording, thread)
    parent = parents(spans)
    nested = parent >= 0
    end = least_around(parent, spans.end)  # after a clock jump a range may end after the one around it
    inside = gaps.within(np.minimum(spans.start, end), end)
    own = inside - np.bincount(parent[nested], inside[nested], len(spans)).astype(np.int64)
    key, group = np.unique(spans.name * (len(trace.names) + 1) + operator + 1, return_inverse=True)
    spent = np.bincount(group, own, len(key)).astype(np.int64)
    longest = np.full(len(key), -1)
    order = np.argsort(own, kind="stable")
    longest[group[order]] = order  # the last to be written is the longest

    def part(name: str, around: str, total: int, gap: int, thread: int = thread) -> IdlePart:
        row = int(_following(recording, gaps.end[gap : gap + 1])[0])
        return IdlePart(
            launched=launched,
            activity=name,
            operator=around,
            thread=trace.threads[thread][1] if thread >= 0 else "",
            following=trace.names[trace.gpu.name[row]] if row < len(trace.gpu) else "",
            ms_per_step=total / len(recording.steps) / 1e6,
        )

    names = (*trace.names, "")
    for place in np.flatnonzero(spent > 0).tolist():
        gap = int(np.searchsorted(gaps.end, spans.start[longest[place]], side="right"))
        name, around = divmod(int(key[place]), len(names))
        yield part(names[name], names[around - 1], int(spent[place]), gap)
    outside = gaps - Intervals.of(spans.start, end)
    if outside.total > 0:
        longest_gap = int(np.argmax(gaps.end - gaps.start))
        call, elsewhere = _other_threads_call(recording, outside, thread)
        rest = outside.total - elsewhere
        if elsewhere > rest:
            name, inner = int(trace.calls.name[call]), int(recording.links.call_operator[call])
            around = int(trace.operators.name[inner]) if inner >= 0 else -1
            yield part(names[name], names[around], elsewhere, longest_gap, int(trace.calls.thread[call]))
        else:
            rest = outside.total
        if rest > 0:
            yield part("", "", rest, longest_gap)


def _other_threads_call(recording: Recording, gaps: Intervals, thread: int) -> tuple[int, int]:
    """The row of a call on another thread of the kind that covers most of the gaps, and its time; -1 and 0 without."""
    calls = recording.trace.calls
    rows = np.flatnonzero(calls.thread != thread)
    inside = gaps.within(calls.start[rows], calls.end[rows])
    kinds, kind = np.unique(np.stack((calls.thread[rows], calls.name[rows])), axis=1, return_inverse=True)
    if not kinds.size or not inside.any():
        return -1, 0
    spent = np.bincount(kind, inside, kinds.shape[1])
    most = int(np.argmax(spent))
    return int(rows[kind == most][np.argmax(inside[kind == most])]), int(spent[most])


def _activities(recording: Recording, thread: int) -> tuple[Spans, Ints]:
    """A thread's calls, operators and annotated ranges in order; and for each call the name of its operator."""
    trace = recording.trace
    no_step = ~step_marks(trace)
    chosen: list[tuple[Spans, NDArray[np.bool_]]] = [
        (trace.annotations, no_step & (trace.annotations.thread == thread)),
        (trace.operators, trace.operators.thread == thread),
        (trace.calls, trace.calls.thread == thread),
    ]
    start, end, name = (
        np.concatenate([getattr(table, column)[rows] for table, rows in chosen]) for column in ("start", "end", "name")
    )
    around = np.full(len(start), -1)
    calls = np.append(trace.operators.name, -1)[recording.links.call_operator[chosen[2][1]]]
    around[len(around) - len(calls) :] = calls
    order = np.lexsort((-end, start))
    spans = Spans(start=start[order], end=end[order], name=name[order], thread=np.zeros(len(start), np.int64))
    return spans, around[order]
