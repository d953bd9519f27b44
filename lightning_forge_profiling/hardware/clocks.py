"""A GPU's clock: watching it, and holding it at one rate for a measurement.

Both go through NVML. Watching needs no permission; locking needs root, and nothing but `locked_clocks` ever changes a
clock.
"""

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from types import FrameType
from typing import Any, Final, Protocol, Self, cast

from lightning_forge_profiling.errors import ClocksUnavailableError
from lightning_forge_profiling.hardware.gpu_usage import throttle_reasons
from lightning_forge_profiling.hardware.nvml import Nvml, error_code, find_device, open_nvml

__all__ = ["ClockReading", "ClockSeen", "ClockWatch", "ClocksUnavailableError", "locked_clocks", "throttled_samples"]

# Boost steps are 15 MHz, under 1 % of any recent part's clock; the moves that matter are several times that.
_LOWERED: Final = 0.97
_PERIOD_NS: Final = 5_000_000
_SM_CLOCK: Final = 1  # nvml.h: NVML_CLOCK_SM
_NO_PERMISSION: Final = 4  # nvml.h: NVML_ERROR_NO_PERMISSION


class _ClockNvml(Nvml, Protocol):
    """What of `pynvml` only the lock calls. Rates are in MHz."""

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: int, /) -> int: ...  # noqa: N802  (NVML's names)
    def nvmlDeviceGetDefaultApplicationsClock(self, handle: Any, clock: int, /) -> int: ...  # noqa: N802
    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int, /) -> None: ...  # noqa: N802
    def nvmlDeviceResetGpuLockedClocks(self, handle: Any, /) -> None: ...  # noqa: N802


def _open(nvml: Nvml | None) -> _ClockNvml:
    try:
        return cast("_ClockNvml", open_nvml() if nvml is None else nvml)
    except LookupError as error:
        raise ClocksUnavailableError(f"The GPU's clock is out of reach: {error}.") from error


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
        median_mhz: over the readings.
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
        uuid: the GPU, as `torch.cuda.get_device_properties(device).uuid` has it.
        nvml: NVML, initialized, for tests; None opens it. Either way this shuts it down on exit.
        clock_ns: the host clock, in nanoseconds.

    Raises:
        ClocksUnavailableError: there is no NVML, or it cannot read this GPU's clock.
    """

    def __init__(self, uuid: str, *, nvml: Nvml | None = None, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        opened = _open(nvml)
        self._nvml = opened
        self._clock_ns = clock_ns
        self._readings: list[ClockReading] = []
        self._last_ns = -_PERIOD_NS
        try:
            self._handle = find_device(opened, uuid=uuid).board
            self._limit_mhz = opened.nvmlDeviceGetMaxClockInfo(self._handle, _SM_CLOCK)
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
        """The clock since the start; None without a reading.

        Args:
            discarded: how many samples were left out.
        """
        if not self._readings:
            return None
        rates = [reading.sm_mhz for reading in self._readings]
        names = tuple(dict.fromkeys(name for reading in self._readings for name in throttle_reasons(reading.reasons)))
        return ClockSeen(float(median(rates)), min(rates), max(rates), self._limit_mhz, names, discarded)

    def _read(self, mark: int) -> None:
        rate = self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK)
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        self._readings.append(ClockReading(mark, rate, reasons))


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
    highest = max((reading.sm_mhz for reading in readings), default=0)
    found = [False] * samples
    held = [bool(throttle_reasons(r.reasons)) and r.sm_mhz < _LOWERED * highest for r in readings]
    for number in range(len(readings)):
        if held[number]:
            before = readings[number - 1].mark if number else 0
            after = readings[number + 1].mark if number + 1 < len(readings) else samples
            found[before:after] = [True] * (min(after, samples) - before)
    return found


@contextlib.contextmanager
def locked_clocks(
    sm_mhz: int | None = None, *, device: Any = None, uuid: str | None = None, nvml: Nvml | None = None
) -> Iterator[int]:
    """Hold a GPU's SM clock at one rate while the block runs, and let it go afterwards.

    The lock is the machine's: it holds for every process on that GPU. NVML cannot tell what an administrator had locked
    before, so what is restored is the driver's own control of the clock. It is restored after an exception, at the
    interpreter's exit and on SIGTERM; after SIGKILL, `nvidia-smi -rgc` does it by hand.

    Args:
        sm_mhz: the rate; None takes the one that the maker rates the part at, where the driver knows it.
        device: which GPU, as PyTorch names it; None takes the current one.
        uuid: which GPU, by its identity instead.
        nvml: NVML, started; for tests. None loads it.

    Yields:
        The rate that was asked for, in MHz. A power cap can still take the clock below it.

    Raises:
        ClocksUnavailableError: there is no NVML, or locking clocks is not permitted here. Nothing was changed.
    """
    if uuid is None:
        import torch  # noqa: PLC0415  (the only use of it here)

        uuid = str(torch.cuda.get_device_properties(device).uuid)
    opened = _open(nvml)
    try:
        with _Lock(opened, uuid, sm_mhz) as rate:
            yield rate
    finally:
        opened.nvmlShutdown()


class _Lock:
    """The lock itself, with the ways out that no `finally` sees."""

    def __init__(self, nvml: _ClockNvml, uuid: str, sm_mhz: int | None) -> None:
        self._nvml = nvml
        self._handle: object = None
        self._uuid = uuid
        self._sm_mhz = sm_mhz
        self._old_handler: Any = None
        self._locked = False

    def __enter__(self) -> int:
        nvml = self._nvml
        try:
            self._handle = find_device(nvml, uuid=self._uuid).board
            rate = self._sm_mhz
            if rate is None:
                rate = nvml.nvmlDeviceGetDefaultApplicationsClock(self._handle, _SM_CLOCK)
        except (nvml.NVMLError, LookupError) as error:
            raise ClocksUnavailableError(
                f"The clock was not locked: NVML says {error}. If it does not know the rated clock of this GPU, name "
                "one: locked_clocks(sm_mhz=...)."
            ) from error
        atexit.register(self._unlock)
        self._catch_sigterm()
        self._locked = True  # from before the call: what ends the process in between must find it
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(self._handle, rate, rate)
        except BaseException as error:
            if isinstance(error, nvml.NVMLError) and error_code(error) == _NO_PERMISSION:
                self._locked = False  # then the reset is not permitted either
                self._let_go()
                raise ClocksUnavailableError(
                    "The clock was not locked: that takes root. Run as root, or time without locked_clocks(): samples "
                    "taken while the clock is held down are left out anyway."
                ) from error
            self._let_go()
            if isinstance(error, nvml.NVMLError):
                raise ClocksUnavailableError(f"The clock was not locked at {rate} MHz: NVML says {error}.") from error
            raise
        return rate

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _let_go(self) -> None:
        try:
            self._unlock()
        finally:
            atexit.unregister(self._unlock)
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)
                self._old_handler = None

    def _unlock(self) -> None:
        if not self._locked:
            return
        self._locked = False
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        except self._nvml.NVMLError as error:
            raise ClocksUnavailableError(
                f"The clock could not be unlocked: NVML says {error}. Run `nvidia-smi -rgc` by hand."
            ) from error

    def _catch_sigterm(self) -> None:
        # a handler of the user's own ends in an exception or an exit, which the other ways out see
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (as signal calls it)
        self._let_go()
        os.kill(os.getpid(), number)
