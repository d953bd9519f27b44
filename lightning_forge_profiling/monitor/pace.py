"""Pace of a run, from its intervals: rates, step times, and the ranks side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT
from lightning_forge_profiling.monitor.standing import Outcome, rank_standing
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.record.histogram import merged, percentile_ms
from lightning_forge_profiling.record.lines import Interval
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.timing.rates import Percentiles, Rates

_BEFORE_COLLECTIVES: Final = ("data", "transfer", "forward")
"""Data-parallel ranks wait for each other in backward. The time until then is a rank's own."""

_COMPARED: Final = 20
"""Number of latest intervals over which ranks are compared."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """The pace of one rank.

    Attributes:
        rank: the global rank.
        host: name of its machine.
        device: its device, such as `cuda:0 (NVIDIA H200)`.
        outcome: its status.
        step: number of steps up to its last line.
        at: time of its last line, Unix time in seconds.
        step_ms: mean step time over the latest intervals; None before the first.
        before_backward_ms: the part of it before backward, in which no rank waits for another.
        late_ms: excess of that part over the mean of the other ranks, if this rank is the late one; else None.
    """

    rank: int
    host: str
    device: str
    outcome: Outcome
    step: int
    at: float
    step_ms: float | None
    before_backward_ms: float | None
    late_ms: float | None = None


def counted(rank: RankRecord) -> list[Interval]:
    """The intervals of a rank that have counted steps."""
    return [interval for interval in rank.intervals if interval.counted]


def split(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals with times by region. A short one may have no split step."""
    return [interval for interval in intervals if not interval.device_ms.keys().isdisjoint(REGIONS)]


def rates_of(intervals: Sequence[Interval]) -> Rates:
    """Sums and rates over intervals.

    Args:
        intervals: intervals of one rank.
    """
    steps = sum(one.counted for one in intervals)
    device_ms = _sums(one.device_ms for one in intervals)
    return Rates(
        steps=steps,
        optimizer_steps=sum(one.optimizer_steps for one in intervals),
        samples=_sum(one.samples for one in intervals),
        tokens=_sum(one.tokens for one in intervals),
        device_ms=device_ms,
        host_ms=_sums(one.host_ms for one in intervals),
        flops=None,
        split_steps=0 if device_ms.keys().isdisjoint(REGIONS) else steps,
    )


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, ms in part.items():
            total[name] = total.get(name, 0.0) + ms
    return total


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def spread_of(intervals: Iterable[Interval]) -> Percentiles:
    """Median and 95th percentile of the step times; 0 without a step."""
    steps = merged(interval.steps_us for interval in intervals)
    return Percentiles(percentile_ms(steps, 50), percentile_ms(steps, 95)) if steps else Percentiles()


def rank_paces(record: RunRecord, now: float) -> list[RankPace]:
    """The pace of each rank. The late rank, if any, has `late_ms`.

    Args:
        record: record of all ranks.
        now: current Unix time in seconds.
    """
    paces = [_pace(rank, now) for rank in record.ranks]
    known = {pace.rank: pace.before_backward_ms for pace in paces if pace.before_backward_ms is not None}
    if len(known) < 2:  # noqa: PLR2004
        return paces
    last = max(known, key=known.__getitem__)
    late_ms = known[last] - fmean(ms for rank, ms in known.items() if rank != last)
    step_ms = fmean(pace.step_ms for pace in paces if pace.step_ms is not None)
    is_late = 100 * late_ms >= NAMED_FROM_PCT * step_ms > 0
    return [replace(pace, late_ms=late_ms) if is_late and pace.rank == last else pace for pace in paces]


def _pace(rank: RankRecord, now: float) -> RankPace:
    standing, latest = rank_standing(rank, now), counted(rank)[-_COMPARED:]
    rates, by_region = rates_of(latest), rates_of(split(latest))
    before_ms = sum(by_region.mean_ms(region) for region in _BEFORE_COLLECTIVES)
    return RankPace(
        rank=rank.begin.rank,
        host=rank.begin.host,
        device=rank.begin.device,
        outcome=standing.outcome,
        step=standing.step,
        at=standing.at,
        step_ms=rates.mean_ms("step") if rates.steps else None,
        before_backward_ms=before_ms if by_region.steps else None,
    )
