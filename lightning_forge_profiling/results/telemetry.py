"""Readings of a GPU's sensors over a run: means, peaks and curves for the reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_forge_profiling.gpu.allocator import AllocatorInterval
from lightning_forge_profiling.gpu.history import GpuPoint
from lightning_forge_profiling.gpu.nvml import GpuUsage

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
"""The curves over time: name, reading of the sensor, and factor to the unit in the name."""

_DIGITS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySeries:
    """Sensor readings over a whole run, warm-up and validation included, as columns of equal length.

    Attributes:
        seconds: time since training began; the middle of a point that merges several samples.
        samples_per_point: samples merged into one point; the last may have fewer.
        values: mean by name, such as `power_w`; None for a point without the reading. Readings that the device lacks
            are left out.
        lowest: minimum within each point; only of readings that vary within a point.
        highest: maximum within each point; likewise.
        throttled_by_pct: share of the samples with a reduced clock, by reason; None if unknown.
        counted_pct: share of the samples that the means of the summary include: none of warm-up, validation or steps
            under the profiler.
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
    """The GPU of rank 0 over the counted steps. None if the driver does not report a value.

    Attributes:
        device: name of the GPU.
        is_mig: whether it is a MIG slice; power, temperature, clocks and throttling are then those of the whole GPU.
        samples: number of samples.
        utilization_pct: mean share of the time in which any kernel runs.
        memory_utilization_pct: mean share of the time in which memory is read or written.
        memory_peak_gib: peak memory of all processes and the driver.
        memory_own_peak_gib: peak memory of this process.
        memory_total_gib: memory of the GPU.
        power_w: mean power.
        power_limit_w: power limit in force.
        temperature_peak_c: peak temperature.
        sm_mhz: mean SM clock.
        sm_peak_mhz: peak SM clock.
        throttled_pct: share of the samples with a reduced clock.
        throttled_by_pct: the same by reason.
        joules_per_sample: energy of the board per training sample of this device.
        allocated_peak_gib: peak memory allocated by PyTorch's tensors.
        alloc_retries: times that PyTorch's allocator ran out of memory, freed its cached blocks and tried again.
        device_allocs_per_step: calls of `cudaMalloc` (or `cuMemMap`) per step.
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
    """Builds the summary of a run's sensor readings."""
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
