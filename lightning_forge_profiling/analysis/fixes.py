"""Changes of recorded steps, as `replay` plays them: what goes, what does not wait, what gets faster."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from operator import or_
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.gpu_time import DISPATCHED
from lightning_forge_profiling.analysis.host import is_lightning_call
from lightning_forge_profiling.analysis.intervals import NOTHING, Intervals, take
from lightning_forge_profiling.analysis.kernels import CATEGORY_OF, KINDS, NO_BANDWIDTH, PRODUCT_KINDS
from lightning_forge_profiling.analysis.operators import IN_TF32, flop_rate
from lightning_forge_profiling.analysis.rank_analysis import TO_DEVICE
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.replay import HOST, Graph, bounds, error_pct, step_ns
from lightning_forge_profiling.analysis.steps import ALLOCATES, FREES, WAITS, named, spans_of
from lightning_forge_profiling.analysis.timeline import CriticalPath, critical_path
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.peaks import bus_gb_per_s, find_peak
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.schema import RankSummary, Replay

_LAUNCH_NS: Final = 1_000
_MUCH_PCT: Final = 25.0
_STAY: Final = "which a CUDA graph cannot contain: they stay, and have to go first"
# Of the forward and the backward pass as a CUDA graph each (`cuda_graph` in tests/data/traces, H200): the time between
# two small kernels, and what the launch of the whole takes on the host for each kernel, 0.43 and 0.87 us.
_IN_GRAPH_NS: Final = 1_000
_IN_GRAPH_LAUNCH_NS: Final = 650
# A captured backward pass leaves the accumulation of each gradient, and twice its time to hand the gradients over: in
# that trace 1.5 ms and 3.2 for 384 of them; on an H100 without recording 0.4 and 1.4 for 96 (2026-11-25).
_PER_PARAMETER: Final = re.compile(r"autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
_GRAPH_LEAVES: Final = 3
# Adam reads and writes some 20 numbers an element where each operator has its kernel, 14 with foreach, and 7 where they
# are fused; of a GPT's 148 tensors 5.4 ms became 1.8 (H100, 2026-11-26) and 3.5 became 1.1, of an embedding 10.1 with
# foreach became 4.9 (H200, 2026-11-28)
_OF_UPDATE: Final = 0.35
_OF_FOREACH: Final = 0.5
# Of these torch.compile makes one kernel where they follow each other, but not of batch norms and of what it has made;
# and it pads products of 16-bit matrices with rows of an odd length, as with a vocabulary of 50,257. Of eleven models
# with and without it what the GPU then does was predicted within 15 % for ten, within 7 % in the median (H200, torch
# 2.11, 2026-11-28; docs/measured.md). In a ViT attention was computed from its parts, which took longer than before.
FUSED: Final = ("elementwise", "copy", "fill", "random", "reduction", "softmax", "loss", "normalization")
_NOT_FUSED: Final = re.compile(r"batch_?norm|cudnn::(ops::)?.*bn_|^triton_", re.IGNORECASE)
_UNALIGNED: Final = re.compile(r"align1\b")
_IN_16_BITS: Final = re.compile(r"gemm_(bf16|f16)")
_OF_UNALIGNED: Final = 0.16
# so many calls in the passes of a step that wait for the GPU or allocate leave little out of what is captured
_FEW_BREAKS: Final = 2
_FOREACH: Final = re.compile("multi_tensor_apply")
_FUSED_UPDATE: Final = re.compile("FusedOptimizer|FusedAdam")
_PAGEABLE: Final = re.compile("HtoD.*Pageable")
_COPY_NS: Final = 10_000
_WIDE: Final = ("fp32", "tf32", "fp64")
# Of `precision="bf16-mixed"` in place of float32 or TF32, by traces of seven models with and without it (two GPTs on an
# H100, 2026-11-26; GPT-2, BERT, Whisper, ResNet-50 and a U-Net on an H200, 2026-11-28; torch 2.11). Products take as
# much less as the peaks differ, times 1.0 to 1.8 for float32, most for convolutions, and 0.8 to 1.2 for TF32;
# attention, which has no kernels for TF32, 0.10 to 0.22 of its time, and the others these parts. Casts are new: 0.04 to
# 0.5 of what the products then take. With them the host takes 1.1 to 2.2 times as long in both passes.
_OF_CONVOLUTION: Final = 1.8
_OF_ATTENTION: Final = 2.0
_OF_KINDS: Final = {"elementwise": 0.8, "reduction": 0.77, "softmax": 0.6}
_CASTS: Final = 1.3
_CASTS_ON_HOST: Final = 1.5
_FLOATS: Final = re.compile(rb'"(float|double)"')


@dataclass(frozen=True, slots=True, eq=False)
class ReplaySteps:
    """Recorded steps of a rank, to be played again."""

    recording: Recording
    graph: Graph  # which changes change
    gone: Intervals = NOTHING  # what the host does no more
    notes: tuple[str, ...] = ()  # what to know of the changes
    overlaps: bool = False  # nothing waits for communication any more, so that what it hides behind cannot be drawn

    def with_graph(self, **columns: Any) -> Self:
        """These steps with other columns of the graph."""
        return replace(self, graph=replace(self.graph, **columns))


Change = Callable[[ReplaySteps], ReplaySteps]


def without(steps: ReplaySteps, ranges: Intervals) -> ReplaySteps:
    """Without what the host does in these ranges, and without the work that it launches there."""
    graph, calls = steps.graph, steps.recording.trace.calls
    gone = ranges.contains(calls.start[graph.call])
    launched = gone[graph.launched_by]
    changed = _shortened(steps, ranges - steps.gone).with_graph(
        takes=np.where(gone, 0, graph.takes),
        awaited=np.where(gone, -1, graph.awaited),
        runs=np.where(launched, 0, graph.runs),
        collective=graph.collective & ~launched,
        latency=np.where(launched, 0, graph.latency),
        behind=np.where(launched, 0, graph.behind),
        after=np.where(launched, -1, graph.after),
    )
    return replace(changed, gone=steps.gone | ranges)


def _shortened(steps: ReplaySteps, ranges: Intervals) -> ReplaySteps:
    """Without the host's time in these ranges between calls."""
    graph = steps.graph
    previous, start, last, end = bounds(steps.recording, graph.call, graph.call_step)
    host = steps.recording.steps.host.spans & ranges
    before = graph.before - host.within(previous, np.maximum(start, previous))
    return steps.with_graph(before=before, rest=graph.rest - host.within(last, end))


def without_operators(name: str) -> Change:
    """Without an operator, or another named range, and the work that it launches.

    Raises:
        ConfigurationError: the steps have none of that name.
    """

    def change(steps: ReplaySteps) -> ReplaySteps:
        trace, host = steps.recording.trace, steps.recording.steps.host
        ranges = [spans_of(table, named(trace, table, name.__eq__)) for table in (trace.operators, trace.annotations)]
        dropped = (ranges[0] | ranges[1]) & host.spans
        if not len(dropped):
            used = {trace.names[row] for row in np.unique(trace.operators.name[host.at(trace.operators.start) >= 0])}
            alike = get_close_matches(name, used, cutoff=0.5)
            meant = f"; did you mean {' or '.join(alike)}?" if alike else ""
            raise ConfigurationError(f"no operator and no range in the recorded steps is called {name!r}{meant}")
        pct = 100 * dropped.total / max(host.spans.total, 1)
        note = (f"{name} is {pct:.0f} % of the host's time, with all that runs in it",) if pct >= _MUCH_PCT else ()
        return replace(without(steps, dropped), notes=steps.notes + note)

    return change


def without_region(name: str) -> Change:
    """Without the host's time in a built-in region."""
    return lambda steps: without(steps, steps.recording.on_host[name])


def without_syncs(steps: ReplaySteps) -> ReplaySteps:
    """Without waits for the GPU, but those of Lightning's own loop: the calls are made, and return at once."""
    graph, trace = steps.graph, steps.recording.trace
    syncs = (named(trace, trace.calls, WAITS) & ~is_lightning_call(steps.recording))[graph.call]
    takes = np.where(syncs, np.minimum(graph.takes, _LAUNCH_NS), graph.takes)
    alone = syncs & ~np.isin(np.arange(len(syncs)), graph.launched_by)  # those that copy go on copying
    gone = np.isin(np.arange(len(trace.calls)), graph.call[alone])
    changed = steps.with_graph(takes=takes, awaited=np.where(syncs, -1, graph.awaited))
    return replace(changed, gone=steps.gone | spans_of(trace.calls, gone))


def without_reads(steps: ReplaySteps) -> ReplaySteps:
    """Without operators that wait for the GPU, as `.item()` and `.cpu()` do; other waits return at once.

    What copies to the GPU stays, and what Lightning's own loop waits for.
    """
    recording, trace = steps.recording, steps.recording.trace
    syncs = named(trace, trace.calls, WAITS) & ~is_lightning_call(recording)
    outermost = recording.nesting.outermost(named(trace, trace.operators, DISPATCHED))
    around = take(outermost, recording.links.call_operator)
    rows = np.unique(around[syncs & (around >= 0)])
    to_gpu = np.array(["HtoD" in name for name in trace.names], bool)[trace.gpu.name]
    copying = np.unique(take(around, recording.links.call[to_gpu]))
    reads = np.isin(np.arange(len(trace.operators)), np.setdiff1d(rows, copying))
    return without(without_syncs(steps), spans_of(trace.operators, reads))


def without_allocations(steps: ReplaySteps) -> ReplaySteps:
    """Without `cudaMalloc` and `cudaFree`, and what the allocator does between two of them."""
    trace, graph = steps.recording.trace, steps.graph
    allocates = named(trace, trace.calls, ALLOCATES) | named(trace, trace.calls, FREES)
    one_by_one = graph.steady & np.concatenate(([False], graph.steady[:-1]))
    changed = steps.with_graph(before=np.where(one_by_one, 0, graph.before))
    return without(changed, spans_of(trace.calls, allocates))


def fused_update(steps: ReplaySteps) -> ReplaySteps:
    """With an optimizer's launches as one, and its kernels as a fused one, which moves a third of the bytes."""
    steps = as_graphs("optimizer")(steps)
    calls, graph = steps.recording.trace.calls, steps.graph
    update = steps.recording.on_host["optimizer"].contains(calls.start[graph.call])[graph.launched_by]
    factor = np.where(_named(steps, _FOREACH), _OF_FOREACH, _OF_UPDATE)
    runs = np.rint(graph.runs * np.where(_named(steps, _FUSED_UPDATE), 1.0, factor)).astype(np.int64)
    return steps.with_graph(runs=np.where(update, runs, graph.runs))


def _named(steps: ReplaySteps, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Of each GPU work whether its name has the pattern."""
    trace = steps.recording.trace
    return np.array([bool(pattern.search(name)) for name in trace.names], bool)[trace.gpu.name[steps.graph.work]]


def fused(steps: ReplaySteps) -> ReplaySteps:
    """With what `torch.compile` fuses in both passes as one kernel, as long as the longest; products are aligned."""
    graph, spans = steps.graph, steps.recording.on_host
    order = np.lexsort((steps.recording.trace.gpu.start[graph.work], graph.lane))
    of_kind = np.isin(steps.recording.kind[graph.work], [KINDS.index(kind) for kind in FUSED])
    called = (spans["forward"] | spans["backward"]).contains(steps.recording.trace.calls.start[graph.call])
    moves = (of_kind & called[graph.launched_by] & ~_named(steps, _NOT_FUSED))[order]
    lane, runs = graph.lane[order], graph.runs[order]
    chain = np.cumsum(~moves | (np.diff(lane, prepend=-1) != 0) | ~np.concatenate(([False], moves[:-1])))
    by_length = np.lexsort((-runs, chain))
    longest = np.zeros(len(order), bool)
    longest[by_length[np.diff(chain[by_length], prepend=-1) != 0]] = True
    unaligned = _named(steps, _UNALIGNED) & _named(steps, _IN_16_BITS)
    left = np.where(unaligned, np.rint(_OF_UNALIGNED * graph.runs).astype(np.int64), graph.runs)
    left[order[~longest]] = 0
    return steps.with_graph(runs=left)


def compiled(steps: ReplaySteps) -> ReplaySteps:
    """With `torch.compile(mode="reduce-overhead")`: kernels fused, and both passes as CUDA graphs."""
    return as_graphs("forward", "backward")(fused(steps))


def from_pinned_memory(steps: ReplaySteps) -> ReplaySteps:
    """With copies to the GPU from pinned memory instead of pageable: as fast as the bus, and the host goes on."""
    graph, trace = steps.graph, steps.recording.trace
    pageable = [bool(_PAGEABLE.search(name)) for name in trace.names]
    copied = _named(steps, _PAGEABLE)
    runs = np.rint(trace.gpu.size[graph.work] / bus_gb_per_s(trace.device)).astype(np.int64)
    calls = np.isin(np.arange(len(graph.call)), graph.launched_by[copied])
    names = [name.replace("Pageable", "Pinned") if of else name for name, of in zip(trace.names, pageable, strict=True)]
    changed = steps.with_graph(
        runs=np.where(copied, np.minimum(runs, graph.runs), graph.runs),
        takes=np.where(calls, np.minimum(graph.takes, _COPY_NS), graph.takes),
        awaited=np.where(calls, -1, graph.awaited),
    )
    return replace(changed, recording=replace(steps.recording, trace=replace(trace, names=names)))


def breaks(recording: Recording, ranges: Intervals) -> int:
    """How many calls in these ranges of the steps wait for the GPU or ask for memory, which no CUDA graph can."""
    calls = recording.trace.calls
    excluded = np.any([named(recording.trace, calls, kind) for kind in (WAITS, ALLOCATES, FREES)], axis=0)
    return int((ranges & recording.steps.host.spans).contains(calls.start[excluded]).sum())


def as_graphs(*regions: str) -> Change:
    """With the launches of each of these regions as one, as by a CUDA graph.

    What waits for the GPU stays, since a graph cannot contain it, and so does what autograd does with each parameter.
    """

    def change(steps: ReplaySteps) -> ReplaySteps:
        graph, trace = steps.graph, steps.recording.trace
        ranges = reduce(or_, (steps.recording.on_host[name] for name in regions))
        inside = ranges.contains(trace.calls.start[graph.call]) & (graph.awaited < 0)
        launched = inside[graph.launched_by]
        stays = spans_of(trace.operators, named(trace, trace.operators, _PER_PARAMETER)) & ranges
        shorter, parameters = _shortened(steps, ranges - steps.gone), _shortened(steps, stays - steps.gone)
        changed = shorter.with_graph(
            before=shorter.graph.before + _GRAPH_LEAVES * (graph.before - parameters.graph.before),
            takes=np.where(inside, np.minimum(graph.takes, _IN_GRAPH_LAUNCH_NS), graph.takes),
            behind=np.where(launched, np.minimum(graph.behind, _IN_GRAPH_NS), graph.behind),
        )
        if not breaks(steps.recording, ranges):
            return changed
        blocked = f"{' or '.join(regions)} has calls that wait for the GPU or ask CUDA for memory, {_STAY}"
        return replace(changed, notes=(*steps.notes, blocked))

    return change


def overlapped(steps: ReplaySteps) -> ReplaySteps:
    """With communication that nothing waits for, although it takes its time on its own stream."""
    graph = steps.graph
    after = np.where(take(graph.collective.astype(np.int64), graph.after) == 1, -1, graph.after)
    alone = np.where(graph.collective, graph.lane.max(initial=0) + 1, graph.lane)
    return replace(steps.with_graph(after=after, lane=alone), overlaps=True)


def scaled(kinds: Collection[str], factor: float) -> Change:
    """With GPU work of some kinds, or of all in a category, taking so many times as long.

    Raises:
        ConfigurationError: a kind is unknown.
    """
    known = {*KINDS, *CATEGORY_OF.values()}
    for kind in kinds:
        if kind not in known:
            raise ConfigurationError(f"no kind of GPU work is called {kind!r}, but {', '.join(sorted(known))}")

    return lambda steps: _with_times(steps, {kind: factor for kind in KINDS if {kind, CATEGORY_OF[kind]} & {*kinds}})


def _with_times(steps: ReplaySteps, factors: Mapping[str, float]) -> ReplaySteps:
    """With GPU work taking so many times as long, by its kind."""
    of_kind = np.array([factors.get(kind, 1.0) for kind in KINDS])
    runs = np.rint(steps.graph.runs * of_kind[steps.recording.kind[steps.graph.work]]).astype(np.int64)
    return steps.with_graph(runs=runs)


def in_bf16(steps: ReplaySteps) -> ReplaySteps:
    """With `precision="bf16-mixed"` in place of a wider one: see the factors above.

    Raises:
        ConfigurationError: the precision or the peaks are unknown, or the products are of 16 bits or fewer already.
    """
    trace = steps.recording.trace
    flops, problem = flop_rate(steps.recording, 1, 1)
    if flops is None:
        raise ConfigurationError(f"bf16 cannot be predicted, because the precision of the steps is unknown: {problem}")
    if flops.dtype not in _WIDE:
        raise ConfigurationError(f"the matrix products of these steps are {flops.dtype} already")
    peak = find_peak(trace.device, memory_bytes=trace.memory_bytes, sms=trace.multiprocessors)
    if peak is None or not {flops.dtype, "bf16"} <= peak.flops.keys():
        raise ConfigurationError(f"bf16 cannot be predicted, because the peaks of {trace.device} are unknown")
    before, after = peak.flops[flops.dtype], peak.flops["bf16"]
    of_tensor_cores = _named(steps, IN_TF32)  # where no name says so, all products are as their rate says
    single = peak.flops.get("fp32", before) if flops.dtype == "tf32" and of_tensor_cores.any() else before
    shorter = single / after
    products = {"matmul": shorter, "convolution": _OF_CONVOLUTION * shorter, "attention": _OF_ATTENTION * shorter}
    factors = products | _OF_KINDS
    casts = {kind: min(by * (_CASTS if kind in PRODUCT_KINDS else 1), 1.0) for kind, by in factors.items()}
    cast = _with_times(steps, casts)
    if "tf32" in peak.flops:
        of_tf32 = dict.fromkeys(("matmul", "convolution"), peak.flops["tf32"] / after * _CASTS)
        aligned = np.where(_named(steps, _UNALIGNED), steps.graph.runs, _with_times(steps, of_tf32).graph.runs)
        cast = cast.with_graph(runs=np.where(of_tensor_cores, aligned, cast.graph.runs))
    spans = steps.recording.on_host
    passes = (spans["forward"] | spans["backward"]).contains(trace.calls.start[cast.graph.call])
    host_ns = cast.graph.before
    slower = np.where(passes, np.rint(host_ns * _CASTS_ON_HOST).astype(np.int64), host_ns)
    note = (
        f"matrix products by the peaks of {trace.device}, {before / 1e12:.0f} TFLOP/s in {flops.dtype} and "
        f"{after / 1e12:.0f} in bf16; what else changes, as measured of seven models on H100 and H200"
    )
    signatures = [replace(each, types=_FLOATS.sub(b'"c10::BFloat16"', each.types)) for each in trace.signatures]
    recording = replace(steps.recording, trace=replace(trace, signatures=signatures))
    return replace(cast.with_graph(before=slower), recording=recording, notes=(*steps.notes, note))


_log = plain_logger(__name__)

MOST_ERROR_PCT: Final = 3.0
"""Steps that are played unchanged have to take as long as recorded, within this: else nothing is predicted."""

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
    recorded_ns = float(graph.recorded_ns.mean())
    off_pct = [100 * (step_ns([graph]) / recorded_ns - 1), error_pct(graph, recording.trace.calls.name) or 0.0]
    if max(map(abs, off_pct)) > MOST_ERROR_PCT:
        return None
    after_ms, played = {}, dict[Change, tuple[float, ...]]()
    for code, change in changes.items():
        try:
            if change not in played:
                played[change] = _with_each_host(change(ReplaySteps(recording, graph)).graph)
            after_ms[code] = played[change]
        except ConfigurationError as exc:
            _log.debug("No prediction for %s: %s", code, exc)
    return Replay(
        host=HOST,
        step_ms=_with_each_host(graph),
        after_ms=after_ms,
        uncertain_pct=max(map(abs, off_pct)) + scatter_pct(graph),
    )


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
    if update_ms + sum(kind.ms_per_step for name, kind in summary.kinds.items() if name == "optimizer") >= least_ms:
        yield "slow-optimizer", fused_update
    yield from _changes_of_work(recording, summary)


def _changes_of_work(recording: Recording, summary: RankSummary) -> Iterator[tuple[str, Change]]:
    """The same for the passes and what they launch."""
    least_ms, spans = _NAMED_FROM * summary.step_ms.mean, recording.on_host
    wide = summary.flops is not None and summary.flops.dtype in _WIDE
    if wide:  # where bf16 is the advice
        yield "compute-bound", in_bf16
    if breaks(recording, spans["forward"] | spans["backward"]) > _FEW_BREAKS * len(recording.steps):
        return
    if summary.host.idle_launching_ms_per_step >= least_ms:
        yield "launch-bound", compiled
    kinds_ms = {name: kind.ms_per_step for name, kind in summary.kinds.items()}
    memory_ms = sum(ms for name, ms in kinds_ms.items() if name not in NO_BANDWIDTH)
    if memory_ms >= least_ms:
        yield "memory-bandwidth-bound", compiled
    if not wide and memory_ms > sum(kinds_ms.get(name, 0.0) for name in PRODUCT_KINDS):
        yield "compute-bound", compiled
