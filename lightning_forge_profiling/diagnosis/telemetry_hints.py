"""Hints from a GPU's sensors over a run: rules of thumb."""

from collections.abc import Iterator
from typing import Final

from lightning_forge_profiling.results.analysis import Hint
from lightning_forge_profiling.results.telemetry import TelemetrySummary

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
