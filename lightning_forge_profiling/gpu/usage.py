"""Readings of a GPU's sensors, and their means, peaks and energy over time. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

THROTTLES: Final[Mapping[int, str]] = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x200: "board limit",
}
"""Reasons for a lowered clock that cost speed: nvml.h, `nvmlClocksEventReason...`. Left out are those that cost none
(0x001: idle; 0x400: the reliability limit, where boost ends) and settings of the user (0x002: application clocks,
0x010: sync boost with other GPUs, 0x100: display clocks)."""

_HARDWARE_SLOWDOWN: Final = 0x008
_NAMED_APART: Final = 0x0C0
"""NVML sets 0x008 together with either of these, which are more specific."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """NVML's readings at one moment; None for sensors that the device lacks.

    Attributes:
        at_ns: time on the host's `perf_counter_ns`.
        utilization_pct: share of NVML's last sample period (1/6 s to 1 s) in which any kernel ran.
        memory_utilization_pct: share of it in which the device's memory was read or written.
        encoder_pct: utilization of the video encoder.
        decoder_pct: utilization of the video (or JPEG) decoder.
        memory_used_bytes: memory of all processes and the driver.
        memory_own_bytes: memory of this process; None in a container with its own process ids.
        allocated_bytes: memory of PyTorch's tensors.
        power_w: power of the board; on most GPUs since Ampere the mean over a second.
        temperature_c: temperature of the GPU.
        sm_mhz: clock of the multiprocessors.
        memory_mhz: clock of the memory.
        throttles: why the clock is lowered; empty if it is not.
        energy_j: energy that the board has used since the driver was loaded.
    """

    at_ns: int
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    encoder_pct: float | None = None
    decoder_pct: float | None = None
    memory_used_bytes: float | None = None
    memory_own_bytes: float | None = None
    allocated_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    throttles: tuple[str, ...] | None = None
    energy_j: float | None = None


SENSORS: Final = tuple(
    name for name in GpuSample.__dataclass_fields__ if name not in {"at_ns", "throttles", "energy_j"}
)
"""The readings with a mean and a peak."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of the clock event reasons in NVML's bit mask that cost speed.

    Example:
        >>> throttle_reasons(0x4), throttle_reasons(0x8 | 0x40), throttle_reasons(0x1)
        (('power cap',), ('temperature (hardware)',), ())
    """
    if mask & _NAMED_APART:
        mask &= ~_HARDWARE_SLOWDOWN
    return tuple(reason for bit, reason in THROTTLES.items() if mask & bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """Usage of a GPU over several samples.

    Attributes:
        samples: number of samples.
        mean: mean of each reading, over the samples that have it.
        peak: highest value of each reading.
        throttled_pct: share of the samples with a lowered clock; None if unknown.
        throttled_by_pct: the same by reason, for reasons that occurred. There may be several at once.
        seconds: time between consecutive samples, without what was left out.
        joules: energy of the board in that time; None if unknown.
    """

    samples: int = 0
    mean: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)
    throttled_pct: float | None = None
    throttled_by_pct: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    joules: float | None = None

    @property
    def watts(self) -> float | None:
        """Mean power of the board by its energy meter; None if unknown."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


class UsageSums:
    """Accumulates samples to a `GpuUsage`.

    Example:
        >>> sums = UsageSums()
        >>> sums.add(GpuSample(at_ns=0, power_w=300.0, energy_j=10.0))
        >>> sums.add(GpuSample(at_ns=500_000_000, power_w=500.0, energy_j=220.0))
        >>> usage = sums.read()
        >>> usage.mean["power_w"], usage.joules, usage.watts
        (400.0, 210.0, 420.0)
    """

    def __init__(self) -> None:
        self._previous: GpuSample | None = None
        self.restart()

    def restart(self) -> None:
        """Start from zero. Energy continues from the last sample, so that no time is missing between two results."""
        self._samples = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self._peaks: dict[str, float] = {}
        self._asked, self._throttled = 0, 0
        self._reasons: dict[str, int] = {}
        self._seconds = 0.0
        self._joules: float | None = None

    def skip(self) -> None:
        """Leave out the time from the last sample to the next one."""
        self._previous = None

    def add(self, sample: GpuSample) -> None:
        """Add a sample, in order of time."""
        previous, self._previous = self._previous, sample
        self._samples += 1
        for name in SENSORS:
            value = getattr(sample, name)
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
                self._peaks[name] = max(value, self._peaks.get(name, value))
        if sample.throttles is not None:
            self._asked += 1
            self._throttled += bool(sample.throttles)
            for reason in sample.throttles:
                self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if previous is not None and previous.energy_j is not None and sample.energy_j is not None:
            used = sample.energy_j - previous.energy_j
            if used >= 0:  # the meter restarts when the driver is reloaded
                self._seconds += (sample.at_ns - previous.at_ns) / 1e9
                self._joules = (self._joules or 0.0) + used

    def read(self) -> GpuUsage:
        """The usage so far."""

        def share(count: int) -> float:
            return 100 * count / self._asked

        return GpuUsage(
            samples=self._samples,
            mean={name: total / count for name, (total, count) in self._sums.items()},
            peak=dict(self._peaks),
            throttled_pct=share(self._throttled) if self._asked else None,
            throttled_by_pct={reason: share(count) for reason, count in self._reasons.items()},
            seconds=self._seconds,
            joules=self._joules,
        )
