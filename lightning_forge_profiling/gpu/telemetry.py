"""GPU telemetry: samples utilization, memory, power, temperature, clocks and energy in a thread beside the training."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Final, NamedTuple

from lightning_forge_profiling.gpu.nvml import SENSORS, GpuReader, GpuSample
from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

DEFAULT_PERIOD_S: Final = 0.2  # NVML renews the utilization at most every 1/6 s (nvml.h, `nvmlUtilization_t`)
MAX_POINTS: Final = 512  # points of a run's curves. A timeline of ordinary width shows no more.
_JOIN_S: Final = 2.0  # the fit ends also if the driver hangs


class ReadingSums(NamedTuple):
    """Count, sum and extremes of one reading's values."""

    samples: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.samples

    def plus(self, later: "ReadingSums") -> "ReadingSums":
        """Both together."""
        low, high = min(self.low, later.low), max(self.high, later.high)
        return ReadingSums(self.samples + later.samples, self.total + later.total, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """Consecutive samples of a GPU, summed up: those of an interval, of a run, or of one point of a curve."""

    first_ns: int = 0  # time of the first sample
    last_ns: int = 0  # time of the last sample
    samples: int = 0  # number of samples
    # number of samples in the run's means; the others are of the warm-up, validation or recorded steps
    counted: int = 0
    # by the reading's name in `GpuSample`; readings that no sample has are missing
    readings: Mapping[str, ReadingSums] = field(default_factory=dict)
    reasons_known: int = 0  # number of samples that tell whether the clock was lowered
    throttled: int = 0  # number of samples with a lowered clock
    # the same by reason, for reasons that occurred. There may be several at once.
    reasons: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # time between consecutive samples with energy, without what was left out
    joules: float | None = None  # energy of the board in that time; None if unknown

    @classmethod
    def of(cls, sample: GpuSample, previous: GpuSample | None = None, *, counted: bool = True) -> "GpuUsage":
        """One sample, with the energy used since the previous one."""
        values = ((name, getattr(sample, name)) for name in SENSORS)
        seconds, joules = 0.0, None
        if previous is not None and previous.energy_j is not None and sample.energy_j is not None:
            used = sample.energy_j - previous.energy_j
            if used >= 0:  # the meter restarts when the driver is reloaded
                seconds, joules = (sample.at_ns - previous.at_ns) / 1e9, used
        return cls(
            first_ns=sample.at_ns,
            last_ns=sample.at_ns,
            samples=1,
            counted=int(counted),
            readings={name: ReadingSums(1, value, value, value) for name, value in values if value is not None},
            reasons_known=int(sample.throttles is not None),
            throttled=int(bool(sample.throttles)),
            reasons=dict.fromkeys(sample.throttles or (), 1),
            seconds=seconds,
            joules=joules,
        )

    def plus(self, later: "GpuUsage") -> "GpuUsage":
        """These samples and later ones."""
        readings = dict(self.readings)
        for name, sums in later.readings.items():
            readings[name] = readings[name].plus(sums) if name in readings else sums
        known = [joules for joules in (self.joules, later.joules) if joules is not None]
        return replace(
            later,
            first_ns=self.first_ns if self.samples else later.first_ns,
            samples=self.samples + later.samples,
            counted=self.counted + later.counted,
            readings=readings,
            reasons_known=self.reasons_known + later.reasons_known,
            throttled=self.throttled + later.throttled,
            reasons=Counter(self.reasons) + Counter(later.reasons),
            seconds=self.seconds + later.seconds,
            joules=sum(known) if known else None,
        )

    @property
    def mean(self) -> dict[str, float]:
        """Mean of each reading, over the samples that have it."""
        return {name: sums.mean for name, sums in self.readings.items()}

    @property
    def peak(self) -> dict[str, float]:
        """Highest value of each reading."""
        return {name: sums.high for name, sums in self.readings.items()}

    @property
    def throttled_pct(self) -> float | None:
        """Share of the samples with a lowered clock; None if unknown."""
        return 100 * self.throttled / self.reasons_known if self.reasons_known else None

    @property
    def throttled_by_pct(self) -> dict[str, float]:
        """The same by reason."""
        return {reason: 100 * count / self.reasons_known for reason, count in self.reasons.items()}

    @property
    def watts(self) -> float | None:
        """Mean power of the board by its energy meter; None if unknown."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


class UsageCurve:
    """Keeps a run of any length in at most `MAX_POINTS` points of equally many samples; the last may have fewer."""

    def __init__(self) -> None:
        self._points: list[GpuUsage] = []
        self._samples_per_point = 1

    def add(self, sample: GpuUsage) -> None:
        """Add a sample, in order of time."""
        points = self._points
        if points and points[-1].samples < self._samples_per_point:
            points[-1] = points[-1].plus(sample)
            return
        if len(points) == MAX_POINTS:
            points[:] = [early.plus(late) for early, late in zip(points[::2], points[1::2], strict=True)]
            self._samples_per_point *= 2
        points.append(sample)

    def leave_out(self) -> None:
        """Mark all samples so far as not counted."""
        self._points = [replace(point, counted=0) for point in self._points]

    def points(self) -> tuple[GpuUsage, ...]:
        """The points so far, in order of time."""
        return tuple(self._points)


class EnergyMeter:
    """Adds up a board's energy over all samples, counted or not."""

    def __init__(self) -> None:
        self.joules: float | None = None  # None if unknown
        self._latest_j: float | None = None

    def add(self, energy_j: float | None) -> None:
        """Add the meter's reading, if there is one. The meter may restart."""
        if energy_j is None:
            return
        if self._latest_j is not None:
            self.joules = (self.joules or 0.0) + max(energy_j - self._latest_j, 0.0)
        self._latest_j = energy_j


class TelemetrySampler:
    """Samples a GPU's sensors in a background thread, which never raises.

    NVML is loaded in that thread too: neither the driver nor the sensors delay the caller.
    """

    def __init__(
        self,
        open_reader: Callable[[], GpuReader],
        *,
        period_s: float = DEFAULT_PERIOD_S,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.device: GpuReader | None = None  # the device, once the thread has found it
        self.problem = ""  # why there is no telemetry; empty if there is
        self.latest: Mapping[str, float] = {}  # the latest reading of each sensor, counted or not
        self.energy = EnergyMeter()
        self._open_reader = open_reader
        self._period_s = period_s
        self._clock_ns = clock_ns
        self._interval, self._run, self._curve = GpuUsage(), GpuUsage(), UsageCurve()
        self._previous: GpuSample | None = None
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
            self.device = self._open_reader()
        except LookupError as exc:
            self.problem = str(exc)
        except Exception as exc:
            self.problem = f"{type(exc).__name__}: {exc}"
            _log.debug("", exc_info=exc)
        if self.problem:
            _log.info("No GPU telemetry: %s.", self.problem)
        return self.device is not None

    def sample(self) -> bool:
        """Take one sample, in the thread. False if that fails."""
        if self.device is None:
            return False
        try:
            sample = self.device.read(self._clock_ns())
        except Exception as exc:
            self.problem = f"{type(exc).__name__}: {exc}"
            _log.warning("GPU telemetry ends: %s.", self.problem)
            _log.debug("", exc_info=exc)
            return False
        with self._lock:
            usage = GpuUsage.of(sample, self._previous, counted=self._counting)
            self._curve.add(usage)
            self.latest = usage.mean
            self.energy.add(sample.energy_j)
            if self._counting:
                self._previous = sample
                self._interval, self._run = self._interval.plus(usage), self._run.plus(usage)
        return True

    def close(self) -> None:
        """Shut NVML down, in the thread."""
        if self.device is not None:
            try:
                self.device.nvml.nvmlShutdown()
            except Exception as exc:
                _log.debug("", exc_info=exc)

    def pause(self) -> None:
        """Leave out the samples from here on, and the energy up to the next one that counts."""
        with self._lock:
            self._counting, self._previous = False, None

    def resume(self) -> None:
        """Count samples again."""
        self._counting = True

    def take(self) -> GpuUsage:
        """Usage over the samples since the last call. There may be none."""
        with self._lock:  # energy continues from the last sample: no time is missing between two intervals
            usage, self._interval = self._interval, GpuUsage()
        return usage

    def run(self) -> GpuUsage:
        """Usage over all samples that count, or those since `restart`."""
        return self._run

    def restart(self) -> None:
        """Leave out the samples so far, as those of the warm-up. The curve keeps them, marked as not counted."""
        with self._lock:
            self._interval = self._run = GpuUsage()
            self._curve.leave_out()

    def curve(self) -> tuple[GpuUsage, ...]:
        """The whole run, in a bounded number of points."""
        with self._lock:
            return self._curve.points()

    def _sample_until_stopped(self) -> None:
        if not self.open():
            return
        try:
            while self.sample() and not self._ended.wait(self._period_s):
                pass
        finally:
            self.close()
