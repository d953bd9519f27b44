"""Samples a GPU's utilization, memory, power, temperature, clocks and energy in a thread beside the training."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Final

from lightning_forge_profiling.gpu.history import GpuHistory, GpuPoint
from lightning_forge_profiling.gpu.nvml import (
    DOES_NOT_ANSWER,
    MEMORY_CLOCK,
    SM_CLOCK,
    GpuSample,
    GpuUsage,
    Nvml,
    NvmlDevice,
    UsageSums,
    clock_event_reasons,
    error_code,
    find_device,
    open_nvml,
    throttle_reasons,
)
from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

DEFAULT_PERIOD_S: Final = 0.2
"""NVML renews the utilization at most every 1/6 s (nvml.h, `nvmlUtilization_t`)."""

_GPU_SENSOR: Final = 0  # nvml.h: NVML_TEMPERATURE_GPU
_JOIN_S: Final = 2.0
"""The fit ends also if the driver hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """Constants of a GPU during a run.

    Attributes:
        name: the driver's name of the GPU or MIG slice.
        uuid: `GPU-...` or `MIG-...`.
        is_mig: whether it is a MIG slice. Power, temperature, clocks and throttling are then the whole GPU's.
        memory_bytes: memory size; None if unknown.
        power_limit_w: the power limit in force; None if unknown.
    """

    name: str
    uuid: str
    is_mig: bool
    memory_bytes: float | None
    power_limit_w: float | None


class GpuReader:
    """Reads the sensors of one device. A sensor that the device lacks is asked once and then is None."""

    def __init__(
        self, nvml: Nvml, device: NvmlDevice, *, pid: int, allocated_bytes: Callable[[], float | None] | None = None
    ) -> None:
        self.nvml = nvml
        self._device = device
        self._pid = pid
        self._allocated_bytes = allocated_bytes
        self._silent: set[str] = set()
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(device.handle))
        milliwatts = self._ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device.board))
        self.info = GpuInfo(
            name=str(self._ask("name", lambda: nvml.nvmlDeviceGetName(device.handle)) or "GPU"),
            uuid=device.uuid,
            is_mig=device.is_mig,
            memory_bytes=None if memory is None else float(memory.total),
            power_limit_w=_scaled(milliwatts, 1e-3),
        )

    def read(self, at_ns: int) -> GpuSample:
        """Read all sensors."""
        nvml, handle, board, ask = self.nvml, self._device.handle, self._device.board, self._ask
        rates = ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        encoder = ask("encoder", lambda: nvml.nvmlDeviceGetEncoderUtilization(handle))
        decoder = ask("decoder", lambda: nvml.nvmlDeviceGetDecoderUtilization(handle))
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        processes = ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        reasons = ask("throttles", lambda: clock_event_reasons(nvml, board))
        celsius = ask("temperature", lambda: nvml.nvmlDeviceGetTemperatureV(board, _GPU_SENSOR))
        if celsius is None:  # drivers before 570
            celsius = ask("old temperature", lambda: nvml.nvmlDeviceGetTemperature(board, _GPU_SENSOR))
        # a MIG slice has no energy meter, only the board
        millijoules = (
            None if self._device.is_mig else ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(board))
        )
        return GpuSample(
            at_ns=at_ns,
            utilization_pct=None if rates is None else float(rates.gpu),
            memory_utilization_pct=None if rates is None else float(rates.memory),
            encoder_pct=None if encoder is None else float(encoder[0]),
            decoder_pct=None if decoder is None else float(decoder[0]),
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_own_bytes=None if processes is None else self._own(processes),
            allocated_bytes=None if self._allocated_bytes is None else self._allocated_bytes(),
            power_w=_scaled(ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(board)), 1e-3),
            temperature_c=_scaled(celsius),
            sm_mhz=_scaled(ask("SM clock", lambda: nvml.nvmlDeviceGetClockInfo(board, SM_CLOCK))),
            memory_mhz=_scaled(ask("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(board, MEMORY_CLOCK))),
            throttles=None if reasons is None else throttle_reasons(reasons),
            energy_j=_scaled(millijoules, 1e-3),
        )

    def _own(self, processes: Sequence[Any]) -> float | None:
        return next((_scaled(process.usedGpuMemory) for process in processes if process.pid == self._pid), None)

    def _ask(self, what: str, function: Callable[[], Any]) -> Any:
        if what in self._silent:
            return None
        try:
            return function()
        except self.nvml.NVMLError as exc:
            if error_code(exc) in DOES_NOT_ANSWER:
                self._silent.add(what)
        except AttributeError:  # bindings older than the function
            self._silent.add(what)
        return None


def _scaled(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else value * factor


def open_reader(
    index: int = 0, *, uuid: str | None = None, allocated_bytes: Callable[[], float | None] | None = None
) -> GpuReader:
    """Open a reader of the device that CUDA calls `index`."""
    nvml = open_nvml()
    try:
        device = find_device(nvml, index, uuid=uuid)
        return GpuReader(nvml, device, pid=os.getpid(), allocated_bytes=allocated_bytes)
    except BaseException:
        nvml.nvmlShutdown()
        raise


class TelemetrySampler:
    """Samples a GPU's sensors in a background thread, which never raises.

    NVML is loaded in that thread too: neither the driver nor the sensors delay the caller.

    Example:
        >>> import functools
        >>> sampler = TelemetrySampler(functools.partial(open_reader, 0))
        >>> sampler.start()
        >>> sampler.stop()
        >>> usage = sampler.run()
    """

    def __init__(
        self,
        open_reader: Callable[[], GpuReader],
        *,
        period_s: float = DEFAULT_PERIOD_S,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.info: GpuInfo | None = None
        """The device, once the thread has found it."""
        self.problem = ""
        """Why there is no telemetry; empty if there is."""
        self._open_reader = open_reader
        self._period_s = period_s
        self._clock_ns = clock_ns
        self._reader: GpuReader | None = None
        self._interval, self._run = UsageSums(), UsageSums()
        self._history = GpuHistory()
        self._counting = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_until_stopped, name="gpu-telemetry", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop sampling. The results can still be read."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_S)

    def open(self) -> bool:
        """Open the device, in the thread. False if that fails; `problem` says why."""
        try:
            self._reader = self._open_reader()
            self.info = self._reader.info
        except LookupError as exc:
            self.problem = str(exc)
        except Exception as exc:
            self.problem = f"{type(exc).__name__}: {exc}"
            _log.debug("", exc_info=exc)
        if self.problem:
            _log.info("No GPU telemetry: %s.", self.problem)
        return self._reader is not None

    def sample(self) -> bool:
        """Take one sample, in the thread. False if that fails."""
        if self._reader is None:
            return False
        try:
            sample = self._reader.read(self._clock_ns())
        except Exception as exc:
            self.problem = f"{type(exc).__name__}: {exc}"
            _log.warning("GPU telemetry ends: %s.", self.problem)
            _log.debug("", exc_info=exc)
            return False
        with self._lock:
            for sums in (self._interval, self._run):
                if self._counting:
                    sums.add(sample)
            self._history.add(sample, counted=self._counting)
        return True

    def close(self) -> None:
        """Shut NVML down, in the thread."""
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                reader.nvml.nvmlShutdown()
            except Exception as exc:
                _log.debug("", exc_info=exc)

    def pause(self) -> None:
        """Leave out the samples from here on, and the energy up to the next one that counts."""
        with self._lock:
            self._counting = False
            for sums in (self._interval, self._run):
                sums.skip()

    def resume(self) -> None:
        """Count samples again."""
        self._counting = True

    def take(self) -> GpuUsage:
        """Usage over the samples since the last call. There may be none."""
        with self._lock:
            usage = self._interval.read()
            self._interval.restart()
        return usage

    def run(self) -> GpuUsage:
        """Usage over all samples, or those since `restart`."""
        with self._lock:
            return self._run.read()

    def restart(self) -> None:
        """Leave out the samples so far, as those of the warm-up. The history keeps them, marked as not counted."""
        with self._lock:
            self._interval.restart()
            self._run.restart()
            self._history.leave_out()

    def history(self) -> tuple[GpuPoint, ...]:
        """The whole run, in a bounded number of points."""
        with self._lock:
            return self._history.points()

    def _sample_until_stopped(self) -> None:
        if not self.open():
            return
        try:
            while self.sample() and not self._ended.wait(self._period_s):
                pass
        finally:
            self.close()
