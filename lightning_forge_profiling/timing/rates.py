"""Rates over steps: samples, tokens and steps per second, milliseconds per region."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Final, Literal, NamedTuple

from lightning_forge_profiling.names import MFU, REGIONS, TFLOPS, WAIT_PREFIX, hook_region, per_second, region_ms
from lightning_forge_profiling.timing.steps import RESERVED, WHOLE

_FEWEST_FOR_P95: Final = 20  # one step in twenty lies above the 95th percentile


class StepWork(NamedTuple):  # made each step, in a fifth of a frozen dataclass's time, as StepTiming is
    """Samples, tokens and FLOPs of one step on this rank."""

    samples: float | None = None  # in the batch; None if unknown
    tokens: float | None = None  # None if not counted
    optimizer_steps: int = 0  # 1 if the weights changed in this step, else 0
    flops: float | None = None  # of the batch; None if unknown
    ends_cycle: bool = True  # the last of an accumulation cycle, as every step is without accumulation


class StepTiming(NamedTuple):
    """How one step was timed."""

    # whether the GPU had finished all but the optimizer's update when the host ended the step; None if unknown
    gpu_starved: bool | None = None
    # whether its regions were timed by choice, so that it can represent steps that were not split; False where it had
    # to be split, as the first step after a validation run
    chosen: bool = True
    timing_us: float = 0.0  # host time in microseconds that timing it took
    before_fetch_ms: float = 0.0  # host time from its beginning to its fetch, if its regions were timed
    saw_all: bool = True  # whether all of its boundaries were announced; otherwise only the whole step is valid
    ended_ns: int = 0  # when it ended, by the host's clock; 0 if unknown


@dataclass(frozen=True, slots=True)
class Rates:
    """Sums over some steps of one rank, and the rates that follow from them.

    Attributes:
        steps: how many steps.
        optimizer_steps: in how many of them the weights changed.
        samples: their samples; None if unknown.
        tokens: their tokens; None if not counted.
        device_ms: device time by region (host time where there is no GPU), the user's regions included. Where the
            regions were timed in some of the steps only, it is estimated from those, and sums to the time of all steps.
        host_ms: host time by region, likewise.
        flops: their floating-point operations; None if unknown.
        regions: the built-in regions that are timed; the others' time is in `other`.
        split_steps: in how many of the steps the regions were timed.
        timing_us: host time in microseconds that timing took inside the steps.
        log_entries_us: host time in microseconds that log entries and the record took between the steps.
        before_fetch_ms: in the split steps, host time from a step's beginning to its fetch, which is in `other`. In a
            run of several processes Lightning synchronizes them there.
        atypical: whether the regions of most steps are estimated from steps unlike them, because there are no others.
        unknown_ms: what long steps take more than the others, if none of them had its regions timed; in `other`.
        unknown_steps: how many those are.
        loader_starts: in how many of the steps the loop created a new iterator of its loader.
        loader_start_ms: device time of that, of the wait for its first batch, and of the ends of iterators of unknown
            length, which is in `data`.
        loader_start_host_ms: host time of the same.
    """

    steps: int = 0
    optimizer_steps: int = 0
    samples: float | None = 0.0
    tokens: float | None = 0.0
    device_ms: Mapping[str, float] = field(default_factory=dict)
    host_ms: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = 0.0
    regions: tuple[str, ...] = REGIONS
    split_steps: int = 0
    timing_us: float = 0.0
    log_entries_us: float = 0.0
    before_fetch_ms: float = 0.0
    atypical: bool = False
    unknown_ms: float = 0.0
    unknown_steps: int = 0
    loader_starts: int = 0
    loader_start_ms: float = 0.0
    loader_start_host_ms: float = 0.0

    @property
    def overhead_us(self) -> float:
        """Host time in microseconds per step that this package took."""
        return (self.timing_us + self.log_entries_us) / self.steps if self.steps else 0.0

    @property
    def total_ms(self) -> float:
        """Device time of the steps: the sum of the built-in regions."""
        return step_ms(self.device_ms)

    def mean_ms(self, region: str) -> float:
        """Mean device milliseconds of a region per step; `"step"` is the whole step."""
        total = self.total_ms if region == "step" else self.device_ms.get(region, 0.0)
        return total / self.steps if self.steps else 0.0

    def mean_host_ms(self, region: str) -> float:
        """Mean host milliseconds of a region per step; `"step"` is the whole step."""
        total = step_ms(self.host_ms) if region == "step" else self.host_ms.get(region, 0.0)
        return total / self.steps if self.steps else 0.0

    @property
    def user_regions(self) -> tuple[str, ...]:
        """The user's own regions, in order of first appearance."""
        return tuple(name for name in self.device_ms if name not in RESERVED and not name.startswith(WAIT_PREFIX))

    @property
    def waits_ms(self) -> dict[str, float]:
        """Device time per step in which the rank waits for others and for what they exchange, by leaf."""
        waits = (name for name in self.device_ms if name.startswith(WAIT_PREFIX))
        return {
            # hooks are timed by the host
            (leaf := name.removeprefix(WAIT_PREFIX)): self.mean_host_ms(name)
            if hook_region(leaf)
            else self.mean_ms(name)
            for name in waits
        }

    def per_second(self, amount: float | None) -> float | None:
        """`amount` per second of the steps' device time; None if unknown, or if no time passed."""
        total_ms = self.total_ms
        return None if amount is None or total_ms <= 0 else amount / total_ms * 1e3

    def metrics(
        self, *, replicas: int = 1, on_device: bool = False, devices_per_batch: int = 1, peak_flops: float | None = None
    ) -> dict[str, float]:
        """The rates as metrics."""
        metrics: dict[str, float] = {}
        for name in ("samples", "tokens", "steps", "optimizer_steps"):
            rate = self.per_second(getattr(self, name))
            if rate is not None:
                # every replica works on its own samples; the steps are the same steps
                of_device = name in {"samples", "tokens"}
                metrics[per_second(name)] = rate * (replicas if of_device else 1)
                if of_device and replicas * devices_per_batch > 1:
                    metrics[per_second(name, device=True)] = rate
        flops_per_second = self.per_second(self.flops)
        if flops_per_second is not None:
            metrics[TFLOPS] = flops_per_second / devices_per_batch / 1e12
            if peak_flops is not None:
                metrics[MFU] = flops_per_second / devices_per_batch / peak_flops
        known = self.split_steps and not self.atypical
        for region in ("step", *((*self.regions, *self.user_regions) if known else ())):
            metrics[region_ms(region)] = self.mean_ms(region)
            if on_device:
                metrics[f"time_host/{region}_ms"] = self.mean_host_ms(region)
        if self.steps:
            metrics["profiling/overhead_us"] = self.overhead_us
        return metrics


@dataclass(frozen=True, slots=True)
class LoopRates:
    """Sums over runs of a loop without training on this rank, by the host's clock, and the rates that follow.

    The first batch of each loader in a run does not count: workers start, and libraries are loaded.

    Attributes:
        loop: `validation`, `test` or `predict`.
        runs: how many runs.
        steps: how many batches count.
        seconds: wall time from the end of each loader's first batch to that of its last, or to the end of the run,
            hooks and metrics included.
        samples: samples of the batches that count; None if unknown.
        tokens: their tokens; None if not counted.
        replicas: data-parallel replicas, each with samples of its own.
    """

    loop: str
    runs: int = 0
    steps: int = 0
    seconds: float = 0.0
    samples: float | None = 0.0
    tokens: float | None = 0.0
    replicas: int = 1

    def plus(self, other: "LoopRates") -> "LoopRates":
        """The sums over the runs of both."""
        return replace(
            other,
            runs=self.runs + other.runs,
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            samples=None if self.samples is None or other.samples is None else self.samples + other.samples,
            tokens=None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def per_second(self) -> dict[str, float]:
        """Samples, tokens and steps per second of the whole job, as far as they are known."""
        if not self.steps or self.seconds <= 0:
            return {}
        amounts = {"samples": self.samples, "tokens": self.tokens}
        rates = {unit: amount * self.replicas / self.seconds for unit, amount in amounts.items() if amount is not None}
        return {**rates, "steps": self.steps / self.seconds}

    def metrics(self) -> dict[str, float]:
        """The rates as metrics: `throughput/LOOP/NAME_per_sec`."""
        return {per_second(unit, loop=self.loop): rate for unit, rate in self.per_second().items()}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The median and 95th percentile of some times, in milliseconds.

    Attributes:
        p50: the median; 0 without any time.
        p95: the 95th percentile, interpolated between neighbours; None for fewer than 20 times.
    """

    p50: float = 0.0
    p95: float | None = None


def percentiles(times_ms: Sequence[float]) -> Percentiles:
    """The median and 95th percentile of times."""
    if not times_ms:
        return Percentiles()
    enough = len(times_ms) >= _FEWEST_FOR_P95
    return Percentiles(median(times_ms), quantiles(times_ms, n=20, method="inclusive")[-1] if enough else None)


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of the steps' device times, in milliseconds; all 0 without a step.

    Attributes:
        p50: the median, of the latest 4096 if there are more.
        p95: the 95th percentile, of the same; None for fewer than 20 steps.
        min: the shortest of all.
        max: the longest of all.
        typical_mean_ms: the mean, if each step took the median time of those like it: that change the weights, or that
            only accumulate gradients.
    """

    p50: float = 0.0
    p95: float | None = None
    min: float = 0.0
    max: float = 0.0
    typical_mean_ms: float = 0.0


def step_ms(by_region: Mapping[str, float]) -> float:
    """The time of the step: the sum of the built-in regions, or the whole if they were not timed."""
    return sum(by_region.get(region, 0.0) for region in (*REGIONS, WHOLE))


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak that a device's rate is relative to.

    Attributes:
        flops: FLOP/s; None if unknown.
        dtype: the type that the peak is for: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`.
        device: the device, in words.
        source: where the peak is from, or why there is none.
        in_table: whether the table of peaks has the device, if only for another type.
    """

    flops: float | None
    dtype: str
    device: str
    source: str
    in_table: bool = False

    def __str__(self) -> str:
        if self.flops is None:
            return f"unknown: {self.source}"
        return f"{self.flops / 1e12:,.4g} TFLOP/s ({self.device}, {self.dtype}; {self.source})"


@dataclass(frozen=True, slots=True)
class Compute:
    """A device's compute rate over the steady steps of a run.

    Attributes:
        kind: `mfu` for the operations that the model needs, `hfu` for those that the device carried out, recomputation
            included (Korthikanti et al. 2022, section 6.1).
        flops_per_second: of one device; None if unknown, for the reason in the peak's source.
        peak: the device's peak.
        note: a remark on the count, "" for none.
        reached: FLOP/s of matrix products as measured on the device; None if not measured.
        partial: whether much of what the device computed could not be counted, so that the rate is no share of a peak.
    """

    kind: Literal["mfu", "hfu"]
    flops_per_second: float | None
    peak: Peak
    note: str = ""
    reached: float | None = None
    partial: bool = False

    @property
    def share(self) -> float | None:
        """The rate as a fraction of the peak; None without one."""
        return _ratio(self.flops_per_second, self.peak.flops)

    @property
    def share_of_reached(self) -> float | None:
        """The rate as a fraction of the measured peak; None if not measured."""
        return _ratio(self.flops_per_second, self.reached)


def _ratio(rate: float | None, of: float | None) -> float | None:
    return None if rate is None or of is None else rate / of
