"""Whether a part of the step takes longer from block to block of a run, against the pace of the rest of the step."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from math import ceil, sqrt
from statistics import correlation, fmean, median
from typing import Final

from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.schema import PartGrowth
from lightning_forge_profiling.timing.counters import Marks

# figures in docs/measured.md, "Growth"
_LEAST_Z: Final = 4.0
_LEAST_BLOCKS: Final = 11
_LEAST_RATIO: Final = 1.3
_LEAST_MS: Final = 0.1
_FIFTH: Final = 5
# within the two pieces that a single step explains best: what is longer from one moment on does not grow
_LEAST_Z_BESIDE_STEP: Final = 2.5
_BESIDE: Final = 2  # blocks on either side that the pace of the rest is the median of
# a region that so explains how long steps are is known in all of them, else only in the few that were split
_ON_LINE: Final = 0.6
_ENOUGH: Final = 10
_LONGEST: Final = 2
_LEAST_REST: Final = 0.1  # of the step; a smaller rest has no pace


def part_growth(part_ms: Sequence[float], step_ms: Sequence[float]) -> PartGrowth | None:
    """How a part grows; None if it does not, beyond noise.

    Args:
        part_ms: its time per step in each block.
        step_ms: the time of these steps.
    """
    rest_ms = [step - part for part, step in zip(part_ms, step_ms, strict=True)][1:]  # the first block warms up
    values = part_ms[1:]
    if len(values) < _LEAST_BLOCKS:
        return None
    first, last = _ends(values)
    if not _rises(values) or _is_step(values) or last - first < _LEAST_MS:
        return None
    if sum(rest_ms) > _LEAST_REST * sum(step_ms[1:]):  # a busy machine and longer batches slow all parts at once
        pace = [median(rest_ms[max(at - _BESIDE, 0) : at + _BESIDE + 1]) for at in range(len(rest_ms))]
        if not _rises([value / max(ms, max(pace) / 10) for value, ms in zip(values, pace, strict=True)]):
            return None
    return PartGrowth(first_ms=first, last_ms=last)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    part = max(len(values) // _FIFTH, 2)
    return median(values[:part]), median(values[-part:])


def _rises(values: Sequence[float]) -> bool:
    first, last = _ends(values)
    return last >= _LEAST_RATIO * first and _trend(values) >= _LEAST_Z


def _is_step(values: Sequence[float]) -> bool:
    """Whether values are longer from one moment on, and rise neither before nor after it."""
    at = min(range(1, len(values)), key=lambda at: _off(values[:at]) + _off(values[at:]))
    return _trend(values[:at], values[at:]) < _LEAST_Z_BESIDE_STEP


def _off(values: Sequence[float]) -> float:
    level = median(values)
    return sum(abs(value - level) for value in values)


def _trend(*pieces: Sequence[float]) -> float:
    """Mann-Kendall's z: how far the pairs that rise outnumber those that fall, in standard deviations of chance."""
    rises = sum((later > earlier) - (later < earlier) for piece in pieces for earlier, later in combinations(piece, 2))
    counts = [len(piece) for piece in pieces]
    return (rises - 1) / sqrt(sum(count * (count - 1) * (2 * count + 5) / 18 for count in counts))


def region_growth(split: Sequence[Mapping[str, float]], step_ms: Sequence[float]) -> dict[str, PartGrowth]:
    """How the built-in regions grow that do.

    Args:
        split: their times in the steps that were split, spread over the run.
        step_ms: the time per step in each block, of all steps.
    """
    size = max(ceil(len(split) / Marks.MOST), 1)
    blocks = [split[at : at + size] for at in range(0, len(split), size)]
    times = {name: [fmean(step.get(name, 0.0) for step in block) for block in blocks] for name in REGIONS}
    whole = [*map(sum, zip(*times.values(), strict=True))]
    found = {}
    for name, some_ms in times.items():
        dense_ms = _by_step(some_ms[1:], whole[1:], step_ms)
        found[name] = part_growth(some_ms, whole) if dense_ms is None else part_growth(dense_ms, step_ms)
    return {name: growth for name, growth in found.items() if growth is not None}


def _by_step(region_ms: Sequence[float], whole_ms: Sequence[float], step_ms: Sequence[float]) -> list[float] | None:
    """The time of a region in blocks of all steps, by the line through those that were split; None if it is off."""
    usual = sorted(zip(whole_ms, region_ms, strict=True))[:-_LONGEST]  # a few long steps are no line
    wholes, regions = [*zip(*usual, strict=True)] or ((), ())
    if len(usual) < _ENOUGH or len({*wholes}) == 1 or len({*regions}) == 1:
        return None
    if correlation(wholes, regions) < _ON_LINE:
        return None
    slope = _slope(usual)
    at_0 = median(region - slope * whole for whole, region in usual)
    return [at_0 + slope * ms for ms in step_ms]


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between two points, those further apart weighing more: a few points off the line are ignored."""
    pairs = [(x - at, y - level) for (at, level), (x, y) in combinations(points, 2) if x != at]
    slopes = sorted((rise / run, abs(run)) for run, rise in pairs)
    half = sum(weight for _, weight in slopes) / 2
    sums = accumulate(weight for _, weight in slopes)
    return next((slope for (slope, _), passed in zip(slopes, sums, strict=True) if passed >= half), 0.0)
