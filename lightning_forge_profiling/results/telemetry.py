"""What a run's GPU did by its own sensors, as plain data for the reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_forge_profiling.gpu.allocator import AllocatorInterval
from lightning_forge_profiling.gpu.history import GpuPoint
from lightning_forge_profiling.gpu.usage import GpuUsage

__all__ = ["SERIES", "TelemetrySeries", "TelemetrySummary", "summarize"]

_GIB: Final = 2**30

SERIES: Final = {
    "utilization_pct": ("utilization_pct", 1.0),
    "memory_utilization_pct": ("memory_utilization_pct", 1.0),
    "encoder_pct": ("encoder_pct", 1.0),
    "decoder_pct": ("decoder_pct", 1.0),
    "memory_used_gib": ("memory_used_bytes", 1 / _GIB),
    "memory_own_gib": ("memory_own_bytes", 1 / _GIB),
    "allocated_gib": ("allocated_bytes", 1 / _GIB),
    "power_w": ("power_w", 1.0),
    "temperature_c": ("temperature_c", 1.0),
    "sm_mhz": ("sm_mhz", 1.0),
    "memory_mhz": ("memory_mhz", 1.0),
}
"""What is drawn over time: its name, the reading, and the factor to its unit."""

_DIGITS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySeries:
    """The readings of a whole run, warm-up and validation included, as columns of the same length.

    Attributes:
        seconds: when, since training began; of a point of several samples the middle between the first and the last.
        samples_per_point: how many samples a point is of; the last may be of fewer.
        values: their mean, by a name of `SERIES`; None where they lack it. What the device never told is left out.
        lowest: the least of them; only of what varied within a point.
        highest: the greatest; likewise.
        throttled_by_pct: in how many of them the clock was held down, by reason, of those that occurred; None where
            none of them tells.
        counted_pct: how many of them are in the means of the summary: not those of the warm-up, of validation, and of
            steps in which the profiler ran.
    """

    seconds: tuple[float, ...] = ()
    samples_per_point: int = 1
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    lowest: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    highest: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    throttled_by_pct: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    counted_pct: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySummary:
    """The GPU of rank 0 over the steps that count. None is what its driver does not tell.

    Attributes:
        device: its name.
        is_mig: whether it is a slice of a GPU; power, temperature, clocks and throttling are then the whole GPU's.
        samples: how many.
        utilization_pct: mean share of the time in which any kernel ran.
        memory_utilization_pct: mean share of the time in which its memory was read or written.
        memory_peak_gib: the most that was in use by all processes and the driver.
        memory_own_peak_gib: the most that this process used.
        memory_total_gib: what there is.
        power_w: mean power.
        power_limit_w: the limit in force.
        temperature_peak_c: the highest temperature.
        sm_mhz: mean clock of the multiprocessors.
        sm_peak_mhz: their highest.
        throttled_pct: share of the samples in which the clock was held down.
        throttled_by_pct: the same by reason.
        joules_per_sample: the board's energy by training sample of this device.
        allocated_peak_gib: the most that PyTorch's tensors took.
        alloc_retries: how often PyTorch's allocator ran out and gave its free blocks back.
        device_allocs_per_step: how often it called `cudaMalloc` (or `cuMemMap`) a step.
        series: the samples over time.
    """

    device: str
    is_mig: bool = False
    samples: int = 0
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    memory_peak_gib: float | None = None
    memory_own_peak_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_peak_c: float | None = None
    sm_mhz: float | None = None
    sm_peak_mhz: float | None = None
    throttled_pct: float | None = None
    throttled_by_pct: Mapping[str, float] = field(default_factory=dict)
    joules_per_sample: float | None = None
    allocated_peak_gib: float | None = None
    alloc_retries: int | None = None
    device_allocs_per_step: float | None = None
    series: TelemetrySeries = field(default_factory=TelemetrySeries)


def summarize(
    usage: GpuUsage,
    *,
    device: str,
    is_mig: bool = False,
    memory_bytes: float | None = None,
    power_limit_w: float | None = None,
    samples_per_second: float | None = None,
    allocator: AllocatorInterval | None = None,
    steps: int = 0,
    history: Sequence[GpuPoint] = (),
    began_ns: int = 0,
) -> TelemetrySummary:
    """Put together what was measured.

    Args:
        usage: what the sensors said.
        device: its name.
        is_mig: whether it is a slice of a GPU.
        memory_bytes: its memory.
        power_limit_w: the limit in force.
        samples_per_second: training samples of this device, over the same steps.
        allocator: what PyTorch's allocator did in those steps.
        steps: how many they are.
        history: the whole run in points.
        began_ns: when training began, on the clock of the history.

    Returns:
        The summary. Energy by sample is mean power over the rate, and so free of what lies between steps. The peaks of
        memory are of the whole history: everything has to fit.
    """
    watts, mean, peak = usage.watts, usage.mean, usage.peak
    return TelemetrySummary(
        device=device,
        is_mig=is_mig,
        samples=usage.samples,
        utilization_pct=mean.get("utilization_pct"),
        memory_utilization_pct=mean.get("memory_utilization_pct"),
        memory_peak_gib=_gib(_peak(usage, history, "memory_used_bytes")),
        memory_own_peak_gib=_gib(_peak(usage, history, "memory_own_bytes")),
        memory_total_gib=_gib(memory_bytes),
        power_w=mean.get("power_w") if watts is None else watts,
        power_limit_w=power_limit_w,
        temperature_peak_c=peak.get("temperature_c"),
        sm_mhz=mean.get("sm_mhz"),
        sm_peak_mhz=peak.get("sm_mhz"),
        throttled_pct=usage.throttled_pct,
        throttled_by_pct=dict(usage.throttled_by_pct),
        joules_per_sample=watts / samples_per_second if watts is not None and samples_per_second else None,
        allocated_peak_gib=None if allocator is None else _gib(allocator.peak_bytes),
        alloc_retries=None if allocator is None else allocator.retries,
        device_allocs_per_step=None if allocator is None or not steps else allocator.device_allocs / steps,
        series=_series(history, began_ns),
    )


def _series(history: Sequence[GpuPoint], began_ns: int) -> TelemetrySeries:
    values, lowest, highest = {}, {}, {}
    for name, (reading, factor) in SERIES.items():
        spreads = [point.readings.get(reading) for point in history]
        if any(spread is not None for spread in spreads):
            values[name] = tuple(None if spread is None else _rounded(spread.mean * factor) for spread in spreads)
        if any(spread is not None and spread.low < spread.high for spread in spreads):
            lowest[name] = tuple(None if spread is None else _rounded(spread.low * factor) for spread in spreads)
            highest[name] = tuple(None if spread is None else _rounded(spread.high * factor) for spread in spreads)
    reasons = dict.fromkeys(reason for point in history for reason in point.throttled)
    return TelemetrySeries(
        seconds=tuple(_rounded(((point.first_ns + point.last_ns) / 2 - began_ns) / 1e9) for point in history),
        samples_per_point=history[0].samples if history else 1,
        values=values,
        lowest=lowest,
        highest=highest,
        throttled_by_pct={
            reason: tuple(
                _rounded(100 * point.throttled.get(reason, 0) / point.asked) if point.asked else None
                for point in history
            )
            for reason in reasons
        },
        counted_pct=tuple(_rounded(100 * point.counted / point.samples) for point in history),
    )


def _peak(usage: GpuUsage, history: Sequence[GpuPoint], reading: str) -> float | None:
    highs = [point.readings[reading].high for point in history if reading in point.readings]
    return max(highs, default=usage.peak.get(reading))


def _rounded(value: float) -> float:
    return round(value, _DIGITS)


def _gib(count: float | None) -> float | None:
    return None if count is None else count / _GIB
