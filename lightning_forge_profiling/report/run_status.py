"""Status and pace of a run, from its record: running or ended, rates, step times, the ranks side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import msgspec

from lightning_forge_profiling.diagnosis.combine import THE_RUN, combine
from lightning_forge_profiling.diagnosis.ranks import STRAGGLER
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.record.histogram import merged, percentile_ms
from lightning_forge_profiling.record.lines import Begin, EventLine, IntervalLine, State
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.timing.rates import Percentiles, Rates

Outcome = Literal["running", "finished", "failed", "silent"]

# Shortest silence. A run writes every few seconds; a shared file system may show that some seconds later.
_PATIENCE_S: Final = 30.0
# silence is longer than this many times the longest recent pause: steps and validation may take long
_PATIENT: Final = 3.0
_RECENT: Final = 50

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run or of one rank."""

    outcome: Outcome  # `running`; `finished` or `failed`, by the last line; `silent` without a new line for long
    step: int  # number of steps up to the last line
    began: float  # start of the fit, Unix time in seconds
    at: float  # time of the last line, Unix time in seconds
    text: str  # the status in words


def run_status(record: RunRecord, now: float) -> RunStatus:
    """Status of a run: finished when its lowest rank has, failed when any rank has."""
    ranks = {rank.begin.rank: rank_status(rank, now) for rank in record.ranks}
    failed = min((one for one in ranks.values() if one.outcome == "failed"), key=lambda one: one.at, default=None)
    if failed is not None:
        return failed
    first = next(iter(ranks.values()))
    shown = first if first.outcome == "finished" else max(ranks.values(), key=lambda one: one.at)
    silent = [(rank, one) for rank, one in ranks.items() if one.outcome == "silent" != shown.outcome]
    others = "".join(f"; rank {rank} silent for {duration(now - one.at)}, step {one.step:,}" for rank, one in silent)
    return replace(shown, text=shown.text + others)


def rank_status(rank: RankRecord, now: float) -> RunStatus:
    """Status of one rank."""
    began = rank.begin.at
    at = max((line.at for line in rank.lines), default=began)
    step = max((line.step for line in rank.lines if not isinstance(line, Begin)), default=0)
    end = rank.end
    if end is not None:
        after = duration(end.at - began)
        steps = "1 step" if end.step == 1 else f"{end.step:,} steps"
        if end.outcome == "finished":
            return RunStatus("finished", end.step, began, end.at, f"finished after {after}, {steps}")
        what = end.exception or "an exception without a message"
        return RunStatus("failed", end.step, began, end.at, f"failed after {after}, step {end.step:,}: {what}")
    ago = duration(now - at)
    times = [began, *(line.at for line in rank.lines)][-_RECENT:]
    if now - at <= max([_PATIENCE_S, *(_PATIENT * (later - earlier) for earlier, later in pairwise(times))]):
        return RunStatus("running", step, began, at, f"running: step {step:,}, last written {ago} ago")
    return RunStatus("silent", step, began, at, f"silent: step {step:,}, last written {ago} ago; killed or stalled")


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = max(0, round(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


_COMPARED: Final = 20  # number of latest intervals that a rank's step time is the mean of


@dataclass(frozen=True, slots=True)
class RankPace:
    """The pace of one rank."""

    rank: int
    host: str
    device: str  # such as `cuda:0 (NVIDIA H200)`
    outcome: Outcome
    step: int  # number of steps up to its last line
    at: float  # time of its last line, Unix time in seconds
    step_ms: float | None  # mean over the latest intervals; None before the first
    own_ms: float | None = None  # its own work per step, by its latest totals; None before the first
    waits_ms: float | None = None  # per step, for other ranks, likewise
    late: bool = False  # whether the others wait for it


def counted(rank: RankRecord) -> list[IntervalLine]:
    """The intervals of a rank that have counted steps."""
    return [interval for interval in rank.intervals if interval.counted]


def split(intervals: Iterable[IntervalLine]) -> list[IntervalLine]:
    """The intervals with times by region. A short one may have no split step."""
    return [interval for interval in intervals if not interval.device_ms.keys().isdisjoint(REGIONS)]


def rates_of(intervals: Sequence[IntervalLine]) -> Rates:
    """Sums and rates over intervals."""
    steps = sum(one.counted for one in intervals)
    device_ms = sums(one.device_ms for one in intervals)
    return Rates(
        steps=steps,
        optimizer_steps=sum(one.optimizer_steps for one in intervals),
        samples=_sum(one.samples for one in intervals),
        tokens=_sum(one.tokens for one in intervals),
        device_ms=device_ms,
        host_ms=sums(one.host_ms for one in intervals),
        flops=None,
        split_steps=0 if device_ms.keys().isdisjoint(REGIONS) else steps,
    )


def sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def mean_metrics(intervals: Sequence[IntervalLine]) -> dict[str, float]:
    """Means of the logged metrics over the counted steps."""
    counted = [interval for interval in intervals if interval.counted]
    steps = sums(dict.fromkeys(one.metrics, float(one.counted)) for one in counted)
    totals = sums({name: value * one.counted for name, value in one.metrics.items()} for one in counted)
    return {name: total / steps[name] for name, total in totals.items()}


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def spread_of(intervals: Iterable[IntervalLine]) -> Percentiles:
    """Median and 95th percentile of the step times; 0 without a step."""
    steps = merged(interval.steps_us for interval in intervals)
    return Percentiles(percentile_ms(steps, 50), percentile_ms(steps, 95)) if steps else Percentiles()


def events_once(record: RunRecord) -> list[tuple[EventLine, list[int]]]:
    """All events by time, each with the ranks that have it."""
    once: dict[tuple[int, str, str], tuple[EventLine, list[int]]] = {}
    for rank in record.ranks:
        for event in rank.events:
            once.setdefault((event.step, event.kind, event.text), (event, []))[1].append(rank.begin.rank)
    return sorted(once.values(), key=lambda entry: entry[0].at)


def totals(record: RunRecord) -> tuple[RankRecord, State | None]:
    """The lowest rank with totals, and its latest with the analysis of all ranks; or the lowest rank, and None."""
    # a rank that has not ended knows only its own work
    states = ((rank, rank.state) for rank in record.ranks if rank.state is not None)
    first, state = next(states, (record.ranks[0], None))
    analysis, works = None if state is None else state.report.analysis, record.works
    if state is None or analysis is None or analysis.run is None:
        return first, state
    if analysis.source != THE_RUN or len(works) <= len(analysis.run.ranks):
        return first, state
    of_all = replace(combine(None, replace(analysis.run, ranks=works)), tracked=analysis.tracked)
    return first, msgspec.structs.replace(state, report=replace(state.report, analysis=of_all))


def rank_paces(record: RunRecord, now: float) -> list[RankPace]:
    """The pace of each rank."""
    _, state = totals(record)
    analysis = None if state is None else state.report.analysis
    works = () if analysis is None or analysis.run is None else analysis.run.ranks
    findings = () if analysis is None else analysis.findings
    late = {finding.rank for finding in findings if finding.code == STRAGGLER}
    paces = {rank.begin.rank: _pace(rank, now) for rank in record.ranks}
    for work in works:
        if work.rank in paces:
            paces[work.rank] = replace(
                paces[work.rank],
                own_ms=sum(work.step_leaves_ms.values()),
                waits_ms=sum(work.waits_ms.values()),
                late=work.rank in late,
            )
    return list(paces.values())


def _pace(rank: RankRecord, now: float) -> RankPace:
    status, rates = rank_status(rank, now), rates_of(counted(rank)[-_COMPARED:])
    return RankPace(
        rank=rank.begin.rank,
        host=rank.begin.host,
        device=rank.begin.device,
        outcome=status.outcome,
        step=status.step,
        at=status.at,
        step_ms=rates.mean_ms("step") if rates.steps else None,
    )
