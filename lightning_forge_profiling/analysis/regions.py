"""Host and GPU time by region: forward, backward, optimizer, data, ..., and custom regions."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.gpu_time import IdleTime
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.operators import self_time
from lightning_forge_profiling.analysis.recording import Recording, by_optimizer
from lightning_forge_profiling.analysis.steps import LAUNCHES, named, spans_of
from lightning_forge_profiling.kineto.trace import Ints
from lightning_forge_profiling.names import MARK_PREFIX, REGIONS
from lightning_forge_profiling.schema import CpuTime, Region

# Ranges that frameworks open, as opposed to custom regions.
_FRAMEWORK: Final = re.compile(
    r"ProfilerStep#.*|forge\..*|enumerate\(DataLoader\)#.*|Optimizer\..*|\[pl\].*|\[\w+\].*|nccl:.*|gloo:.*|mpi:.*|ucc:.*"
    r"|DistributedDataParallel\..*|FullyShardedDataParallel.*|FSDP.*|torch/.*|Torch-Compiled Region.*|## .*|"
    r"CompiledF\w.*|TorchDynamo.*|AOTAutograd.*|Pregraph bytecode|dynamo_.*|_compile.*|autograd::.*|c10d::.*|"
    r"PyTorch Profiler.*"
)
_MOST_USER_REGIONS: Final = 64


def region_table(recording: Recording, idle: IdleTime) -> tuple[Region, ...]:
    """The built-in regions, then the custom ones."""
    trace, annotations = recording.trace, recording.trace.annotations
    region = partial(_region, recording, idle, trace.calls.start[named(trace, trace.calls, LAUNCHES)])
    built_in = []
    for number, name in enumerate(REGIONS):
        marks = named(trace, annotations, f"{MARK_PREFIX}{name}".__eq__)
        calls = int((recording.steps.host.at(annotations.start[marks]) >= 0).sum()) if name != "other" else 0
        rows = (recording.region == number) & (recording.step >= 0)
        built_in.append(region(name, rows, calls=calls, host=recording.on_host[name]))
    return (*built_in, *_custom_regions(recording, region))


def _custom_regions(recording: Recording, region: Callable[..., Region]) -> Iterator[Region]:
    trace = recording.trace
    custom = named(trace, trace.annotations, lambda name: not _FRAMEWORK.fullmatch(name))
    custom &= recording.steps.host.at(trace.annotations.start) >= 0
    for name in np.unique(trace.annotations.name[custom])[:_MOST_USER_REGIONS].tolist():
        entered = custom & (trace.annotations.name == name)
        spans = spans_of(trace.annotations, entered)
        rows = spans.contains(recording.links.time) & (recording.step >= 0)
        yield replace(region(trace.names[name], rows, calls=int(entered.sum()), host=spans), user=True)


def _region(
    recording: Recording,
    idle: IdleTime,
    launches: Ints,
    name: str,
    rows: NDArray[np.bool_],
    *,
    calls: int,
    host: Intervals,
) -> Region:
    trace, steps = recording.trace, recording.steps
    spent = steps.gpu.measure(spans_of(trace.gpu, rows))
    waited = np.append(rows, False)[idle.waiting_for]
    waiting = Intervals(idle.waiting.start[waited], idle.waiting.end[waited])
    return Region(
        name=name,
        user=False,
        calls_per_step=calls / len(steps),
        host_ms_per_step=steps.mean_ms(steps.host.measure(host)),
        gpu_ms_per_step=steps.mean_ms(spent),
        idle_ms_per_step=steps.mean_ms(steps.gpu.measure(waiting)),
        pct=steps.pct(spent),
        launches_per_step=int((steps.host.spans & host).contains(launches).sum()) / len(steps),
    )


_COSTLIEST: Final = 3
_STEP: Final = re.compile(r"Optimizer\.step#(\w+)\.step")
_FUSED: Final = re.compile(r"aten::_fused_\w+")
_FOREACH: Final = re.compile(r"aten::_foreach_\w+")
_READS: Final = re.compile(r"aten::_local_scalar_dense")
_ITEM: Final = re.compile(r"aten::(?:_local_scalar_dense|item|is_nonzero)")
_EXCHANGE: Final = re.compile(r"(?:gloo|mpi|ucc):.*")  # on the backend's thread; the training thread may wait for it
_ANY_ENGINE: Final = re.compile(r"autograd::engine::.*")


def cpu_time(recording: Recording) -> CpuTime | None:
    """Split the step time of a rank that trains on the CPU."""
    trace, steps = recording.trace, recording.steps
    operators = trace.operators
    used_gpu = len(trace.gpu) or len(trace.allocations) or trace.foreign or named(trace, trace.calls, LAUNCHES).any()
    in_step = steps.host.at(operators.start) >= 0
    if used_gpu or not in_step.any():
        return None
    data, optimizer = recording.on_host["data"], recording.on_host["optimizer"]
    trains = np.isin(operators.thread, _training_threads(recording))
    computing = spans_of(operators, trains) - data - optimizer
    rest = outside_operators(recording)
    exchanging = _exchanging(recording) - computing - data - optimizer
    rows = np.arange(len(operators))
    updates = in_step & by_optimizer(trace, recording.nesting, operators.start, rows)
    elsewhere = in_step & trains & ~data.contains(operators.start) & ~optimizer.contains(operators.start)

    def host_ms(spans: Intervals) -> float:
        return steps.mean_ms(steps.host.measure(spans))

    names = (_STEP.fullmatch(trace.names[name]) for name in np.unique(trace.annotations.name).tolist())
    return CpuTime(
        data_ms_per_step=host_ms(data),
        optimizer_ms_per_step=host_ms(optimizer),
        operators_ms_per_step=host_ms(computing),
        python_ms_per_step=host_ms(rest),
        costliest_ms_per_step=_costliest(recording, elsewhere),
        optimizer=next((match[1] for match in names if match), ""),
        update=_update(recording, updates),
        update_calls_per_step=int(updates.sum()) / len(steps),
        item_calls_per_step=int((elsewhere & named(trace, operators, _READS)).sum()) / len(steps),
        item_ms_per_step=host_ms(spans_of(operators, elsewhere & named(trace, operators, _ITEM))),
        exchange_ms_per_step=host_ms(exchanging),
        operator_threads=len(np.unique(operators.thread[in_step])),
        intra_op_threads=trace.intra_op_threads,
        usable_cores=trace.usable_cores,
    )


def outside_operators(recording: Recording) -> Intervals:
    """When a rank that trains on the CPU is in no operator, nor in data loader and optimizer, nor in an exchange."""
    operators = recording.trace.operators
    computing = spans_of(operators, np.isin(operators.thread, _training_threads(recording)))
    apart = recording.on_host["data"] | recording.on_host["optimizer"] | computing | _exchanging(recording)
    return recording.steps.host.spans - apart


def _exchanging(recording: Recording) -> Intervals:
    trace = recording.trace
    return spans_of(trace.annotations, named(trace, trace.annotations, _EXCHANGE))


def _training_threads(recording: Recording) -> NDArray[np.int64]:
    """Threads that mark steps, run operators that autograd records, or run the backward pass; not the loader's."""
    trace, operators = recording.trace, recording.trace.operators
    of_autograd = (operators.sequence >= 0) | named(trace, operators, _ANY_ENGINE)
    threads = np.union1d(operators.thread[of_autograd], trace.annotations.thread[recording.steps.marks])
    return threads if len(threads) else np.unique(operators.thread)


def _costliest(recording: Recording, rows: NDArray[np.bool_]) -> dict[str, float]:
    trace = recording.trace
    spent = np.bincount(trace.operators.name[rows], self_time(recording)[rows], len(trace.names)).astype(np.int64)
    first = np.argsort(-spent, kind="stable")[:_COSTLIEST].tolist()
    return {trace.names[name]: recording.steps.mean_ms(spent[name]) for name in first if spent[name] > 0}


def _update(recording: Recording, rows: NDArray[np.bool_]) -> Literal["", "loop", "foreach", "fused"]:
    trace, operators = recording.trace, recording.trace.operators
    if (named(trace, operators, _FUSED) & rows).any():
        return "fused"
    if (named(trace, operators, _FOREACH) & rows).any():
        return "foreach"
    return "loop" if rows.any() else ""
