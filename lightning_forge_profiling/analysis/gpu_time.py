"""Idle time of the GPU by the runtime call, operator or annotated range on the host."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host import is_lightning_call
from lightning_forge_profiling.analysis.intervals import NOTHING, Intervals, Nesting, take
from lightning_forge_profiling.analysis.kernels import CATEGORY_OF, KINDS
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.steps import (
    ALLOCATES,
    COPIES,
    FREES,
    GRAPH_LAUNCHES,
    HOST_ALLOCATES,
    LOADS_DATA,
    WAITS,
    named,
    spans_of,
    step_marks,
)
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Ints, Spans
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.schema import CATEGORIES, IDLE_CAUSES, IdlePart

# Overlapping work counts to the first of these: computation before the communication that it hides.
_CLAIM_ORDER: Final = ("matmul", "other", "memory", "comm")


@dataclass(frozen=True, slots=True, eq=False)
class BusyTime:
    """Busy time in nanoseconds; every array has one entry per step."""

    union: Intervals  # when any GPU work runs
    busy: Ints  # its length in each step's window
    # busy time by kind. Overlapping work counts once, to the first of matmul, other, memory, comm. The kinds sum to
    # `busy`.
    kinds: dict[str, Ints]
    categories: dict[str, Ints]  # the same by category
    comm: Ints  # time in which communication runs
    comm_exposed: Ints  # time in which it runs without another kernel; a copy beside it hides nothing
    comm_holds_up: Ints  # the part of that without the time in which the host was yet to launch the next kernel


def busy_time(recording: Recording) -> BusyTime:
    """Split the busy time of each step by kind of work."""
    gpu, steps = recording.trace.gpu, recording.steps
    present = [KINDS[number] for number in np.unique(recording.kind)]
    present.sort(key=lambda kind: _CLAIM_ORDER.index(CATEGORY_OF[kind]))
    claimed = NOTHING
    kinds: dict[str, Ints] = {}
    measured = np.zeros(len(steps), np.int64)
    for kind in present:
        rows = recording.kind == KINDS.index(kind)
        claimed |= spans_of(gpu, rows)
        now = steps.gpu.measure(claimed)
        kinds[kind], measured = now - measured, now
    comm = recording.kind == KINDS.index("comm")
    communication = spans_of(gpu, comm)
    other = ~comm & (gpu.activity == ACTIVITIES.index("kernel"))
    exposed = communication - spans_of(gpu, other)
    return BusyTime(
        union=claimed,
        busy=measured,
        kinds=kinds,
        categories={
            category: sum((kinds[kind] for kind in present if CATEGORY_OF[kind] == category), 0 * measured)
            for category in CATEGORIES
        },
        comm=steps.gpu.measure(communication),
        comm_exposed=steps.gpu.measure(exposed),
        comm_holds_up=steps.gpu.measure(exposed - _host_is_behind(recording, exposed, np.flatnonzero(other))),
    )


def _host_is_behind(recording: Recording, spans: Intervals, kernels: Ints) -> Intervals:
    """The parts of these spans in which the host was yet to launch the next of these kernels, and did not wait."""
    links, calls = recording.links, recording.trace.calls
    following = take(kernels, np.searchsorted(recording.trace.gpu.start[kernels], spans.end, side="left"))
    launch = take(links.time, following)
    ready = np.where(launch < 0, spans.start, np.minimum(launch + launch_latency(recording), spans.end))
    waits = named(recording.trace, calls, WAITS) & np.isin(calls.thread, _training_threads(recording))
    return Intervals.of(spans.start, ready) - spans_of(calls, waits)


_LATENCY_PERCENTILE: Final = 5
_USUAL_LATENCY_NS: Final = 10_000  # 4 to 9 us in traces of H100s and H200s that were idle at times
_QUEUED_NS: Final = 1_000_000  # work that begins so long after its launch was in a queue
# A launch takes 3 to 20 us of host time (H200); one that first loads the kernel's module 6 to 330 ms (lazy loading on
# MI250 and MI300X).
_LONG_LAUNCH_NS: Final = 100_000
# Operators of the dispatcher, not autograd nodes or compiled regions, which are whole programs around a sync.
DISPATCHED: Final = re.compile(r"(?!autograd::)\w+::.+")

# Python between two launches took up to 1.2 ms in 24 traces of planted bottlenecks, the median 0.002 to 0.06 ms (H200,
# torch 2.11, 2026-11); four times that leaves room for slower hosts
_LONG_GAP_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True, eq=False)
class IdleTime:
    """Idle time of the GPU in nanoseconds; every array has one entry per step."""

    idle: Ints  # idle time in each step's window
    causes: dict[str, Ints]  # the same by cause (`IDLE_CAUSES`, and `others` with several GPUs); the causes sum to it
    # idle time caused by syncs. A gap that begins during a sync, because the queue ran dry, counts whole; of other
    # gaps, the time in syncs and in operators that contain one. Lightning's syncs are left out.
    after_sync: Ints
    after_allocator: Ints  # likewise for allocations and frees, without the time that counts to a sync
    # the rest of the time in which the GPU waits for Python or a launch, without gaps after any sync, and those so long
    # that the host does other work in them
    launching: Ints
    data_wait: Ints  # host time in the data loader, whether or not the GPU is busy
    for_python: Intervals  # when it waits as in `launching`
    for_host: Intervals  # when the GPU waits for the host: until the call that launches the next work returns
    for_launch: Intervals  # the rest of the gaps, in which the next work is already launched
    waiting: Intervals  # when the GPU waits for the host or for a launch to reach it
    waiting_for: Ints  # for each of those gaps the row of the work that ends it; one past the last if none does


def launch_latency(recording: Recording) -> int:
    """Time from a launch to the start of its kernel on an idle GPU, in nanoseconds; a usual one if it never is idle."""
    gpu, linked = recording.trace.gpu, recording.links.linked
    launch = recording.links.time[linked]
    delay = gpu.start[linked] - launch
    busy_until = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(gpu.end)[:-1]))[: len(gpu)]
    known = delay > 0
    if not known.any():
        return 0
    idle = known & (launch >= busy_until[linked])  # else most kernels wait in the queue
    # what ran before a recording is not in it, and its first work may have waited for that
    first = np.diff(np.searchsorted(recording.trace.begins, gpu.start, side="right"), prepend=0) > 0
    idle &= ~first[linked] | (delay < _QUEUED_NS)
    least = np.percentile(delay[idle], _LATENCY_PERCENTILE) if idle.any() else _USUAL_LATENCY_NS
    return int(min(np.percentile(delay[known], _LATENCY_PERCENTILE), least))  # the minimum would be an outlier


def idle_time(recording: Recording, busy: Intervals) -> IdleTime:
    """Split the idle time of each step by cause.

    A gap ends when the next work begins. Until the call that launches it returns, the GPU waits for the host, and the
    host's activity is the cause. Until the launch latency has passed, it waits for the launch. The rest of the gap is
    the GPU's own: work was launched and did not begin. Where other GPUs of the process work, it waits for those.
    """
    steps, gpu, links = recording.steps, recording.trace.gpu, recording.links
    gaps = steps.gpu.spans - busy
    following = np.searchsorted(gpu.start, gaps.end, side="left")
    launch = take(links.time, following)
    launch = np.where(launch < 0, gaps.end, launch)
    call = take(links.call, following)
    returned = np.minimum(np.maximum(launch, take(recording.trace.calls.end, call)), gaps.end)
    ready = np.minimum(np.maximum(launch + launch_latency(recording), returned), gaps.end)
    waits = ready > gaps.start
    elsewhere = recording.elsewhere
    # for the host, or for the launch to reach the GPU
    waiting = Intervals(gaps.start[waits], ready[waits]) - elsewhere
    for_host = Intervals.of(gaps.start, returned) - elsewhere

    activity = _host_activity(recording)
    in_call = np.maximum(launch, gaps.start)
    graphs = np.append(named(recording.trace, recording.trace.calls, GRAPH_LAUNCHES), False)[call]
    long_launch = (returned - in_call >= _LONG_LAUNCH_NS) & ~graphs
    activity["launch"] = Intervals.of(in_call[long_launch], returned[long_launch]) - activity["copy"]
    causes: dict[str, Ints] = {}
    claimed = NOTHING
    for cause in IDLE_CAUSES[: len(activity)]:
        spans = activity[cause]
        causes[cause] = steps.gpu.measure((for_host & spans) - claimed)
        claimed |= spans
    causes["python"] = steps.gpu.measure(waiting) - sum(causes.values())
    causes["gpu"] = steps.gpu.measure(gaps - elsewhere) - steps.gpu.measure(waiting)
    if elsewhere.total:
        causes["others"] = steps.gpu.measure(gaps & elsewhere)

    def caused_by(calls: Intervals) -> Intervals:
        # work launched before the gap would have begun no sooner without the call
        begun = (calls - activity["data"]).contains(gaps.start - 1) & (launch > gaps.start)
        return Intervals(gaps.start[begun], gaps.end[begun]) | (for_host & calls)

    syncs = named(recording.trace, recording.trace.calls, WAITS)
    after_any_sync = caused_by(_waiting_for_gpu(recording, syncs))
    after_allocator = caused_by(activity["allocator"]) - after_any_sync
    for_python = _of_launch_length(recording, waiting - after_any_sync - after_allocator - (for_host & claimed))
    return IdleTime(
        idle=steps.gpu.measure(gaps),
        causes=causes,
        after_sync=steps.gpu.measure(caused_by(_waiting_for_gpu(recording, syncs & ~is_lightning_call(recording)))),
        after_allocator=steps.gpu.measure(after_allocator),
        launching=steps.gpu.measure(for_python),
        data_wait=steps.host.measure(activity["data"]),
        for_python=for_python,
        for_host=for_host,
        for_launch=gaps - for_host,
        waiting=waiting,
        waiting_for=_following(recording, waiting.end),
    )


def _of_launch_length(recording: Recording, gaps: Intervals) -> Intervals:
    """The gaps that are no longer than launching takes, and those before a CUDA graph or in an update.

    A CUDA graph stands for many launches, and an optimizer prepares all of its parameters before it launches anything.
    """
    trace = recording.trace
    following = _following(recording, gaps.end)
    call = take(recording.links.call, following)
    graphs = np.append(named(trace, trace.calls, GRAPH_LAUNCHES), False)[call]
    updates = take(recording.region, following) == REGIONS.index("optimizer")
    kept = graphs | updates | (gaps.end - gaps.start <= _LONG_GAP_NS)
    return Intervals(gaps.start[kept], gaps.end[kept])


def _waiting_for_gpu(recording: Recording, syncs: NDArray[np.bool_]) -> Intervals:
    """When a training thread is in these calls, or in the outermost operators that contain them: all of `.item()`."""
    calls, operators = recording.trace.calls, recording.trace.operators
    syncs = syncs & np.isin(calls.thread, _training_threads(recording))
    outermost = recording.nesting.outermost(named(recording.trace, operators, DISPATCHED))
    rows = take(outermost, recording.links.call_operator[syncs])
    within = np.isin(np.arange(len(operators)), rows)
    return spans_of(calls, syncs) | spans_of(operators, within)


def _host_activity(recording: Recording) -> dict[str, Intervals]:
    """When the host is in each activity, on threads that launch work or mark steps; not on those of the loader."""
    trace, threads = recording.trace, _training_threads(recording)
    calls = np.isin(trace.calls.thread, threads)
    loading = named(trace, trace.annotations, LOADS_DATA) & np.isin(trace.annotations.thread, threads)
    frees = (FREES, ALLOCATES, HOST_ALLOCATES)
    return {
        "data": spans_of(trace.annotations, loading),
        "allocator": spans_of(trace.calls, calls & np.any([named(trace, trace.calls, name) for name in frees], axis=0)),
        "sync": spans_of(trace.calls, calls & named(trace, trace.calls, WAITS)),
        "copy": spans_of(trace.calls, calls & named(trace, trace.calls, COPIES)),
    }


def _training_threads(recording: Recording) -> Ints:
    annotations, threads = recording.trace.annotations, np.unique(recording.links.thread[recording.step >= 0])
    return np.union1d(threads, annotations.thread[recording.steps.marks]) if len(annotations) else threads


_MOST: Final = 10
_MOST_THREADS: Final = 64  # that launch work: one or two in practice; the limit bounds the time for hostile traces


def idle_parts(recording: Recording, idle: IdleTime) -> tuple[IdlePart, ...]:
    """The longest parts of the idle time, by the activity of the thread that launches the next work."""
    activity_of = cache(partial(_activity, recording))
    parts = [
        part
        for launched, gaps in ((False, idle.for_host), (True, idle.for_launch))
        for thread, own in _by_thread(recording, gaps)
        for part in _parts(recording, own, thread, *activity_of(thread), launched=launched)
    ]
    return tuple(sorted(parts, key=lambda part: -part.ms_per_step)[:_MOST])


def _by_thread(recording: Recording, gaps: Intervals) -> Iterator[tuple[int, Intervals]]:
    """The gaps by the thread that launched the work that ends them; by the thread of the step marks if unknown."""
    marks = recording.steps.marks
    steps = int(recording.trace.annotations.thread[marks[0]]) if len(marks) else -1
    thread = take(recording.links.thread, _following(recording, gaps.end))
    thread = np.where(thread < 0, steps, thread)
    threads, group = np.unique(thread, return_inverse=True)
    waited = np.bincount(group, gaps.end - gaps.start, len(threads))
    for number in threads[np.argsort(-waited, kind="stable")][:_MOST_THREADS].tolist():
        yield number, Intervals(gaps.start[thread == number], gaps.end[thread == number])


def _following(recording: Recording, time: Ints) -> Ints:
    """The row of the first GPU work at or after each instant; one past the last if there is none."""
    return np.searchsorted(recording.trace.gpu.start, time, side="left")


def _activity(recording: Recording, thread: int) -> tuple[Spans, Ints]:
    """A thread's calls, operators and annotated ranges, each only as far as it is in the one around it, and that one.

    `name` numbers the name and, for a call, that of its operator.
    """
    trace = recording.trace
    calls = trace.calls.thread == thread
    tables: list[tuple[Spans, NDArray[np.bool_]]] = [
        (trace.annotations, (trace.annotations.thread == thread) & ~step_marks(trace)),
        (trace.operators, trace.operators.thread == thread),
        (trace.calls, calls),
    ]
    columns = ("start", "end", "name")
    start, end, kind = (np.concatenate([getattr(table, name)[rows] for table, rows in tables]) for name in columns)
    kind *= len(trace.names) + 1
    kind[len(kind) - calls.sum() :] += take(trace.operators.name, recording.links.call_operator[calls]) + 1
    order = np.lexsort((-end, start))
    start, end, kind = start[order], end[order], kind[order]
    nesting = Nesting(Spans(start=start, end=end, thread=np.zeros(len(start), np.int64)))
    end = nesting.least_around(end)  # after a clock jump a range may end after the one around it
    return Spans(start=np.minimum(start, end), end=end, name=kind), nesting.parent


def _parts(
    recording: Recording, gaps: Intervals, thread: int, activity: Spans, parent: Ints, *, launched: bool
) -> Iterator[IdlePart]:
    trace = recording.trace
    inside = gaps.within(activity.start, activity.end)
    nested = parent >= 0
    own = inside - np.bincount(parent[nested], inside[nested], len(inside)).astype(np.int64)
    rows = np.flatnonzero(own)
    rows = rows[np.argsort(own[rows], kind="stable")]
    kinds, group = np.unique(activity.name[rows], return_inverse=True)
    spent = np.bincount(group, own[rows], len(kinds)).astype(np.int64)
    longest = np.zeros(len(kinds), np.int64)
    longest[group] = rows  # the last to be written is the longest

    def part(name: str, operator: str, total: int, gap: int, thread: int = thread) -> IdlePart:
        row = int(_following(recording, gaps.end[gap : gap + 1])[0])
        return IdlePart(
            launched=launched,
            activity=name,
            operator=operator,
            thread=trace.threads[thread][1] if thread >= 0 else "",
            following=trace.names[trace.gpu.name[row]] if row < len(trace.gpu) else "",
            ms_per_step=recording.steps.mean_ms(total),
        )

    names = (*trace.names, "")
    first_gap = np.searchsorted(gaps.end, activity.start[longest], side="right")
    for kind, total, gap in zip(kinds.tolist(), spent.tolist(), first_gap.tolist(), strict=True):
        name, operator = divmod(kind, len(names))
        yield part(names[name], names[operator - 1], total, gap)
    outside = gaps - Intervals.of(activity.start, activity.end)
    if outside.total > 0:
        longest_gap = int(np.argmax(gaps.end - gaps.start))
        call, elsewhere = _other_threads_call(recording, outside, thread)
        if 2 * elsewhere > outside.total:
            operator = take(trace.operators.name, recording.links.call_operator)[call]
            name = names[trace.calls.name[call]]
            yield part(name, names[operator], elsewhere, longest_gap, int(trace.calls.thread[call]))
        else:
            elsewhere = 0
        if outside.total > elsewhere:
            yield part("", "", outside.total - elsewhere, longest_gap)


def _other_threads_call(recording: Recording, gaps: Intervals, thread: int) -> tuple[int, int]:
    """The row of a call on another thread of the kind that covers most of the gaps, and its time; -1 and 0 without."""
    calls = recording.trace.calls
    rows = np.flatnonzero(calls.thread != thread)
    inside = gaps.within(calls.start[rows], calls.end[rows])
    if not inside.any():
        return -1, 0
    _, kind = np.unique(calls.thread[rows] * len(recording.trace.names) + calls.name[rows], return_inverse=True)
    spent = np.bincount(kind, inside)
    most = int(np.argmax(spent))
    return int(rows[kind == most][np.argmax(inside[kind == most])]), int(spent[most])
