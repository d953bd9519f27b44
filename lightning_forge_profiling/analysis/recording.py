"""A trace prepared for measuring: launches, steps, and the kind of each kernel."""

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.correlation import Links, launched_before, link
from lightning_forge_profiling.analysis.host_calls import named, spans_of
from lightning_forge_profiling.analysis.kernel_kinds import KINDS, classify
from lightning_forge_profiling.analysis.marks import region_marks
from lightning_forge_profiling.analysis.nesting import enclosing, outermost_marked, parents
from lightning_forge_profiling.analysis.steps import Steps, find_steps
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Ints, Trace
from lightning_forge_profiling.names import MARK_PREFIX


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A trace with its launches, steps and kinds.

    Attributes:
        trace: the trace.
        operator_parent: for each operator the one around it; -1 for the outermost.
        links: launches of the GPU work.
        steps: the steps.
        kind: for each row of GPU work the position of its kind in `KINDS`.
        step: for each row of GPU work the position of its step: the one that launched it, or if the launch is unknown
            the one in whose window it begins; -1 for none, and for work launched before the recording.
    """

    trace: Trace
    operator_parent: Ints
    links: Links
    steps: Steps
    kind: Ints
    step: Ints


def prepare(trace: Trace) -> Recording:
    """Find launches, steps and kinds of a trace."""
    operator_parent = parents(trace.operators)
    links = link(trace, operator_parent)
    steps = find_steps(trace, links)
    step = np.where(links.linked, steps.of_host(links.time), steps.of_gpu(trace.gpu.start))
    step[launched_before(trace, links)] = -1
    return Recording(trace, operator_parent, links, steps, _kinds(trace, links, operator_parent), step)


def with_steps(recording: Recording, chosen: NDArray[np.bool_]) -> Recording:
    """The recording with only some of its steps."""
    place = np.append(np.where(chosen, np.cumsum(chosen) - 1, -1), -1)
    return replace(recording, steps=recording.steps.only(chosen), step=place[recording.step])


def _kinds(trace: Trace, links: Links, operator_parent: Ints) -> Ints:
    """The kind of each row of GPU work, classified once for each distinct name, collective and operator."""
    gpu = trace.gpu
    names = (*trace.names, "", "Optimizer.step#")
    no_operator, update = len(names) - 2, len(names) - 1
    operator = np.append(trace.operators.name, no_operator)[links.operator]
    operator = np.where(by_optimizer(trace, operator_parent, links.time, links.operator), update, operator)
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
            ).kind
        )
        for name, activity, collective, operator in np.transpose(np.unravel_index(keys, shape)).tolist()
    ]
    return np.array(kinds, np.int64)[row.reshape(-1)] if kinds else np.zeros(0, np.int64)


def by_optimizer(trace: Trace, operator_parent: Ints, time: Ints, operator: Ints) -> NDArray[np.bool_]:
    """Mask of the instants in an optimizer's step, without the closure's forward and backward inside it.

    The closure's part is all that autograd records or runs and, in a trace that the callbacks marked, all in other
    marks: a forward pass without gradients, or DistributedDataParallel's bucket copies.
    """
    steps = spans_of(trace.annotations, named(trace, trace.annotations, re.compile(r"Optimizer\.step#.*")))
    operators, marked = trace.operators, region_marks(trace)
    of_closure = (operators.sequence >= 0) | named(trace, operators, re.compile(r"autograd::engine::.*"))
    in_closure = np.append(outermost_marked(operator_parent, of_closure), -1)[operator] >= 0
    mark = enclosing(marked, parents(marked), time, np.zeros(len(time), np.int64))
    in_closure |= np.append(~named(trace, marked, re.compile(f"{MARK_PREFIX}optimizer")), False)[mark]
    return steps.contains(time) & ~in_closure
