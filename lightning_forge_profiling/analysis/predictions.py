"""What the fixes of a rank's findings would leave of a step: its recorded steps, played again with each of them."""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.critical_path import CriticalPath, critical_path
from lightning_forge_profiling.analysis.fixes import (
    FUSED,
    Change,
    ReplaySteps,
    as_graphs,
    can_be_captured,
    from_pinned_memory,
    fused,
    fused_update,
    in_bf16,
    without_allocations,
    without_reads,
    without_region,
)
from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.rank_analysis import TO_DEVICE
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.regions import host_spans
from lightning_forge_profiling.analysis.replay import HOST, Graph, error_pct, step_ns
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.schema import RankSummary, Replay

_log = plain_logger(__name__)

MOST_ERROR_PCT: Final = 3.0
"""Steps that are played unchanged have to take as long as recorded, within this: else nothing is predicted."""

_GPU_BOUND_PCT: Final = 85.0  # below, what the GPU computes is no finding
_NAMED_FROM: Final = 0.05  # of the step; what costs less is no finding
_MOST_WORK: Final = 50_000  # GPU work that is played, which takes some 10 s


def predictions(recording: Recording, summary: RankSummary) -> Replay | None:
    """What the fixes would leave; None where none is looked for, or where the steps cannot be played again."""
    changes = dict(_changes(recording, summary))
    if not changes or not recording.links.linked.any():
        return None
    graph = _graph(recording)
    if graph is None:
        return None
    steps = ReplaySteps(recording, graph, Intervals.of([], []))
    recorded_ns = float(graph.recorded_ns.mean())
    off_pct = [100 * (step_ns([graph]) / recorded_ns - 1), error_pct(graph, recording.trace.calls.name) or 0.0]
    if max(map(abs, off_pct)) > MOST_ERROR_PCT:
        return None
    changed = dict(_changed(steps, changes))
    return Replay(
        host=HOST,
        step_ms=_with_each_host(graph),
        after_ms={code: _with_each_host(graph) for code, graph in changed.items()},
        uncertain_pct=max(map(abs, off_pct)) + scatter_pct(graph),
    )


def _changed(steps: ReplaySteps, changes: Mapping[str, Change]) -> Iterator[tuple[str, Graph]]:
    for code, change in changes.items():
        try:
            yield code, change(steps).graph
        except ConfigurationError as exc:
            _log.debug("No prediction for %s: %s", code, exc)


def path_of(recording: Recording) -> CriticalPath | None:
    """The critical path of a rank's steps; None where they cannot be played."""
    graph = _graph(recording)
    return None if graph is None else critical_path(recording, graph)


def _graph(recording: Recording) -> Graph | None:
    if int((recording.step >= 0).sum()) > _MOST_WORK:
        return None
    graph = Graph.of(recording)
    return graph if can_be_played(graph) else None


def can_be_played(graph: Graph) -> bool:
    """Whether there is GPU work whose launch is known, and time in each step."""
    return bool(len(graph.work)) and int(graph.recorded_ns.min()) > 0


def scatter_pct(graph: Graph) -> float:
    """Twice the standard error of the mean recorded step, in percent of it; 0 for a single step."""
    if graph.steps == 1:
        return 0.0
    ms = graph.recorded_ns
    return float(200 * ms.std(ddof=1) / np.sqrt(graph.steps) / ms.mean())


def _with_each_host(graph: Graph) -> tuple[float, ...]:
    return tuple(step_ns([graph.with_host(factor)]) / 1e6 for factor in HOST)


def _changes(recording: Recording, summary: RankSummary) -> Iterator[tuple[str, Change]]:
    """By the code of a finding what its fix changes, for causes that cost enough to be one."""
    least_ms = _NAMED_FROM * summary.step_ms.mean
    update_ms = sum(region.idle_ms_per_step for region in summary.regions if region.name == "optimizer")
    if summary.idle["data"].ms_per_step >= least_ms:
        yield "input-bound", without_region("data")
    if summary.host.idle_after_sync_ms_per_step >= least_ms:
        yield "sync-bound", without_reads
    to_gpu = [copies for copies in summary.copies if copies.direction == TO_DEVICE]
    if sum(copies.exposed_ms_per_step for copies in to_gpu if copies.memory == "pageable") >= least_ms:
        yield "transfer-bound", from_pinned_memory
    if summary.host.idle_after_allocator_ms_per_step >= least_ms:
        yield "allocator-churn", without_allocations
    if update_ms >= least_ms:
        yield "slow-optimizer", fused_update
    spans = host_spans(recording)
    passes = spans["forward"] | spans["backward"]
    if summary.host.idle_launching_ms_per_step >= least_ms and can_be_captured(recording, passes):
        yield "launch-bound", as_graphs("forward", "backward")
    if summary.gpu.busy_pct < _GPU_BOUND_PCT:
        return
    if summary.flops is not None and summary.flops.dtype in {"fp32", "tf32"}:  # where bf16 is the advice
        yield "compute-bound", in_bf16
    if sum(kind.ms_per_step for name, kind in summary.kinds.items() if name in FUSED) >= least_ms:
        yield "memory-bandwidth-bound", fused
