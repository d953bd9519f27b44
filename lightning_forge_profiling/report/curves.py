"""Curves of a run: its intervals merged into points, and the charts of these."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.names import MFU, TFLOPS, per_second
from lightning_forge_profiling.record.lines import IntervalLine
from lightning_forge_profiling.report.charts import Chart
from lightning_forge_profiling.report.run_status import spread_of
from lightning_forge_profiling.timing.rates import Percentiles

_MOST_POINTS: Final = 500

_METRICS: Final = (
    ("Samples", "per second", per_second("samples"), 1.0),
    ("Tokens", "per second", per_second("tokens"), 1.0),
    ("MFU", "%", MFU, 100.0),
    ("TFLOP/s", "per device", TFLOPS, 1.0),
    ("GPU utilization", "%", "gpu/utilization_pct", 1.0),
    ("GPU memory", "GiB", "gpu/memory_used_gib", 1.0),
    ("GPU power", "W", "gpu/power_w", 1.0),
    ("GPU clock", "MHz", "gpu/sm_mhz", 1.0),
    ("GPU temperature", "°C", "gpu/temperature_c", 1.0),
)
_HUNDRED: Final = "gpu/utilization_pct"
_FROM_LEAST: Final = "gpu/temperature_c"


@dataclass(frozen=True, slots=True)
class Point:
    """Consecutive intervals, merged.

    Attributes:
        second: end of the last interval, in seconds since the run began.
        spread: percentiles of the step times.
        metrics: means of the logged metrics, weighted by steps.
    """

    second: float
    spread: Percentiles
    metrics: Mapping[str, float]


def points(intervals: Sequence[IntervalLine], began: float, most: int = _MOST_POINTS) -> list[Point]:
    """Merge intervals into at most `most` points."""
    each = max(1, -(-len(intervals) // most))
    parts = (intervals[start : start + each] for start in range(0, len(intervals), each))
    return [Point(part[-1].at - began, spread_of(part), _means(part)) for part in parts]


def _means(intervals: Sequence[IntervalLine]) -> dict[str, float]:
    names = dict.fromkeys(name for interval in intervals for name in interval.metrics)
    return {
        name: _mean([(one.metrics[name], one.counted) for one in intervals if name in one.metrics]) for name in names
    }


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


def curves(found: Sequence[Point]) -> Iterator[Chart]:
    """Charts of a run: step time, then the rates and telemetry that were logged."""
    seconds = [point.second for point in found]
    medians, highs = [point.spread.p50 for point in found], [point.spread.p95 or point.spread.p50 for point in found]
    yield Chart("Step time", "ms", "median", seconds, medians, highs=highs, band="to the 95th percentile")
    for title, unit, name, factor in _METRICS:
        values = [None if (value := point.metrics.get(name)) is None else factor * value for point in found]
        if any(value is not None for value in values):
            top = 100.0 if name == _HUNDRED else None
            yield Chart(title, unit, "mean", seconds, values, top=top, from_least=name == _FROM_LEAST)
