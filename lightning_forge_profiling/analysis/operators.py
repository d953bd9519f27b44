"""PyTorch operators: how often, how long on the host, how much GPU work, how much memory."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.nesting import enclosing, sum_into_ancestors
from lightning_forge_profiling.analysis.rank_summary import Operator
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.trace import Ints

__all__ = ["SORTS", "operator_table"]

SORTS: Final = MappingProxyType[str, Callable[[Operator], float]](
    {
        "device": lambda operator: operator.device_ms,
        "self_device": lambda operator: operator.self_device_ms,
        "host": lambda operator: operator.host_ms,
        "self_host": lambda operator: operator.self_host_ms,
        "calls": lambda operator: operator.calls,
        "memory": lambda operator: abs(operator.allocated_bytes or 0),
    }
)
"""What operators can be sorted by, largest first."""

_SHAPES_SHOWN: Final = 3
_SHAPES_LENGTH: Final = 200


def operator_table(recording: Recording, *, sort: str = "device", top: int = 20) -> tuple[Operator, ...]:
    """The operators called in the recorded steps.

    Args:
        recording: the recording.
        sort: a key of `SORTS`.
        top: how many.
    """
    trace, parent = recording.trace, recording.operator_parent
    operators = trace.operators
    counted = recording.steps.of_host(operators.start) >= 0
    if not counted.any():
        return ()
    duration = operators.end - operators.start
    inner = np.zeros(len(operators), np.int64)
    child = np.flatnonzero(parent >= 0)
    # one that ends after the operator around it, as clocks may have it, is in there only in part
    np.add.at(
        inner, parent[child], np.minimum(operators.end[child], operators.end[parent[child]]) - operators.start[child]
    )
    self_device = _device_time(recording)
    device = sum_into_ancestors(parent, self_device)
    memory = sum_into_ancestors(parent, _allocated(recording))
    outer = counted & ~_in_namesake(operators.name, parent)

    def by_name(values: Ints, rows: NDArray[np.bool_]) -> Ints:
        return np.bincount(operators.name[rows], values[rows], len(trace.names)).astype(np.int64)

    ones = np.ones(len(operators), np.int64)
    calls, host, self_host = by_name(ones, counted), by_name(duration, outer), by_name(duration - inner, counted)
    self_device_sum, device_sum = by_name(self_device, counted), by_name(device, outer)
    memory_sum = by_name(memory, outer)
    table = [
        Operator(
            name=trace.names[name],
            calls=int(calls[name]),
            host_ms=int(host[name]) / 1e6,
            self_host_ms=int(self_host[name]) / 1e6,
            device_ms=int(device_sum[name]) / 1e6,
            self_device_ms=int(self_device_sum[name]) / 1e6,
            allocated_bytes=int(memory_sum[name]) if len(trace.allocations) else None,
            input_shapes=(),
        )
        for name in np.flatnonzero(calls).tolist()
    ]
    table.sort(key=lambda operator: (-SORTS[sort](operator), -operator.host_ms))
    return tuple(_with_shapes(recording, operator, device, counted) for operator in table[:top])


def _in_namesake(name: Ints, parent: Ints) -> NDArray[np.bool_]:
    """Which calls are within one of the same name, and so part of that one."""
    found = np.zeros(len(name), bool)
    around = parent
    while (inside := around >= 0).any():
        found |= inside & (name[around] == name)
        around = np.where(inside, parent[around], -1)
    return found


def _device_time(recording: Recording) -> Ints:
    """Durations of the GPU work that each operator launched itself, in the recorded steps."""
    gpu = recording.trace.gpu
    spent = np.zeros(len(recording.trace.operators), np.int64)
    rows = np.flatnonzero((recording.links.operator >= 0) & (recording.step >= 0))
    np.add.at(spent, recording.links.operator[rows], (gpu.end - gpu.start)[rows])
    return spent


def _allocated(recording: Recording) -> Ints:
    """Bytes that each operator itself allocated on the device, less those it freed."""
    trace = recording.trace
    allocated = np.zeros(len(trace.operators), np.int64)
    owner = enclosing(trace.operators, recording.operator_parent, trace.allocations.time, trace.allocations.thread)
    np.add.at(allocated, owner[owner >= 0], trace.allocations.size[owner >= 0])
    return allocated


def _with_shapes(recording: Recording, operator: Operator, device: Ints, counted: NDArray[np.bool_]) -> Operator:
    operators, signatures = recording.trace.operators, recording.trace.signatures
    rows = np.flatnonzero(counted & (operators.name == recording.trace.names.index(operator.name)))
    spent = np.bincount(operators.signature[rows], device[rows] + 1.0, len(signatures))
    order = np.argsort(-spent, kind="stable")
    texts = dict.fromkeys(
        signatures[number].dims.decode(errors="replace")[:_SHAPES_LENGTH]
        for number in order[: np.count_nonzero(spent)].tolist()
    )
    shapes = tuple(text for text in texts if text)[:_SHAPES_SHOWN]
    return replace(operator, input_shapes=shapes)
