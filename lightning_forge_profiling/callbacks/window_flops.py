"""Compute rates of a run from the FLOPs of its recorded steps, and what to do if they are unknown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from lightning_forge_profiling.callbacks.training import UNKNOWN, Training
from lightning_forge_profiling.flops.peaks import find_peak, power_may_tell
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.gpu.nvml import find_device, open_nvml
from lightning_forge_profiling.names import MFU_MEASURED
from lightning_forge_profiling.schema import Flops, RankSummary, RunSummary
from lightning_forge_profiling.timing.rates import Compute, Peak


def run_peak(training: Training, given: float | None, *, asks_power: bool = True) -> Peak:
    """The peak FLOP/s of this process's device, in the type that the run computes in."""
    device = training.facts.device
    dtype = training.dtype()
    if device.type != "cuda":
        source = "given" if given is not None else f"no peak known for {device.type}"
        return Peak(given, dtype, str(device), source)
    properties = torch.cuda.get_device_properties(device)
    if dtype == "fp32" and has_tf32(device) and fp32_runs_as_tf32(training.model):
        dtype = "tf32"
    if given is not None:
        return Peak(given, dtype, properties.name, "given")
    name, memory, sms = torch.cuda.get_device_name(device), properties.total_memory, properties.multi_processor_count
    known = find_peak(name, memory_bytes=memory, sms=sms)
    if known is None and asks_power and power_may_tell(name, memory_bytes=memory, sms=sms):
        known = find_peak(name, memory_bytes=memory, sms=sms, power_w=_power_limit_w(device, str(properties.uuid)))
    if known is None:
        return Peak(None, dtype, properties.name, f"{properties.name} is not in the peak table")
    if dtype not in known.flops:
        return Peak(None, dtype, known.device, no_rate_for(dtype, known.device), in_table=True)
    return Peak(known.flops[dtype], dtype, known.device, known.source_of(dtype), in_table=True)


def no_rate_for(dtype: str, device: str) -> str:
    """Why there is no peak for a device of the table: the table lacks the type, or that is unknown."""
    if dtype == UNKNOWN:
        return "without a Trainer the type that the loop computes in is unknown"
    return f"the peak table has no {dtype} rate for {device}"


def _power_limit_w(device: torch.device, uuid: str) -> float | None:
    try:
        nvml = open_nvml()
    except LookupError:
        return None
    try:
        board = find_device(nvml, uuid, device.index or 0).board
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(board)) / 1e3
    except (LookupError, nvml.NVMLError):
        return None
    finally:
        nvml.nvmlShutdown()


_GIVE_PEAK: Final = (
    "give the device's dense {0} rate in operations a second, ThroughputCallback(peak_flops=989e12), or what it "
    'reaches now, measured_peak=measure_peak("{0}")'
)


def give_peak(dtype: str) -> str:
    """What to do about the unknown peak of a type."""
    return _GIVE_PEAK.format("bf16" if dtype == UNKNOWN else dtype)


GIVE_FLOPS: Final = (
    "FLOPs per batch are unknown: pass flops_per_batch=count_flops(module, batch).total, or let ForgeProfilerCallback "
    "record a window on a GPU"
)

_SAME_LENGTH: Final = 0.005
_SAME_WORK: Final = 0.001
# what is missing from a share may be as much again as this leaves, which is what runs differ by
_ENOUGH_COUNTED_PCT: Final = 95.0
_ALL_COUNTED_PCT: Final = 99.0
_NAMED: Final = 3


def recorded_compute(
    run: RunSummary,
    rank: RankSummary,
    steps: Sequence[int],
    peak: Peak,
    *,
    peak_is_given: bool,
    reached: Callable[[Peak], float | None] = lambda _peak: None,
    model_is_counted: bool = False,
) -> tuple[Compute, ...]:
    """FLOPs of the recorded steps over the time of the steady steps, as recording slows steps; scaled with tokens."""
    flops, step_ms = rank.flops, run.steady.mean_ms("step")
    if flops is None or not step_ms:
        return ()
    scale, note = _scale(run, steps)
    notes = [note] if note else []
    if flops.counted_pct < _ALL_COUNTED_PCT:
        notes.append(f"of the products, {flops.counted_pct:.0f} % by time could be counted")
    if "attention" in rank.kinds:
        notes.append("attention counted in full, causal or not")
    if not peak_is_given:
        peak = _as_recorded(peak, flops, rank.device)
    measured = reached(peak)
    partial = flops.counted_pct < _ENOUGH_COUNTED_PCT
    if partial:
        peak, measured = replace(peak, flops=None, source="the FLOPs of too few operators are known"), None
    per_second, model, rates = scale / step_ms * 1e3, flops.model_per_step, list[Compute]()
    if model is not None and not model_is_counted:
        note = "; ".join(["by the recorded shapes", *notes])
        rates.append(Compute("mfu", model * per_second, peak, note, measured, partial))
    if model is None or model_is_counted or flops.per_step > (1 + _SAME_WORK) * model:
        rates.append(Compute("hfu", flops.per_step * per_second, peak, "; ".join(notes), measured, partial))
    if flops.uncounted:  # named once
        rates[0] = _noted(rates[0], _without(flops.uncounted))
    return tuple(rates)


def recorded_metrics(rates: Sequence[Compute]) -> dict[str, float]:
    """A window's rates as metrics, without those of which a part could not be counted."""
    metrics: dict[str, float] = {}
    for each in rates:
        if each.flops_per_second is None or each.partial:
            continue
        is_model = each.kind == "mfu"
        name = "tflops_per_device" if is_model else "hardware_tflops_per_device"
        metrics[f"throughput/{name}"] = each.flops_per_second / 1e12
        if each.share is not None:
            metrics[f"throughput/{each.kind}"] = each.share
        if is_model and each.share_of_reached is not None:
            metrics[MFU_MEASURED] = each.share_of_reached
    return metrics


def with_problem(rates: Sequence[Compute], peak: Peak, problem: str) -> tuple[Compute, ...]:
    """Add why the FLOPs of the batches are unknown: in the note of a rate, or in place of one if there is none."""
    if not problem:
        return tuple(rates)
    if not rates:
        return (Compute("mfu", None, replace(peak, flops=None, source=problem)),)
    return (_noted(rates[0], problem), *rates[1:])


def with_advice(rates: Sequence[Compute]) -> tuple[Compute, ...]:
    """Add once which argument to pass, if the device's peak is unknown."""
    for row, each in enumerate(rates):
        lacks_peak = each.peak.flops is None and each.reached is None and each.flops_per_second
        if lacks_peak and not each.partial:
            return (*rates[:row], _noted(each, give_peak(each.peak.dtype)), *rates[row + 1 :])
    return tuple(rates)


def _scale(run: RunSummary, steps: Sequence[int]) -> tuple[float, str]:
    """The tokens of the mean step relative to a recorded one, and a note on it."""
    tokens = [run.recorded_tokens.get(step, 0.0) for step in steps]
    if not run.steady.tokens or not tokens or not all(tokens):
        return 1.0, ""
    mean, recorded = run.steady.tokens / run.steady.steps, sum(tokens) / len(tokens)
    if abs(mean / recorded - 1) <= _SAME_LENGTH:
        return 1.0, ""
    return mean / recorded, f"scaled from the {recorded:,.0f} tokens of a recorded step to the mean {mean:,.0f}"


def _as_recorded(peak: Peak, flops: Flops, device: str) -> Peak:
    """The peak of the type that the recorded kernels computed in, where that is another than was expected."""
    # kernels' names do not always tell TF32 from fp32
    if flops.dtype == peak.dtype or (flops.dtype, peak.dtype) == ("fp32", "tf32"):
        return peak
    if flops.peak_tflops is not None:
        return Peak(flops.peak_tflops * 1e12, flops.dtype, device, "dtype from the recorded kernels")
    source = no_rate_for(flops.dtype, peak.device) if peak.in_table else peak.source
    return replace(peak, flops=None, dtype=flops.dtype, source=source)


def _without(operators: Sequence[str]) -> str:
    named = ", ".join(operators[:_NAMED])
    return f"not counted: {named}" + (f" and {len(operators) - _NAMED} more" if len(operators) > _NAMED else "")


def _noted(compute: Compute, note: str) -> Compute:
    return replace(compute, note="; ".join(filter(None, [compute.note, note])))
