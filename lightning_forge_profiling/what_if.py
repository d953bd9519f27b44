"""How long a step of a trace would take with something changed, and what would bound it then: `predict`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

import numpy as np

from lightning_forge_profiling.analysis.fixes import MOST_ERROR_PCT, Change, ReplaySteps, can_be_played, scatter_pct
from lightning_forge_profiling.analysis.intervals import ascending
from lightning_forge_profiling.analysis.recording import prepared, with_steps
from lightning_forge_profiling.analysis.replay import Graph, Played, error_pct, live_hosts, play, step_ns, together
from lightning_forge_profiling.diagnosis.ranks import MOST_SHOWN
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.kineto.trace import Events, Ints, Trace, join_traces
from lightning_forge_profiling.pipeline import compare_ranks, counted_steps, rank_result
from lightning_forge_profiling.schema import Analysis, RankResult

_T = TypeVar("_T", bound=Events)


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
        return type(table)(**columns).in_order()

    stays = ~steps.gone.contains(trace.calls.start[graph.call])[graph.launched_by]
    start, end = played.work_start[stays] - base, played.work_end[stays] - base
    return replace(
        trace,
        gpu=replace(trace.gpu.at(graph.work[stays]), start=start, end=end).in_order(),
        calls=moved(trace.calls),
        operators=moved(trace.operators),
        annotations=moved(trace.annotations),
        modules=moved(trace.modules),
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


_NOTHING: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step with something changed. Times are of one step."""

    source: str  # the trace or the folder
    recorded_steps: tuple[int, ...]  # numbers of the steps that were played
    steps: int  # how many those are, of each rank
    ranks: int  # how many ranks
    recorded_ms: float  # the mean recorded step, on the slowest rank
    replayed_ms: float  # when the recorded steps are played again unchanged
    live_ms: float | None  # without recording, for which the host is made faster; None if unknown
    hosts: tuple[float, ...]  # parts of its recorded time that the host is played with, if the step does not show it
    before_ms: float  # what the change is made to: `live_ms` if a faster host explains it, or what is played
    error_pct: float | None  # how far means of every other step, played again, are off; None with a single step
    after_ms: float  # with the change
    low_ms: float  # lower end of the interval that the scatter of the recorded steps and the hosts give it
    high_ms: float  # its upper end
    analysis: Analysis | None  # what would bound the step then; None if it is unknown what communication hides behind
    notes: tuple[str, ...]  # what to know of the changes


def predict(
    path: Path,
    changes: Sequence[Change],
    *,
    equal_ranks: bool = False,
    rank: int | None = None,
    live_ms: float | None = None,
) -> Prediction:
    """Predict a step of a trace, or of the traces of all ranks in a folder, with something changed.

    Args:
        path: a trace that `torch.profiler` exported, or a folder with one per rank.
        changes: see `analysis.fixes`; made one after the other, on each rank.
        equal_ranks: each rank does what the one does whose own work takes least.
        rank: only this rank.
        live_ms: how long a step takes without recording, which slows the host; None to play what was recorded.

    Raises:
        ConfigurationError: a change is of what the steps have not, or ranks are to be equal of which there is one.
        TraceError: there is no trace, or its steps cannot be played again: no GPU work, more than 16 ranks, or a replay
            that takes longer or shorter than the recorded steps.
        OSError: a file could not be read.

    Examples:
        >>> from lightning_forge_profiling.analysis.fixes import without_region
        >>> found = predict(Path("tests/data/traces/input_bound"), [without_region("data")])
        >>> f"{found.recorded_ms:.1f} ms, then {found.after_ms:.1f} ms"
        '40.2 ms, then 15.0 ms'
    """
    ranks, source = _recorded(path, rank)
    if equal_ranks and len(ranks) == 1:
        raise ConfigurationError(f"{source}: one rank, and ranks can be equal only where there are several")
    # together, if they make the same collectives; else each waits as long in them as it was recorded
    graphs = together([steps.graph for steps in ranks]) or [steps.graph for steps in ranks]
    replayed_ns, recorded_ns = step_ns(graphs), max(float(steps.graph.recorded_ns.mean()) for steps in ranks)
    errors = [error_pct(steps.graph, steps.recording.trace.calls.name) for steps in ranks]
    error = max((each for each in errors if each is not None), key=abs, default=None)
    off_pct = max(100 * abs(replayed_ns / recorded_ns - 1), abs(error or 0.0))
    if off_pct > MOST_ERROR_PCT:
        raise TraceError(
            f"{path}: its steps cannot be played again, so nothing is predicted: unchanged they take {off_pct:.0f} % "
            f"more or less than recorded, and at most {MOST_ERROR_PCT:.0f} % would be"
        )
    changed = [
        reduce(lambda each, change: change(each), changes, replace(steps, graph=graph))
        for steps, graph in zip(ranks, graphs, strict=True)
    ]
    hosts = live_hosts(graphs, None if live_ms is None else live_ms * 1e6)
    if equal_ranks:  # which then wait for each other no more
        changed = [min(changed, key=lambda steps: step_ns([steps.graph.with_host(hosts[0])]))] * len(changed)
    each_ns = [step_ns([steps.graph.with_host(factor) for steps in changed]) for factor in hosts]
    after_ns = fmean(each_ns)
    before_ns = fmean(step_ns([graph.with_host(factor) for graph in graphs]) for factor in hosts)
    changed = [replace(steps, graph=steps.graph.with_host(fmean(hosts))) for steps in changed]
    notes = tuple(dict.fromkeys(note for steps in changed for note in steps.notes))
    if abs(after_ns - before_ns) < _NOTHING * before_ns:
        notes += ("that changes nothing in these steps",)
    scatter = scatter_pct(ranks[0].graph) / 100
    results = [
        _result(replayed_trace(steps, played), of.recording.trace.rank)
        for steps, played, of in zip(changed, play([steps.graph for steps in changed]), ranks, strict=True)
    ]
    overlaps = any(steps.overlaps for steps in changed)
    return Prediction(
        source=source,
        recorded_steps=tuple(ranks[0].recording.steps.number.tolist()),
        notes=notes,
        steps=ranks[0].graph.steps,
        ranks=len(ranks),
        recorded_ms=recorded_ns / 1e6,
        replayed_ms=replayed_ns / 1e6,
        live_ms=live_ms,
        hosts=hosts,
        before_ms=before_ns / 1e6,
        error_pct=error,
        after_ms=after_ns / 1e6,
        low_ms=min(each_ns) * (1 - scatter) / 1e6,
        high_ms=max(each_ns) * (1 + scatter) / 1e6,
        analysis=None if overlaps else compare_ranks(results, source=source).analysis,
    )


def _recorded(path: Path, rank: int | None) -> tuple[list[ReplaySteps], str]:
    """The steps of each rank, and the trace or the folder of the window that they are of."""
    files, _ = find_traces(path)
    groups = [group for group in windows_by_rank(files) if rank is None or rank_in_name(group[0]) in {None, rank}]
    if not groups:
        raise TraceError(f"{path}: no trace of rank {rank}")
    if len(groups) > MOST_SHOWN:
        raise TraceError(
            f"{path}: {len(groups)} ranks, and at most {MOST_SHOWN} are played together: choose one (--rank)"
        )
    ranks = []
    for group in groups:
        recording = prepared(join_traces([read_trace(file) for file in group]))
        recording = with_steps(recording, counted_steps(recording, from_the_start=True))
        steps = ReplaySteps(recording, Graph.of(recording))
        if not can_be_played(steps.graph):
            known = " whose launch is known" if len(recording.trace.gpu) else ""
            raise TraceError(f"{group[0]}: no GPU work{known}, without which its steps cannot be played again")
        trace = recording.trace
        number = trace.rank if trace.rank is not None else rank_in_name(group[0])
        ranks.append(replace(steps, recording=replace(recording, trace=replace(trace, rank=number))))
    return ranks, str(groups[0][0] if len(groups) == 1 else groups[0][0].parent)


def _result(trace: Trace, rank: int | None) -> RankResult:
    recording = prepared(trace)
    return rank_result(recording, rank, counted_steps(recording, from_the_start=True))
