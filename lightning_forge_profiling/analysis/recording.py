"""A trace prepared for measuring: launches, steps, the kind of each kernel, and the operators of light steps."""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import NOTHING, Intervals, Nesting, ascending, places, take
from lightning_forge_profiling.analysis.kernels import KINDS, classify
from lightning_forge_profiling.analysis.steps import (
    LOADS_DATA,
    WAITS,
    Links,
    Steps,
    find_steps,
    launched_before,
    link,
    named,
    region_marks,
    spans_of,
    step_marks,
)
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Cut, Events, Ints, Trace
from lightning_forge_profiling.names import MARK_PREFIX, REGIONS


@dataclass(frozen=True, eq=False)
class Recording:
    """A trace with its launches, steps and kinds."""

    trace: Trace  # the trace
    nesting: Nesting  # how the operators lie in each other
    links: Links  # launches of the GPU work
    steps: Steps  # the steps
    kind: Ints  # for each row of GPU work the position of its kind in `KINDS`
    # for each row of GPU work the position of its step: the one that launched it, or if the launch is unknown the one
    # in whose window it begins; -1 for none, and for work launched before the recording
    step: Ints
    elsewhere: Intervals = NOTHING  # when other GPUs of the process work

    @cached_property
    def _regions(self) -> tuple[Ints, dict[str, Intervals]]:
        marked = any(name.startswith(MARK_PREFIX) for name in self.trace.names)
        return _marked(self) if marked else _inferred(self)

    @property
    def region(self) -> Ints:
        """For each row of GPU work the position of its built-in region in `REGIONS`."""
        return self._regions[0]

    @property
    def on_host(self) -> dict[str, Intervals]:
        """When the host is in each built-in region."""
        return self._regions[1]


def prepare(trace: Trace) -> Recording:
    """Find launches, steps and kinds of a trace, of the GPU that works longest."""
    trace, elsewhere = _of_one_gpu(trace)
    nesting = Nesting(trace.operators)
    links = link(trace, nesting)
    steps = find_steps(trace, links)
    step = np.where(links.linked, steps.host.at(links.time), steps.gpu.at(trace.gpu.start))
    step[launched_before(trace, links)] = -1
    return Recording(trace, nesting, links, steps, _kinds(trace, links, nesting), step, elsewhere)


def _of_one_gpu(trace: Trace) -> tuple[Trace, Intervals]:
    """The trace with only the GPU that works longest and the launches of its work, and when others work."""
    gpus, number = np.unique([device for device, _ in trace.lanes], return_inverse=True)
    gpu = number[trace.gpu.lane] if len(trace.gpu) else np.zeros(0, np.int64)
    worked = [spans_of(trace.gpu, gpu == each).total for each in range(len(gpus))]
    if np.count_nonzero(worked) < 2:  # noqa: PLR2004
        return trace, NOTHING
    longest = int(np.argmax(worked))
    work = ", ".join(
        [f"GPU {name} {ns / 1e6:,.1f} ms" for name, ns in zip(gpus, worked, strict=True) if ns][:_MOST_GPUS]
    )
    note = f"{trace.file}: several GPUs work in this process ({work}); all figures are of GPU {gpus[longest]}"
    own = gpu == longest
    ids = trace.calls.correlation
    launch_others = np.isin(ids, trace.gpu.correlation[~own]) & ~np.isin(ids, trace.gpu.correlation[own])
    of_one = replace(trace, gpu=trace.gpu.at(own), calls=trace.calls.at(~launch_others))
    return replace(of_one, warnings=(*trace.warnings, note)), spans_of(trace.gpu, ~own)


def with_steps(recording: Recording, chosen: NDArray[np.bool_]) -> Recording:
    """The recording with only some of its steps."""
    return replace(recording, steps=recording.steps.only(chosen), step=places(chosen)[recording.step])


def _kinds(trace: Trace, links: Links, nesting: Nesting) -> Ints:
    """The kind of each row of GPU work, classified once for each distinct name, collective and operator."""
    gpu = trace.gpu
    names = (*trace.names, "", "Optimizer.step#")
    no_operator, update = len(names) - 2, len(names) - 1
    operator = np.append(trace.operators.name, no_operator)[links.operator]
    operator = np.where(by_optimizer(trace, nesting, links.time, links.operator), update, operator)
    columns = (gpu.name, gpu.activity, gpu.collective + 1, operator)
    shape = (len(names), len(ACTIVITIES), len(trace.collectives) + 1, len(names))
    keys, row = np.unique(np.ravel_multi_index(columns, shape), return_inverse=True)
    kinds = [
        KINDS.index(
            classify(
                names[name],
                activity=ACTIVITIES[activity],
                collective=trace.collectives[collective - 1].name if collective else "",
                operator=names[operator],
            )
        )
        for name, activity, collective, operator in np.transpose(np.unravel_index(keys, shape)).tolist()
    ]
    return np.array(kinds, np.int64)[row.reshape(-1)] if kinds else np.zeros(0, np.int64)


def by_optimizer(trace: Trace, nesting: Nesting, time: Ints, operator: Ints) -> NDArray[np.bool_]:
    """Mask of the instants in an optimizer's step, without the closure's forward and backward inside it.

    The closure's part is all that autograd records or runs and, in a trace that the callbacks marked, all in other
    marks: a forward pass without gradients, or DistributedDataParallel's bucket copies.
    """
    steps = spans_of(trace.annotations, named(trace, trace.annotations, re.compile(r"Optimizer\.step#.*")))
    operators, marked = trace.operators, region_marks(trace)
    of_closure = (operators.sequence >= 0) | named(trace, operators, re.compile(r"autograd::engine::.*"))
    in_closure = take(nesting.innermost(of_closure), operator) >= 0
    mark = Nesting(marked).enclosing(time, np.zeros(len(time), np.int64))
    in_closure |= np.append(~named(trace, marked, re.compile(f"{MARK_PREFIX}optimizer")), False)[mark]
    return steps.contains(time) & ~in_closure


_MOST_GPUS: Final = 8  # that a note names

_OTHER: Final = REGIONS.index("other")

_ENGINE: Final = re.compile(r"autograd::engine::evaluate_function.*")
# Nodes that autograd's engine runs, for traces of PyTorch before 1.10, which do not mark the engine.
_NODE: Final = re.compile(r"\w+Backward\d*|torch::autograd::(?:AccumulateGrad|CopyBackwards|GraphRoot)")


def _marked(recording: Recording) -> tuple[Ints, dict[str, Intervals]]:
    """The regions of a trace that the callbacks marked: work belongs to the innermost mark."""
    trace = recording.trace
    spans = region_marks(trace)
    names = [trace.names[name].removeprefix(MARK_PREFIX) for name in spans.name.tolist()]
    region = np.array([REGIONS.index(name) if name in REGIONS else _OTHER for name in names], np.int64)
    nesting = Nesting(spans)
    launched = nesting.enclosing(recording.links.time, np.zeros(len(trace.gpu), np.int64))
    host, covered = {}, NOTHING
    for number, name in enumerate(REGIONS):
        own = region == number
        inner = np.isin(nesting.parent, np.flatnonzero(own)) & ~own
        host[name] = spans_of(spans, own) - spans_of(spans, inner)
        covered |= spans_of(spans, own)
    host["other"] = recording.steps.host.spans - (covered - host["other"])
    return np.append(region, _OTHER)[launched], host


def _inferred(recording: Recording) -> tuple[Ints, dict[str, Intervals]]:
    """The regions of a trace without marks.

    `backward` is the work of autograd's engine, `optimizer` that of `Optimizer.step`, `data` that of the data loader,
    `forward` that of operators that autograd records (before PyTorch 1.10: that begin before backward), `other` the
    rest.
    """
    trace, links, nesting = recording.trace, recording.links, recording.nesting
    operators = trace.operators
    engine = named(trace, operators, _ENGINE)
    if not engine.any():
        engine = named(trace, operators, _NODE)
    loads = named(trace, trace.annotations, LOADS_DATA)
    steps_optimizer = named(trace, trace.annotations, lambda name: name.startswith("Optimizer.step"))
    data, optimizer = spans_of(trace.annotations, loads), spans_of(trace.annotations, steps_optimizer)
    backward = spans_of(operators, engine)
    recorded = operators.sequence >= 0 if (operators.sequence >= 0).any() else _before_backward(recording, engine)
    forward = spans_of(operators, recorded & ~engine) - backward - data
    in_engine = take(nesting.innermost(engine), links.operator) >= 0
    in_recorded = take(nesting.innermost(recorded), links.operator) >= 0
    # the optimizer last: its step contains Lightning's closure with forward and backward
    region = np.select(
        [data.contains(links.time), in_engine, in_recorded, optimizer.contains(links.time)],
        [REGIONS.index(name) for name in ("data", "backward", "forward", "optimizer")],
        _OTHER,
    )
    known = {"data": data, "forward": forward, "backward": backward}
    known["optimizer"] = optimizer - forward - backward - data
    known["other"] = recording.steps.host.spans - (data | forward | backward | optimizer)
    return region, {name: known.get(name, NOTHING) for name in REGIONS}


def _before_backward(recording: Recording, engine: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of the operators before the backward of their step: forward, in a trace without sequence numbers."""
    start = recording.trace.operators.start
    step = recording.steps.host.at(start)
    begins = np.full(len(recording.steps) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, step[engine], start[engine])
    with_backward = np.isin(step, step[engine]) & (step >= 0)
    return ~engine & with_backward & (start < begins[step])


_TABLE_WORDS: Final = MappingProxyType({"gpu": "GPU work", "calls": "runtime calls", "frames": "Python functions"})


def where_cut(trace: Trace, steps: Steps) -> str:
    """Describes where the first file that is cut off ends, and which steps are whole; "" if all files are complete."""
    cut = next((cut for cut in trace.cuts if cut), None)
    if cut is None:
        return ""
    if len(trace.cuts) > 1:
        return f"{trace.file}: one of these files is cut off, and its steps that may lack events are left out."
    whole = steps.number[steps.whole].tolist()
    if whole:
        completeness = f"Its events are in order of time, so the steps before are whole: {', '.join(map(str, whole))}."
    else:
        completeness = "Events of other threads may be missing, so no step is known to be whole."
    return f"{trace.file} is cut off{_at_step(trace, cut, steps)}. {completeness}"


def _at_step(trace: Trace, cut: Cut, steps: Steps) -> str:
    of = "stream" if cut.table == "gpu" else "thread"
    inside = f"it ends in the {_TABLE_WORDS.get(cut.table, cut.table)} of {of} {cut.thread[1].removeprefix('stream ')}"
    if not len(steps.marks):
        return f", without any step mark: {inside}"
    if cut.table == "gpu":
        return f": {inside}"  # the GPU may be some steps behind the host
    step = int(np.searchsorted(steps.host_start, cut.time, side="right")) - 1
    if step < 0:
        return f" before step {steps.number[0]}: {inside}"
    if step and _ascending(trace, cut):
        inside += f", which are whole up to step {steps.number[step - 1]}"
    return f" in step {steps.number[step]}: {inside}"


def _ascending(trace: Trace, cut: Cut) -> bool:
    """Whether no event of the thread is later than the last one read."""
    table = getattr(trace, cut.table)
    of_thread = np.array([thread == cut.thread for thread in trace.threads])[table.thread]
    return bool((table.start[of_thread] <= cut.time).all())


_MARK: Final = re.compile(rf"{re.escape(MARK_PREFIX)}.*")
_T = TypeVar("_T", bound=Events)


def prepared(trace: Trace) -> Recording:
    """Launches, steps and kinds of a trace, with operators in its light steps."""
    recording = prepare(trace)
    return explain(recording) if recording.steps.light.any() else recording


def explain(recording: Recording) -> Recording:
    """The recording with operators in those light steps whose launches agree with those of a step that has them.

    Recording operators slows the host, so a window begins with light steps, whose GPU work, runtime calls and marks
    alone are recorded. Where one made the same launches and waits in the same order on each thread as a step with
    operators, and each launch ran kernels of the same names, the operators of that step are laid over it: the same
    calls are the anchors, and between two of them time is stretched or shrunk evenly.
    """
    steps, trace = recording.steps, recording.trace
    works = _works(recording)
    donors: dict[bytes, list[int]] = defaultdict(list)
    for step in np.flatnonzero(~steps.light & steps.whole).tolist():
        donors[works[step].key].append(step)
    done, collective = np.zeros_like(steps.light), trace.gpu.collective.copy()
    operators, annotations, modules = [trace.operators], [trace.annotations], [trace.modules]
    sequences = int(trace.operators.sequence.max(initial=0)) + 1
    marks = step_marks(trace) | named(trace, trace.annotations, _MARK)
    annotated = steps.host.at(trace.annotations.start)
    for step in np.flatnonzero(steps.light).tolist():
        same = donors[works[step].key]
        if not same:
            continue
        donor, done[step] = same[len(operators) % len(same)], True
        clock = _Clock(recording, works, donor, step)
        moved = clock.moved(trace.operators, np.ones(len(trace.operators), bool))
        sequence = np.where(moved.sequence >= 0, moved.sequence + len(operators) * sequences, moved.sequence)
        operators.append(replace(moved, external=np.full(len(moved), -1), sequence=sequence))
        # the callbacks' marks and the user's regions are shown in light steps, too
        own = np.isin(trace.annotations.name, trace.annotations.name[annotated == step])
        annotations.append(clock.moved(trace.annotations, ~(marks | own)))
        modules.append(clock.moved(trace.modules, np.ones(len(trace.modules), bool)))
        collective[works[step].gpu] = collective[works[donor].gpu]
    if not done.any():
        return recording
    gpu = replace(trace.gpu, collective=collective)
    laid = replace(
        trace, operators=_joined(operators), annotations=_joined(annotations), modules=_joined(modules), gpu=gpu
    )
    again = prepare(laid)
    steps = replace(again.steps, light=steps.light, explained=done)
    return replace(again, steps=steps, elsewhere=recording.elsewhere)


def _joined(parts: list[_T]) -> _T:
    """Tables as one, in order."""
    columns: Any = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    return type(parts[0])(**columns).in_order()


class _Work(NamedTuple):
    """What a step launched and waited for."""

    key: bytes  # the same for steps that do the same
    calls: Ints  # rows of `Trace.calls`, by thread and time
    gpu: Ints  # rows of `Trace.gpu`, by launch and name


def _works(recording: Recording) -> list[_Work]:
    trace, links, steps = recording.trace, recording.links, recording.steps
    calls = trace.calls
    launched = np.zeros(len(calls) + 1, bool)
    launched[links.call] = True
    threads = np.unique(calls.thread[launched[:-1]])
    rows = np.flatnonzero(launched[:-1] | (named(trace, calls, WAITS) & np.isin(calls.thread, threads)))
    at = steps.host.at(calls.start[rows])
    rows, at = rows[at >= 0], at[at >= 0]
    order = np.lexsort((calls.start[rows], calls.thread[rows], at))
    rows, at = rows[order], at[order]
    position = np.full(len(calls) + 1, -1)  # of a call among those of its step
    position[rows] = np.arange(len(rows)) - np.searchsorted(at, at)
    gpu = np.flatnonzero(position[links.call] >= 0)
    step = steps.host.at(links.time[gpu])
    order = np.lexsort((trace.gpu.start[gpu], trace.gpu.name[gpu], position[links.call[gpu]], step))
    later = np.arange(1, len(steps))
    works = []
    by_step = np.split(rows, np.searchsorted(at, later)), np.split(gpu[order], np.searchsorted(step[order], later))
    for own, work in zip(*by_step, strict=True):
        columns = (calls.thread[own], calls.name[own], position[links.call[work]], trace.gpu.name[work])
        works.append(_Work(len(own).to_bytes(8) + b"".join(column.tobytes() for column in columns), own, work))
    return works


class _Clock:
    """When a light step did what a step with operators did."""

    def __init__(self, recording: Recording, works: list[_Work], donor: int, step: int) -> None:
        self._steps, self._donor = recording.steps, donor
        trace, steps, both = recording.trace, recording.steps, (donor, step)
        self._bounds = tuple(np.array([steps.host_start[each], steps.host_end[each]]) for each in both)
        marks = region_marks(trace)
        marks_of = [marks.at(steps.host.at(marks.start) == each) for each in both]
        same_marks = np.array_equal(marks_of[0].name, marks_of[1].name)
        main = int(trace.annotations.thread[steps.marks[0]]) if len(steps.marks) else -1
        self._anchors: dict[int, tuple[Ints, Ints]] = {}
        for thread in {main, *np.unique(trace.calls.thread[works[donor].calls]).tolist()}:
            instants = []
            for each, bounds, own in zip(both, self._bounds, marks_of, strict=True):
                rows = works[each].calls[trace.calls.thread[works[each].calls] == thread]
                tables = [trace.calls.at(rows), *([own] if thread == main and same_marks else [])]
                instants.append(np.concatenate((bounds, *(side for one in tables for side in (one.start, one.end)))))
            self._anchors[thread] = ascending(*instants)

    def moved(self, table: _T, wanted: NDArray[np.bool_]) -> _T:
        """The wanted rows that begin in the step with operators, at their times in the light step."""
        columns: dict[str, Any] = table.at(wanted & (self._steps.host.at(table.start) == self._donor)).columns()
        for thread in np.unique(columns["thread"]).tolist():
            own = columns["thread"] == thread
            theirs, here = self._anchors.get(thread, self._bounds)
            for side in ("start", "end"):
                columns[side][own] = np.rint(np.interp(columns[side][own], theirs, here))
        return type(table)(**columns)
