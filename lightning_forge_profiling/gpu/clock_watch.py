"""Watching a GPU's clock while something is measured. It goes through NVML, and needs no permission."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Final, Self

from lightning_forge_profiling.errors import ClocksUnavailableError
from lightning_forge_profiling.gpu.nvml import SM_CLOCK, Nvml, clock_event_reasons, find_device, open_nvml
from lightning_forge_profiling.gpu.usage import throttle_reasons

__all__ = ["ClockReading", "ClockSeen", "ClockWatch", "throttled_samples"]

# Boost steps are 15 MHz, under 1 % of any recent part's clock; the moves that matter are several times that.
_LOWERED: Final = 0.97
_PERIOD_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock at one moment.

    Attributes:
        mark: how far the measurement had got, as the watcher was told.
        sm_mhz: the SM clock.
        reasons: what held it down, as bits of `nvmlClocksEventReasons`.
    """

    mark: int
    sm_mhz: int
    reasons: int


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """The SM clock over a measurement.

    Attributes:
        median_mhz: over the readings, without those of samples that were left out.
        min_mhz: the lowest reading.
        max_mhz: the highest.
        limit_mhz: what the part could reach.
        reasons: what held the clock down at some time, in words; empty when nothing did.
        discarded: how many samples were left out because the clock was held down while they were taken.
    """

    median_mhz: float
    min_mhz: int
    max_mhz: int
    limit_mhz: int
    reasons: tuple[str, ...]
    discarded: int

    def __str__(self) -> str:
        """As `SM clock 1980 MHz (1755 to 1980, of 1980)`."""
        moved = f"{self.min_mhz} to {self.max_mhz}, of" if self.min_mhz != self.max_mhz else "of"
        held = f", held down by {' and '.join(self.reasons)}" if self.reasons else ""
        return f"SM clock {self.median_mhz:.0f} MHz ({moved} {self.limit_mhz}){held}"


class ClockWatch:
    """Reads one GPU's SM clock and what holds it down, at most once in 5 ms.

    Args:
        index: the device, as in `cuda:0`.
        uuid: `torch.cuda.get_device_properties(index).uuid`.
        nvml: NVML, initialized, for tests; None opens it. Either way this shuts it down on exit.
        clock_ns: the host clock, in nanoseconds.

    Raises:
        ClocksUnavailableError: there is no NVML, or it cannot read this GPU's clock.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        uuid: str | None = None,
        nvml: Nvml | None = None,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        try:
            opened = open_nvml() if nvml is None else nvml
        except LookupError as error:
            raise ClocksUnavailableError(f"The GPU's clock is out of reach: {error}.") from error
        self._nvml = opened
        self._clock_ns = clock_ns
        self._readings: list[ClockReading] = []
        self._last_ns = -_PERIOD_NS
        try:
            self._handle = find_device(opened, index, uuid=uuid).board
            self._limit_mhz = opened.nvmlDeviceGetMaxClockInfo(self._handle, SM_CLOCK)
            self._read(0)
        except (opened.NVMLError, LookupError) as error:
            opened.nvmlShutdown()
            raise ClocksUnavailableError(f"The GPU's clock cannot be read: NVML says {error}.") from error
        self._readings.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()

    def look(self, mark: int) -> None:
        """Read the clock, if the last reading is old enough.

        Args:
            mark: how many samples have been taken.
        """
        now = self._clock_ns()
        if now - self._last_ns < _PERIOD_NS:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # a reading less
            self._read(mark)
        self._last_ns = self._clock_ns()

    def throttled(self, samples: int) -> list[bool]:
        """Which of the samples were taken while the clock was held down.

        Those are the samples beside a reading that names a reason and is under 97 % of the highest reading. Where the
        clock was held at one low rate throughout, none of them is told from the others.

        Args:
            samples: how many were taken.
        """
        return throttled_samples(self._readings, samples)

    def seen(self, discarded: int) -> ClockSeen | None:
        """The clock since the start, its median that of the samples that were kept; None without a reading.

        Args:
            discarded: how many samples were left out.
        """
        if not self._readings:
            return None
        rates = [reading.sm_mhz for reading in self._readings]
        held = _held_down(self._readings) if discarded else [False] * len(rates)
        kept = [rate for rate, down in zip(rates, held, strict=True) if not down]
        names = tuple(dict.fromkeys(name for reading in self._readings for name in throttle_reasons(reading.reasons)))
        return ClockSeen(float(median(kept)), min(rates), max(rates), self._limit_mhz, names, discarded)

    def _read(self, mark: int) -> None:
        rate = self._nvml.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK)
        self._readings.append(ClockReading(mark, rate, clock_event_reasons(self._nvml, self._handle)))


def throttled_samples(readings: Sequence[ClockReading], samples: int) -> list[bool]:
    """For each sample, whether the reading before or after it shows the clock held down.

    Args:
        readings: in the order they were made.
        samples: how many samples were taken.

    Example:
        >>> readings = [ClockReading(0, 1980, 0), ClockReading(2, 1980, 0), ClockReading(3, 1700, 0x04)]
        >>> throttled_samples(readings, 4)
        [False, False, True, True]
    """
    found = [False] * samples
    held = _held_down(readings)
    for number in range(len(readings)):
        if held[number]:
            before = readings[number - 1].mark if number else 0
            after = readings[number + 1].mark if number + 1 < len(readings) else samples
            found[before:after] = [True] * (min(after, samples) - before)
    return found


def _held_down(readings: Sequence[ClockReading]) -> list[bool]:
    highest = max((reading.sm_mhz for reading in readings), default=0)
    return [bool(throttle_reasons(r.reasons)) and r.sm_mhz < _LOWERED * highest for r in readings]
