"""Rates over steps: samples, tokens and steps per second, milliseconds per region."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final, Literal, NamedTuple

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


def percentiles(times_ms: Sequence[float]) -> tuple[float, float | None]:
    """The median and 95th percentile of times, None for fewer than 20."""
    enough = len(times_ms) >= _FEWEST_FOR_P95
    return median(times_ms), quantiles(times_ms, n=20, method="inclusive")[-1] if enough else None


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
