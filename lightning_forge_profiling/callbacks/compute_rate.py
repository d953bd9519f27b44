"""How fast a fit computes: by the FLOPs of its batches and of its recorded steps, and of which peak that is a part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from msgspec import structs

from lightning_forge_profiling.callbacks.batches import WorkCounter
from lightning_forge_profiling.callbacks.fit_settings import ThroughputSettings
from lightning_forge_profiling.callbacks.training import UNKNOWN, Training
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.gpu.nvml import find_device, open_nvml
from lightning_forge_profiling.names import MFU, PEAK_TFLOPS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.schema import Flops, RankSummary, Rates, RunCompute, RunSummary, TraceReport

_log = plain_logger(__name__)


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


def compute_of(kind: Literal["mfu", "hfu"], flops_per_second: float | None, peak: Peak, note: str = "") -> RunCompute:
    """The rate of one device: MFU or HFU (Korthikanti et al. 2022, section 6.1).

    Args:
        kind: `mfu` for the operations that the model needs, `hfu` for those that the device carried out.
        flops_per_second: of one device; None if unknown, for the reason in the peak's source.
        peak: the device's peak.
        note: caveat of the FLOP count; "" for none.
    """
    return RunCompute(
        kind=kind,
        tflops=None if flops_per_second is None else flops_per_second / 1e12,
        dtype=peak.dtype,
        device=peak.device,
        peak_tflops=None if peak.flops is None else peak.flops / 1e12,
        peak_source=peak.source,
        pct_of_peak=None if flops_per_second is None or not peak.flops else 100 * flops_per_second / peak.flops,
        note=note,
    )


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
    known = find_peak(
        torch.cuda.get_device_name(device),
        memory_bytes=properties.total_memory,
        sms=properties.multi_processor_count,
        power_w=lambda: _power_limit_w(device, str(properties.uuid)) if asks_power else None,
    )
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
        return nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3
    except (LookupError, nvml.NVMLError):
        return None
    finally:
        nvml.nvmlShutdown()


def give_peak(dtype: str) -> str:
    """What to do about the unknown peak of a type."""
    known = "bf16" if dtype == UNKNOWN else dtype
    return f"give the device's dense {known} rate in operations a second, ThroughputCallback(peak_flops=989e12)"


GIVE_FLOPS: Final = (
    "FLOPs per batch are unknown: pass flops_per_batch=count_flops(module, batch).total, or let ForgeProfilerCallback "
    "record a window on a GPU"
)

_SAME_LENGTH: Final = 0.005
_SAME_WORK: Final = 0.001
# what is missing from a share may be as much again as this leaves, which is what runs differ by
_ENOUGH_COUNTED_PCT: Final = 95.0
_ALL_COUNTED_PCT: Final = 99.0
_PARTIAL: Final = "the FLOPs of too few operators are known"  # in place of a peak: the rate is no share of one
_NAMED: Final = 3


def recorded_compute(
    run: RunSummary,
    rank: RankSummary,
    steps: Sequence[int],
    peak: Peak,
    *,
    peak_is_given: bool,
    model_is_counted: bool = False,
) -> tuple[RunCompute, ...]:
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
    if flops.counted_pct < _ENOUGH_COUNTED_PCT:
        peak = replace(peak, flops=None, source=_PARTIAL)
    per_second, model, rates = scale / step_ms * 1e3, flops.model_per_step, list[RunCompute]()
    if model is not None and not model_is_counted:
        note = "; ".join(["by the recorded shapes", *notes])
        rates.append(compute_of("mfu", model * per_second, peak, note))
    if model is None or model_is_counted or flops.per_step > (1 + _SAME_WORK) * model:
        rates.append(compute_of("hfu", flops.per_step * per_second, peak, "; ".join(notes)))
    if flops.uncounted:  # named once
        rates[0] = _noted(rates[0], _without(flops.uncounted))
    return tuple(rates)


def recorded_metrics(rates: Sequence[RunCompute]) -> dict[str, float]:
    """A window's rates as metrics, without those of which a part could not be counted."""
    metrics: dict[str, float] = {}
    for each in rates:
        if each.tflops is None or each.peak_source == _PARTIAL:
            continue
        name = "tflops_per_device" if each.kind == "mfu" else "hardware_tflops_per_device"
        metrics[f"throughput/{name}"] = each.tflops
        if each.pct_of_peak is not None:
            metrics[f"throughput/{each.kind}"] = each.pct_of_peak / 100
    return metrics


class ComputeRate:
    """The compute rate of one fit, and the peak of its device, which is looked up once."""

    def __init__(self, training: Training, settings: ThroughputSettings, *, alone: bool) -> None:
        self._training, self._settings = training, settings
        self._alone = alone  # no recorded window counts operations
        self._counter: WorkCounter | None = None
        self._peak: Peak | None = None
        self._sought = self._logged = self._advised = False

    def begin(self, counter: WorkCounter) -> None:
        """Training begins: find what the rate is compared with, if there may be one."""
        self._counter = counter
        if self._may_count or self._compares:
            self._find_peak()

    @property
    def _counts(self) -> bool:
        """Whether the FLOPs per batch are given, by an argument or by the module."""
        return self._counter is not None and self._counter.counts_flops

    @property
    def _compares(self) -> bool:
        """Whether the user gave something to compare a rate with."""
        return self._settings.peak_flops is not None

    @property
    def _may_count(self) -> bool:
        """Whether operations are counted, or a recorded window may count them."""
        return self._counts or not self._alone

    def _find_peak(self) -> None:
        self._sought = True
        try:
            self._peak = peak = run_peak(self._training, self._settings.peak_flops, asks_power=self._may_count)
        except Exception as exc:
            _log.warning("No MFU: the device's peak could not be looked up: %s: %s", type(exc).__name__, exc)
            return
        if not self._training.facts.is_zero or not self._counts:
            return
        if peak.flops is not None:
            _log.info("MFU is of %s.", peak)
        elif peak.device != "cpu":
            self._advised = True
            _log.warning("No MFU: %s; %s.", peak.source, give_peak(peak.dtype))

    def metrics(self, rates: Rates, *, on_device: bool) -> dict[str, float]:
        """The metrics of the rates of some steps."""
        facts, peak = self._training.facts, self._peak
        return rates.metrics(
            replicas=facts.replicas,
            on_device=on_device,
            devices_per_batch=facts.devices_per_batch,
            peak_flops=None if peak is None else peak.flops,
        )

    def new_peak(self, metrics: dict[str, float]) -> dict[str, float]:
        """The peak as a metric, beside the first MFU."""
        if MFU not in metrics or self._logged or self._peak is None or not self._peak.flops:
            return {}
        self._logged = True
        return {PEAK_TFLOPS: self._peak.flops / 1e12}

    def look_again(self) -> None:
        """Find the peak if the module knows its FLOPs per batch only now, after its first step."""
        if self._counts and not self._sought:
            self._find_peak()

    def of_window(self, run: RunSummary, trace: TraceReport | None, rank: RankSummary | None) -> tuple[RunCompute, ...]:
        """How fast the run computed, by what its recorded steps carried out."""
        if self._peak is None or trace is None or rank is None:
            return ()
        return recorded_compute(
            run,
            rank,
            trace.steps,
            self._peak,
            peak_is_given=self._settings.peak_flops is not None,
            model_is_counted=self._of_batches(run) is not None,
        )

    def _of_batches(self, run: RunSummary) -> float | None:
        return run.steady.per_second(run.steady.flops) if self._counts else None

    def of_run(self, run: RunSummary, of_window: Sequence[RunCompute]) -> tuple[RunCompute, ...]:
        """How fast the run computed, by what its batches asked for too; or why that is unknown, and what to do."""
        peak, rate = self._peak, self._of_batches(run)
        if peak is None:
            return ()
        rates = list(of_window)
        if rate is not None:
            of_batches = rate / self._training.facts.devices_per_batch
            rates.insert(0, compute_of("mfu", of_batches, peak))
        problem = self._counter.flops_problem if self._counter is not None and rate is None else ""
        if not (problem or rates) and self._compares and not self._counts and run.steady.steps:
            problem = GIVE_FLOPS
        if problem and rates:
            rates[0] = _noted(rates[0], problem)
        elif problem:
            rates.append(compute_of("mfu", None, replace(peak, flops=None, source=problem)))
        if peak.device != "cpu" and not self._advised:
            for row, each in enumerate(rates):  # once
                lacks_peak = each.peak_tflops is None and each.tflops
                if lacks_peak and each.peak_source != _PARTIAL:
                    rates[row] = _noted(each, give_peak(each.dtype))
                    break
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


def _noted(compute: RunCompute, note: str) -> RunCompute:
    return structs.replace(compute, note="; ".join(filter(None, [compute.note, note])))
