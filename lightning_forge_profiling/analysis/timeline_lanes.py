"""Lanes of a report's timeline: host regions, streams, communication."""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals, Nesting
from lightning_forge_profiling.analysis.kernels import KINDS
from lightning_forge_profiling.analysis.launches import named, spans_of
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.steps import step_marks
from lightning_forge_profiling.kineto.trace import GpuWork, Ints, Spans, Trace
from lightning_forge_profiling.names import MARK_PREFIX
from lightning_forge_profiling.results.timeline import Lane, Timeline

MOST_SPANS: Final = 20_000  # about 600 kB of HTML
_KINDS: Final = (*KINDS, "region")
_NAME_LENGTH: Final = 300
_OPTIMIZER: Final = f"{MARK_PREFIX}optimizer"


def draw(recording: Recording, rank: int, *, most_spans: int = MOST_SPANS) -> Timeline:
    """Lay out the recorded steps of a rank as lanes."""
    trace, steps = recording.trace, recording.steps
    gpu, annotations = trace.gpu, trace.annotations
    if not len(steps):
        return Timeline(rank=rank, length_us=0.0, steps=(), names=(), kinds=_KINDS, lanes=())
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
    place = np.zeros(len(trace.names) + 1, np.int64)
    place[names] = np.arange(len(names))

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
        names=tuple(trace.names[name][:_NAME_LENGTH] for name in names.tolist()),
        kinds=_KINDS,
        lanes=tuple(lanes),
        omitted=omitted,
        left_out=tuple(
            ((start - begin) / 1e3, (stop - begin) / 1e3)
            for start, stop in zip(left_out.start.tolist(), left_out.end.tolist(), strict=True)
        ),
    )


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
