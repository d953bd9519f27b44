"""A trace prepared for measuring: launches, steps, and the kind of each kernel."""

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Nesting, take
from lightning_forge_profiling.analysis.kernels import KINDS, classify
from lightning_forge_profiling.analysis.launches import Links, launched_before, link, named, spans_of
from lightning_forge_profiling.analysis.steps import Steps, find_steps, region_marks
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Cut, Ints, Trace
from lightning_forge_profiling.names import MARK_PREFIX


@dataclass(frozen=True, slots=True, eq=False)
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


def prepare(trace: Trace) -> Recording:
    """Find launches, steps and kinds of a trace."""
    nesting = Nesting(trace.operators)
    links = link(trace, nesting)
    steps = find_steps(trace, links)
    step = np.where(links.linked, steps.host.at(links.time), steps.gpu.at(trace.gpu.start))
    step[launched_before(trace, links)] = -1
    return Recording(trace, nesting, links, steps, _kinds(trace, links, nesting), step)


def with_steps(recording: Recording, chosen: NDArray[np.bool_]) -> Recording:
    """The recording with only some of its steps."""
    position = np.append(np.where(chosen, np.cumsum(chosen) - 1, -1), -1)
    return replace(recording, steps=recording.steps.only(chosen), step=position[recording.step])


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
