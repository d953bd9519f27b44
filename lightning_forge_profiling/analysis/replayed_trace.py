"""A trace of steps as they were played again, to be analysed like a recorded one."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from lightning_forge_profiling.analysis.fixes import ReplaySteps
from lightning_forge_profiling.analysis.intervals import ascending
from lightning_forge_profiling.analysis.replay import Played
from lightning_forge_profiling.kineto.trace import Ints, Table, Trace

_T = TypeVar("_T", bound=Table)


def replayed_trace(steps: ReplaySteps, played: Played) -> Trace:
    """The trace of the last round: all times moved, without what is gone."""
    trace, graph, of = steps.recording.trace, steps.graph, steps.recording.steps
    recorded, now = _anchors(steps, played)
    base = int(now[0])

    def moved(table: _T) -> _T:
        rows = (of.host.at(table.start) >= 0) & ~steps.gone.contains(table.start)
        columns: dict[str, Any] = {name: column[rows] for name, column in table.columns().items()}
        for side in {"start", "end"} & columns.keys():
            columns[side] = np.rint(np.interp(columns[side], recorded, now)).astype(np.int64) - base
        return _in_order(type(table)(**columns))

    stays = ~steps.gone.contains(trace.calls.start[graph.call])[graph.launched_by]
    start, end = played.work_start[stays] - base, played.work_end[stays] - base
    gpu = replace(trace.gpu.at(graph.work[stays]), start=start, end=end)
    return replace(
        trace,
        gpu=_in_order(gpu),
        calls=moved(trace.calls),
        operators=moved(trace.operators),
        annotations=moved(trace.annotations),
        frames=moved(trace.frames),
        allocations=moved(trace.allocations),
        base_ns=None,
        begins=(min(0, int(start.min(initial=0))),),
        cuts=(None,),
        light_steps=(),
    )


def _anchors(steps: ReplaySteps, played: Played) -> tuple[Ints, Ints]:
    """Instants on the host as recorded, in order, and when they come now."""
    graph, of, calls = steps.graph, steps.recording.steps, steps.recording.trace.calls
    first = np.searchsorted(graph.call_step, np.arange(graph.steps))
    last = np.searchsorted(graph.call_step, np.arange(graph.steps), side="right") - 1
    some = last >= first  # steps with calls
    first, last = first[some], last[some]
    recorded = (of.host_start[some], calls.start[graph.call], calls.end[graph.call], of.host_end[some] - 1)
    now = (
        played.call_start[first] - graph.before[first],
        played.call_start,
        played.call_end,
        played.call_end[last] + graph.rest[some] - 1,
    )
    return ascending(np.concatenate(recorded), np.concatenate(now))


def _in_order(table: _T) -> _T:
    columns = table.columns()
    end = columns.get("end", columns["start"])
    return table.at(np.lexsort((-end, columns["start"])))
