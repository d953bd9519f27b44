"""Counters and histograms of steps: they only grow, and who reads them subtracts what was last seen."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from functools import reduce
from math import ceil, inf, log
from statistics import median
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from lightning_forge_profiling.names import BETWEEN_EPOCHS, EXCLUDED, LOADER_END, LOADER_START, REGIONS, WHOLE
from lightning_forge_profiling.schema import StepCounters, StepGroup
from lightning_forge_profiling.timing.steps import StepTiming, StepWork

_T = TypeVar("_T")
_Number = TypeVar("_Number", int, float)

# Steps of more than so many medians are counted apart: those of one such length say nothing about those of another,
# and one of them among few split steps would else stand for a part of all.
_LONG: Final = (2, 8, 32, 128)

KINDS: Final = tuple((kind, *(f"{kind}/{times}" for times in _LONG)) for kind in ("accumulating", "changing"))
"""Steps that only accumulate gradients, and steps that change the weights, whose regions differ most; of each the usual
ones first, then those of each length."""

FORCED: Final = "forced"
"""Steps that had to be split, as the first after a validation run, and represent no others."""

_SUMS: Final = (
    *("steps", "optimizer_steps", "samples", "no_samples", "tokens", "no_tokens", "flops", "no_flops", "starved"),
    *("asked", "loader_starts", "between_ms", "between_host_ms", "timing_us", "log_entries_us"),
)
_ZEROS: Final = (0.0, 0.0)
_NOTHING: Final = (0.0, 0.0, 0.0)
_IN_STEP: Final = frozenset((*REGIONS, WHOLE))


class Typical:
    """The median of recent step times, renewed now and then."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=63)
        self._count, self._ms = 0, inf

    def length(self, ms: float) -> int:
        """How long the next step is: 0 as usual, else how many of the limits it exceeds."""
        self._latest.append(ms)
        self._count = count = self._count + 1
        if not count & (count - 1) or not count % 32:
            self._ms = median(self._latest)
        return bisect_left(_LONG, ms / self._ms) if self._ms else 0


def count_step(  # noqa: PLR0917  (runs each step)
    counters: StepCounters,
    kind: str,
    device_ms: Mapping[str, float],
    host_ms: Mapping[str, float],
    took_ms: float,
    work: StepWork,
    timing: StepTiming,
) -> None:
    """Enter a step of a kind."""
    samples, tokens, optimizer_steps, flops, _ = work
    starved, chosen, timing_us, _, _, _ = timing
    counters.steps += 1
    counters.optimizer_steps += optimizer_steps
    counters.timing_us += timing_us
    if samples is None:
        counters.no_samples += 1
    else:
        counters.samples += samples
    if tokens is None:
        counters.no_tokens += 1
    else:
        counters.tokens += tokens
    if flops is None:
        counters.no_flops += 1
    else:
        counters.flops += flops
    if starved is not None:
        counters.starved += starved
        counters.asked += 1
    whole = WHOLE in device_ms
    name = kind if whole or chosen else FORCED
    groups, host_groups = counters.groups, counters.host_groups
    group = groups.get(name)
    if group is None:
        groups[name] = group = StepGroup()
        host_groups[name] = StepGroup()
    if whole and len(device_ms) == 1:  # as most often
        group.unsplit += 1
        group.unsplit_ms += took_ms
        group = host_groups[name]
        group.unsplit += 1
        group.unsplit_ms += host_ms[WHOLE]
        return
    if LOADER_START in device_ms or LOADER_END in device_ms:
        counters.loader_starts += LOADER_START in device_ms
        between_ms, between_host_ms = (sum(map(by.get, BETWEEN_EPOCHS, _ZEROS)) for by in (device_ms, host_ms))
        counters.between_ms += between_ms
        counters.between_host_ms += between_host_ms
        took_ms -= between_ms
    host_took_ms = 0.0
    for region, ms in host_ms.items():
        if region in _IN_STEP:
            host_took_ms += ms
    _count_times(group, device_ms, took_ms, split=not whole)
    _count_times(host_groups[name], host_ms, host_took_ms, split=not whole)


def _count_times(group: StepGroup, by_region: Mapping[str, float], step_ms: float, *, split: bool) -> None:
    """Enter a step's times by one clock."""
    if not split:
        group.unsplit += 1
        group.unsplit_ms += step_ms
        return
    group.split += 1
    group.ms += step_ms
    group.squares += step_ms * step_ms
    regions = group.regions
    for region, ms in by_region.items():
        sums = regions.get(region)
        if sums is not None:
            sums[0] += ms
            sums[1] += ms * ms
            sums[2] += ms * step_ms
        elif region not in EXCLUDED and region not in BETWEEN_EPOCHS:
            regions[region] = [ms, ms * ms, ms * step_ms]


def copied(counters: StepCounters) -> StepCounters:
    """The counters as they are now."""
    return replace(
        counters,
        groups={kind: _copied(group) for kind, group in counters.groups.items()},
        host_groups={kind: _copied(group) for kind, group in counters.host_groups.items()},
        steps_us=counters.steps_us.copy(),
    )


def _copied(group: StepGroup) -> StepGroup:
    return replace(group, regions={region: sums.copy() for region, sums in group.regions.items()})


def combined(one: StepCounters, other: StepCounters, sign: int = 1) -> StepCounters:
    """The sum of two; with a sign of -1, what has been added since the other was read."""
    return _add(copied(one), other, sign)


def total(parts: Iterable[StepCounters]) -> StepCounters:
    """The sum of several."""
    return reduce(_add, parts, StepCounters())


def _add(result: StepCounters, other: StepCounters, sign: int = 1) -> StepCounters:
    for name in _SUMS:
        setattr(result, name, getattr(result, name) + sign * getattr(other, name))
    _combine(result.groups, other.groups, sign)
    _combine(result.host_groups, other.host_groups, sign)
    histogram = result.steps_us
    for bucket, count in other.steps_us.items():
        histogram[bucket] = histogram.get(bucket, 0) + sign * count
        if not histogram[bucket]:
            del histogram[bucket]
    return result


def _combine(groups: dict[str, StepGroup], others: Mapping[str, StepGroup], sign: int) -> None:
    for kind, other in others.items():
        group = groups.setdefault(kind, StepGroup())
        add_group(group, other, sign)
        if not (group.split or group.unsplit):
            del groups[kind]


def add_group(group: StepGroup, other: StepGroup, sign: int = 1) -> None:
    """Add the sums of another group, or take them away."""
    group.split += sign * other.split
    group.ms += sign * other.ms
    group.squares += sign * other.squares
    group.unsplit += sign * other.unsplit
    group.unsplit_ms += sign * other.unsplit_ms
    for region, sums in other.regions.items():
        ms, squares, products = group.regions.get(region, _NOTHING)
        group.regions[region] = [ms + sign * sums[0], squares + sign * sums[1], products + sign * sums[2]]
    if not group.split:  # nothing is left, but for what subtracting has rounded
        group.ms = group.squares = 0.0
        group.regions.clear()
    if not group.unsplit:
        group.unsplit_ms = 0.0


def is_split(counters: StepCounters) -> bool:
    """Whether regions are known: of steps that were split by choice, or of all."""
    groups = counters.groups
    split = any(group.split for kind, group in groups.items() if kind != FORCED)
    return split or (FORCED in groups and not any(group.unsplit for group in groups.values()))


def step_total_ms(counters: StepCounters) -> float:
    """Device time of all steps."""
    return counters.between_ms + sum(group.ms + group.unsplit_ms for group in counters.groups.values())


def added(one: float | None, other: float | None) -> float | None:
    """The sum; None if a summand is unknown."""
    return None if one is None or other is None else one + other


def summed(parts: Iterable[Mapping[_T, _Number]]) -> dict[_T, _Number]:
    """Sums by name, or by bucket of a histogram."""
    total: dict[_T, _Number] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


def known(amount: float, unknown_in: int) -> float | None:
    """An amount; None if it is unknown in some of the steps."""
    return None if unknown_in else amount


class Marks(Generic[_T]):
    """What something that grows was at up to 64 steps that are a power of 2 apart: between them are blocks."""

    MOST: Final = 64

    def __init__(self) -> None:
        self.every = 1
        self.due = 0  # the first step before which a mark is missing
        self._marks: dict[int, _T] = {}

    def add(self, step: int, value: _T) -> None:
        """Add what it was before a step, the first one that counts of its block."""
        if len(self._marks) >= self.MOST and step // self.every * self.every not in self._marks:
            self.every *= 2
            self._marks = self._at(self.every)
        place = step // self.every * self.every
        self._marks.setdefault(place, value)
        self.due = place + self.every

    def _at(self, every: int) -> dict[int, _T]:
        marks: dict[int, _T] = {}
        for step, value in sorted(dict(self._marks).items()):  # a copy: another thread may be adding one
            marks.setdefault(step // every * every, value)
        return marks

    def until(self, step: int, value: _T) -> "Marks[_T]":
        """These marks and a last one."""
        ended = Marks[_T]()
        ended.every, ended._marks = self.every, {**self._marks, step: value}
        return ended

    def at(self, step: int) -> _T | None:
        """What it was before a step, by the latest mark; None before the first."""
        return self._marks.get(max((at for at in self._marks if at <= step), default=-1))

    def read(self, every: int = 1) -> list[tuple[int, _T]]:
        """The marks in order, with the first step of each block, at least so many steps apart."""
        return sorted(self._at(max(self.every, every)).items())


# largest relative error of a value read from a bucket (as in DDSketch: Masson, Rim and Lee 2019, VLDB)
_PRECISION: Final = 0.01
# buckets have a fixed relative width, so histograms add over steps and ranks
BUCKET_RATIO: Final = (1 + _PRECISION) / (1 - _PRECISION)
_LOG_RATIO: Final = log(BUCKET_RATIO)


def bucket(ms: float) -> int:
    """Index of the bucket that a time in milliseconds falls into."""
    # bucket b holds times t with `BUCKET_RATIO`^(b-1) < t <= `BUCKET_RATIO`^b in microseconds, 0 those up to 1 µs
    us = ms * 1e3
    return ceil(log(us) / _LOG_RATIO) if us > 1 else 0


def percentile_ms(counts: Mapping[int, int], percent: float) -> float:
    """Percentile of the times in milliseconds, within 1 % of a recorded one."""
    above, index = percent / 100 * (sum(counts.values()) - 1), 0
    for index in sorted(counts):
        above -= counts[index]
        if above < 0:
            break
    return 2 * BUCKET_RATIO**index / (BUCKET_RATIO + 1) / 1e3
