"""A GPU's sensor readings over a run, as the reports show them: means, peaks and curves."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """The GPU of a rank over the counted steps. None if the driver does not report a value.

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
        joules: energy of the board during the fit, warm-up and validation included.
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
    joules: float | None = None
    allocated_peak_gib: float | None = None
    alloc_retries: int | None = None
    device_allocs_per_step: float | None = None
    series: TelemetrySeries = field(default_factory=TelemetrySeries)
