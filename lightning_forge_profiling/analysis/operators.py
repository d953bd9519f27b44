"""Table of PyTorch operators: calls, host time, GPU time, device memory, shapes."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.nesting import enclosing, in_namesake, sum_into_ancestors
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints
from lightning_forge_profiling.results.table_rows import Operator

SORTS: Final = MappingProxyType[str, Callable[[Operator], float]](
    {
        "self_device": lambda operator: operator.self_device_ms_per_step,
        "device": lambda operator: operator.device_ms_per_step,
        "self_host": lambda operator: operator.self_host_ms_per_step,
        "host": lambda operator: operator.host_ms_per_step,
        "calls": lambda operator: operator.calls_per_step,
        "memory": lambda operator: abs(operator.allocated_bytes_per_step or 0),
    }
)
"""Sort keys of the operator table, largest first."""

_SHAPES_SHOWN: Final = 3
_SHAPES_LENGTH: Final = 200


def operator_table(recording: Recording, *, sort: str | None = None, top: int = 20) -> tuple[Operator, ...]:
    """The top operators of the recorded steps, means per step."""
    trace, parent = recording.trace, recording.operator_parent
    operators = trace.operators
    counted = recording.steps.of_host(operators.start) >= 0
    if not counted.any():
        return ()
    self_device = _device_time(recording)
    device = sum_into_ancestors(parent, self_device)
    memory = sum_into_ancestors(parent, _allocated(recording))
    outer = counted & ~in_namesake(operators, parent)

    def by_name(values: Ints, rows: NDArray[np.bool_]) -> Ints:
        return np.bincount(operators.name[rows], values[rows], len(trace.names)).astype(np.int64)

    ones, steps = np.ones(len(operators), np.int64), len(recording.steps)
    calls, self_host = by_name(ones, counted), by_name(self_time(recording), counted)
    host = by_name(operators.end - operators.start, outer)
    self_device_sum, device_sum = by_name(self_device, counted), by_name(device, outer)
    memory_sum = by_name(memory, outer)
    table = [
        Operator(
            name=trace.names[name],
            calls_per_step=int(calls[name]) / steps,
            host_ms_per_step=int(host[name]) / steps / 1e6,
            self_host_ms_per_step=int(self_host[name]) / steps / 1e6,
            device_ms_per_step=int(device_sum[name]) / steps / 1e6,
            self_device_ms_per_step=int(self_device_sum[name]) / steps / 1e6,
            allocated_bytes_per_step=int(memory_sum[name]) / steps if len(trace.allocations) else None,
            input_shapes=(),
        )
        for name in np.flatnonzero(calls).tolist()
    ]
    by = SORTS[sort or ("self_device" if self_device_sum.any() else "self_host")]
    table.sort(key=lambda operator: (-by(operator), -operator.self_host_ms_per_step))
    shapes = _shapes(recording, device, counted)
    return tuple(replace(operator, input_shapes=tuple(shapes[operator.name])) for operator in table[:top])


def self_time(recording: Recording) -> Ints:
    """Host time of each operator without its child operators, in nanoseconds."""
    operators, parent = recording.trace.operators, recording.operator_parent
    inner = np.zeros(len(operators), np.int64)
    child = np.flatnonzero(parent >= 0)
    # after a clock jump a child may end after its parent: only the part inside counts
    np.add.at(
        inner, parent[child], np.minimum(operators.end[child], operators.end[parent[child]]) - operators.start[child]
    )
    return operators.end - operators.start - inner


def _device_time(recording: Recording) -> Ints:
    """Time of the GPU work that each operator launched itself, in the recorded steps."""
    gpu = recording.trace.gpu
    spent = np.zeros(len(recording.trace.operators), np.int64)
    rows = np.flatnonzero((recording.links.operator >= 0) & (recording.step >= 0))
    np.add.at(spent, recording.links.operator[rows], (gpu.end - gpu.start)[rows])
    return spent


def _allocated(recording: Recording) -> Ints:
    """Device memory that each operator itself allocated less what it freed, in bytes."""
    trace = recording.trace
    allocated = np.zeros(len(trace.operators), np.int64)
    owner = enclosing(trace.operators, recording.operator_parent, trace.allocations.time, trace.allocations.thread)
    np.add.at(allocated, owner[owner >= 0], trace.allocations.size[owner >= 0])
    return allocated


def _shapes(recording: Recording, device: Ints, counted: NDArray[np.bool_]) -> dict[str, list[str]]:
    """The shapes of each operator that took the most device time."""
    trace, operators = recording.trace, recording.trace.operators
    pairs, place = np.unique(
        np.stack((operators.name[counted], operators.signature[counted])), axis=1, return_inverse=True
    )
    spent = np.bincount(place.reshape(-1), device[counted] + 1.0)
    found: dict[str, list[str]] = {}
    for name, signature in pairs[:, np.lexsort((-spent, pairs[0]))].T.tolist():
        texts = found.setdefault(trace.names[name], [])
        text = trace.signatures[signature].dims[: 4 * _SHAPES_LENGTH].decode(errors="replace")[:_SHAPES_LENGTH]
        if text and text not in texts and len(texts) < _SHAPES_SHOWN:
            texts.append(text)
    return found
