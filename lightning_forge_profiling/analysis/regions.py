"""Host and GPU time by region: forward, backward, optimizer, data, ..., and custom regions."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.host_calls import LAUNCHES, LOADS_DATA, named, spans_of
from lightning_forge_profiling.analysis.idle import IdleTime
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.marks import region_marks
from lightning_forge_profiling.analysis.nesting import enclosing, outermost_marked, parents
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints
from lightning_forge_profiling.names import MARK_PREFIX, REGIONS
from lightning_forge_profiling.results.rank import Region

_OTHER: Final = REGIONS.index("other")

# Ranges that frameworks open, as opposed to custom regions.
_FRAMEWORK: Final = re.compile(
    r"ProfilerStep#.*|forge\..*|enumerate\(DataLoader\)#.*|Optimizer\..*|\[pl\].*|\[\w+\].*|nccl:.*|gloo:.*|mpi:.*|ucc:.*"
    r"|DistributedDataParallel\..*|FullyShardedDataParallel.*|FSDP.*|torch/.*|Torch-Compiled Region.*|## .*|"
    r"CompiledF\w.*|TorchDynamo.*|AOTAutograd.*|Pregraph bytecode|dynamo_.*|_compile.*|autograd::.*|c10d::.*|"
    r"PyTorch Profiler.*"
)
_MOST_USER_REGIONS: Final = 64

_ENGINE: Final = re.compile(r"autograd::engine::evaluate_function.*")
_NODE: Final = re.compile(r"\w+Backward\d*|torch::autograd::(?:AccumulateGrad|CopyBackwards|GraphRoot)")
"""Nodes that autograd's engine runs, for traces of PyTorch before 1.10, which do not mark the engine."""


def region_table(recording: Recording, idle: IdleTime) -> tuple[Region, ...]:
    """The built-in regions, then the custom ones.

    In a trace that the callbacks marked, work belongs to the innermost mark. In others the regions are inferred:
    `backward` is the work of autograd's engine, `optimizer` that of `Optimizer.step`, `data` that of the data loader,
    `forward` that of operators that autograd records (before PyTorch 1.10: that begin before backward), `other` the
    rest.
    """
    of_work, host = _marked(recording) if _has_marks(recording) else _inferred(recording)
    launches = recording.trace.calls.start[named(recording.trace, recording.trace.calls, LAUNCHES)]
    region = partial(_region, recording, idle, launches)
    table = []
    for number, name in enumerate(REGIONS):
        calls, spans = host[number]
        rows = (of_work == number) & (recording.step >= 0)
        table.append(region(name, rows, calls=calls, host=spans))
    return tuple(table) + tuple(_custom_regions(recording, region))


def host_spans(recording: Recording) -> dict[str, Intervals]:
    """When the host is in each built-in region."""
    _, host = _marked(recording) if _has_marks(recording) else _inferred(recording)
    return {name: spans for name, (_, spans) in zip(REGIONS, host, strict=True)}


def _has_marks(recording: Recording) -> bool:
    return any(name.startswith(MARK_PREFIX) for name in recording.trace.names)


def _marked(recording: Recording) -> tuple[Ints, list[tuple[int, Intervals]]]:
    trace = recording.trace
    spans = region_marks(trace)
    names = [trace.names[name].removeprefix(MARK_PREFIX) for name in spans.name.tolist()]
    region = np.array([REGIONS.index(name) if name in REGIONS else _OTHER for name in names], np.int64)
    parent = parents(spans)
    launched = enclosing(spans, parent, recording.links.time, np.zeros(len(trace.gpu), np.int64))
    host = []
    covered = Intervals.of([], [])
    for number in range(len(REGIONS)):
        own = region == number
        inner = np.isin(parent, np.flatnonzero(own)) & ~own
        calls = int((recording.steps.of_host(spans.start[own]) >= 0).sum())
        host.append((calls, spans_of(spans, own) - spans_of(spans, inner)))
        covered |= spans_of(spans, own)
    host[_OTHER] = (0, recording.steps.host_scope - (covered - host[_OTHER][1]))
    return np.append(region, _OTHER)[launched], host


def _inferred(recording: Recording) -> tuple[Ints, list[tuple[int, Intervals]]]:
    trace, links, parent = recording.trace, recording.links, recording.operator_parent
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
    in_engine = np.append(outermost_marked(parent, engine), -1)[links.operator] >= 0
    in_recorded = np.append(outermost_marked(parent, recorded), -1)[links.operator] >= 0
    # the optimizer last: its step contains Lightning's closure with forward and backward
    region = np.select(
        [data.contains(links.time), in_engine, in_recorded, optimizer.contains(links.time)],
        [REGIONS.index(name) for name in ("data", "backward", "forward", "optimizer")],
        _OTHER,
    )
    known = {"data": data, "forward": forward, "backward": backward}
    known["optimizer"] = optimizer - forward - backward - data
    known["other"] = recording.steps.host_scope - (data | forward | backward | optimizer)
    return region, [(0, known.get(name, Intervals.of([], []))) for name in REGIONS]


def _before_backward(recording: Recording, engine: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of the operators before the backward of their step: forward, in a trace without sequence numbers."""
    start = recording.trace.operators.start
    step = recording.steps.of_host(start)
    begins = np.full(len(recording.steps) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, step[engine], start[engine])
    begins[begins == np.iinfo(np.int64).max] = np.iinfo(np.int64).min  # no backward there
    begins[-1] = np.iinfo(np.int64).min  # for operators outside the steps
    return ~engine & (start < begins[step])


def _custom_regions(recording: Recording, region: Callable[..., Region]) -> Iterator[Region]:
    trace = recording.trace
    custom = named(trace, trace.annotations, lambda name: not _FRAMEWORK.fullmatch(name))
    custom &= recording.steps.of_host(trace.annotations.start) >= 0
    for name in np.unique(trace.annotations.name[custom])[:_MOST_USER_REGIONS].tolist():
        spans = spans_of(trace.annotations, custom & (trace.annotations.name == name))
        rows = spans.contains(recording.links.time) & (recording.step >= 0)
        calls = int((custom & (trace.annotations.name == name)).sum())
        yield replace(region(trace.names[name], rows, calls=calls, host=spans), user=True)


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
    spent = int(steps.measure(Intervals.of(trace.gpu.start[rows], trace.gpu.end[rows])).sum())
    waited = np.append(rows, False)[idle.waiting_for]
    waiting = Intervals(idle.waiting.start[waited], idle.waiting.end[waited])
    return Region(
        name=name,
        user=False,
        calls_per_step=calls / len(steps),
        host_ms_per_step=int(steps.measure_host(host).sum()) / len(steps) / 1e6,
        gpu_ms_per_step=spent / len(steps) / 1e6,
        idle_ms_per_step=int(steps.measure(waiting).sum()) / len(steps) / 1e6,
        pct=100 * spent / max(int(steps.length().sum()), 1),
        launches_per_step=int((steps.host_scope & host).contains(launches).sum()) / len(steps),
    )
