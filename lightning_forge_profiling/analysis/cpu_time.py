"""Step time of a rank that trains on the CPU: data loader, operators, optimizer, Python."""

import re
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import LAUNCHES, named, spans_of
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.operators import self_time
from lightning_forge_profiling.analysis.recording import Recording, by_optimizer
from lightning_forge_profiling.analysis.regions import host_spans
from lightning_forge_profiling.results.cpu import CpuTime

_COSTLIEST: Final = 3
_STEP: Final = re.compile(r"Optimizer\.step#(\w+)\.step")
_FUSED: Final = re.compile(r"aten::_fused_\w+")
_FOREACH: Final = re.compile(r"aten::_foreach_\w+")
_READS: Final = re.compile(r"aten::_local_scalar_dense")
_ITEM: Final = re.compile(r"aten::(?:_local_scalar_dense|item|is_nonzero)")
_ENGINE: Final = re.compile(r"autograd::engine::.*")


def cpu_time(recording: Recording) -> CpuTime | None:
    """Split the step time of a rank that trains on the CPU."""
    trace, steps = recording.trace, recording.steps
    operators, parent = trace.operators, recording.operator_parent
    used_gpu = len(trace.gpu) or len(trace.allocations) or named(trace, trace.calls, LAUNCHES).any()
    in_step = steps.of_host(operators.start) >= 0
    if used_gpu or not in_step.any():
        return None
    host = host_spans(recording)
    data, optimizer = host["data"], host["optimizer"]
    trains = np.isin(operators.thread, _training_threads(recording))
    computing = spans_of(operators, trains) - data - optimizer
    rest = outside_operators(recording, host)
    rows = np.arange(len(operators))
    updates = in_step & by_optimizer(trace, parent, operators.start, rows)
    elsewhere = in_step & trains & ~data.contains(operators.start) & ~optimizer.contains(operators.start)
    names = (_STEP.fullmatch(trace.names[name]) for name in np.unique(trace.annotations.name).tolist())
    return CpuTime(
        data_ms_per_step=_mean_ms(recording, steps.measure_host(data)),
        optimizer_ms_per_step=_mean_ms(recording, steps.measure_host(optimizer)),
        operators_ms_per_step=_mean_ms(recording, steps.measure_host(computing)),
        python_ms_per_step=_mean_ms(recording, steps.measure_host(rest)),
        costliest_ms_per_step=_costliest(recording, elsewhere),
        optimizer=next((match[1] for match in names if match), ""),
        update=_update(recording, updates),
        update_calls_per_step=int(updates.sum()) / len(steps),
        item_calls_per_step=int((elsewhere & named(trace, operators, _READS)).sum()) / len(steps),
        item_ms_per_step=_mean_ms(
            recording, steps.measure_host(spans_of(operators, elsewhere & named(trace, operators, _ITEM)))
        ),
        operator_threads=len(np.unique(operators.thread[in_step])),
        intra_op_threads=trace.intra_op_threads,
        usable_cores=trace.usable_cores,
    )


def outside_operators(recording: Recording, host: Mapping[str, Intervals]) -> Intervals:
    """When a rank that trains on the CPU is in no operator, nor in data loader and optimizer."""
    operators = recording.trace.operators
    computing = spans_of(operators, np.isin(operators.thread, _training_threads(recording)))
    return recording.steps.host_scope - host["data"] - host["optimizer"] - computing


def _training_threads(recording: Recording) -> NDArray[np.int64]:
    """Threads that mark steps, run operators that autograd records, or run the backward pass; not the loader's."""
    trace, operators = recording.trace, recording.trace.operators
    of_autograd = (operators.sequence >= 0) | named(trace, operators, _ENGINE)
    threads = np.union1d(operators.thread[of_autograd], trace.annotations.thread[recording.steps.marks])
    return threads if len(threads) else np.unique(operators.thread)


def _costliest(recording: Recording, rows: NDArray[np.bool_]) -> dict[str, float]:
    trace = recording.trace
    spent = np.bincount(trace.operators.name[rows], self_time(recording)[rows], len(trace.names)).astype(np.int64)
    first = np.argsort(-spent, kind="stable")[:_COSTLIEST].tolist()
    return {trace.names[name]: _mean_ms(recording, spent[name]) for name in first if spent[name] > 0}


def _update(recording: Recording, rows: NDArray[np.bool_]) -> Literal["", "loop", "foreach", "fused"]:
    trace, operators = recording.trace, recording.trace.operators
    if (named(trace, operators, _FUSED) & rows).any():
        return "fused"
    if (named(trace, operators, _FOREACH) & rows).any():
        return "foreach"
    return "loop" if rows.any() else ""


def _mean_ms(recording: Recording, spent: NDArray[np.int64] | np.int64) -> float:
    return int(np.sum(spent)) / len(recording.steps) / 1e6
