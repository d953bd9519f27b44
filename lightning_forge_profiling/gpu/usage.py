"""Readings of a GPU's sensors, and what they come to over a time. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["SENSORS", "THROTTLES", "GpuSample", "GpuUsage", "UsageSums", "throttle_reasons"]

THROTTLES: Final[Mapping[int, str]] = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x200: "board limit",
}
"""What holds a GPU's clock below what it would choose: nvml.h, `nvmlClocksEventReason...`. Not among them are what is
no loss (0x001: idle; 0x400: its reliability limit, where boost ordinarily ends) and what somebody has set (0x002:
application clocks, 0x010: sync boost with other GPUs, 0x100: display clocks)."""

_HARDWARE_SLOWDOWN: Final = 0x008
_NAMED_APART: Final = 0x0C0
"""NVML raises 0x008 together with either of these, which say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What NVML said at one moment. None is what it does not tell on this device.

    Attributes:
        at_ns: when, on the host's `perf_counter_ns`.
        utilization_pct: share of NVML's last sample period (1/6 s to 1 s) in which any kernel ran.
        memory_utilization_pct: share of it in which the device's memory was read or written.
        encoder_pct: how busy the video encoder was.
        decoder_pct: how busy the video (or JPEG) decoder was.
        memory_used_bytes: taken by all processes and the driver.
        memory_own_bytes: taken by this process. In a container with its own process numbers NVML's do not match.
        allocated_bytes: what PyTorch's tensors take.
        power_w: what the board draws; on most GPUs since Ampere averaged over a second.
        temperature_c: of the GPU.
        sm_mhz: clock of the multiprocessors.
        memory_mhz: clock of the memory.
        throttles: why the clock is held down, in words; empty when it is not.
        energy_j: what the board has used up since the driver was loaded.
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
"""The readings of which there are a mean and a peak."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """NVML's bit mask of clock event reasons, in words: those that cost speed.

    Example:
        >>> throttle_reasons(0x4), throttle_reasons(0x8 | 0x40), throttle_reasons(0x1)
        (('power cap',), ('temperature (hardware)',), ())
    """
    if mask & _NAMED_APART:
        mask &= ~_HARDWARE_SLOWDOWN
    return tuple(reason for bit, reason in THROTTLES.items() if mask & bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """What samples come to.

    Attributes:
        samples: how many.
        mean: by name of the reading, the mean over the samples that had it.
        peak: the greatest.
        throttled_pct: in how many of them the clock was held down; None where NVML does not tell.
        throttled_by_pct: the same by reason, of those that occurred. There may be several at once.
        seconds: what passed from each of them back to the one before, where nothing was left out between.
        joules: what the board used up in that time; None where NVML does not tell.
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
        """Energy over time: what the board drew in the mean, by its own meter."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


class UsageSums:
    """Usage under way.

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
        """Begin anew. Energy goes on from the last sample, so that no time is missing between two readings."""
        self._samples = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self._peaks: dict[str, float] = {}
        self._asked, self._throttled = 0, 0
        self._reasons: dict[str, int] = {}
        self._seconds = 0.0
        self._joules: float | None = None

    def skip(self) -> None:
        """A sample that does not count: neither does the time to the next one."""
        self._previous = None

    def add(self, sample: GpuSample) -> None:
        """Enter a sample; they come in the order of their time."""
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
            if used >= 0:  # the meter begins anew when the driver is loaded again
                self._seconds += (sample.at_ns - previous.at_ns) / 1e9
                self._joules = (self._joules or 0.0) + used

    def read(self) -> GpuUsage:
        """What it has come to so far."""

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
