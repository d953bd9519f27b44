"""Which call, and which operator, launched each piece of GPU work."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.nesting import enclosing
from lightning_forge_profiling.kineto.trace import Calls, Ints, Operators, Trace

__all__ = ["Links", "launched_before", "link"]

_NO_EXTERNAL: Final = (0, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Where GPU work comes from; each array has one entry for each row of `Trace.gpu`.

    Attributes:
        call: row of the runtime or driver call, -1 where the trace has none.
        operator: row of the innermost operator, -1 where there was none.
        time: when the host launched it, nanoseconds; of the operator where the call is missing; -1 for unlinked work.
        thread: which thread did, -1 for unlinked work.
        call_operator: for each row of `Trace.calls` the innermost operator around it, -1 where there was none.
    """

    call: Ints
    operator: Ints
    time: Ints
    thread: Ints
    call_operator: Ints

    @property
    def linked(self) -> NDArray[np.bool_]:
        """Which work has a known launch."""
        return self.time >= 0


def link(trace: Trace, operator_parent: Ints) -> Links:
    """Join GPU work to its launch: by correlation over runtime and driver calls, then by `External id`.

    Args:
        trace: the trace.
        operator_parent: `nesting.parents` of its operators.
    """
    gpu, calls, operators = trace.gpu, trace.calls, trace.operators
    call = _match(gpu.correlation, calls.correlation, none=(-1, 0))
    call_operator = _operator_of_calls(calls, operators, operator_parent)
    by_external = _match(gpu.external, operators.external, none=_NO_EXTERNAL)
    has_call = call >= 0
    operator = np.where(has_call, _take(call_operator, call), by_external)
    time = np.where(has_call, _take(calls.start, call), _take(operators.start, by_external))
    thread = np.where(has_call, _take(calls.thread, call), _take(operators.thread, by_external))
    return Links(call, operator, time, thread, call_operator)


def launched_before(trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Which GPU work the host launched before the recording began, as that of the profiler's warm-up step.

    Its calls are not in the trace, and correlation ids ascend: it has a lower one than all recorded calls.
    """
    gpu, begins = trace.gpu, np.array(trace.begins)
    lowest = np.full(len(begins), np.iinfo(np.int64).max)
    calls = trace.calls.correlation > 0
    recording = np.searchsorted(begins, trace.calls.start[calls], side="right") - 1
    np.minimum.at(lowest, np.maximum(recording, 0), trace.calls.correlation[calls])
    before = lowest[np.maximum(np.searchsorted(begins, gpu.start, side="right") - 1, 0)]
    return ~links.linked & (gpu.correlation > 0) & (gpu.correlation < before)


def _operator_of_calls(calls: Calls, operators: Operators, parent: Ints) -> Ints:
    """The operator that a call says it is of, if that lies around it; else the innermost around it.

    In some traces the `External id` of a call is its own correlation id, and by chance that of some other operator.
    """
    found = _match(calls.external, operators.external, none=_NO_EXTERNAL)
    around = (
        (_take(operators.thread, found) == calls.thread)
        & (_take(operators.start, found) <= calls.start)
        & (calls.start <= _take(operators.end, found))
    )
    missing = (found < 0) | ~around
    if missing.any():
        found[missing] = enclosing(operators, parent, calls.start[missing], calls.thread[missing])
    return found


def _match(keys: Ints, table: Ints, *, none: tuple[int, ...]) -> Ints:
    """For each key the first row of the table with it; -1 where there is none."""
    if not len(table):
        return np.full(len(keys), -1)
    order = np.argsort(table, kind="stable")
    place = np.minimum(np.searchsorted(table[order], keys), len(table) - 1)
    row = order[place]
    return np.where((table[row] == keys) & ~np.isin(keys, none), row, -1)


def _take(column: Ints, row: Ints) -> Ints:
    """The column's values at rows, -1 at row -1."""
    return np.append(column, -1)[row]
