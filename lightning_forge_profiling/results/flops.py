"""FLOPs and compute rates of a recorded window."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of matrix products, convolutions and attention, counted from the recorded input shapes.

    Attributes:
        per_step: floating-point operations per step; a multiply-add is two.
        model_per_step: those that the model requires: without recomputation by activation checkpointing and without
            the optimizer's products; None if compiled code hides which they are.
        counted_pct: share of the time of matmul, convolution and attention kernels whose operators were counted.
        matmul_tflops: counted operations over the time of the kernels they launched.
        busy_tflops: counted operations over the GPU's busy time.
        step_tflops: counted operations over the step time.
        dtype: data type of most of the FLOPs.
        peak_tflops: dense peak of the device for that dtype; None for a device that is not in the table.
        matmul_pct_of_peak: `matmul_tflops` in percent of the peak; None without a peak.
        busy_pct_of_peak: `busy_tflops` in percent of the peak; None without a peak.
        uncounted: operators that launch such kernels but whose FLOPs are unknown.
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
