"""The timeline of a rank: lanes of host regions, streams and communication, and the critical path of its steps."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals, Nesting
from lightning_forge_profiling.analysis.kernels import KINDS
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.replay import Graph, before_on_lane
from lightning_forge_profiling.analysis.steps import named, spans_of, step_marks
from lightning_forge_profiling.kineto.trace import GpuWork, Ints, Spans, Trace
from lightning_forge_profiling.names import MARK_PREFIX, REGIONS
from lightning_forge_profiling.schema import Lane, Timeline

HOST: Final = -1
_UNKNOWN_NS: Final = 100_000  # work that begins so much later waited for something that the graph has not


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """Pieces of the path in order of time: what the end of the last step waited for, back to the first one's begin.

    A shorter piece of it would have made the steps shorter, until another chain of waits takes its place.
    """

    start: Ints  # nanoseconds
    end: Ints  # the next piece begins there or later
    work: Ints  # row of `Trace.gpu`; `HOST` for a piece on the host

    def __len__(self) -> int:
        return len(self.start)


def critical_path(recording: Recording, graph: Graph) -> CriticalPath:
    """Follow the waits of the recorded steps back from their last work."""
    calls, gpu = recording.trace.calls, recording.trace.gpu
    call_start, call_end = calls.start[graph.call].tolist(), calls.end[graph.call].tolist()
    work_start, work_end = gpu.start[graph.work].tolist(), gpu.end[graph.work].tolist()
    columns = (graph.launched_by, graph.awaited, graph.latency, graph.behind, graph.after, graph.lag)
    launched_by, awaited, latency, behind, after, lag = (column.tolist() for column in columns)
    before = before_on_lane(graph.lane).tolist()
    first = int(recording.steps.host_start[0])
    pieces: list[tuple[int, int, int]] = []

    work = int(np.argmax(gpu.end[graph.work])) if len(graph.work) else -1
    call, until = len(call_end) - 1, call_end[-1] if call_end else first
    while work >= 0 or call >= 0:
        if work >= 0:
            pieces.append((work_start[work], work_end[work], int(graph.work[work])))
            reasons = [(call_start[launched_by[work]] + latency[work], -1)]
            if before[work] >= 0:
                reasons.append((work_end[before[work]] + behind[work], before[work]))
            if after[work] >= 0:
                reasons.append((work_end[after[work]] + lag[work], after[work]))
            latest, earlier = max(reasons)
            if work_start[work] - latest > _UNKNOWN_NS:  # mostly work of a step before the first
                break
            call, until = launched_by[work], call_start[launched_by[work]]
            work = earlier
            continue
        # back on the host, to the last call that waited for the GPU
        while call > 0 and not (awaited[call - 1] >= 0 and work_end[awaited[call - 1]] > call_start[call - 1]):
            call -= 1
        pieces.append((call_end[call - 1] if call > 0 else first, until, HOST))
        work = awaited[call - 1] if call > 0 else -1
        call = -1 if work < 0 else call
    start, end, of_work = np.array(pieces[::-1], np.int64).reshape(-1, 3).T
    return CriticalPath(start, np.maximum(end, start), of_work)


MOST_SPANS: Final = 20_000  # about 600 kB of HTML
_KINDS: Final = (*KINDS, "region")
_NAME_LENGTH: Final = 300
_TOGETHER_NS: Final = 10_000
_OPTIMIZER: Final = f"{MARK_PREFIX}optimizer"


def draw(
    recording: Recording, rank: int, *, most_spans: int = MOST_SPANS, path: CriticalPath | None = None
) -> Timeline:
    """Lay out the recorded steps of a rank, and their critical path, as lanes."""
    trace, steps = recording.trace, recording.steps
    gpu, annotations = trace.gpu, trace.annotations
    begin = int(min(steps.start.min(), steps.host_start.min()))
    end = int(max(steps.end.max(), steps.host_end.max()))
    shown = (annotations.end > begin) & (annotations.start < end) & ~step_marks(trace)
    work = (gpu.end > begin) & (gpu.start < end)
    rows = np.concatenate((np.flatnonzero(shown), len(annotations) + np.flatnonzero(work)))
    omitted = max(len(rows) - most_spans, 0)
    if omitted:
        duration = np.concatenate((annotations.end - annotations.start, gpu.end - gpu.start))
        kept = np.zeros(len(duration), bool)
        kept[rows[np.argsort(-duration[rows], kind="stable")[:most_spans]]] = True
        shown, work = kept[: len(annotations)], kept[len(annotations) :]
    names = np.unique(np.concatenate((annotations.name[shown], gpu.name[work])))
    place = np.zeros(len(trace.names) + len(REGIONS) + 1, np.int64)
    place[names] = np.arange(len(names))
    place[len(trace.names) : -1] = len(names) + np.arange(len(REGIONS))

    def lane(name: str, group: str, spans: Spans | GpuWork, kind: Ints) -> Lane:
        start, stop = np.maximum(spans.start, begin), np.minimum(spans.end, end)
        return Lane(
            name=name,
            group=group,
            start_us=tuple(((start - begin) / 1e3).tolist()),
            duration_us=tuple(((stop - start) / 1e3).tolist()),
            name_index=tuple(place[spans.name].tolist()),
            kind_index=tuple(kind.tolist()),
        )

    lanes = [
        lane(f"host: {label}", "host", spans, np.full(len(spans), len(KINDS)))
        for label, spans in _host_lanes(recording, shown)
    ]
    if path is not None:
        lanes.append(lane("critical path", "path", *_pieces(recording, path, most_spans)))
    comm = recording.kind == KINDS.index("comm")
    several = len({device for device, _ in trace.lanes}) > 1
    rows = np.flatnonzero(work)
    rows = rows[np.lexsort((comm[rows], gpu.lane[rows]))]
    ends = np.flatnonzero((np.diff(gpu.lane[rows]) != 0) | (np.diff(comm[rows]) != 0)) + 1
    for chosen in np.split(rows, ends) if len(rows) else ():
        device, stream = trace.lanes[gpu.lane[chosen[0]]]
        group = "comm" if comm[chosen[0]] else "stream"
        name = f"stream {stream}" if group == "stream" else f"communication, stream {stream}"
        name += f" (GPU {device})" if several else ""
        lanes.append(lane(name, group, gpu.at(chosen), recording.kind[chosen]))
    left_out = Intervals.of(steps.start, steps.end) - steps.gpu.spans
    return Timeline(
        rank=rank,
        length_us=(end - begin) / 1e3,
        steps=tuple(
            (int(number), (int(start) - begin) / 1e3, (int(stop) - begin) / 1e3)
            for number, start, stop in zip(steps.number, steps.start, steps.end, strict=True)
        ),
        names=(
            *(trace.names[name][:_NAME_LENGTH] for name in names.tolist()),
            *(f"{MARK_PREFIX}{name}" for name in REGIONS),
        ),
        kinds=_KINDS,
        lanes=tuple(lanes),
        omitted=omitted,
        left_out=tuple(
            ((start - begin) / 1e3, (stop - begin) / 1e3)
            for start, stop in zip(left_out.start.tolist(), left_out.end.tolist(), strict=True)
        ),
    )


def _pieces(recording: Recording, path: CriticalPath, most: int) -> tuple[Spans, Ints]:
    """The pieces of a path as spans, named by region on the host and by kernel on the GPU, and their kinds.

    Work of one kind that follows upon each other is one piece, named by the longest of it.
    """
    gpu = path.work != HOST
    kind = np.where(gpu, np.append(recording.kind, -1)[path.work], -1)
    name = np.append(recording.trace.gpu.name, 0)[path.work]
    joins = np.zeros(len(path), bool)
    joins[1:] = (kind[1:] == kind[:-1]) & gpu[1:] & (path.start[1:] - path.end[:-1] < _TOGETHER_NS)
    group = np.cumsum(~joins) - 1
    first = np.flatnonzero(~joins)
    by_length = np.lexsort((path.end - path.start, group))
    longest = by_length[np.searchsorted(group[by_length], np.arange(len(first)), side="right") - 1]
    start, end = path.start[first], np.maximum.reduceat(path.end, first) if len(first) else path.end
    of_gpu = gpu[first]
    columns = [(start[of_gpu], end[of_gpu], name[longest][of_gpu], kind[first][of_gpu])]
    host = Intervals.of(path.start[~gpu], path.end[~gpu])
    for region, in_region in recording.on_host.items():
        spans = host & in_region
        number = len(recording.trace.names) + REGIONS.index(region)
        columns.append(
            (spans.start, spans.end, np.full(len(spans), number), np.full(len(spans), _KINDS.index("region")))
        )
    start, end, name, kind = (np.concatenate(column) for column in zip(*columns, strict=True))
    kept = np.sort(np.argsort(start - end, kind="stable")[:most])
    kept = kept[np.argsort(start[kept], kind="stable")]
    return Spans(start=start[kept], end=end[kept], name=name[kept], thread=np.zeros(len(kept), np.int64)), kind[kept]


def _host_lanes(recording: Recording, shown: NDArray[np.bool_]) -> list[tuple[str, Spans]]:
    """The host's ranges, one lane per depth of nesting."""
    spans = _beside_closures(recording.trace, recording.trace.annotations.at(shown))
    depth = Nesting(replace(spans, thread=np.zeros(len(spans), np.int64))).depth()
    levels = range(int(depth.max(initial=-1)) + 1)
    return [(f"nested {level}" if level else "regions", spans.at(depth == level)) for level in levels]


def _beside_closures(trace: Trace, spans: Spans) -> Spans:
    """The ranges with those of optimizers cut where the closure's regions are, which then lie beside them."""
    regions = named(trace, spans, lambda name: name.startswith(MARK_PREFIX) and name != _OPTIMIZER)
    closures = spans_of(spans, regions)
    for is_update in (_OPTIMIZER.__eq__, lambda name: name.startswith("Optimizer.step#")):
        cut = named(trace, spans, is_update)
        whole, others = spans.at(cut), spans.at(~cut)
        pieces = Intervals.of(whole.start, whole.end) - closures
        of = whole.at(np.searchsorted(whole.start, pieces.start, side="right") - 1)
        split = replace(of, start=pieces.start, end=pieces.end)
        columns = {name: np.concatenate((column, split.columns()[name])) for name, column in others.columns().items()}
        spans = Spans(**columns).at(np.argsort(columns["start"], kind="stable"))
    return spans
