"""Rates over steps: samples, tokens and steps per second, milliseconds per region. Pure arithmetic on step times."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

from lightning_forge_profiling.timing.steps import EXCLUDED, PARTITION, StepTimes

__all__ = ["MEDIAN_OVER", "Rates", "RunLedger", "RunSummary", "Spread", "StepWork"]

LeftOut = Literal["warm-up", "recorded"]

MEDIAN_OVER: Final = 4096
"""The median of the steps' times is over so many of the latest, which is what is kept of them."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step worked through on this rank.

    Attributes:
        samples: samples in the batch; None where no batch size could be found.
        tokens: tokens in the batch; None where nobody counts them.
        optimizer_steps: 1 when the weights changed in this step, else 0.
        flops: floating-point operations that the batch asks for; None where nobody counts them.
    """

    samples: float | None = None
    tokens: float | None = None
    optimizer_steps: int = 0
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Sums over some steps of one rank, and the rates that follow from them.

    Attributes:
        steps: how many steps.
        optimizer_steps: in how many of them the weights changed.
        samples: their samples; None where a batch size was not found.
        tokens: their tokens; None where nobody counts them.
        device_ms: device time by region (host time where there is no GPU), the user's regions included.
        host_ms: host time by region.
        flops: their floating-point operations; None where nobody counts them.
        regions: the built-in regions that are told apart; the others' time is in `other`.
    """

    steps: int = 0
    optimizer_steps: int = 0
    samples: float | None = 0.0
    tokens: float | None = 0.0
    device_ms: Mapping[str, float] = field(default_factory=dict)
    host_ms: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = 0.0
    regions: tuple[str, ...] = PARTITION

    @property
    def total_ms(self) -> float:
        """Device time of the steps: the sum of the built-in regions."""
        return sum(self.device_ms.get(region, 0.0) for region in PARTITION)

    def mean_ms(self, region: str) -> float:
        """Mean device milliseconds of a region per step; `"step"` is the whole step."""
        total = self.total_ms if region == "step" else self.device_ms.get(region, 0.0)
        return total / self.steps if self.steps else 0.0

    def mean_host_ms(self, region: str) -> float:
        """Mean host milliseconds of a region per step; `"step"` is the whole step."""
        if not self.steps:
            return 0.0
        if region == "step":
            return sum(self.host_ms.get(name, 0.0) for name in PARTITION) / self.steps
        return self.host_ms.get(region, 0.0) / self.steps

    @property
    def user_regions(self) -> tuple[str, ...]:
        """The user's own regions, in order of first appearance."""
        return tuple(name for name in self.device_ms if name not in PARTITION and name not in EXCLUDED)

    def per_second(self, amount: float | None) -> float | None:
        """`amount` over the steps' device time; None where it is unknown or no time passed."""
        total_ms = self.total_ms
        return None if amount is None or total_ms <= 0 else amount / total_ms * 1e3

    def since(self, earlier: "Rates") -> "Rates":
        """The steps that have come to these sums since they were `earlier`.

        Example:
            >>> Rates(steps=5, samples=40.0, tokens=None).since(Rates(steps=3, samples=24.0, tokens=None)).samples
            16.0
        """

        def less(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
            return {region: ms - then.get(region, 0.0) for region, ms in now.items()}

        return Rates(
            self.steps - earlier.steps,
            self.optimizer_steps - earlier.optimizer_steps,
            None if self.samples is None or earlier.samples is None else self.samples - earlier.samples,
            None if self.tokens is None or earlier.tokens is None else self.tokens - earlier.tokens,
            less(self.device_ms, earlier.device_ms),
            less(self.host_ms, earlier.host_ms),
            None if self.flops is None or earlier.flops is None else self.flops - earlier.flops,
            self.regions,
        )

    def metrics(
        self,
        *,
        replicas: int = 1,
        on_device: bool = False,
        devices_per_batch: int = 1,
        peak_flops: float | None = None,
    ) -> dict[str, float]:
        """The rates as loggers take them.

        Args:
            replicas: data-parallel replicas; samples and tokens of this rank are multiplied by it.
            on_device: whether times are device times; host times are then given beside them.
            devices_per_batch: how many devices share a batch, as tensor-parallel ones do, and so its operations.
            peak_flops: operations a second that a device could do; None where that is unknown.

        Returns:
            `throughput/...` per second, `time/NAME_ms` and `time_host/NAME_ms` in milliseconds per step. A rate that
            is unknown is left out. With FLOPs `throughput/tflops_per_device`, and with a peak too `throughput/mfu`,
            a fraction: model FLOPs utilization as in PaLM (Chowdhery et al. 2022, appendix B).

        Example:
            >>> rates = Rates(steps=2, samples=16.0, tokens=None, device_ms={"forward": 30.0, "backward": 50.0})
            >>> metrics = rates.metrics(replicas=4)
            >>> metrics["throughput/samples_per_sec"], metrics["throughput/device/samples_per_sec"]
            (800.0, 200.0)
            >>> metrics["time/step_ms"], metrics["time/forward_ms"]
            (40.0, 15.0)
        """
        metrics: dict[str, float] = {}
        own = {
            "samples": self.per_second(self.samples),
            "tokens": self.per_second(self.tokens),
            "steps": self.per_second(self.steps),
            "optimizer_steps": self.per_second(self.optimizer_steps),
        }
        for name, rate in own.items():
            if rate is not None:
                # every replica works on its own samples; the steps are the same steps
                metrics[f"throughput/{name}_per_sec"] = rate * (replicas if name in {"samples", "tokens"} else 1)
                metrics[f"throughput/device/{name}_per_sec"] = rate
        flops_per_second = self.per_second(self.flops)
        if flops_per_second is not None:
            metrics["throughput/tflops_per_device"] = flops_per_second / devices_per_batch / 1e12
            if peak_flops is not None:
                metrics["throughput/mfu"] = flops_per_second / devices_per_batch / peak_flops
        for region in ("step", *self.regions, *self.user_regions):
            metrics[f"time/{region}_ms"] = self.mean_ms(region)
            if on_device:
                metrics[f"time_host/{region}_ms"] = self.mean_host_ms(region)
        return metrics


@dataclass(frozen=True, slots=True)
class Spread:
    """How the device times of steps differ, in milliseconds; all 0 where there is no step.

    Attributes:
        p50: the median of the latest `MEDIAN_OVER`.
        min: the shortest of all.
        max: the longest of all.
    """

    p50: float = 0.0
    min: float = 0.0
    max: float = 0.0


class _Sums:
    """Rates and spread under way."""

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.regions = regions
        self.latest_ms: deque[float] = deque(maxlen=MEDIAN_OVER)
        self.shortest_ms, self.longest_ms = float("inf"), 0.0
        self.caught_up: int | None = None
        self.steps = 0
        self.optimizer_steps = 0
        self.samples: float | None = 0.0
        self.tokens: float | None = 0.0
        self.flops: float | None = 0.0
        self.device_ms: dict[str, float] = {}
        self.host_ms: dict[str, float] = {}

    def add(self, times: StepTimes, work: StepWork, caught_up: bool | None) -> None:
        step_ms = times.step_ms
        self.latest_ms.append(step_ms)
        self.shortest_ms = min(self.shortest_ms, step_ms)
        self.longest_ms = max(self.longest_ms, step_ms)
        if caught_up is not None:
            self.caught_up = (self.caught_up or 0) + caught_up
        self.steps += 1
        self.optimizer_steps += work.optimizer_steps
        self.samples = None if self.samples is None or work.samples is None else self.samples + work.samples
        self.tokens = None if self.tokens is None or work.tokens is None else self.tokens + work.tokens
        self.flops = None if self.flops is None or work.flops is None else self.flops + work.flops
        for sums, added in ((self.device_ms, times.device_ms), (self.host_ms, times.host_ms)):
            for region, ms in added.items():
                sums[region] = sums.get(region, 0.0) + ms

    def read(self) -> Rates:
        return Rates(
            self.steps,
            self.optimizer_steps,
            self.samples,
            self.tokens,
            dict(self.device_ms),
            dict(self.host_ms),
            self.flops,
            self.regions,
        )

    def spread(self) -> Spread:
        return Spread(median(self.latest_ms), self.shortest_ms, self.longest_ms) if self.latest_ms else Spread()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Where a whole run's time went on this rank.

    Attributes:
        steps: training batches of this fit.
        steady: the steps that count; where the run had nothing but warm-up steps, those without the very first; where
            it had but one step, that.
        only_warmup: whether that was so.
        step_ms: how the times of those steps differ.
        caught_up_steps: in how many of them the GPU was done with all but the optimizer's update when the host finished
            the batch: it had nothing queued and waited for the host. None where nobody can tell.
        warmup_steps: how many were left out as warm-up.
        recorded_steps: how many were left out because the profiler ran.
        untimed_steps: how many had to be left out because something in them could not be timed.
        excluded_ms: time between batches that is no part of a step, by `validation`, `checkpoint`, `profiler`.
        samples: samples of all steps, None where a batch size was not found.
        first_step_s: from the start of fit to the end of its first step, None when there was none.
        wall_s: from the start of fit to its end.
        recorded_tokens: tokens of each step that was left out because the profiler ran, where they are counted.
    """

    steps: int
    steady: Rates
    only_warmup: bool
    step_ms: Spread
    caught_up_steps: int | None
    warmup_steps: int
    recorded_steps: int
    untimed_steps: int
    excluded_ms: Mapping[str, float]
    samples: float | None
    first_step_s: float | None
    wall_s: float
    recorded_tokens: Mapping[int, float] = field(default_factory=dict)


class RunLedger:
    """Keep the books of a run: which steps count, which are left out and why.

    Args:
        regions: the built-in regions that are told apart.
    """

    def __init__(self, regions: tuple[str, ...] = PARTITION) -> None:
        self._steady = _Sums(regions)
        self._warmup = _Sums(regions)
        self._first = _Sums(regions)
        self._left_out: dict[str, int] = {"warm-up": 0, "recorded": 0}
        self._excluded_ms = dict.fromkeys(EXCLUDED, 0.0)
        self._samples: float | None = 0.0
        self._first_step_s: float | None = None
        self._recorded_tokens: dict[int, float] = {}

    def add(self, times: StepTimes, work: StepWork, left_out: LeftOut | None, caught_up: bool | None = None) -> None:
        """Enter one step.

        Args:
            times: its times.
            work: what it worked through.
            left_out: why it does not count, if so.
            caught_up: whether the GPU had caught up with the host at its end; None where nobody can tell.
        """
        self._samples = None if self._samples is None or work.samples is None else self._samples + work.samples
        self.add_excluded(times)
        if times.step == 0:
            self._first_step_s = sum(times.device_ms.get(name, 0.0) for name in (*PARTITION, *EXCLUDED)) / 1e3
        if left_out is None:
            self._steady.add(times, work, caught_up)
            return
        self._left_out[left_out] += 1
        if left_out == "recorded" and work.tokens is not None:
            self._recorded_tokens[times.step] = work.tokens
        if left_out == "warm-up":
            (self._warmup if times.step else self._first).add(times, work, caught_up)

    def add_excluded(self, times: StepTimes) -> None:
        """Enter only what is no part of a step."""
        for name in EXCLUDED:
            if name in times.device_ms:
                self._excluded_ms[name] += times.device_ms[name]

    def steady(self) -> Rates:
        """Sums over the steps that count."""
        return self._steady.read()

    def summary(self, *, steps: int, before_first_s: float, wall_s: float) -> RunSummary:
        """Close the books.

        Args:
            steps: how many steps ended.
            before_first_s: seconds from the start of fit to the start of its first step.
            wall_s: seconds of the whole fit.
        """
        counted = self._steady.steps
        only_warmup = not counted
        warmup, recorded = self._left_out["warm-up"], self._left_out["recorded"]
        shown = next((sums for sums in (self._steady, self._warmup) if sums.steps), self._first)
        return RunSummary(
            steps=steps,
            steady=shown.read(),
            only_warmup=only_warmup,
            step_ms=shown.spread(),
            caught_up_steps=shown.caught_up,
            warmup_steps=warmup,
            recorded_steps=recorded,
            untimed_steps=max(steps - counted - warmup - recorded, 0),
            excluded_ms=dict(self._excluded_ms),
            samples=self._samples,
            first_step_s=None if self._first_step_s is None else before_first_s + self._first_step_s,
            wall_s=wall_s,
            recorded_tokens=dict(self._recorded_tokens),
        )
