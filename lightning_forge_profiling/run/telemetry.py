"""GPU telemetry of a fit: when to sample, which samples count, what is logged, and the summary at the end."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Final

import torch

from lightning_forge_profiling.gpu.memory import AllocatorReading, read_allocator
from lightning_forge_profiling.gpu.nvml import SENSORS, GpuReader, open_reader
from lightning_forge_profiling.gpu.telemetry import GpuUsage, TelemetrySampler
from lightning_forge_profiling.profiler.child import ctrl_c_ends
from lightning_forge_profiling.schema import TelemetrySeries, TelemetrySummary
from lightning_forge_profiling.timing.counters import added

_GIB: Final = 2**30

# shortest time between two log entries with telemetry, a few samples: reading PyTorch's allocator takes 0.1 ms
_LOG_NS: Final = 10**9


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
        self._began_ns = self._next_log_ns = self._earlier_peak = 0
        self._read_allocator = read_allocator
        self._before: AllocatorReading | None = None
        self._samples: float | None = 0.0
        self._took_ms = 0.0
        self._interval: AllocatorReading | None = None
        self._run: AllocatorReading | None = None

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
        self._interval = self._run = None
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
        if now_ns < self._next_log_ns:
            return {}
        self._next_log_ns = now_ns + _LOG_NS
        samples_per_second = self._samples / self._took_ms * 1e3 if self._samples and self._took_ms else None
        self._samples, self._took_ms = 0.0, 0.0
        usage = self.sampler.take()
        self._read(usage.peak.get("allocated_bytes", 0.0))
        allocator, self._interval = self._interval, None
        return gpu_metrics(usage, self.sampler.device, allocator, samples_per_second)

    def latest(self) -> dict[str, float]:
        """The latest reading of each sensor, by its name in the metrics; for any thread."""
        named = ((_name_and_factor(reading), value) for reading, value in self.sampler.latest.items())
        return {name: value * factor for (name, factor), value in named}

    def run_metrics(self, samples_per_second: float | None) -> dict[str, float]:
        """The metrics for the whole run up to the last log entry, without its warm-up."""
        return gpu_metrics(self.sampler.run(), self.sampler.device, self._run_allocator(), samples_per_second)

    def summary(self, samples_per_second: float | None, steps: int) -> TelemetrySummary | None:
        """The summary of the whole run without its warm-up; None without telemetry."""
        device, usage = self.sampler.device, self.sampler.run()
        if device is None or not usage.samples:
            return None
        curve, allocator = self.sampler.curve(), self._run_allocator()
        mean, peak, watts = usage.mean, usage.peak, usage.watts
        peak_of_all = functools.reduce(GpuUsage.plus, curve).peak  # of memory, because everything has to fit
        return TelemetrySummary(
            device=device.name,
            is_mig=device.is_mig,
            samples=usage.samples,
            utilization_pct=mean.get("utilization_pct"),
            memory_utilization_pct=mean.get("memory_utilization_pct"),
            memory_peak_gib=_gib(peak_of_all.get("memory_used_bytes")),
            memory_own_peak_gib=_gib(peak_of_all.get("memory_own_bytes")),
            memory_total_gib=_gib(device.memory_bytes),
            power_w=mean.get("power_w") if watts is None else watts,
            power_limit_w=device.power_limit_w,
            temperature_peak_c=peak.get("temperature_c"),
            sm_mhz=mean.get("sm_mhz"),
            sm_peak_mhz=peak.get("sm_mhz"),
            throttled_pct=usage.throttled_pct,
            throttled_by_pct=usage.throttled_by_pct,
            joules_per_sample=watts / samples_per_second if watts is not None and samples_per_second else None,
            joules=self.sampler.energy.joules,
            allocated_peak_gib=None if allocator is None else _gib(allocator.peak_bytes),
            alloc_retries=None if allocator is None else allocator.retries,
            device_allocs_per_step=None if allocator is None or not steps else allocator.device_allocs / steps,
            series=telemetry_series(curve, self._began_ns),
        )

    def _run_allocator(self) -> AllocatorReading | None:
        if self._run is None:
            return None
        # the peak is most likely reached in the warm-up; one from before this fit leaves only the sampled lower bound
        peak = self._read_allocator().peak_bytes
        if peak <= self._earlier_peak:
            peak = int(max((point.peak.get("allocated_bytes", 0.0) for point in self.sampler.curve()), default=0))
        return replace(self._run, peak_bytes=max(peak, self._run.peak_bytes))

    def _read(self, sampled_bytes: float = 0.0) -> None:
        if self._before is None:
            return
        after = self._read_allocator()
        latest = after.since(self._before, sampled_bytes=sampled_bytes)
        self._before = after
        self._interval = latest if self._interval is None else self._interval.plus(latest)
        self._run = latest if self._run is None else self._run.plus(latest)


def run_telemetry(device: torch.device, period_s: float) -> RunTelemetry:
    """The telemetry of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    opener = functools.partial(
        open_reader,
        index,
        str(torch.cuda.get_device_properties(index).uuid),
        lambda: float(read_allocator(index).allocated_bytes),
    )
    return RunTelemetry(opener, functools.partial(read_allocator, index), period_s=period_s)


def gpu_metrics(
    usage: GpuUsage, device: GpuReader | None, allocator: AllocatorReading | None, samples_per_second: float | None
) -> dict[str, float]:
    """Telemetry as metrics: means over the samples, without readings that the driver does not support."""
    metrics = {}
    for reading, mean in usage.mean.items():
        name, factor = _name_and_factor(reading)
        if name != "allocated_gib":  # the allocator knows its own peak
            metrics[f"gpu/{name}"] = mean * factor
    if device is not None and device.power_limit_w and "gpu/power_w" in metrics:
        metrics["gpu/power_pct_of_limit"] = 100 * metrics["gpu/power_w"] / device.power_limit_w
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


def telemetry_series(curve: Sequence[GpuUsage], began_ns: int) -> TelemetrySeries:
    """The samples over time, as columns."""
    values, lowest, highest = {}, {}, {}
    for reading in SENSORS:
        name, factor = _name_and_factor(reading)
        sums = [point.readings.get(reading) for point in curve]
        known = [each for each in sums if each is not None]
        if known:
            values[name] = tuple(None if each is None else _rounded(each.mean * factor) for each in sums)
        if any(each.low < each.high for each in known):
            lowest[name] = tuple(None if each is None else _rounded(each.low * factor) for each in sums)
            highest[name] = tuple(None if each is None else _rounded(each.high * factor) for each in sums)
    reasons = dict.fromkeys(reason for point in curve for reason in point.reasons)
    return TelemetrySeries(
        seconds=tuple(_rounded(((point.first_ns + point.last_ns) / 2 - began_ns) / 1e9) for point in curve),
        samples_per_point=curve[0].samples if curve else 1,
        values=values,
        lowest=lowest,
        highest=highest,
        throttled_by_pct={
            reason: tuple(
                _rounded(point.throttled_by_pct.get(reason, 0.0)) if point.reasons_known else None for point in curve
            )
            for reason in reasons
        },
        counted_pct=tuple(_rounded(100 * point.counted / point.samples) for point in curve),
    )


def _rounded(value: float) -> float:
    return round(value, 3)


def _name_and_factor(reading: str) -> tuple[str, float]:
    """A reading's name in metrics and curves, and the factor to the unit in that name."""
    return (reading.replace("_bytes", "_gib"), 1 / _GIB) if reading.endswith("_bytes") else (reading, 1.0)


def _gib(count: float | None) -> float | None:
    return None if count is None else count / _GIB
