"""What kept the GPU waiting."""

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

__all__ = ["IdleTime", "idle_time", "launch_latency"]

_LATENCY_PERCENTILE: Final = 5
_LONG_LAUNCH_NS: Final = 100_000
"""A launch takes the host 3 to 20 us (H200); one that first loads the kernel's module took 6 to 330 ms (lazy loading
on MI250 and MI300X)."""
_OPERATOR: Final = re.compile(r"(?!autograd::)\w+::.+")
"""One of the dispatcher's: not autograd's nodes nor compiled regions, which are a whole program around a sync."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleTime:
    """Nanoseconds in each step's window; every array has one entry a step.

    Attributes:
        idle: when the GPU did nothing.
        causes: the same by what the host did meanwhile (`IDLE_CAUSES`); they sum to it.
        after_sync: idle time in gaps that waited for the host and began while it waited for the GPU, in an operator
            made for that: the queue ran dry then, and the whole gap is the price; and in other gaps the time in such
            operators. Without Lightning's own.
        after_allocator: likewise for allocations and frees, where no sync is the reason.
        launching: what remains of `python` in other gaps, and after no sync of Lightning's either.
        for_host: when it waited for the host: until the call that launches the next work had returned.
        for_launch: the rest of the gaps, in which the next work had been launched.
        waiting: when the GPU waited for the host or for a launch to get through.
        waiting_for: for each of those gaps the row of the work that ended it, one past the last where none did.
        data_wait: how long the host was in the data loader, whether or not the GPU was busy meanwhile.
    """

    idle: Ints
    causes: dict[str, Ints]
    after_sync: Ints
    after_allocator: Ints
    launching: Ints
    data_wait: Ints
    for_host: Intervals
    for_launch: Intervals
    waiting: Intervals
    waiting_for: Ints


def launch_latency(recording: Recording) -> int:
    """From the beginning of a launch to the beginning of its kernel where nothing delays it, in nanoseconds.

    The fifth percentile over the recording: most kernels of a busy GPU wait in the queue, and this must not be a
    single lucky one.
    """
    linked = recording.links.linked
    delay = recording.trace.gpu.start[linked] - recording.links.time[linked]
    delay = delay[delay > 0]
    return int(np.percentile(delay, _LATENCY_PERCENTILE)) if len(delay) else 0


def idle_time(recording: Recording, busy: Intervals) -> IdleTime:
    """Split the idle time of each step by its cause.

    A gap ends when the next work begins. Until the call that launches it has returned, the GPU waits for the host, and
    what the host does is the cause; from then on, and for the time that any launch takes to get through, it waits for
    the launch itself. What is left of the gap is the GPU's own: work that was there and did not begin.

    Args:
        recording: the recording.
        busy: when the GPU was busy.
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
    waiting = Intervals(gaps.start[waits], ready[waits])  # for the host, or for the launch to get through
    for_host = Intervals.of(gaps.start, returned)

    doing = _host_activity(recording)
    in_call = np.maximum(launch, gaps.start)
    graphs = np.append(named(recording.trace, recording.trace.calls, GRAPH_LAUNCHES), False)[call]
    long_launch = (returned - in_call >= _LONG_LAUNCH_NS) & ~graphs
    doing["launch"] = Intervals.of(in_call[long_launch], returned[long_launch]) - doing["copy"]
    idle = steps.measure(gaps)
    causes: dict[str, Ints] = {}
    claimed = Intervals.of([], [])
    for cause in IDLE_CAUSES[: len(doing)]:
        spans = doing[cause]
        causes[cause] = steps.measure((for_host & spans) - claimed)
        claimed |= spans
    causes["python"] = steps.measure(waiting) - sum(causes.values())
    causes["gpu"] = idle - steps.measure(waiting)

    def price(calls: Intervals) -> Intervals:
        # work that had been launched before the gap began would have begun no sooner without the call
        begun = (calls - doing["data"]).contains(gaps.start - 1) & (launch > gaps.start)
        return Intervals(gaps.start[begun], gaps.end[begun]) | (for_host & calls)

    syncs = named(recording.trace, recording.trace.calls, WAITS)
    after_any_sync = price(_waiting_for_gpu(recording, syncs))
    after_allocator = price(doing["allocator"]) - after_any_sync
    return IdleTime(
        idle=idle,
        causes={cause: causes[cause] for cause in IDLE_CAUSES},
        after_sync=steps.measure(price(_waiting_for_gpu(recording, syncs & ~of_lightning(recording)))),
        after_allocator=steps.measure(after_allocator),
        launching=steps.measure(waiting - after_any_sync - after_allocator - (for_host & claimed)),
        data_wait=steps.measure_host(doing["data"]),
        for_host=for_host,
        for_launch=gaps - for_host,
        waiting=waiting,
        waiting_for=following[waits],
    )


def _waiting_for_gpu(recording: Recording, syncs: NDArray[np.bool_]) -> Intervals:
    """When a thread that trains was in such calls, or in the outermost operators with them: all of `.item()`."""
    calls, operators = recording.trace.calls, recording.trace.operators
    syncs = syncs & np.isin(calls.thread, _training_threads(recording))
    outermost = outermost_marked(recording.operator_parent, named(recording.trace, operators, _OPERATOR))
    rows = np.append(outermost, -1)[recording.links.call_operator[syncs]]
    within = np.isin(np.arange(len(operators)), rows)
    return spans_of(calls, syncs) | spans_of(operators, within)


def _host_activity(recording: Recording) -> dict[str, Intervals]:
    """What the host was doing, on threads that launch work or mark steps; a loader's own threads are no matter."""
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
