"""The critical path of recorded steps: what the end of the last step waited for, back to the beginning of the first.

A shorter piece of it would have made the steps shorter, until another chain of waits takes its place.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.regions import host_spans
from lightning_forge_profiling.analysis.replay import Graph, before_on_lane
from lightning_forge_profiling.kineto.trace import Ints

HOST: Final = -1
_UNKNOWN_NS: Final = 100_000  # work that begins so much later waited for something that the graph has not


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """Pieces of the path in order of time.

    Attributes:
        start: begin of each, in nanoseconds.
        end: its end; the next one begins there or later.
        work: row of `Trace.gpu`; `HOST` for a piece on the host.
    """

    start: Ints
    end: Ints
    work: Ints

    def __len__(self) -> int:
        return len(self.start)


def critical_path(recording: Recording, graph: Graph) -> CriticalPath:
    """Follow the waits of the recorded steps back from their last work."""
    calls, gpu = recording.trace.calls, recording.trace.gpu
    call_start, call_end = calls.start[graph.call].tolist(), calls.end[graph.call].tolist()
    work_start, work_end = gpu.start[graph.work].tolist(), gpu.end[graph.work].tolist()
    before, launched_by = before_on_lane(graph.begins.lane).tolist(), graph.launched_by.tolist()
    begins = graph.begins
    columns = (begins.latency, begins.behind, begins.after, begins.lag)
    latency, behind, after, lag = (column.tolist() for column in columns)
    awaited = graph.awaited.tolist()
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
    pieces.reverse()
    start, end, work_rows = (
        (np.array(column, np.int64) for column in zip(*pieces, strict=True)) if pieces else 3 * [_NONE]
    )
    return CriticalPath(start, np.maximum(end, start), work_rows)


_NONE: Final = np.zeros(0, np.int64)


def by_region(recording: Recording, path: CriticalPath) -> list[tuple[str, Intervals]]:
    """The path's time on the host by built-in region."""
    host = path.work == HOST
    spans = Intervals.of(path.start[host], path.end[host])
    return [(name, spans & region) for name, region in host_spans(recording).items()]
