"""A run's readings over time, in a bounded number of points."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from lightning_forge_profiling.gpu.nvml import SENSORS, GpuSample

MAX_POINTS: Final = 512
"""A timeline of ordinary width shows no more points."""


class Spread(NamedTuple):
    """Count, sum and extremes of one reading's values."""

    samples: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPoint:
    """Consecutive samples, joined.

    Attributes:
        first_ns: time of the first sample.
        last_ns: time of the last sample.
        samples: number of samples.
        counted: number of samples in the means; the others are from the warm-up, validation or recorded steps.
        readings: by the reading's name in `GpuSample`; readings that no sample has are missing.
        asked: number of samples that tell whether the clock was lowered.
        throttled: number of samples with a lowered clock, by reason.
    """

    first_ns: int
    last_ns: int
    samples: int
    counted: int
    readings: Mapping[str, Spread]
    asked: int
    throttled: Mapping[str, int]


class GpuHistory:
    """Keeps a run of any length in at most `max_points` points of equally many samples; the last may have fewer.

    Example:
        >>> history = GpuHistory(max_points=2)
        >>> for second, watts in enumerate((100.0, 300.0, 500.0)):
        ...     history.add(GpuSample(at_ns=second * 10**9, power_w=watts), counted=True)
        >>> [(point.samples, point.readings["power_w"].mean) for point in history.points()]
        [(2, 200.0), (1, 500.0)]
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[GpuPoint] = []
        self._samples_per_point = 1

    def add(self, sample: GpuSample, *, counted: bool) -> None:
        """Add a sample, in order of time."""
        point = _point_of(sample, counted=counted)
        if self._points and self._points[-1].samples < self._samples_per_point:
            self._points[-1] = _joined(self._points[-1], point)
            return
        if len(self._points) == self._max_points:
            self._points = [_joined(*pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)]
            self._samples_per_point *= 2
            self.add(sample, counted=counted)
        else:
            self._points.append(point)

    def leave_out(self) -> None:
        """Mark all samples so far as not counted: they were the warm-up."""
        self._points = [replace(point, counted=0) for point in self._points]

    def points(self) -> tuple[GpuPoint, ...]:
        """The points so far, in order of time."""
        return tuple(self._points)


def _point_of(sample: GpuSample, *, counted: bool) -> GpuPoint:
    readings = ((name, getattr(sample, name)) for name in SENSORS)
    return GpuPoint(
        first_ns=sample.at_ns,
        last_ns=sample.at_ns,
        samples=1,
        counted=int(counted),
        readings={name: Spread(1, value, value, value) for name, value in readings if value is not None},
        asked=int(sample.throttles is not None),
        throttled=dict.fromkeys(sample.throttles or (), 1),
    )


def _joined(first: GpuPoint, second: GpuPoint) -> GpuPoint:
    readings = dict(first.readings)
    for name, late in second.readings.items():
        early = readings.get(name)
        readings[name] = late if early is None else _both(early, late)
    reasons = [*first.throttled, *(reason for reason in second.throttled if reason not in first.throttled)]
    return GpuPoint(
        first_ns=first.first_ns,
        last_ns=second.last_ns,
        samples=first.samples + second.samples,
        counted=first.counted + second.counted,
        readings=readings,
        asked=first.asked + second.asked,
        throttled={reason: first.throttled.get(reason, 0) + second.throttled.get(reason, 0) for reason in reasons},
    )


def _both(one: Spread, other: Spread) -> Spread:
    return Spread(
        one.samples + other.samples, one.total + other.total, min(one.low, other.low), max(one.high, other.high)
    )
