"""`locked_clocks`: holds a GPU's SM clock at one rate; needs root. Nothing else in this package changes a clock."""

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
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from lightning_forge_profiling.errors import ClocksUnavailableError, ConfigurationError
from lightning_forge_profiling.gpu.nvml import (
    NO_PERMISSION,
    SM_CLOCK,
    Nvml,
    NvmlDevice,
    clock_event_reasons,
    error_code,
    find_device,
    open_nvml,
    throttle_reasons,
)

if TYPE_CHECKING:
    import torch

# Signals that end a process without `finally` or exit handlers; SIGHUP comes from a closed terminal.
_ENDING: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def locked_clocks(
    sm_mhz: int | None = None,
    *,
    device: "torch.device | str | int | None" = None,
    uuid: str | None = None,
    nvml: Nvml | None = None,
) -> Iterator[int]:
    """Lock a GPU's SM clock at one rate while the block runs, and unlock it afterwards.

    The lock applies to every process on that GPU, and to all of its MIG slices. NVML does not report an earlier lock,
    so unlocking returns the clock to the driver's control. That happens after an exception, at the interpreter's exit
    and, if the block was entered in the main thread, on SIGTERM and SIGHUP; a forked child does not unlock. After
    SIGKILL, run `nvidia-smi -rgc`. Blocks for several GPUs can be nested.

    Args:
        sm_mhz: the rate; None takes the GPU's rated clock, if the driver knows it.
        device: the GPU, as PyTorch names it; None takes the current one.
        uuid: the GPU, as `nvidia-smi -L` names it, instead of `device`; for a process that does not use CUDA.
        nvml: an initialized NVML, for tests; None loads it.

    Yields:
        The locked rate, in MHz. A power cap can still lower the clock.

    Raises:
        ConfigurationError: `sm_mhz` is not a rate, or `device` not a GPU.
        ClocksUnavailableError: NVML or the GPU is missing, locking clocks is not permitted, or this process has locked
            them already. Nothing was changed.
    """
    if sm_mhz is not None and (isinstance(sm_mhz, bool) or not isinstance(sm_mhz, int) or sm_mhz <= 0):
        raise ConfigurationError(
            f"sm_mhz must be a clock rate in whole MHz, such as 1500, got {sm_mhz!r}; "
            "`nvidia-smi -q -d SUPPORTED_CLOCKS` lists those of a GPU."
        )
    named = named_device("cuda" if device is None else device) if uuid is None else None
    if uuid is None and named is None:
        raise ConfigurationError(f"device must be a GPU as PyTorch names it, such as 'cuda:0' or 0, got {device!r}.")
    try:
        opened = open_nvml() if nvml is None else nvml
    except LookupError as error:
        raise ClocksUnavailableError(f"The clock was not locked: {error}.") from error
    try:
        try:
            # a UUID names a GPU also if CUDA_VISIBLE_DEVICES hides it
            gpu = find_device(opened, str(uuid)) if named is None else _find(opened, named)
        except LookupError as error:
            raise ClocksUnavailableError(f"The clock was not locked: {error}.") from error
        with _Lock(opened, gpu, sm_mhz) as rate:
            yield rate
    finally:
        opened.nvmlShutdown()


def named_device(device: "torch.device | str | int") -> "torch.device | None":
    """The device that PyTorch names so; None if that is no name of a device."""
    import torch  # noqa: PLC0415  (a process that gives a UUID need not touch CUDA)

    name = f"cuda:{device}" if type(device) is int else device
    with contextlib.suppress(RuntimeError, TypeError):
        named = torch.device(name)
        if str(named) == str(name):  # it takes "cuda:256" for "cuda:0"
            return named
    return None


def _find(nvml: Nvml, named: "torch.device") -> NvmlDevice:
    import torch  # noqa: PLC0415  (as above)

    count = torch.cuda.device_count()
    if named.type != "cuda" or (named.index or 0) >= count:
        raise LookupError(f"{named} is not one of the {count} CUDA devices here")
    index = torch.cuda.current_device() if named.index is None else named.index
    return find_device(nvml, str(torch.cuda.get_device_properties(index).uuid), index)


class _Lock:
    """The lock, and the exits from it that no `finally` handles."""

    def __init__(self, nvml: Nvml, device: NvmlDevice, sm_mhz: int | None) -> None:
        self._nvml = nvml
        self._board = device.board
        self._uuid = nvml.nvmlDeviceGetUUID(device.board)
        self._sm_mhz = sm_mhz
        self._pid = os.getpid()
        self._locked = False
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> int:
        nvml = self._nvml
        rate = self._rate()
        if _held.setdefault(self._uuid, self) is not self:  # its end would unlock the other one's clock
            raise ClocksUnavailableError(
                "The clock was not locked: this process holds it already. Leave that locked_clocks() block first."
            )
        try:
            atexit.register(self._unlock)
            _catch_signals()
            self._locked = True  # before the call: a signal during it must unlock
            nvml.nvmlDeviceSetGpuLockedClocks(self._board, rate, rate)
        except nvml.NVMLError as error:
            if error_code(error) != NO_PERMISSION:  # then the reset is not permitted either
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceResetGpuLockedClocks(self._board)
            self._locked = False
            self.let_go()
            why = f"NVML says {error}. `nvidia-smi -q -d SUPPORTED_CLOCKS` lists the rates of a GPU."
            if error_code(error) == NO_PERMISSION:
                why = "that needs root. Run as root, or time without locked_clocks(): samples taken while the clock "
                why += "is held down are left out in either case."
            raise ClocksUnavailableError(f"The clock was not locked at {rate} MHz: {why}") from error
        except BaseException:
            self.let_go()
            raise
        return rate

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _rate(self) -> int:
        if self._sm_mhz is not None:
            return self._sm_mhz
        try:
            return self._nvml.nvmlDeviceGetDefaultApplicationsClock(self._board, SM_CLOCK)
        except self._nvml.NVMLError as error:
            raise ClocksUnavailableError(
                f"The clock was not locked: NVML does not report this GPU's rated clock ({error}). Pass one: "
                "locked_clocks(sm_mhz=...)."
            ) from error

    def let_go(self) -> None:
        """Unlock the clock and remove the handlers."""
        try:
            self._unlock()
        finally:
            _held.pop(self._uuid, None)
            atexit.unregister(self._unlock)
            _restore_signals()

    def _unlock(self) -> None:
        if not self._locked or os.getpid() != self._pid:  # a forked child does not own the lock
            return
        try:
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._board)
            self._locked = False  # after the call, for the same reason
        except self._nvml.NVMLError as error:
            self._locked = False
            raise ClocksUnavailableError(
                f"The clock could not be unlocked: NVML says {error}. Run `nvidia-smi -rgc` by hand."
            ) from error


# All locks of this process, by the GPU's UUID. They share one signal handler: a second one would take the first for the
# user's.
_held: Final[dict[str, _Lock]] = {}


def _catch_signals() -> None:
    # a handler of the user's ends in an exception or an exit, which unlock as well
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _ended)


def _restore_signals() -> None:
    """Restore the default handlers after the last lock."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and not any(lock.in_main_thread for lock in list(_held.values())):
        for number in _ENDING:
            if signal.getsignal(number) is _ended:
                signal.signal(number, signal.SIG_DFL)


def _ended(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (as signal calls it)
    for lock in list(_held.values()):
        try:
            lock.let_go()
        except ClocksUnavailableError as error:
            os.write(2, f"{error}\n".encode())  # the process ends: nothing can catch it
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# Boost moves in steps of 15 MHz, under 1 % of any recent GPU's clock; throttling moves it several times that.
_LOWERED: Final = 0.97
_PERIOD_NS: Final = 5_000_000


class ClockReading(NamedTuple):
    """The clock at one moment."""

    samples: int  # taken by then
    sm_mhz: int
    reasons: int  # why it was lowered, as bits of `nvmlClocksEventReasons`


@dataclass(frozen=True, slots=True)
class ClockSummary:
    """The SM clock over a measurement."""

    median_mhz: float  # the median reading, without those of discarded samples
    min_mhz: int  # the lowest reading
    max_mhz: int  # the highest reading
    limit_mhz: int  # the highest clock of this GPU
    reasons: tuple[str, ...]  # why the clock was lowered at any time; empty if it was not
    discarded: int  # number of samples discarded because the clock was lowered

    def __str__(self) -> str:
        """Such as `SM clock 1980 MHz (1755 to 1980, of 1980)`."""
        moved = f"{self.min_mhz} to {self.max_mhz}, of" if self.min_mhz != self.max_mhz else "of"
        held = f", held down by {' and '.join(self.reasons)}" if self.reasons else ""
        return f"SM clock {self.median_mhz:.0f} MHz ({moved} {self.limit_mhz}){held}"


class ClockWatch:
    """Reads one GPU's SM clock and the reasons for lowering it, at most every 5 ms."""

    def __init__(
        self,
        uuid: str,
        index: int | None = None,
        *,
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
            self._handle = find_device(opened, uuid, index).board
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

    def read(self, samples: int) -> None:
        """Read the clock after so many samples, unless the last reading is under 5 ms old."""
        now = self._clock_ns()
        if now - self._last_ns < _PERIOD_NS:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # one reading fewer
            self._read(samples)
        self._last_ns = self._clock_ns()

    def throttled(self, samples: int) -> list[bool]:
        """Whether each sample was taken at a lowered clock."""
        return throttled_samples(self._readings, samples)

    def summary(self, discarded: int) -> ClockSummary | None:
        """The clock since the start, with the median of the kept samples; None without a reading."""
        if not self._readings:
            return None
        rates = [reading.sm_mhz for reading in self._readings]
        lowered = _lowered(self._readings) if discarded else [False] * len(rates)
        kept = [rate for rate, low in zip(rates, lowered, strict=True) if not low]
        names = tuple(dict.fromkeys(name for reading in self._readings for name in throttle_reasons(reading.reasons)))
        return ClockSummary(float(median(kept)), min(rates), max(rates), self._limit_mhz, names, discarded)

    def _read(self, samples: int) -> None:
        rate = self._nvml.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK)
        self._readings.append(ClockReading(samples, rate, clock_event_reasons(self._nvml, self._handle)))


def throttled_samples(readings: Sequence[ClockReading], samples: int) -> list[bool]:
    """Whether the reading before or after each sample shows a lowered clock.

    Examples:
        >>> readings = [ClockReading(0, 1980, 0), ClockReading(2, 1980, 0), ClockReading(3, 1700, 0x04)]
        >>> throttled_samples(readings, 4)
        [False, False, True, True]
    """
    throttled = [False] * samples
    ends = [0, *(reading.samples for reading in readings), samples]
    for before, after, lowered in zip(ends, ends[2:], _lowered(readings), strict=False):
        if lowered:
            throttled[before:after] = [True] * (min(after, samples) - before)
    return throttled


def _lowered(readings: Sequence[ClockReading]) -> list[bool]:
    """Whether each has a reason and is under 97 % of the highest; a clock that is lowered throughout marks none."""
    highest = max((reading.sm_mhz for reading in readings), default=0)
    return [bool(throttle_reasons(r.reasons)) and r.sm_mhz < _LOWERED * highest for r in readings]
