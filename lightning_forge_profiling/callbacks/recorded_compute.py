"""How fast a run computed, by what its recorded steps carried out."""

from collections.abc import Sequence

from lightning_forge_profiling.analysis.rank_summary import RankSummary
from lightning_forge_profiling.timing.throughput import RunSummary
from lightning_forge_profiling.timing.utilization import Compute, Peak

__all__ = ["recorded_compute"]

_SAME_LENGTH = 0.005
_SAME_WORK = 0.001
_ALL_COUNTED_PCT = 99.0


def recorded_compute(
    run: RunSummary,
    rank: RankSummary,
    steps: Sequence[int],
    peak: Peak,
    *,
    peak_is_given: bool,
    model_is_counted: bool = False,
) -> tuple[Compute, ...]:
    """The operations of the recorded steps over the time of the steps that count.

    Recorded steps are slower than others and do not count themselves; what they compute is the same. Where the user
    counts tokens, operations are taken to be proportional to them.

    Args:
        run: the run's books.
        rank: what its trace says.
        steps: which steps the trace has.
        peak: what the run's rate is compared with.
        peak_is_given: whether the user said so. Otherwise it follows from the run's settings, and where the trace shows
            that the run computed in another type that type's peak is taken.
        model_is_counted: whether the operations that the model asks for are known from elsewhere.

    Returns:
        By what the model asks for (`mfu`) where the trace tells that and it is not known already, and by what the
        device carried out (`hfu`) where that is more or all that is known; nothing where the trace has no operations
        or no step counts.
    """
    flops, step_ms = rank.flops, run.steady.mean_ms("step")
    if flops is None or not step_ms:
        return ()
    notes, scale = [], 1.0
    tokens = [run.recorded_tokens.get(step, 0.0) for step in steps]
    if run.steady.tokens and tokens and all(tokens):
        mean, recorded = run.steady.tokens / run.steady.steps, sum(tokens) / len(tokens)
        if abs(mean / recorded - 1) > _SAME_LENGTH:
            scale = mean / recorded
            notes.append(f"scaled from the {recorded:,.0f} tokens of a recorded step to the mean {mean:,.0f}")
    if flops.counted_pct < _ALL_COUNTED_PCT:
        notes.append(f"of the products, {flops.counted_pct:.0f} % by time could be counted")
    if "attention" in rank.kinds:
        notes.append("attention counted in full, causal or not")
    # kernels' names do not always tell TF32 from fp32
    as_expected = flops.dtype == peak.dtype or (flops.dtype, peak.dtype) == ("fp32", "tf32")
    if not peak_is_given and not as_expected:
        rate = None if flops.peak_tflops is None else flops.peak_tflops * 1e12
        peak = Peak(rate, flops.dtype, rank.device, "the type by the recorded kernels")
    per_second, model, found = scale / step_ms * 1e3, flops.model_per_step, []
    if model is not None and not model_is_counted:
        note = "; ".join(["by the recorded shapes", *notes])
        found.append(Compute("mfu", model * per_second, peak, note))
    if model is None or model_is_counted or flops.per_step > (1 + _SAME_WORK) * model:
        found.append(Compute("hfu", flops.per_step * per_second, peak, "; ".join(notes)))
    return tuple(found)
