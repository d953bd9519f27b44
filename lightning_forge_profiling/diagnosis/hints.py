"""Hints, which are less than a cause: rules of thumb on a recorded rank, settings that are on, the GPU's sensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from lightning_forge_profiling.diagnosis.rule import MIN_STEPS, RuleContext, RunTimes, in_ms, listed
from lightning_forge_profiling.schema import Hint, RankSummary, RunEvidence, Switches, TelemetrySummary

# -- hints on a recorded rank ------------------------------------------------------------------------------------------

_MANY_ITEMS: Final = 20  # Lightning and its progress bar read a few a step


def _copy_pct(rank: RankSummary) -> float:
    """Share of the step that `aten::copy_` spends in kernels, so not in copies to the GPU."""
    spent_ms = sum(operator.self_device_ms_per_step for operator in rank.operators if operator.name == "aten::copy_")
    return RuleContext(rank).pct(max(spent_ms - sum(copy.ms_per_step for copy in rank.copies), 0.0))


def _other_pct(rank: RankSummary) -> float:
    """What could be fused: convolutions and attention count to `other`, but are as good as matrix products."""
    math = sum(kind.pct for name, kind in rank.kinds.items() if name in {"convolution", "attention"})
    return rank.categories["other"].pct - math


def _item_pct(rank: RankSummary) -> float:
    if rank.cpu is None or rank.cpu.item_calls_per_step < _MANY_ITEMS:
        return 0.0
    return RuleContext(rank).pct(rank.cpu.item_ms_per_step)


class _Thumb(NamedTuple):
    """A rule of thumb: the figure of a rank, above which it is worth a look, and the words for it."""

    code: str
    figure: Callable[[RankSummary], float]
    above: float
    text: str


# from KempnerForge's summary and common teaching
_OF_RANKS: Final = (
    _Thumb(
        "matmul-heavy",
        lambda rank: rank.categories["matmul"].pct,
        50,
        "matrix products take {:.0f} % of the step, the work that a GPU does best; a lower precision or larger tiles "
        "remain",
    ),
    _Thumb(
        "comm-heavy",
        lambda rank: RuleContext(rank).pct(rank.comm.ms_per_step),
        20,
        "communication runs for {:.0f} % of the step, hidden or not",
    ),
    _Thumb(
        "other-heavy",
        _other_pct,
        40,
        "kernels other than matrix products, convolutions and attention take {:.0f} % of the step: torch.compile can "
        "fuse many of them",
    ),
    _Thumb(
        "copy-heavy",
        _copy_pct,
        10,
        "aten::copy_ takes {:.0f} % of the step: casts between types and layouts; keep one precision (bf16-true), make "
        "tensors contiguous once",
    ),
    _Thumb(
        "cuda-malloc",
        lambda rank: rank.host.cuda_mallocs_per_step,
        0,
        "cudaMalloc is called {:.1f} times a step: in a steady state PyTorch's allocator needs none",
    ),
    _Thumb(
        "item-calls",
        _item_pct,
        1,
        "a tensor's value is read {rank.cpu.item_calls_per_step:.0f} times a step, as by .item(), float() or "
        "`if tensor:`; the operators alone take {:.0f} % of the recorded step: read many at once with .tolist(), or "
        "every n steps",
    ),
    _Thumb(
        "recomputation",
        lambda rank: 0.0 if rank.flops is None else rank.flops.recomputed_pct,
        5,
        "{:.0f} % of the operations recompute activations (checkpointing) or belong to the optimizer: if memory is "
        "left, checkpoint fewer layers",
    ),
)


def rules_of_thumb(ranks: Iterable[RankSummary]) -> tuple[Hint, ...]:
    """The rules that apply, once each: on the rank where their figure is greatest."""
    ranks, hints = tuple(ranks), []
    for code, figure, above, text in _OF_RANKS:
        rank = max(ranks, key=figure, default=None)
        if rank is not None and figure(rank) > above:
            hints.append(Hint(code=code, rank=rank.rank, text=text.format(figure(rank), rank=rank)))
    return tuple(hints)


# -- switches ----------------------------------------------------------------------------------------------------------


def _switches(switches: Switches) -> Iterator[tuple[str, str]]:
    """Code and words of each that is on and may slow the run; those that distort its times are findings."""
    if switches.deterministic:
        names = {"algorithms": "torch.use_deterministic_algorithms", "cudnn": "cudnn.deterministic"}
        on = f"{names[switches.deterministic]} is on: slower kernels may be chosen"
        off = "Remove Trainer(deterministic=True) or the call, if the run need not repeat bit for bit"
        yield "deterministic", _unmeasured(on, off)
    if switches.distributed_debug == "INFO":
        on = "TORCH_DISTRIBUTED_DEBUG=INFO is set: DDP logs what it does"
        yield "distributed-debug", _unmeasured(on, "Unset the environment variable")
    if pct := switches.float64_pct:
        share = "all" if pct >= 99.5 else f"{pct:.1g} %" if pct < 1 else f"{pct:.0f} %"  # noqa: PLR2004  (rounds to all)
        on = f"{share} of the parameters are float64: twice the memory of float32"
        off = 'Leave out Trainer(precision="64-true") and torch.set_default_dtype(torch.float64), or call model.float()'
        yield "float64", _unmeasured(on, off)
    if switches.eager_attention:
        on = f"{switches.eager_attention} computes attention by matrix products and a softmax (eager)"
        yield "eager-attention", _unmeasured(on, 'Load the model with attn_implementation="sdpa"')
    if switches.unused_parameters:
        on = "DDP looks for unused parameters in the graph of each step (find_unused_parameters=True)"
        yield "unused-parameters", _unmeasured(on, 'Use strategy="ddp", if each parameter gets a gradient')
    if switches.tf32_off:
        on = "float32 matrix products do not use the GPU's TF32 tensor cores, which keep 10 bits of mantissa"
        off = 'Use them with torch.set_float32_matmul_precision("high"), if the loss allows it'
        yield "tf32-off", _unmeasured(on, off)
    if switches.pin_memory_unused:
        on = "the DataLoader has pin_memory=True, and there is no GPU"
        yield "pin-memory", f"{on}; PyTorch ignores it, so it costs nothing. Remove it."


def _unmeasured(on: str, off: str) -> str:
    return f"{on}; what it costs here was not measured. {off}."


def switch_hints(switches: Switches | None) -> tuple[Hint, ...]:
    """One hint for each switch that is on."""
    return () if switches is None else tuple(_hint(code, text) for code, text in _switches(switches))


# -- hints by the GPU's sensors ----------------------------------------------------------------------------------------

_MIN_SAMPLES: Final = 10  # two seconds at the default period: NVML's utilization is over up to one

_WELL_USED_PCT: Final = 90.0
_UNDERUSED_PCT: Final = 50.0  # the limits commonly taught for `nvidia-smi`'s GPU-Util

_THROTTLED_PCT: Final = 5.0
_NEARLY_FULL_PCT: Final = 95.0
# in a steady state the caching allocator needs none; batches of many sizes make it grow occasionally
_MALLOCS_PER_STEP: Final = 0.1

_FEW_MALLOCS: Final = 5  # so many may still be from the warm-up, however many per step they are in a short run

_MEANS: Final = {
    "power cap": "it draws what its power limit allows, as is normal under dense compute",
    "temperature": "it is too hot; look at the cooling and at its neighbours",
    "temperature (hardware)": "it is far too hot; look at the cooling",
    "power brake": "the server's power supply asks it to draw less",
    "hardware slowdown": "its hardware protects itself from heat or a spike in power",
    "board limit": "the board limits it",
}


def telemetry_hints(summary: TelemetrySummary, *, steps: int | None = None) -> tuple[Hint, ...]:
    """The hints that apply: none from few samples, or about a few calls of `cudaMalloc` in all."""
    return (*(_sensors(summary) if summary.samples >= _MIN_SAMPLES else ()), *_memory(summary, steps))


def _sensors(summary: TelemetrySummary) -> Iterator[Hint]:
    used_pct = summary.utilization_pct
    if used_pct is not None and used_pct > _WELL_USED_PCT:
        yield _hint(
            "gpu-well-used",
            f"GPU utilization is {used_pct:.0f} %: nearly always a kernel was running. How much of the GPU those "
            "kernels use is another question, which the MFU answers.",
        )
    if used_pct is not None and used_pct < _UNDERUSED_PCT:
        yield _hint(
            "gpu-underused",
            f"GPU utilization is {used_pct:.0f} %: most of the time no kernel was running. It waits for data, for the "
            "host's launches or for other ranks; the verdict says for which.",
        )
    if summary.throttled_pct is not None and summary.throttled_pct >= _THROTTLED_PCT:
        yield _hint("gpu-throttled", _throttled(summary))


def _memory(summary: TelemetrySummary, steps: int | None) -> Iterator[Hint]:
    if summary.memory_peak_gib and summary.memory_total_gib:
        full_pct = 100 * summary.memory_peak_gib / summary.memory_total_gib
        if full_pct >= _NEARLY_FULL_PCT:
            yield _hint("gpu-memory-full", _full(summary, full_pct))
    mallocs = summary.device_allocs_per_step
    if mallocs is not None and mallocs > _MALLOCS_PER_STEP and (steps is None or mallocs * steps > _FEW_MALLOCS):
        yield _hint(
            "cuda-malloc-steady",
            f"PyTorch's allocator asked the device for memory {mallocs:.1f} times a step after the warm-up, where it "
            "needs no more once it has run a step: batches of varying sizes (pad them to a few), "
            "torch.cuda.empty_cache() in the loop, or memory near full. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:"
            "True reduces this. A recorded window (ForgeProfilerCallback) shows what it costs.",
        )


def _throttled(summary: TelemetrySummary) -> str:
    reasons = sorted(summary.throttled_by_pct.items(), key=lambda item: -item[1])
    text = f"The GPU's clock was held down {summary.throttled_pct:.0f} % of the time"
    if reasons:
        text += f" ({', '.join(f'{reason} {pct:.0f} %' for reason, pct in reasons)})"
    if summary.sm_mhz is not None and summary.sm_peak_mhz is not None:
        text += f", at {summary.sm_mhz:.0f} MHz on average ({summary.sm_peak_mhz:.0f} MHz at most)"
    if summary.power_w is not None and summary.power_limit_w is not None:
        text += f" and {summary.power_w:.0f} W of the {summary.power_limit_w:.0f} W allowed"
    return f"{text}: {_MEANS.get(reasons[0][0] if reasons else '', 'its driver does not say why')}."


def _full(summary: TelemetrySummary, full_pct: float) -> str:
    peak_gib, total_gib = summary.memory_peak_gib, summary.memory_total_gib
    text = f"The GPU's memory was {full_pct:.0f} % full: {peak_gib:.1f} of {total_gib:.1f} GiB"
    if summary.allocated_peak_gib is not None:
        text += f", {summary.allocated_peak_gib:.1f} GiB of it tensors"
    if not summary.alloc_retries:
        return f"{text}. That costs no time, but a larger batch may not fit."
    return (
        f"{text}. PyTorch's allocator ran out {summary.alloc_retries} times and released its free blocks, for "
        "which it waits for the GPU: a smaller batch, activation checkpointing or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


def _hint(code: str, text: str) -> Hint:
    return Hint(code=code, rank=0, text=text)


# -- hints on the steps of a run ---------------------------------------------------------------------------------------

LARGER_BATCHES: Final = frozenset({"forward", "backward"})
"""What grows with the batches, where both do."""

_UNEVEN: Final = 1.2  # a mean so much above the median says that few steps take a good part of the time


def run_hints(run: RunEvidence) -> tuple[Hint, ...]:
    """The hints on a run; none where there are fewer than `MIN_STEPS` steps."""
    if run.timing.steps < MIN_STEPS or run.timing.step_ms.mean <= 0:
        return ()
    sensors = () if run.machine.telemetry is None else telemetry_hints(run.machine.telemetry, steps=run.timing.steps)
    return (*_of_steps(run), *sensors)


def _of_steps(run: RunEvidence) -> Iterator[Hint]:
    step = run.timing.step_ms
    restarts_ms = 0.0 if run.timing.worker_restarts is None else run.timing.worker_restarts.device_ms
    if step.mean - restarts_ms > _UNEVEN * (
        step.p50 if run.timing.typical_mean_ms is None else run.timing.typical_mean_ms
    ):
        yield _hint(
            "uneven-steps",
            f"Steps are uneven: mean {in_ms(step.mean)}, median {in_ms(step.p50)}, longest {in_ms(step.max)}.",
        )
    grows = run.timing.grows
    if grows.keys() >= LARGER_BATCHES:
        grown = [f"{name} from {in_ms(each.first_ms)} to {in_ms(each.last_ms)}" for name, each in grows.items()]
        yield _hint(
            "growing-steps",
            f"Steps get longer over the run: {listed(grown)}. Forward and backward together grow with the batches, as "
            "in a curriculum of lengths; if those are alike, look for inputs that collect what earlier steps had.",
        )
    if (measured := RunTimes.of(run)).backward_is_heavy:
        times = measured.region("backward").device_ms / max(measured.region("forward").device_ms, 1e-3)
        yield _hint(
            "backward-heavy",
            f"Backward takes {times:.1f} times as long as forward, where twice is usual. With {run.ranks.world_size} "
            "processes the rest is likely the exchange of gradients or waiting for a slower rank; a recorded window "
            "of all ranks shows which.",
        )
