"""Rules of thumb on a rank's breakdown: less than a cause, worth a look."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.diagnosis.rule import MIN_STEPS, Explanation, Rule, backward_is_heavy, in_ms, region
from lightning_forge_profiling.results.analysis import Hint, RunEvidence
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.run import Switches
from lightning_forge_profiling.results.telemetry import TelemetrySummary

_MANY_ITEMS: Final = 20
"""Lightning and its progress bar read a few a step."""


def _communication_pct(rank: RankSummary) -> float:
    return 100 * rank.comm.ms_per_step / rank.step_ms.mean if rank.step_ms.mean else 0.0


def _copy_pct(rank: RankSummary) -> float:
    """Share of the step that `aten::copy_` spends in kernels, so not in copies to the GPU."""
    spent = sum(operator.self_device_ms_per_step for operator in rank.operators if operator.name == "aten::copy_")
    spent = max(spent - sum(copy.ms_per_step for copy in rank.copies), 0.0)
    return 100 * spent / rank.step_ms.mean if rank.step_ms.mean else 0.0


def _other_pct(rank: RankSummary) -> float:
    """What could be fused: convolutions and attention count to `other`, but are as good as matrix products."""
    math = sum(kind.pct for name, kind in rank.kinds.items() if name in {"convolution", "attention"})
    return rank.categories["other"].pct - math


def _recomputed_pct(rank: RankSummary) -> float:
    return 0.0 if rank.flops is None else rank.flops.recomputed_pct


def _item_pct(rank: RankSummary) -> float:
    cpu = rank.cpu
    many = cpu is not None and cpu.item_calls_per_step >= _MANY_ITEMS and rank.step_ms.mean > 0
    return 100 * cpu.item_ms_per_step / rank.step_ms.mean if cpu is not None and many else 0.0


def _item(rank: RankSummary) -> Explanation:
    calls = 0.0 if rank.cpu is None else rank.cpu.item_calls_per_step
    return Explanation(
        f"a tensor's value is read {calls:.0f} times a step, as by .item(), float() or `if tensor:`; the "
        f"operators alone take {_item_pct(rank):.0f} % of the recorded step: read many at once with "
        ".tolist(), or every n steps"
    )


_RULES: Final[tuple[Rule[RankSummary], ...]] = (
    Rule(
        "matmul-heavy",
        lambda rank: rank.categories["matmul"].pct,
        lambda rank: Explanation(
            f"matrix products take {rank.categories['matmul'].pct:.0f} % of the step, the work that a GPU does best; "
            "a lower precision or larger tiles remain"
        ),
        above=50,
    ),
    Rule(
        "comm-heavy",
        _communication_pct,
        lambda rank: Explanation(f"communication runs for {_communication_pct(rank):.0f} % of the step, hidden or not"),
        above=20,
    ),
    Rule(
        "other-heavy",
        _other_pct,
        lambda rank: Explanation(
            f"kernels other than matrix products, convolutions and attention take {_other_pct(rank):.0f} % of the "
            "step: torch.compile can fuse many of them"
        ),
        above=40,
    ),
    Rule(
        "copy-heavy",
        _copy_pct,
        lambda rank: Explanation(
            f"aten::copy_ takes {_copy_pct(rank):.0f} % of the step: casts between types and layouts; keep one "
            "precision (bf16-true), make tensors contiguous once"
        ),
        above=10,
    ),
    Rule(
        "cuda-malloc",
        lambda rank: rank.host.cuda_mallocs_per_step,
        lambda rank: Explanation(
            f"cudaMalloc is called {rank.host.cuda_mallocs_per_step:.1f} times a step: in a steady state PyTorch's "
            "allocator needs none"
        ),
    ),
    Rule("item-calls", _item_pct, _item, above=1),
    Rule(
        "recomputation",
        _recomputed_pct,
        lambda rank: Explanation(
            f"{_recomputed_pct(rank):.0f} % of the operations recompute activations (checkpointing) or belong to the "
            "optimizer: if memory is left, checkpoint fewer layers"
        ),
        above=5,
    ),
)
"""From KempnerForge's summary and common teaching: above which share something is worth a look."""


def rules_of_thumb(ranks: Iterable[RankSummary]) -> tuple[Hint, ...]:
    """The rules that apply, once each: on the rank where their figure is greatest."""
    ranks, hints = tuple(ranks), []
    for rule in _RULES:
        rank = max(ranks, key=rule.cost, default=None)
        if rank is not None and rule.cost(rank) > rule.above:
            hints.append(Hint(code=rule.code, rank=rank.rank, text=rule.explain(rank).title))
    return tuple(hints)


_UNKNOWN: Final = "what it costs here was not measured"
_MOST_OF_PCT: Final = 99.5


@dataclass(frozen=True, slots=True)
class _Rule:
    """A switch.

    Attributes:
        code: the code of its hint.
        on: what is on, with what it does; "" if it is off.
        off: what to do about it.
        name: its short name if the times of the run are not those of the run without it; "" otherwise.
        cost: what is known of its cost.
    """

    code: str
    on: Callable[[Switches], str]
    off: str
    name: str = ""
    cost: str = _UNKNOWN


def _when(field: str, text: str) -> Callable[[Switches], str]:
    return lambda switches: text.format(value) if (value := getattr(switches, field)) else ""


def _deterministic(switches: Switches) -> str:
    names = {"algorithms": "torch.use_deterministic_algorithms is on", "cudnn": "cudnn.deterministic is on"}
    return f"{names[switches.deterministic]}: slower kernels may be chosen" if switches.deterministic else ""


def _distributed_debug(switches: Switches) -> str:
    does = {"INFO": "DDP logs what it does", "DETAIL": "each collective is first compared over all ranks"}
    level = switches.distributed_debug
    return f"TORCH_DISTRIBUTED_DEBUG={level} is set: {does.get(level, 'PyTorch checks more')}" if level else ""


def _float64(switches: Switches) -> str:
    pct = switches.float64_pct
    share = "all" if pct >= _MOST_OF_PCT else f"{pct:.1g} %" if pct < 1 else f"{pct:.0f} %"
    return f"{share} of the trainable parameters are float64: twice the memory of float32" if pct else ""


_SWITCHES: Final = (
    _Rule(
        "anomaly-detection",
        _when("anomaly_detection", "anomaly detection is on: a stack for each operator, a check of each gradient"),
        "Remove Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True)",
        name="anomaly detection",
    ),
    _Rule(
        "launch-blocking",
        _when("launch_blocking", "CUDA_LAUNCH_BLOCKING=1 is set: the host waits for each kernel"),
        "Unset the environment variable",
        name="CUDA_LAUNCH_BLOCKING",
    ),
    _Rule(
        "tracer",
        _when("tracer", "{} traces the training thread: it runs at each call or line of Python"),
        "Run without the debugger, coverage tool or profiler",
        name="a tracer of Python code",
    ),
    _Rule(
        "other-profiler",
        _when("profiler", "another torch profiler is running: it records each operator"),
        "Remove it, or limit it to a few steps with a schedule",
        name="another torch profiler",
    ),
    _Rule(
        "deterministic",
        _deterministic,
        "Remove Trainer(deterministic=True) or the call, if the run need not repeat bit for bit",
    ),
    _Rule(
        "distributed-debug",
        _distributed_debug,
        "Unset the environment variable",
    ),
    _Rule(
        "float64",
        _float64,
        'Leave out Trainer(precision="64-true") and torch.set_default_dtype(torch.float64), or call model.float()',
    ),
    _Rule(
        "tf32-off",
        _when(
            "tf32_off", "float32 matrix products do not use the GPU's TF32 tensor cores, which keep 10 bits of mantissa"
        ),
        'Use them with torch.set_float32_matmul_precision("high"), if the loss allows it',
    ),
    _Rule(
        "pin-memory",
        _when("pin_memory_unused", "the DataLoader has pin_memory=True, and there is no GPU"),
        "Remove it",
        cost="PyTorch ignores it, so it costs nothing",
    ),
)


def switch_hints(switches: Switches | None) -> tuple[Hint, ...]:
    """One hint for each switch that is on.

    Example:
        >>> print(*(hint.text for hint in switch_hints(Switches(pin_memory_unused=True))))
        the DataLoader has pin_memory=True, and there is no GPU; PyTorch ignores it, so it costs nothing. Remove it.
    """
    if switches is None:
        return ()
    return tuple(
        Hint(code=rule.code, rank=0, text=f"{on}; {rule.cost}. {rule.off}.")
        for rule in _SWITCHES
        if (on := rule.on(switches))
    )


def switched_on(switches: Switches | None) -> str:
    """What stands beside the verdict if the times are not those of the run without a switch; "" otherwise.

    Example:
        >>> switched_on(Switches(anomaly_detection=True, profiler=True))
        'All times include anomaly detection and another torch profiler, which were on.'
    """
    names = [] if switches is None else [rule.name for rule in _SWITCHES if rule.name and rule.on(switches)]
    if not names:
        return ""
    last = names.pop()
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"All times include {listed}, which {'were' if names else 'was'} on."


MIN_SAMPLES: Final = 10
"""Two seconds at the default period: NVML's utilization is over up to one."""

_WELL_USED_PCT: Final = 90.0
_UNDERUSED_PCT: Final = 50.0
"""The limits commonly taught for `nvidia-smi`'s GPU-Util."""

_THROTTLED_PCT: Final = 5.0
_NEARLY_FULL_PCT: Final = 95.0
_MALLOCS_PER_STEP: Final = 0.1
"""In a steady state the caching allocator needs none; batches of many sizes make it grow occasionally."""

_FEW_MALLOCS: Final = 5
"""So many may still be from the warm-up, however many per step they are in a short run."""

_MEANS: Final = {
    "power cap": "it draws what its power limit allows, as is normal under dense compute",
    "temperature": "it is too hot; look at the cooling and at its neighbours",
    "temperature (hardware)": "it is far too hot; look at the cooling",
    "power brake": "the server's power supply asks it to draw less",
    "hardware slowdown": "its hardware protects itself from heat or a spike in power",
    "board limit": "the board limits it",
}

_WELL_USED: Final = (
    "GPU utilization is {:.0f} %: nearly always a kernel was running. How much of the GPU those kernels use is another "
    "question, which the MFU answers."
)
_UNDERUSED: Final = (
    "GPU utilization is {:.0f} %: most of the time no kernel was running. It waits for data, for the host's launches "
    "or for other ranks; the verdict says for which."
)
_MALLOCS: Final = (
    "PyTorch's allocator asked the device for memory {:.1f} times a step after the warm-up, where it needs no more "
    "once it has run a step: batches of varying sizes (pad them to a few), torch.cuda.empty_cache() in the loop, or "
    "memory near full. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces this. A recorded window "
    "(ForgeProfilerCallback) shows what it costs."
)


def telemetry_hints(summary: TelemetrySummary, *, steps: int | None = None, rank: int = 0) -> tuple[Hint, ...]:
    """The hints that apply.

    There are none about utilization and clocks from fewer than `MIN_SAMPLES` samples, and none about a few calls of
    `cudaMalloc` in all.

    Example:
        >>> summary = TelemetrySummary(device="NVIDIA H200", samples=50, utilization_pct=31.0)
        >>> [hint.code for hint in telemetry_hints(summary)]
        ['gpu-underused']
    """
    return tuple(Hint(code=code, rank=rank, text=text) for code, text in _rules(summary, steps))


def _rules(summary: TelemetrySummary, steps: int | None) -> Iterator[tuple[str, str]]:
    if summary.samples >= MIN_SAMPLES:
        if summary.utilization_pct is not None and summary.utilization_pct > _WELL_USED_PCT:
            yield "gpu-well-used", _WELL_USED.format(summary.utilization_pct)
        if summary.utilization_pct is not None and summary.utilization_pct < _UNDERUSED_PCT:
            yield "gpu-underused", _UNDERUSED.format(summary.utilization_pct)
        if summary.throttled_pct is not None and summary.throttled_pct >= _THROTTLED_PCT:
            yield "gpu-throttled", _throttled(summary)
    if summary.memory_peak_gib and summary.memory_total_gib:
        full_pct = 100 * summary.memory_peak_gib / summary.memory_total_gib
        if full_pct >= _NEARLY_FULL_PCT:
            yield "gpu-memory-full", _full(summary, full_pct)
    mallocs = summary.device_allocs_per_step
    if mallocs is not None and mallocs > _MALLOCS_PER_STEP and (steps is None or mallocs * steps > _FEW_MALLOCS):
        yield "cuda-malloc-steady", _MALLOCS.format(mallocs)


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


_UNEVEN: Final = 1.2
"""A mean so much above the median says that few steps take a good part of the time."""


def run_hints(evidence: RunEvidence) -> tuple[Hint, ...]:
    """The hints; none where there are fewer than `MIN_STEPS` steps."""
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0:
        return ()
    sensors = () if evidence.telemetry is None else telemetry_hints(evidence.telemetry, steps=evidence.steps)
    return (*_hints(evidence), *sensors)


def _hints(evidence: RunEvidence) -> Iterator[Hint]:
    step = evidence.step_ms
    restarts_ms = 0.0 if evidence.worker_restarts is None else evidence.worker_restarts.device_ms
    like_ms = step.p50 if evidence.like_ms is None else evidence.like_ms
    if step.mean - restarts_ms > _UNEVEN * like_ms:
        yield Hint(
            code="uneven-steps",
            rank=0,
            text=f"Steps are uneven: mean {in_ms(step.mean)}, median {in_ms(step.p50)}, longest {in_ms(step.max)}, "
            "more than gradient accumulation and restarts of workers explain.",
        )
    if backward_is_heavy(evidence):
        times = region(evidence, "backward").device_ms / max(region(evidence, "forward").device_ms, 1e-3)
        yield Hint(
            code="backward-heavy",
            rank=0,
            text=f"Backward takes {times:.1f} times as long as forward, where twice is usual. With "
            f"{evidence.world_size} processes the rest is likely the exchange of gradients or waiting for a slower "
            "rank; a recorded window of all ranks shows which.",
        )
