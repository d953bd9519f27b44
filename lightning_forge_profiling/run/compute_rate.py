"""How fast a fit computes: by the FLOPs of its batches and of its recorded steps, and of which peak that is a part."""

from collections.abc import Sequence
from typing import Final, Literal

import torch
from msgspec import structs

from lightning_forge_profiling.flops.peaks import DEVICES, find_peak
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.gpu.nvml import find_device, open_nvml
from lightning_forge_profiling.names import MFU, PEAK_TFLOPS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.batches import WorkCounter
from lightning_forge_profiling.run.fit_settings import ThroughputSettings
from lightning_forge_profiling.run.training import UNKNOWN, Training
from lightning_forge_profiling.schema import Flops, RankSummary, RunCompute, RunTiming, TraceReport

_log = plain_logger(__name__)


def peak_of(device: str, dtype: str, tflops: float | None, source: str) -> RunCompute:
    """The peak of a device, as an MFU whose rate is not known; without one, `source` says why."""
    return RunCompute(
        kind="mfu",
        tflops=None,
        dtype=dtype,
        device=device,
        peak_tflops=tflops,
        peak_source=source,
        pct_of_peak=None,
    )


def compute_of(kind: Literal["mfu", "hfu"], tflops: float, peak: RunCompute, note: str = "") -> RunCompute:
    """The rate of one device: MFU or HFU (Korthikanti et al. 2022, section 6.1).

    Args:
        kind: `mfu` for the operations that the model needs, `hfu` for those that the device carried out.
        tflops: 10¹² operations per second of one device.
        peak: the device's peak.
        note: caveat of the FLOP count; "" for none.
    """
    share = 100 * tflops / peak.peak_tflops if peak.peak_tflops else None
    return structs.replace(peak, kind=kind, tflops=tflops, pct_of_peak=share, note=note)


def run_peak(training: Training, given: float | None, *, asks_power: bool = True) -> RunCompute:
    """The peak FLOP/s of this process's device, in the type that the run computes in."""
    device = training.facts.device
    dtype = training.dtype()
    given_tflops = None if given is None else given / 1e12
    if device.type != "cuda":
        source = "given" if given is not None else f"no peak known for {device.type}"
        return peak_of(str(device), dtype, given_tflops, source)
    properties = torch.cuda.get_device_properties(device)
    if dtype == "fp32" and has_tf32(device) and fp32_runs_as_tf32(training.model):
        dtype = "tf32"
    if given is not None:
        return peak_of(properties.name, dtype, given_tflops, "given")
    known = find_peak(
        torch.cuda.get_device_name(device),
        memory_bytes=properties.total_memory,
        sms=properties.multi_processor_count,
        power_w=lambda: _power_limit_w(device, str(properties.uuid)) if asks_power else None,
    )
    if known is None:
        return peak_of(properties.name, dtype, None, f"{properties.name} is not in the peak table")
    if dtype not in known.flops:
        return peak_of(known.device, dtype, None, no_rate_for(dtype, known.device))
    return peak_of(known.device, dtype, known.flops[dtype] / 1e12, known.source_of(dtype))


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
    run: RunTiming,
    rank: RankSummary,
    steps: Sequence[int],
    peak: RunCompute,
    *,
    peak_is_given: bool,
    model_is_counted: bool = False,
) -> tuple[RunCompute, ...]:
    """FLOPs of the recorded steps over the time of the steady steps, as recording slows steps; scaled with tokens."""
    flops, step_ms = rank.flops, run.step_ms.mean
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
        peak = structs.replace(peak, peak_tflops=None, peak_source=_PARTIAL)
    tera_per_s, model, rates = scale / step_ms * 1e3 / 1e12, flops.model_per_step, list[RunCompute]()
    if model is not None and not model_is_counted:
        note = "; ".join(["by the recorded shapes", *notes])
        rates.append(compute_of("mfu", model * tera_per_s, peak, note))
    if model is None or model_is_counted or flops.per_step > (1 + _SAME_WORK) * model:
        rates.append(compute_of("hfu", flops.per_step * tera_per_s, peak, "; ".join(notes)))
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
        self._peak: RunCompute | None = None
        self._sought = self._logged = self._advised = False

    def begin(self, counter: WorkCounter) -> None:
        """Training begins: find what the rate is compared with, if there may be one."""
        self._counter = counter
        if self._may_count or self._settings.peak_flops is not None:
            self._find_peak()

    @property
    def _counts(self) -> bool:
        """Whether the FLOPs per batch are given, by an argument or by the module."""
        return self._counter is not None and self._counter.counts_flops

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
        if peak.peak_tflops is not None:
            told = f"{peak.peak_tflops:,.4g} TFLOP/s ({peak.device}, {peak.dtype}; {peak.peak_source})"
            _log.info("MFU is of %s.", told)
        elif peak.device != "cpu":
            self._advised = True
            _log.warning("No MFU: %s; %s.", peak.peak_source, give_peak(peak.dtype))

    def metrics(self, timing: RunTiming) -> dict[str, float]:
        """The metrics of some steps."""
        facts, peak = self._training.facts, self._peak
        return timing.metrics(
            replicas=facts.replicas,
            devices_per_batch=facts.devices_per_batch,
            peak_flops=None if peak is None or peak.peak_tflops is None else peak.peak_tflops * 1e12,
        )

    def new_peak(self, metrics: dict[str, float]) -> dict[str, float]:
        """The peak as a metric, beside the first MFU."""
        if MFU not in metrics or self._logged or self._peak is None or not self._peak.peak_tflops:
            return {}
        self._logged = True
        return {PEAK_TFLOPS: self._peak.peak_tflops}

    def look_again(self) -> None:
        """Find the peak if the module knows its FLOPs per batch only now, after its first step."""
        if self._counts and not self._sought:
            self._find_peak()

    def of_window(self, run: RunTiming, trace: TraceReport | None, rank: RankSummary | None) -> tuple[RunCompute, ...]:
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

    def _of_batches(self, run: RunTiming) -> float | None:
        return run.per_second(run.flops) if self._counts else None

    def of_run(self, run: RunTiming, of_window: Sequence[RunCompute]) -> tuple[RunCompute, ...]:
        """How fast the run computed, by what its batches asked for too; or why that is unknown, and what to do."""
        peak, rate = self._peak, self._of_batches(run)
        if peak is None:
            return ()
        rates = list(of_window)
        if rate is not None:
            rates.insert(0, compute_of("mfu", rate / self._training.facts.devices_per_batch / 1e12, peak))
        problem = self._counter.flops_problem if self._counter is not None and rate is None else ""
        if not (problem or rates or self._counts) and self._settings.peak_flops is not None and run.steps:
            problem = GIVE_FLOPS
        if problem and rates:
            rates[0] = _noted(rates[0], problem)
        elif problem:
            rates.append(structs.replace(peak, peak_tflops=None, peak_source=problem))
        if peak.device != "cpu" and not self._advised:
            for row, each in enumerate(rates):  # once
                if each.tflops and each.peak_tflops is None and each.peak_source != _PARTIAL:
                    rates[row] = _noted(each, give_peak(each.dtype))
                    break
        return tuple(rates)


def _scale(run: RunTiming, steps: Sequence[int]) -> tuple[float, str]:
    """The tokens of the mean step relative to a recorded one, and a note on it."""
    tokens = [run.left_out.recorded_tokens.get(step, 0.0) for step in steps]
    if not run.tokens or not tokens or not all(tokens):
        return 1.0, ""
    mean, recorded = run.tokens / run.steps, sum(tokens) / len(tokens)
    if abs(mean / recorded - 1) <= _SAME_LENGTH:
        return 1.0, ""
    return mean / recorded, f"scaled from the {recorded:,.0f} tokens of a recorded step to the mean {mean:,.0f}"


def _as_recorded(peak: RunCompute, flops: Flops, device: str) -> RunCompute:
    """The peak of the type that the recorded kernels computed in, where that is another than was expected."""
    # kernels' names do not always tell TF32 from fp32
    if flops.dtype == peak.dtype or (flops.dtype, peak.dtype) == ("fp32", "tf32"):
        return peak
    if flops.peak_tflops is not None:
        return peak_of(device, flops.dtype, flops.peak_tflops, "dtype from the recorded kernels")
    listed = any(known.device == peak.device for known in DEVICES)
    return peak_of(
        peak.device, flops.dtype, None, no_rate_for(flops.dtype, peak.device) if listed else peak.peak_source
    )


def _without(operators: Sequence[str]) -> str:
    named = ", ".join(operators[:_NAMED])
    return f"not counted: {named}" + (f" and {len(operators) - _NAMED} more" if len(operators) > _NAMED else "")


def _noted(compute: RunCompute, note: str) -> RunCompute:
    return structs.replace(compute, note="; ".join(filter(None, [compute.note, note])))
