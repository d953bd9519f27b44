"""Reads a GPU's clock through NVML while something is measured; needs no permission."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Final, Self

from lightning_forge_profiling.errors import ClocksUnavailableError
from lightning_forge_profiling.gpu.nvml import SM_CLOCK, Nvml, clock_event_reasons, find_device, open_nvml
from lightning_forge_profiling.gpu.usage import throttle_reasons

# Boost moves in steps of 15 MHz, under 1 % of any recent GPU's clock; throttling moves it several times that.
_LOWERED: Final = 0.97
_PERIOD_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock at one moment.

    Attributes:
        mark: number of samples taken by then.
        sm_mhz: the SM clock.
        reasons: why it was lowered, as bits of `nvmlClocksEventReasons`.
    """

    mark: int
    sm_mhz: int
    reasons: int


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """The SM clock over a measurement.

    Attributes:
        median_mhz: the median reading, without those of discarded samples.
        min_mhz: the lowest reading.
        max_mhz: the highest reading.
        limit_mhz: the highest clock of this GPU.
        reasons: why the clock was lowered at any time; empty if it was not.
        discarded: number of samples discarded because the clock was lowered.
    """

    median_mhz: float
    min_mhz: int
    max_mhz: int
    limit_mhz: int
    reasons: tuple[str, ...]
    discarded: int

    def __str__(self) -> str:
        """Such as `SM clock 1980 MHz (1755 to 1980, of 1980)`."""
        moved = f"{self.min_mhz} to {self.max_mhz}, of" if self.min_mhz != self.max_mhz else "of"
        held = f", held down by {' and '.join(self.reasons)}" if self.reasons else ""
        return f"SM clock {self.median_mhz:.0f} MHz ({moved} {self.limit_mhz}){held}"


class ClockWatch:
    """Reads one GPU's SM clock and the reasons for lowering it, at most every 5 ms."""

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
            raise ClocksUnavailableError(f"The GPU's clock cannot be read: {error}.") from error
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
        """Read the clock, unless the last reading is under 5 ms old."""
        now = self._clock_ns()
        if now - self._last_ns < _PERIOD_NS:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # one reading fewer
            self._read(mark)
        self._last_ns = self._clock_ns()

    def throttled(self, samples: int) -> list[bool]:
        """Whether each sample was taken at a lowered clock.

        That is a sample next to a reading with a reason and under 97 % of the highest reading. A clock that is lowered
        throughout marks no sample.
        """
        return throttled_samples(self._readings, samples)

    def seen(self, discarded: int) -> ClockSeen | None:
        """The clock since the start, with the median of the kept samples; None without a reading."""
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
    """Whether the reading before or after each sample shows a lowered clock.

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
