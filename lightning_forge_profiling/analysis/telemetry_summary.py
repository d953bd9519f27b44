"""What a run's GPU did by its own sensors, as plain data for the reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_forge_profiling.hardware.allocator import AllocatorInterval
from lightning_forge_profiling.hardware.gpu_usage import GpuSample, GpuUsage

__all__ = ["SERIES", "TelemetrySeries", "TelemetrySummary", "summarize"]

_GIB: Final = 2**30

SERIES: Final = {
    "utilization_pct": ("utilization_pct", 1.0),
    "memory_used_gib": ("memory_used_bytes", 1 / _GIB),
    "power_w": ("power_w", 1.0),
    "temperature_c": ("temperature_c", 1.0),
    "sm_mhz": ("sm_mhz", 1.0),
}
"""What is drawn over time: its name, the reading, and the factor to its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySeries:
    """Samples over a run, as columns of the same length.

    Attributes:
        seconds: when, since the first.
        values: by a name of `SERIES`; None where a sample lacks it. What the device never told is left out.
        throttled: whether the clock was held down.
    """

    seconds: tuple[float, ...] = ()
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    throttled: tuple[bool, ...] = ()


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
    history: Sequence[GpuSample] = (),
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
        history: samples of the whole run.

    Returns:
        The summary. Energy by sample is mean power over the rate, and so free of what lies between steps.
    """
    watts, mean, peak = usage.watts, usage.mean, usage.peak
    return TelemetrySummary(
        device=device,
        is_mig=is_mig,
        samples=usage.samples,
        utilization_pct=mean.get("utilization_pct"),
        memory_utilization_pct=mean.get("memory_utilization_pct"),
        memory_peak_gib=_gib(peak.get("memory_used_bytes")),
        memory_own_peak_gib=_gib(peak.get("memory_own_bytes")),
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
        series=_series(history),
    )


def _series(history: Sequence[GpuSample]) -> TelemetrySeries:
    values = {}
    for name, (reading, factor) in SERIES.items():
        column = [getattr(sample, reading) for sample in history]
        if any(value is not None for value in column):
            values[name] = tuple(None if value is None else round(value * factor, 3) for value in column)
    return TelemetrySeries(
        seconds=tuple(round((sample.at_ns - history[0].at_ns) / 1e9, 3) for sample in history),
        values=values,
        throttled=tuple(bool(sample.throttles) for sample in history),
    )


def _gib(count: float | None) -> float | None:
    return None if count is None else count / _GIB
