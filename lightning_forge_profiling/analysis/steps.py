"""Calls of the host, the GPU work that they launch, and the steps: their boundaries, and time measured per step."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals, Nesting, take
from lightning_forge_profiling.kineto.trace import Calls, GpuWork, Ints, Operators, Spans, Trace
from lightning_forge_profiling.names import EXCLUDED, MARK_PREFIX

_NO_EXTERNAL: Final = (0, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Launches of GPU work. Arrays have one entry per row of `Trace.gpu`, `call_operator` per row of `Trace.calls`."""

    call: Ints  # row of the runtime or driver call that launched it; -1 if the trace has none
    operator: Ints  # row of the innermost operator around the launch; -1 without one
    time: Ints  # time of the launch on the host, nanoseconds; of the operator if the call is missing; -1 if unlinked
    thread: Ints  # host thread of the launch; -1 if unlinked
    call_operator: Ints  # row of the innermost operator around each call; -1 without one

    @property
    def linked(self) -> NDArray[np.bool_]:
        """Mask of the work whose launch is known."""
        return self.time >= 0


def link(trace: Trace, nesting: Nesting) -> Links:
    """Join GPU work to its launch: by correlation over runtime and driver calls, then by `External id`."""
    gpu, calls, operators = trace.gpu, trace.calls, trace.operators
    call = _match(gpu.correlation, calls.correlation, none=(-1, 0))
    call_operator = _operator_of_calls(calls, operators, nesting)
    by_external = _match(gpu.external, operators.external, none=_NO_EXTERNAL)
    has_call = call >= 0
    operator = np.where(has_call, take(call_operator, call), by_external)
    time = np.where(has_call, take(calls.start, call), take(operators.start, by_external))
    thread = np.where(has_call, take(calls.thread, call), take(operators.thread, by_external))
    return Links(call, operator, time, thread, call_operator)


def launched_before(trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Mask of the GPU work launched before the recording began, such as that of the profiler's warm-up step.

    Its calls are not in the trace, and its correlation id is lower than those of all recorded calls.
    """
    gpu, begins = trace.gpu, np.array(trace.begins)
    lowest = np.full(len(begins), np.iinfo(np.int64).max)
    calls = trace.calls.correlation > 0
    recording = np.searchsorted(begins, trace.calls.start[calls], side="right") - 1
    np.minimum.at(lowest, recording, trace.calls.correlation[calls])
    before = lowest[np.searchsorted(begins, gpu.start, side="right") - 1]
    return ~links.linked & (gpu.correlation > 0) & (gpu.correlation < before)


def _operator_of_calls(calls: Calls, operators: Operators, nesting: Nesting) -> Ints:
    """The operator with a call's `External id` if it encloses the call, else the innermost operator around it.

    In some traces the `External id` of a call is its own correlation id, which by chance may be that of an operator.
    """
    operator = _match(calls.external, operators.external, none=_NO_EXTERNAL)
    around = (
        (take(operators.thread, operator) == calls.thread)
        & (take(operators.start, operator) <= calls.start)
        & (calls.start <= take(operators.end, operator))
    )
    operator[~around] = nesting.enclosing(calls.start[~around], calls.thread[~around])
    return operator


def _match(keys: Ints, table: Ints, *, none: tuple[int, ...]) -> Ints:
    """The first row of the table with each key; -1 without one."""
    if not len(table):
        return np.full(len(keys), -1)
    order = np.argsort(table, kind="stable")
    at = np.minimum(np.searchsorted(table[order], keys), len(table) - 1)
    row = order[at]
    return np.where((table[row] == keys) & ~np.isin(keys, none), row, -1)


# Launches of kernels and of CUDA graphs.
LAUNCHES: Final = re.compile(
    r"(?:cuda|hip|cu|musa)(?:Ext|ExtModule|Module)?Launch(?:(?:Cooperative|Multi)?Kernel\w*|_\w+)?"
    r"|(?:cuda|hip|cu)GraphLaunch(?:_\w+)?|hip(?:Hcc|Ext)ModuleLaunchKernel"
    r"|zeCommandListAppendLaunchKernel|urEnqueueKernelLaunch\w*"
)
# Launches of CUDA graphs, whose host time grows with the number of kernels.
GRAPH_LAUNCHES: Final = re.compile(r"(?:cuda|hip|cu)GraphLaunch(?:_\w+)?")
# Calls that block the host until the GPU has completed work.
WAITS: Final = re.compile(
    r"(?:cuda|hip)(?:Device|Stream|Event|Thread)Synchronize(?:_\w+)?|cu(?:Ctx|Stream|Event)Synchronize(?:_\w+)?"
    r"|(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol)?(?:_ptds|_v\d+)?|hipMemcpyWithStream"
    r"|cuMemcpy(?:HtoD|DtoH|DtoD)?(?:_v\d+)?|ur(?:QueueFinish|EventWait)|ze(?:CommandQueue|Event|Fence)\w*Synchronize"
)
ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)Malloc(?:Async|Managed|Pitch|FromPoolAsync)?(?:_\w+)?|cuMem(?:Create|Alloc)(?:_v\d+)?"
)
FREES: Final = re.compile(r"(?:cuda|hip)Free(?:Async)?(?:_\w+)?|cuMem(?:Release|Free|Unmap)(?:_v\d+)?")
HOST_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)(?:HostAlloc|MallocHost|HostMalloc|FreeHost|HostFree|HostRegister|HostUnregister)(?:_\w+)?"
)
COPIES: Final = re.compile(r"(?:cuda|hip|cu)Memcpy\w*|urEnqueue(?:USM|Mem)\w*(?:Memcpy|Read|Write|Copy)\w*")

# Ranges in which a training loop fetches a batch: by the callbacks, PyTorch or Lightning, and usual custom names.
LOADS_DATA: Final = re.compile(
    r"forge\.data|enumerate\(DataLoader\)#.*|(?:\[pl\]\[(?:profile|module)\])?\[_\w+Loop\]\.train(?:_dataloader)?_next"
    r"|(?:dataloader|data_loader|get_batch|fetch_batch|next_batch|data_loading|load_data)(?:_next)?"
)


def named(trace: Trace, spans: Spans, pattern: re.Pattern[str] | Callable[[str], object]) -> NDArray[np.bool_]:
    """Mask of the ranges whose whole name matches."""
    match = pattern.fullmatch if isinstance(pattern, re.Pattern) else pattern
    if not len(spans):
        return np.zeros(0, bool)
    used = np.flatnonzero(np.bincount(spans.name))
    matches = np.zeros(len(trace.names), bool)
    matches[[name for name in used.tolist() if match(trace.names[name])]] = True
    return matches[spans.name]


def spans_of(spans: Spans | GpuWork, rows: NDArray[np.bool_]) -> Intervals:
    """The union of some ranges."""
    return Intervals.of(spans.start[rows], spans.end[rows])


_STEP: Final = re.compile(r"ProfilerStep#\d{1,18}")

_ROUNDING_NS: Final = 2_000  # a step may begin so much before the previous one ends: older traces round to microseconds
_OVERLAP: Final = 4  # the step with the next number may begin in the last 1/4 of a step
_MOST_SETS: Final = 4
# Among the sets of marks with at least this share of the busiest one's work, the one with the most steps is taken.
_AS_MUCH: Final = 0.9


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


# Validation and checkpoints as the callbacks mark them: between two batches, and so inside the next `ProfilerStep`.
_NO_STEP: Final = tuple(MARK_PREFIX + name for name in EXCLUDED)

_BEGINS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)StreamBeginCapture\w*")
_ENDS_CAPTURE: Final = re.compile(r"(?:cuda|hip|cu)StreamEndCapture(?:_\w+)?")
_INSTANTIATES: Final = re.compile(r"(?:cuda|hip|cu)GraphInstantiate\w*")

# a step is whole if at least this share of its launches has GPU work. In 33 traces (H200, torch 2.11) and 7 that other
# projects publish all had, but CUPTI loses the first kernels of a window that begins after idle time (pytorch issue
# 192021, torch 2.10)
_LAUNCHES_DONE: Final = 0.98
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """The time of the steps, on the host or on the GPU, without validation and checkpoints."""

    spans: Intervals  # disjoint and ascending; those of adjacent steps are not merged
    step: Ints  # for each of them the position of its step
    steps: int  # number of steps

    @classmethod
    def of(cls, start: Ints, end: Ints, without: Intervals) -> Self:
        """The steps from these starts to these ends, less some time."""
        some = np.flatnonzero(end > start)
        spans = Intervals(start[some], end[some]) - without
        return cls(spans, some[np.searchsorted(start[some], spans.start, side="right") - 1], len(start))

    def measure(self, covered: Intervals) -> Ints:
        """Total length of the intervals within each step, in nanoseconds."""
        return np.bincount(self.step, covered.within(self.spans.start, self.spans.end), self.steps).astype(np.int64)

    def length(self) -> Ints:
        """Length of each step."""
        return self.measure(self.spans)

    def at(self, time: Ints) -> Ints:
        """The step of each instant; -1 for none, and for validation and checkpoints."""
        number = np.searchsorted(self.spans.start, time, side="right") - 1
        return np.where(time < take(self.spans.end, number), take(self.step, number), -1)

    def only(self, chosen: NDArray[np.bool_]) -> Self:
        """Some of the steps."""
        kept = chosen[self.step]
        spans = Intervals(self.spans.start[kept], self.spans.end[kept])
        return replace(self, spans=spans, step=(np.cumsum(chosen) - 1)[self.step[kept]], steps=int(chosen.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps in order of time. Arrays have one entry per step."""

    number: Ints  # the N of `ProfilerStep#N`
    host_start: Ints  # start of the step on the host, nanoseconds
    host_end: Ints  # its end on the host, which is the start of the next step
    start: Ints  # start of its window on the GPU: the GPU has completed the previous step
    end: Ints  # end of its window on the GPU: the GPU has completed this step's work
    whole: NDArray[np.bool_]  # False for a step that is cut off or whose kernels were lost
    lost: Ints  # how many of its kernel launches have no GPU work
    captures: NDArray[np.bool_]  # True for a step in which a CUDA graph is captured or instantiated
    light: NDArray[np.bool_]  # True for a step recorded without operators
    explained: NDArray[np.bool_]  # True for a light step that has the operators of another step
    host: StepTime
    gpu: StepTime
    marks: Ints  # rows of `Trace.annotations` that mark the steps; empty if the whole recording is one step

    def __len__(self) -> int:
        return len(self.number)

    def mean_ms(self, nanoseconds: Ints | int) -> float:
        """A time over all steps as milliseconds per step."""
        return int(np.sum(nanoseconds)) / len(self) / 1e6

    def pct(self, nanoseconds: Ints | int) -> float:
        """A time over all steps in percent of their windows on the GPU."""
        total = int(self.gpu.length().sum())
        return 100 * int(np.sum(nanoseconds)) / total if total else 0.0

    def only(self, chosen: NDArray[np.bool_]) -> Self:
        """Some of the steps."""
        per_step = (
            "number",
            "host_start",
            "host_end",
            "start",
            "end",
            "whole",
            "lost",
            "captures",
            "light",
            "explained",
        )
        columns = {name: getattr(self, name)[chosen] for name in per_step}
        return replace(self, **columns, host=self.host.only(chosen), gpu=self.gpu.only(chosen))


def find_steps(trace: Trace, links: Links) -> Steps:
    """Find the steps of a trace.

    A step on the host lasts from its `ProfilerStep#N` to the next. GPU work belongs to the step in which the host
    launched it. The window of a step on the GPU begins when the previous step's work completes and ends when its own
    does.
    """
    rows = chosen_marks(trace)
    if len(rows):
        number, recording = (
            step_numbers(trace, rows),
            np.searchsorted(trace.begins, trace.annotations.start[rows], "right"),
        )
        # a step may have been marked more than once
        first = (np.diff(number, prepend=-1) != 0) | (np.diff(recording, prepend=-1) != 0)
        number, marks = number[first], trace.annotations.at(rows[first])
        host_start, host_end, same = marks.start, marks.end, np.diff(recording[first]) == 0
        host_end[:-1] = np.where(same, host_start[1:], host_end[:-1])
    else:  # each recording is one
        host_start, host_end = _recordings(trace)
        number, same = np.arange(len(host_start)), np.zeros(len(host_start) - 1, bool)
    capturing = _capturing(trace, host_start, host_end)
    start, end = _windows(trace, links, host_start, host_end, same=same, capturing=capturing)
    whole, lost = _whole(trace, links, host_start, host_end)
    not_host, not_gpu = _no_step(trace, links)
    host, gpu = StepTime.of(host_start, host_end, not_host), StepTime.of(start, end, not_gpu)
    light = np.isin(number, trace.light_steps)
    none = np.zeros_like(light)
    return Steps(number, host_start, host_end, start, end, whole, lost, capturing, light, none, host, gpu, rows)


def _recordings(trace: Trace) -> tuple[Ints, Ints]:
    """Start and end of each recording: the time between two of them is in no step."""
    tables = [table for table in (trace.gpu, trace.calls, trace.operators, trace.annotations) if len(table)]
    start, end = np.full(len(trace.begins), _NEVER), np.zeros(len(trace.begins), np.int64)
    for table in tables:
        recording = np.searchsorted(trace.begins, table.start, side="right") - 1
        np.minimum.at(start, recording, table.start)
        np.maximum.at(end, recording, table.end)
    some = start < _NEVER
    return (start[some], end[some]) if some.any() else (np.zeros(1, np.int64), np.zeros(1, np.int64))


def _windows(
    trace: Trace,
    links: Links,
    host_start: Ints,
    host_end: Ints,
    *,
    same: NDArray[np.bool_],
    capturing: NDArray[np.bool_],
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
    first = np.full(steps, _NEVER)
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
        done = completed[number] if first[number] < _NEVER else host_end[number]
        # all of the host's step is of a recording's only step, and of one that captures, whose launches run nothing
        if capturing[number] or not same[max(number - 1, 0) : number + 1].any():
            done = max(done, host_end[number])
        end[number] = max(start[number], done)
    return start, end


def _whole(trace: Trace, links: Links, host_start: Ints, host_end: Ints) -> tuple[NDArray[np.bool_], Ints]:
    """Mask of the steps whose GPU work is all in the trace, by their kernel launches, and how many of these have none.

    Other calls do not show it: a small memset or copy may leave no GPU work, and neither does a launch while a CUDA
    graph is captured.
    """
    launched = np.zeros(len(trace.calls), bool)
    launched[links.call[links.call >= 0]] = True
    kinds = np.unique(trace.calls.name[launched])
    launching = named(trace, trace.calls, LAUNCHES) & np.isin(trace.calls.name, kinds)
    launches = np.flatnonzero(launching & ~captures(trace).contains(trace.calls.start))
    step = np.searchsorted(host_start, trace.calls.start[launches], side="right") - 1
    inside = (step >= 0) & (trace.calls.start[launches] < host_end[step])
    asked = np.bincount(step[inside], minlength=len(host_start))
    done = np.bincount(step[inside], launched[launches[inside]], len(host_start))
    recording = np.maximum(np.searchsorted(trace.begins, host_start, side="right") - 1, 0)
    # a file that is cut off has all events before its last one only if they are in order of time
    until = [cut and (cut.time if cut.in_order else -1) for cut in trace.cuts]
    ends = np.array([_NEVER if end is None else end for end in until])[recording]
    enough = np.where([cut is None for cut in trace.cuts], _LAUNCHES_DONE, 1)[recording]
    return (done >= enough * asked) & (host_end < ends), (asked - done).astype(np.int64)


def captures(trace: Trace) -> Intervals:
    """When CUDA graphs are captured: launches of any thread then go into the graph, and run nothing."""
    calls, begun = trace.calls, np.array(trace.begins)
    begins = calls.start[named(trace, calls, _BEGINS_CAPTURE)]
    ends = np.sort(calls.end[named(trace, calls, _ENDS_CAPTURE)])
    first_begin, first_end = (
        np.append(np.sort(times), _NEVER)[np.searchsorted(np.sort(times), begun)] for times in (begins, ends)
    )
    cut_off = begun[(first_end < first_begin) & (first_end < np.append(begun[1:], _NEVER))]  # it began before
    starts = np.concatenate([begins, cut_off])
    ends = np.sort(np.concatenate([ends, begun[1:], [_NEVER]]))  # with its recording at the latest
    return Intervals.of(starts, ends[np.searchsorted(ends, starts, side="right")])


def _capturing(trace: Trace, host_start: Ints, host_end: Ints) -> NDArray[np.bool_]:
    """Mask of the steps in which a CUDA graph is captured or instantiated."""
    instantiates = trace.calls.start[named(trace, trace.calls, _INSTANTIATES)]
    inside = np.searchsorted(instantiates, host_end) > np.searchsorted(instantiates, host_start)
    return inside | (captures(trace).within(host_start, host_end) > 0)


def _no_step(trace: Trace, links: Links) -> tuple[Intervals, Intervals]:
    """The time of validation and checkpoints, on the host and on the GPU."""
    host = spans_of(trace.annotations, named(trace, trace.annotations, _NO_STEP.__contains__))
    # on the GPU such a range begins once the host has reached it and earlier work is complete, and ends likewise
    order = np.argsort(links.time, kind="stable")
    order = order[links.linked[order]]
    completed: Ints = np.append(np.maximum.accumulate(trace.gpu.end[order]), -1)

    def reached(time: Ints) -> Ints:
        return np.maximum(time, completed[np.searchsorted(links.time[order], time, side="left") - 1])

    return host, Intervals.of(reached(host.start), reached(host.end))
