"""GPU telemetry of a fit: when to sample, which samples count, and what is logged."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns
from typing import Final

import torch

from lightning_forge_profiling.gpu.allocator import (
    AllocatorInterval,
    AllocatorReading,
    between,
    merged,
    read_allocator,
)
from lightning_forge_profiling.gpu.nvml import GpuUsage
from lightning_forge_profiling.gpu.telemetry import GpuInfo, GpuReader, TelemetrySampler, open_reader
from lightning_forge_profiling.profiler.child import ctrl_c_ends
from lightning_forge_profiling.results.telemetry import TelemetrySummary, summarize
from lightning_forge_profiling.timing.sums import added

_GIB: Final = 2**30

_ROW_NS: Final = 10**9
"""Shortest time between two rows with telemetry, a few samples: reading PyTorch's allocator takes 0.1 ms."""

_LOGGED: Final = {
    "utilization_pct": ("gpu/utilization_pct", 1.0),
    "memory_utilization_pct": ("gpu/memory_utilization_pct", 1.0),
    "encoder_pct": ("gpu/encoder_pct", 1.0),
    "decoder_pct": ("gpu/decoder_pct", 1.0),
    "memory_used_bytes": ("gpu/memory_used_gib", 1 / _GIB),
    "memory_own_bytes": ("gpu/memory_own_gib", 1 / _GIB),
    "power_w": ("gpu/power_w", 1.0),
    "temperature_c": ("gpu/temperature_c", 1.0),
    "sm_mhz": ("gpu/sm_mhz", 1.0),
    "memory_mhz": ("gpu/memory_mhz", 1.0),
}


class RunTelemetry:
    """Samples a GPU's sensors during a fit; PyTorch's allocator is read when figures are asked for."""

    def __init__(
        self,
        open_reader: Callable[[], GpuReader],
        read_allocator: Callable[[], AllocatorReading],
        *,
        period_s: float,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.sampler = TelemetrySampler(open_reader, period_s=period_s, clock_ns=clock_ns)
        self._clock_ns = clock_ns
        self._began_ns = 0
        self._read_allocator = read_allocator
        self._before: AllocatorReading | None = None
        self._earlier_peak = 0
        self._next_row_ns = 0
        self._samples: float | None = 0.0
        self._took_ms = 0.0
        self._interval: list[AllocatorInterval] = []
        self._run: AllocatorInterval | None = None

    @property
    def problem(self) -> str:
        """Why there is no telemetry; "" if there is."""
        return self.sampler.problem

    def start(self) -> None:
        """Begin to sample, as training begins."""
        self._began_ns = self._clock_ns()
        self._before = self._read_allocator()
        self._earlier_peak = self._before.peak_bytes
        self.sampler.start()

    def stop(self) -> None:
        """Stop sampling; the figures are kept, without paused time."""
        with ctrl_c_ends():  # a driver that hangs takes until the sampler gives it up
            self.sampler.stop()

    def restart(self) -> None:
        """Drop the samples so far, at the end of the warm-up."""
        self.sampler.restart()
        self._interval, self._run = [], None
        if self._before is not None:
            self._before = self._read_allocator()

    def pause(self) -> None:
        """Leave out what follows, as validation."""
        if self._before is not None:
            self.sampler.pause()
            self._read()
            self._before = None

    def resume(self) -> None:
        """Count samples again."""
        if self._before is None:
            self.sampler.resume()
            self._before = self._read_allocator()

    def metrics(self, samples: float | None, took_ms: float) -> dict[str, float]:
        """The metrics for the time since the last ones, at most once a second."""
        self._samples, self._took_ms = added(self._samples, samples), self._took_ms + took_ms
        now_ns = self._clock_ns()
        if now_ns < self._next_row_ns:
            return {}
        self._next_row_ns = now_ns + _ROW_NS
        samples_per_second = self._samples / self._took_ms * 1e3 if self._samples and self._took_ms else None
        self._samples, self._took_ms = 0.0, 0.0
        usage = self.sampler.take()
        self._read(usage.peak.get("allocated_bytes", 0.0))
        interval, self._interval = self._interval, []
        allocator = merged(interval) if interval else None
        return gpu_metrics(usage, self.sampler.info, allocator, samples_per_second)

    def run_metrics(self, samples_per_second: float | None) -> dict[str, float]:
        """The metrics for the whole run up to the last row, without its warm-up."""
        return gpu_metrics(self.sampler.run(), self.sampler.info, self._run_allocator(), samples_per_second)

    def summary(self, samples_per_second: float | None, steps: int) -> TelemetrySummary | None:
        """The summary of the whole run without its warm-up; None without telemetry."""
        info, usage = self.sampler.info, self.sampler.run()
        if info is None or not usage.samples:
            return None
        return summarize(
            usage,
            device=info.name,
            is_mig=info.is_mig,
            memory_bytes=info.memory_bytes,
            power_limit_w=info.power_limit_w,
            samples_per_second=samples_per_second,
            allocator=self._run_allocator(),
            steps=steps,
            history=self.sampler.history(),
            began_ns=self._began_ns,
        )

    def _run_allocator(self) -> AllocatorInterval | None:
        if self._run is None:
            return None
        # the peak is most likely reached in the warm-up; one from before this fit leaves only the sampled lower bound
        peak = self._read_allocator().peak_bytes
        if peak <= self._earlier_peak:
            seen = (point.readings.get("allocated_bytes") for point in self.sampler.history())
            peak = int(max((spread.high for spread in seen if spread is not None), default=0))
        return replace(self._run, peak_bytes=max(peak, self._run.peak_bytes))

    def _read(self, sampled_bytes: float = 0.0) -> None:
        if self._before is None:
            return
        after = self._read_allocator()
        interval = between(self._before, after, sampled_bytes=sampled_bytes)
        self._before = after
        self._interval.append(interval)
        self._run = interval if self._run is None else merged([self._run, interval])


def run_telemetry(device: torch.device, period_s: float) -> RunTelemetry:
    """The telemetry of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    opener = functools.partial(
        open_reader,
        index,
        uuid=str(torch.cuda.get_device_properties(index).uuid),
        allocated_bytes=lambda: float(read_allocator(index).allocated_bytes),
    )
    return RunTelemetry(opener, functools.partial(read_allocator, index), period_s=period_s)


def gpu_metrics(
    usage: GpuUsage, info: GpuInfo | None, allocator: AllocatorInterval | None, samples_per_second: float | None
) -> dict[str, float]:
    """Telemetry as metrics: means over the samples, without readings that the driver does not support.

    Example:
        >>> usage = GpuUsage(samples=5, mean={"utilization_pct": 93.0}, seconds=2.0, joules=1000.0)
        >>> gpu_metrics(usage, None, None, samples_per_second=250.0)
        {'gpu/utilization_pct': 93.0, 'gpu/joules_per_sample': 2.0}
    """
    metrics = {
        name: usage.mean[reading] * factor for reading, (name, factor) in _LOGGED.items() if reading in usage.mean
    }
    if info is not None and info.power_limit_w and "power_w" in usage.mean:
        metrics["gpu/power_pct_of_limit"] = 100 * usage.mean["power_w"] / info.power_limit_w
    if usage.throttled_pct is not None:
        metrics["gpu/throttled_pct"] = usage.throttled_pct
    for reason, pct in usage.throttled_by_pct.items():
        metrics[f"gpu/throttled_by_{re.sub(r'[^a-z]+', '_', reason).strip('_')}_pct"] = pct
    if usage.watts is not None and samples_per_second:
        metrics["gpu/joules_per_sample"] = usage.watts / samples_per_second
    if allocator is not None:
        metrics["gpu/allocated_gib"] = allocator.allocated_bytes / _GIB
        metrics["gpu/allocated_peak_gib"] = allocator.peak_bytes / _GIB
        metrics["gpu/reserved_gib"] = allocator.reserved_bytes / _GIB
        metrics["gpu/alloc_retries"] = float(allocator.retries)
        metrics["gpu/device_allocs"] = float(allocator.device_allocs)
    return metrics
