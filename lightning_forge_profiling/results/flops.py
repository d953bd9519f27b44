"""What a recorded window says of arithmetic."""

from dataclasses import dataclass

__all__ = ["Flops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Arithmetic of matrix products, convolutions and attention, from the recorded input shapes.

    Attributes:
        per_step: floating-point operations a step; a multiply-add is two.
        model_per_step: those that the model asks for, without what activation checkpointing computes again and what the
            optimizer multiplies; None where compiled code does not tell.
        counted_pct: share of the matmul, convolution and attention kernels' time whose operators could be counted.
        matmul_tflops: those operations over the time of the kernels they launched.
        busy_tflops: over the busy time.
        step_tflops: over the step.
        dtype: what the counted operators mostly compute in, by FLOPs.
        peak_tflops: the device's dense peak for that dtype; None for a device that is not in the table.
        matmul_pct_of_peak: None without a peak.
        busy_pct_of_peak: None without a peak.
        uncounted: operators that launch such kernels and whose FLOPs are not known.
    """

    per_step: float
    model_per_step: float | None
    counted_pct: float
    matmul_tflops: float
    busy_tflops: float
    step_tflops: float
    dtype: str
    peak_tflops: float | None
    matmul_pct_of_peak: float | None
    busy_pct_of_peak: float | None
    uncounted: tuple[str, ...]

    @property
    def recomputed_pct(self) -> float:
        """Share of the operations that the model does not ask for: recomputed activations, the optimizer's own."""
        return 0.0 if self.model_per_step is None else 100 * (1 - self.model_per_step / self.per_step)
