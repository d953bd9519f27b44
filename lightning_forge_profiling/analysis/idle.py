"""Idle time of the GPU, split by what it waits for."""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import (
    ALLOCATES,
    COPIES,
    FREES,
    GRAPH_LAUNCHES,
    HOST_ALLOCATES,
    LOADS_DATA,
    WAITS,
    named,
    spans_of,
)
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.nesting import outermost_marked
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.syncs import of_lightning
from lightning_forge_profiling.kineto.trace import Ints
from lightning_forge_profiling.results.rank import IDLE_CAUSES

_LATENCY_PERCENTILE: Final = 5
_LONG_LAUNCH_NS: Final = 100_000
"""A launch takes 3 to 20 us of host time (H200); one that first loads the kernel's module 6 to 330 ms (lazy loading on
MI250 and MI300X)."""
_OPERATOR: Final = re.compile(r"(?!autograd::)\w+::.+")
"""Operators of the dispatcher, not autograd nodes or compiled regions, which are whole programs around a sync."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleTime:
    """Idle time of the GPU in nanoseconds; every array has one entry per step.

    Attributes:
        idle: idle time in each step's window.
        causes: the same by cause (`IDLE_CAUSES`); the causes sum to it.
        after_sync: idle time caused by syncs. A gap that begins during a sync, because the queue ran dry, counts whole;
            of other gaps, the time in syncs and in operators that contain one. Lightning's syncs are left out.
        after_allocator: likewise for allocations and frees, without the time that counts to a sync.
        launching: the rest of the time in which the GPU waits for Python or a launch, without gaps after any sync.
        for_python: when that is.
        for_host: when the GPU waits for the host: until the call that launches the next work returns.
        for_launch: the rest of the gaps, in which the next work is already launched.
        waiting: when the GPU waits for the host or for a launch to reach it.
        waiting_for: for each of those gaps the row of the work that ends it; one past the last if none does.
        data_wait: host time in the data loader, whether or not the GPU is busy.
    """

    idle: Ints
    causes: dict[str, Ints]
    after_sync: Ints
    after_allocator: Ints
    launching: Ints
    data_wait: Ints
    for_python: Intervals
    for_host: Intervals
    for_launch: Intervals
    waiting: Intervals
    waiting_for: Ints


def launch_latency(recording: Recording) -> int:
    """Time from a launch to the start of its kernel on an idle GPU, in nanoseconds.

    The fifth percentile over the recording: most kernels of a busy GPU wait in the queue, and the minimum would be an
    outlier.
    """
    linked = recording.links.linked
    delay = recording.trace.gpu.start[linked] - recording.links.time[linked]
    delay = delay[delay > 0]
    return int(np.percentile(delay, _LATENCY_PERCENTILE)) if len(delay) else 0


def idle_time(recording: Recording, busy: Intervals) -> IdleTime:
    """Split the idle time of each step by cause.

    A gap ends when the next work begins. Until the call that launches it returns, the GPU waits for the host, and the
    host's activity is the cause. Until the launch latency has passed, it waits for the launch. The rest of the gap is
    the GPU's own: work was launched and did not begin.
    """
    steps, gpu, links = recording.steps, recording.trace.gpu, recording.links
    gaps = steps.scope - busy
    following = np.searchsorted(gpu.start, gaps.end, side="left")
    launch = np.append(links.time, -1)[following]
    launch = np.where(launch < 0, gaps.end, launch)
    call = np.append(links.call, -1)[following]
    returned = np.minimum(np.maximum(launch, np.append(recording.trace.calls.end, -1)[call]), gaps.end)
    ready = np.minimum(np.maximum(launch + launch_latency(recording), returned), gaps.end)
    waits = ready > gaps.start
    waiting = Intervals(gaps.start[waits], ready[waits])  # for the host, or for the launch to reach the GPU
    for_host = Intervals.of(gaps.start, returned)

    activity = _host_activity(recording)
    in_call = np.maximum(launch, gaps.start)
    graphs = np.append(named(recording.trace, recording.trace.calls, GRAPH_LAUNCHES), False)[call]
    long_launch = (returned - in_call >= _LONG_LAUNCH_NS) & ~graphs
    activity["launch"] = Intervals.of(in_call[long_launch], returned[long_launch]) - activity["copy"]
    idle = steps.measure(gaps)
    causes: dict[str, Ints] = {}
    claimed = Intervals.of([], [])
    for cause in IDLE_CAUSES[: len(activity)]:
        spans = activity[cause]
        causes[cause] = steps.measure((for_host & spans) - claimed)
        claimed |= spans
    causes["python"] = steps.measure(waiting) - sum(causes.values())
    causes["gpu"] = idle - steps.measure(waiting)

    def caused_by(calls: Intervals) -> Intervals:
        # work launched before the gap would have begun no sooner without the call
        begun = (calls - activity["data"]).contains(gaps.start - 1) & (launch > gaps.start)
        return Intervals(gaps.start[begun], gaps.end[begun]) | (for_host & calls)

    syncs = named(recording.trace, recording.trace.calls, WAITS)
    after_any_sync = caused_by(_waiting_for_gpu(recording, syncs))
    after_allocator = caused_by(activity["allocator"]) - after_any_sync
    for_python = waiting - after_any_sync - after_allocator - (for_host & claimed)
    return IdleTime(
        idle=idle,
        causes={cause: causes[cause] for cause in IDLE_CAUSES},
        after_sync=steps.measure(caused_by(_waiting_for_gpu(recording, syncs & ~of_lightning(recording)))),
        after_allocator=steps.measure(after_allocator),
        launching=steps.measure(for_python),
        data_wait=steps.measure_host(activity["data"]),
        for_python=for_python,
        for_host=for_host,
        for_launch=gaps - for_host,
        waiting=waiting,
        waiting_for=following[waits],
    )


def _waiting_for_gpu(recording: Recording, syncs: NDArray[np.bool_]) -> Intervals:
    """When a training thread is in these calls, or in the outermost operators that contain them: all of `.item()`."""
    calls, operators = recording.trace.calls, recording.trace.operators
    syncs = syncs & np.isin(calls.thread, _training_threads(recording))
    outermost = outermost_marked(recording.operator_parent, named(recording.trace, operators, _OPERATOR))
    rows = np.append(outermost, -1)[recording.links.call_operator[syncs]]
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
