"""Compute rates of a device, and the peaks that they are relative to."""

from dataclasses import dataclass
from typing import Literal


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
