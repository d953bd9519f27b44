"""Plays recorded steps again with something changed, to say how long a step would then take.

A step is a chain of calls on the host, in order of time over its threads: between two calls the host takes as long as
it did. A launch puts work on a stream. That work begins once the launch has reached the GPU, the work before it on its
stream is done, and work on another stream that it waits for is done; which that is, is inferred from the times. A call
that waits for the GPU returns once the work is done that was done when it returned. Of several ranks a collective
begins once all of them are there, and takes as long as on the rank that waited least.

The recorded steps are played over and over, and the time from one round to the next is what counts. Whether such a
graph describes the steps is tested: they have to take as long as recorded, and means of every other step as those did.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.gpu_time import launch_latency
from lightning_forge_profiling.analysis.intervals import places, take
from lightning_forge_profiling.analysis.kernels import KINDS
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.steps import ALLOCATES, FREES, WAITS, Links, named
from lightning_forge_profiling.kineto.trace import Ints, Trace
from lightning_forge_profiling.schema import hosts_of

ROUNDS: Final = 4  # of the recorded steps; those before the last let host and GPU settle
_CLOSE_NS: Final = 30_000  # work that begins so soon after other work has waited for it; 11 to 26 us on an H200
_BLOCKED_NS: Final = 100_000  # a launch takes 3 to 20 us; one that takes so long waits for room in the queue
_MUCH_QUEUED: Final = 256  # works; the queue takes 1,024 entries, and an H100 was seen to block from 460 works on
_MOST_LOOKED_AT: Final = 1_000  # works that ended last, among which the one that is waited for is looked for
_SHORTEST_GAP_NS: Final = 1_000  # between kernels of one stream, where it cannot be measured


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Calls and GPU work of some steps of one rank, in the order of the calls. Times in nanoseconds."""

    steps: int
    # by step
    recorded_ns: Ints  # how long it took
    rest: Ints  # host time from its last call to its end
    # by call
    call: Ints  # row of `Trace.calls`
    call_step: Ints  # position of its step
    before: Ints  # host time from the end of the previous call, or from the beginning of the step
    takes: Ints  # host time of the call, without waiting
    awaited: Ints  # position of the work that it waits for; -1 for none
    returns: Ints  # how long after that work's end it returns
    steady: NDArray[np.bool_]  # not slowed by recording: `cudaMalloc` and `cudaFree` are long, and the driver's own
    # by GPU work
    work: Ints  # row of `Trace.gpu`
    launched_by: Ints  # position of its call
    runs: Ints  # duration
    collective: NDArray[np.bool_]  # communication, in which ranks wait for each other
    lane: Ints  # number of its stream
    latency: Ints  # from the launch to the earliest start
    behind: Ints  # least time between the previous work of the stream and this
    after: Ints  # position of work on another stream that it waits for; -1 for none
    lag: Ints  # how long after that work's end it begins at the earliest

    def calls_of(self, step: int) -> slice:
        """Positions of a step's calls."""
        return slice(*np.searchsorted(self.call_step, (step, step + 1)).tolist())

    def works_of(self, step: int) -> slice:
        """Positions of the GPU work that a step launched."""
        calls = self.calls_of(step)
        return slice(*np.searchsorted(self.launched_by, (calls.start, calls.stop)).tolist())

    def key(self, step: int, names: Ints) -> bytes:
        """What two steps have in common that do the same."""
        calls, works = self.calls_of(step), self.works_of(step)
        columns = (names[self.call[calls]], self.launched_by[works] - calls.start, self.lane[works])
        return b"".join(column.tobytes() for column in columns)

    def with_means(self, step: int, others: Sequence[int]) -> Self:
        """The graph with one step's times replaced by the means of other steps that do the same."""
        rest = self.rest.copy()
        rest[step] = rest[list(others)].mean()
        changed: dict[str, Any] = {"rest": rest}
        rows = {self.calls_of: ("before", "takes", "returns"), self.works_of: ("latency", "behind", "runs")}
        for of, names in rows.items():
            for name in names:
                changed[name] = getattr(self, name).copy()
                changed[name][of(step)] = np.rint(np.mean([getattr(self, name)[of(other)] for other in others], axis=0))
        return replace(self, **changed)

    def only(self, chosen: NDArray[np.bool_]) -> Self:
        """Some of the steps."""
        calls = chosen[self.call_step]
        works = calls[self.launched_by]
        rows = {
            "recorded_ns": chosen,
            "rest": chosen,
            **dict.fromkeys(_OF_CALL, calls),
            **dict.fromkeys(_OF_WORK, works),
        }
        columns: dict[str, Any] = {name: getattr(self, name)[kept] for name, kept in rows.items()}
        for name, among in (("call_step", chosen), ("launched_by", calls), ("awaited", works), ("after", works)):
            columns[name] = places(among)[columns[name]]
        return replace(self, steps=int(chosen.sum()), **columns)

    def with_host(self, factor: float) -> Self:
        """The graph of a host that takes so many times as long."""
        calls = np.where(self.steady, 1.0, factor)
        factors = {"before": factor, "takes": calls, "returns": calls, "rest": factor}
        return replace(
            self, **{name: np.rint(getattr(self, name) * by).astype(np.int64) for name, by in factors.items()}
        )

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """The graph of the steps of a recording."""
        trace, links, steps = recording.trace, recording.links, recording.steps
        calls, gpu = trace.calls, trace.gpu
        launched = np.zeros(len(calls) + 1, bool)
        launched[links.call[recording.step >= 0]] = True
        threads = np.unique(calls.thread[launched[:-1]])
        of_driver = named(trace, calls, FREES) | named(trace, calls, ALLOCATES)
        waiting = named(trace, calls, WAITS) | of_driver
        chosen = launched[:-1] | (waiting & np.isin(calls.thread, threads))
        row = np.flatnonzero(chosen & (steps.host.at(calls.start) >= 0))  # in order of time
        step, start, end = steps.host.at(calls.start[row]), calls.start[row], calls.end[row]
        place = np.full(len(calls) + 1, -1)
        place[row] = np.arange(len(row))
        # of all work, since what comes before the steps is not to be taken for a slow launch
        every = np.flatnonzero(links.call >= 0)
        every = every[np.lexsort((gpu.start[every], links.time[every]))]
        inside = place[links.call[every]] >= 0
        waits = {
            name: column[inside] for name, column in _waits(trace, links, every, launch_latency(recording)).items()
        }
        waits["after"], work = places(inside)[waits["after"]], every[inside]
        launched_by = place[links.call[work]]

        previous, _, last, finish = bounds(recording, row, step)
        host = steps.host.spans
        before = np.where(start > previous, host.within(previous, np.maximum(start, previous)), start - previous)
        awaited, returns = _awaited(start, end, waiting[row], gpu.end[work], launched_by)
        # a full queue is waited for, too, where what it is full of was launched before these steps
        sent, begun = (np.searchsorted(np.sort(times[every]), start) for times in (links.time, gpu.start))
        full = (end - start > _BLOCKED_NS) & (sent - begun >= _MUCH_QUEUED)
        waited = (take(gpu.end[work], awaited) > start) | ((awaited < 0) & full)
        takes = np.where(waited, np.minimum(end - start, _SHORTEST_GAP_NS), end - start)
        return cls(
            steps=len(steps),
            recorded_ns=steps.gpu.length(),
            call=row,
            call_step=step,
            before=before,
            takes=takes,
            awaited=awaited,
            returns=returns,
            steady=of_driver[row],
            rest=host.within(last, finish),
            work=work,
            launched_by=launched_by,
            runs=gpu.end[work] - gpu.start[work],
            collective=recording.kind[work] == KINDS.index("comm"),
            **waits,
        )


_OF_CALL: Final = ("call", "call_step", "before", "takes", "awaited", "returns", "steady")
_OF_WORK: Final = ("work", "launched_by", "runs", "collective", "lane", "latency", "behind", "after", "lag")


def bounds(recording: Recording, row: Ints, step: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Instants between which the host makes none of some calls, which are in order of time.

    Returns:
        For each call the end of the one before it or the beginning of its step, and its start; for each step the end of
        its last call, or its own beginning, and its end.
    """
    calls, steps = recording.trace.calls, recording.steps
    start, end = calls.start[row], calls.end[row]
    first = np.diff(step, prepend=-1) > 0
    previous = np.where(first, steps.host_start[step], np.concatenate(([0], end))[:-1] if len(end) else end)
    last = steps.host_start.copy()
    last[step] = end  # the last call of each step is the last to be written
    return previous, start, last, np.maximum(steps.host_end, last)


def _awaited(
    start: Ints, end: Ints, waiting: NDArray[np.bool_], work_end: Ints, launched_by: Ints
) -> tuple[Ints, Ints]:
    """For each call the work that was done last when it returned, if it waited for it, and how long after it did."""
    awaited, returns = np.full(len(start), -1), np.zeros(len(start), np.int64)
    order = np.argsort(work_end, kind="stable")
    by_end = work_end[order]
    for call in np.flatnonzero(waiting | (end - start > _BLOCKED_NS)).tolist():
        ended = int(np.searchsorted(by_end, end[call], side="right"))
        done = order[max(ended - _MOST_LOOKED_AT, 0) : ended]
        done = done[launched_by[done] <= call]
        if len(done) and (work_end[done[-1]] > start[call] or waiting[call]):
            awaited[call] = done[-1]
            returns[call] = end[call] - max(work_end[done[-1]], start[call])
    return awaited, returns


def _waits(trace: Trace, links: Links, rows: Ints, usual_ns: int) -> dict[str, Ints]:
    """Why each work began when it did; of works in the order of their launches."""
    start, end, lane, launch = trace.gpu.start[rows], trace.gpu.end[rows], trace.gpu.lane[rows], links.time[rows]
    before = before_on_lane(lane)
    free = np.where(before >= 0, take(end, before), np.iinfo(np.int64).min // 2)
    late = start - np.maximum(free, launch + usual_ns)
    after = _other_streams(start, end, lane, np.flatnonzero(late > _CLOSE_NS))
    queued = (free >= launch + usual_ns) & (after < 0)
    return {
        "lane": lane,
        "latency": np.where(queued | (after >= 0), usual_ns, start - launch),
        "behind": np.where(queued, start - free, np.minimum(_SHORTEST_GAP_NS, start - free)),
        "after": after,
        "lag": np.where(after >= 0, start - take(end, after), 0),
    }


def _other_streams(start: Ints, end: Ints, lane: Ints, late: Ints) -> Ints:
    """For late work the last work of another stream that was launched before it and ended right before it began."""
    after = np.full(len(start), -1)
    by_end = np.argsort(end, kind="stable")
    first, last = (np.searchsorted(end[by_end], start[late] + at, "left") for at in (-_CLOSE_NS, _SHORTEST_GAP_NS))
    for work, low, high in zip(late.tolist(), first.tolist(), last.tolist(), strict=True):
        others = by_end[max(low, high - _MOST_LOOKED_AT) : high]
        others = others[(lane[others] != lane[work]) & (others < work)]
        if len(others):
            after[work] = others[-1]
    return after


def before_on_lane(lane: Ints) -> Ints:
    """For each work the one before it on its stream; -1 for the first."""
    order = np.argsort(lane, kind="stable")
    before = np.full(len(lane), -1)
    same = np.diff(lane[order]) == 0
    before[order[1:][same]] = order[:-1][same]
    return before


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """When a rank does what, in the last of several rounds. Times in nanoseconds."""

    call_start: Ints
    call_end: Ints
    work_start: Ints  # of a collective once this rank is ready
    work_end: Ints
    rounds: tuple[int, ...]  # when all work of each round is done


def step_ns(graphs: Sequence[Graph]) -> float:
    """How long a step takes, in nanoseconds, if the steps of these ranks are played again and again."""
    played = play(graphs)
    before, last = (max(rank.rounds[number] for rank in played) for number in (-2, -1))
    return (last - before) / max(graph.steps for graph in graphs)


def play(graphs: Sequence[Graph]) -> list[Played]:
    """Play the steps of all ranks again and again."""
    plays, ended = [_rank(graph) for graph in graphs], dict[int, Played]()

    def proceed(rank: int, start: int | None) -> int | None:
        try:
            return next(plays[rank]) if start is None else plays[rank].send(start)
        except StopIteration as done:
            ended[rank] = done.value
            return None

    ready = [proceed(rank, None) for rank in range(len(plays))]
    while some := [time for time in ready if time is not None]:
        ready = [None if time is None else proceed(rank, max(some)) for rank, time in enumerate(ready)]
    return [ended[rank] for rank in range(len(plays))]


def _rank(graph: Graph) -> Generator[int, int, Played]:
    """Play the steps of a rank: yields when it is ready for a collective and is told when that begins."""
    calls = _rows(graph.call_step, graph.before, graph.takes, graph.awaited, graph.returns)
    waits = (graph.latency, graph.lane, graph.behind, graph.after, graph.lag)
    works, rest = _rows(*waits, graph.runs, graph.collective), graph.rest.tolist()
    first = np.searchsorted(graph.launched_by, np.arange(len(calls) + 1)).tolist()
    began, returned, starts, done = [0] * len(calls), [0] * len(calls), [0] * len(works), [0] * len(works)
    free: dict[int, int] = {}
    now, rounds = 0, []
    for _ in range(ROUNDS):
        under_way = 0
        for call, (step, before, takes, awaited, returns) in enumerate(calls):
            while under_way < step:
                now += rest[under_way]
                under_way += 1
            began[call] = now = now + before
            for work in range(first[call], first[call + 1]):
                latency, lane, behind, after, lag, runs, collective = works[work]
                start = max(now + latency, free.get(lane, 0) + behind)
                if after >= 0:
                    start = max(start, done[after] + lag)
                starts[work] = start
                begun = (yield start) if collective else start
                free[lane] = done[work] = begun + runs
            now += takes
            if awaited >= 0:
                now = max(now, done[awaited] + returns)
            returned[call] = now
        now += sum(rest[under_way:])
        rounds.append(max(free.values(), default=now))
    return Played(np.array(began), np.array(returned), np.array(starts), np.array(done), tuple(rounds))


def _rows(*columns: Ints | NDArray[np.bool_]) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def together(graphs: Sequence[Graph]) -> list[Graph]:
    """The graphs of all ranks, with each collective as long as on the rank that waited least; none if they differ."""
    collectives = [graph.runs[graph.collective] for graph in graphs]
    if len({len(runs) for runs in collectives}) != 1:
        return []
    shortest = np.min(collectives, axis=0)
    shared = [replace(graph, runs=graph.runs.copy()) for graph in graphs]
    for graph in shared:
        graph.runs[graph.collective] = shortest
    return shared


def error_pct(graph: Graph, names: Ints) -> float | None:
    """By what percent the rest of the steps, played with the means of every other step, differ from what those took.

    How the steps differ by themselves does not count: only whether a step that is played takes its time. None if no
    steps do the same. `names` are those of the calls, for each row of `Trace.calls`.
    """
    keys = [graph.key(step, names) for step in range(graph.steps)]
    alike = {key: [step for step in range(0, graph.steps, 2) if keys[step] == key] for key in {*keys[::2]}}
    tested = [step for step in range(1, graph.steps, 2) if keys[step] in alike]
    if not tested:
        return None
    fitted = graph
    for step in tested:
        fitted = fitted.with_means(step, alike[keys[step]])
    took = np.mean([graph.recorded_ns[alike[keys[step]]].mean() for step in tested])
    return float(100 * (step_ns([fitted.only(np.isin(np.arange(graph.steps), tested))]) / took - 1))


HOST: Final = (1.0, 0.7, 0.55, 0.4)
"""Parts of its recorded time that a host may take. Of 20 fits with their operators, shapes and memory recorded, a live
host took 0.37 to 0.61, 0.47 in the median (H200, torch 2.11, 2026-11-28)."""

_CLOSE: Final = 1.01


def live_hosts(graphs: Sequence[Graph], live_ns: float | None) -> tuple[float, ...]:
    """What the host may take of its recorded time without recording, by how long a step takes then.

    Returns:
        Factors: several where the GPU sets the pace, so that a step does not show it; 1 where the step is unknown, no
        shorter than recorded, or not explained by a faster host.
    """
    steps = [step_ns([graph.with_host(factor) for graph in graphs]) for factor in HOST]
    alike = hosts_of(steps, steps[0] if live_ns is None else min(live_ns, steps[0]))
    if len(alike) > 1:
        return tuple(HOST[host] for host in alike)
    if live_ns is None or not steps[-1] <= _CLOSE * live_ns < steps[0]:
        return (1.0,)
    # a step is close to linear between two of these hosts
    return (float(np.interp(live_ns, steps[::-1], HOST[::-1])),)
