"""NVML: finds a CUDA device and reads its sensors."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, cast

# ruff: noqa: N802, D102  (the names are NVML's, and so is their documentation)

SM_CLOCK: Final = 1  # nvml.h, `NVML_CLOCK_SM`
MEMORY_CLOCK: Final = 2  # nvml.h, `NVML_CLOCK_MEM`
NO_PERMISSION: Final = 4  # nvml.h, `NVML_ERROR_NO_PERMISSION`

_NOT_SUPPORTED, _INVALID_ARGUMENT, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH = 3, 2, 13, 25

# the `nvmlReturn_t` that every later call would return too, because of this device, driver or user. From nvml.h, where
# they are part of the binary interface.
DOES_NOT_ANSWER: Final = frozenset(
    {_NOT_SUPPORTED, NO_PERMISSION, _INVALID_ARGUMENT, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH}
)


class Nvml(Protocol):
    """The module `pynvml` (package `nvidia-ml-py`), without the sensors. Handles are opaque, rates in MHz."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, /) -> Any: ...
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, /) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: int, /) -> int: ...
    def nvmlDeviceGetDefaultApplicationsClock(self, handle: Any, clock: int, /) -> int: ...
    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int, /) -> None: ...
    def nvmlDeviceResetGpuLockedClocks(self, handle: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One CUDA device."""

    handle: Any  # may be a MIG slice
    board: Any  # the whole GPU; `handle` itself without MIG
    uuid: str  # of `handle`: `GPU-...` or `MIG-...`

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG slice."""
        return self.uuid.startswith("MIG-")


def open_nvml() -> Nvml:
    """Load and initialize NVML. Each call needs one `nvmlShutdown()`."""
    try:
        nvml = cast("Nvml", import_module("pynvml"))
    except ImportError as exc:
        raise LookupError("the package nvidia-ml-py is not installed") from exc
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        raise LookupError(f"NVML failed to start ({exc}): no NVIDIA driver") from exc
    return nvml


def error_code(exc: Exception) -> int | None:
    """The `nvmlReturn_t` of an `NVMLError`."""
    return getattr(exc, "value", None)


def clock_event_reasons(nvml: Nvml, board: Any) -> int:
    """Why a GPU's clock is what it is, as bits of `nvmlClocksEventReasons`; `throttle_reasons` names them."""
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(board)
    except AttributeError:  # bindings older than the name
        pass
    except nvml.NVMLError as exc:
        if error_code(exc) != _FUNCTION_NOT_FOUND:  # as drivers before 535 return
            raise
    return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(board)


def find_device(
    nvml: Nvml, uuid: str, index: int | None = None, *, environ: Mapping[str, str] = os.environ
) -> NvmlDevice:
    """Find the device with a UUID, which CUDA calls `index`. NVML's own indices are of all GPUs, in another order."""
    entries = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = "" if index is None else next(iter(entries[index:]), "")
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        if entry.startswith("MIG-"):  # CUDA may give such a slice the UUID of its GPU
            return _slice(nvml, nvml.nvmlDeviceGetHandleByUUID(entry))
        for prefix, device in (("GPU-", _whole), ("MIG-", _slice)):
            if (handle := _answer(nvml, nvml.nvmlDeviceGetHandleByUUID, prefix + bare)) is not None:
                return device(nvml, handle)
    except nvml.NVMLError as exc:
        raise LookupError(f"NVML does not show {uuid} ({exc})") from exc
    raise LookupError(f"NVML does not know the UUID {bare}")


def _whole(nvml: Nvml, handle: Any) -> NvmlDevice:
    """A GPU, or its MIG slice if it has exactly one; CUDA does not report which of several it uses."""
    mode = _answer(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or not mode[0]:
        return NvmlDevice(handle, handle, nvml.nvmlDeviceGetUUID(handle))
    count, ask = nvml.nvmlDeviceGetMaxMigDeviceCount(handle), nvml.nvmlDeviceGetMigDeviceHandleByIndex
    slices = [each for index in range(count) if (each := _answer(nvml, ask, handle, index)) is not None]
    if len(slices) != 1:
        raise LookupError(f"the GPU has {len(slices)} MIG slices: name one in CUDA_VISIBLE_DEVICES")
    return _slice(nvml, slices[0])


def _slice(nvml: Nvml, handle: Any) -> NvmlDevice:
    return NvmlDevice(handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), nvml.nvmlDeviceGetUUID(handle))


def _answer(nvml: Nvml, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


# reasons for a lowered clock that cost speed: nvml.h, `nvmlClocksEventReason...`. Left out are those that cost none
# (0x001: idle; 0x400: the reliability limit, where boost ends) and settings of the user (0x002: application clocks,
# 0x010: sync boost with other GPUs, 0x100: display clocks).
THROTTLES: Final[Mapping[int, str]] = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x200: "board limit",
}

_HARDWARE_SLOWDOWN: Final = 0x008
_NAMED_APART: Final = 0x0C0  # NVML sets 0x008 together with either of these, which are more specific


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of the clock event reasons in NVML's bit mask that cost speed.

    Examples:
        >>> throttle_reasons(0x4), throttle_reasons(0x8 | 0x40), throttle_reasons(0x1)
        (('power cap',), ('temperature (hardware)',), ())
    """
    if mask & _NAMED_APART:
        mask &= ~_HARDWARE_SLOWDOWN
    return tuple(reason for bit, reason in THROTTLES.items() if mask & bit)


_GPU_SENSOR: Final = 0  # nvml.h: NVML_TEMPERATURE_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """NVML's readings at one moment; None for sensors that the device lacks."""

    at_ns: int  # time on the host's `perf_counter_ns`
    utilization_pct: float | None = None  # share of NVML's last sample period (1/6 s to 1 s) in which any kernel ran
    memory_utilization_pct: float | None = None  # share of it in which the device's memory was read or written
    encoder_pct: float | None = None  # utilization of the video encoder
    decoder_pct: float | None = None  # utilization of the video (or JPEG) decoder
    memory_used_bytes: float | None = None  # memory of all processes and the driver
    memory_own_bytes: float | None = None  # memory of this process; None in a container with its own process ids
    allocated_bytes: float | None = None  # memory of PyTorch's tensors
    power_w: float | None = None  # power of the board; on most GPUs since Ampere the mean over a second
    temperature_c: float | None = None  # temperature of the GPU
    sm_mhz: float | None = None  # clock of the multiprocessors
    memory_mhz: float | None = None  # clock of the memory
    throttles: tuple[str, ...] | None = None  # why the clock is lowered; empty if it is not
    energy_j: float | None = None  # energy that the board has used since the driver was loaded


# the readings with a mean and a peak
SENSORS: Final = tuple(
    name for name in GpuSample.__dataclass_fields__ if name not in {"at_ns", "throttles", "energy_j"}
)


class GpuReader:
    """Reads the sensors of one device. A sensor that the device lacks is asked once and then is None."""

    def __init__(
        self, nvml: Nvml, device: NvmlDevice, *, pid: int, allocated_bytes: Callable[[], float | None] = lambda: None
    ) -> None:
        self.nvml = nvml
        # whether it is a MIG slice. Power, temperature, clocks and throttling are then the whole GPU's.
        self.is_mig = device.is_mig
        self.uuid = device.uuid
        self._handle, self._board = device.handle, device.board
        self._pid = pid
        self._allocated_bytes = allocated_bytes
        self._unsupported: set[tuple[Any, ...]] = set()
        self.name = str(self._ask("nvmlDeviceGetName", self._handle) or "GPU")
        memory = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        self.memory_bytes = None if memory is None else float(memory.total)
        self.power_limit_w = _scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit", self._board), 1e-3)

    def read(self, at_ns: int) -> GpuSample:
        """Read all sensors."""
        ask, handle, board = self._ask, self._handle, self._board
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        encoder = ask("nvmlDeviceGetEncoderUtilization", handle)
        decoder = ask("nvmlDeviceGetDecoderUtilization", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", board)
        if reasons is None:  # drivers before 535
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", board)
        celsius = ask("nvmlDeviceGetTemperatureV", board, _GPU_SENSOR)
        if celsius is None:  # drivers before 570
            celsius = ask("nvmlDeviceGetTemperature", board, _GPU_SENSOR)
        # a MIG slice has no energy meter, only the board
        millijoules = None if self.is_mig else ask("nvmlDeviceGetTotalEnergyConsumption", board)
        return GpuSample(
            at_ns=at_ns,
            utilization_pct=None if rates is None else float(rates.gpu),
            memory_utilization_pct=None if rates is None else float(rates.memory),
            encoder_pct=None if encoder is None else float(encoder[0]),
            decoder_pct=None if decoder is None else float(decoder[0]),
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_own_bytes=next((_scaled(each.usedGpuMemory) for each in processes if each.pid == self._pid), None),
            allocated_bytes=self._allocated_bytes(),
            power_w=_scaled(ask("nvmlDeviceGetPowerUsage", board), 1e-3),
            temperature_c=_scaled(celsius),
            sm_mhz=_scaled(ask("nvmlDeviceGetClockInfo", board, SM_CLOCK)),
            memory_mhz=_scaled(ask("nvmlDeviceGetClockInfo", board, MEMORY_CLOCK)),
            throttles=None if reasons is None else throttle_reasons(reasons),
            energy_j=_scaled(millijoules, 1e-3),
        )

    def _ask(self, function: str, handle: Any, *arguments: int) -> Any:
        if (function, *arguments) in self._unsupported:
            return None
        try:
            return getattr(self.nvml, function)(handle, *arguments)
        except self.nvml.NVMLError as exc:
            if error_code(exc) in DOES_NOT_ANSWER:
                self._unsupported.add((function, *arguments))
        except AttributeError:  # bindings older than the function
            self._unsupported.add((function, *arguments))
        return None


def _scaled(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else value * factor


def open_reader(index: int, uuid: str, allocated_bytes: Callable[[], float | None]) -> GpuReader:
    """Open a reader of the device that CUDA calls `index`."""
    nvml = open_nvml()
    try:
        return GpuReader(nvml, find_device(nvml, uuid, index), pid=os.getpid(), allocated_bytes=allocated_bytes)
    except BaseException:
        nvml.nvmlShutdown()
        raise
