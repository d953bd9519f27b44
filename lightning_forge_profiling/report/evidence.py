"""The evidence of a finding as reports show it: what a figure is called, the figure with its unit, what it means."""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.json_layout import field_texts
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import (
    Communication,
    CpuTime,
    CpuUse,
    Finding,
    Flops,
    Host,
    LoaderSettings,
    MemoryGrowth,
    RunTiming,
)

# units that names end in, the longer ones first, and how a figure is written with one
_UNITS: Final[Mapping[str, tuple[float, str]]] = MappingProxyType(
    {
        "ms per step": (1, "{} ms per step"),
        "us per step": (1, "{} µs per step"),
        "megabytes per step": (1, "{} MB per step"),
        "mb per step": (1, "{} MB per step"),
        "mib per step": (1, "{} MiB per step"),
        "bytes per step": (1e6, "{} MB per step"),
        "per step": (1, "{} per step"),
        "gb per s": (1, "{} GB/s"),
        "per s": (1, "{} per second"),
        "pct of peak": (1, "{} % of the peak"),
        "pct": (1, "{} %"),
        "tflops": (1, "{} TFLOP/s"),
        "gib": (1, "{} GiB"),
        "seconds": (1, "{} s"),
        "ms": (1, "{} ms"),
        "us": (1, "{} µs"),
        "s": (1, "{} s"),
    }
)
# what is called otherwise than by its name: without its unit it would read as another, or as nothing
_CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "line_pct": "of it in that line",
        "loader": "class of the loader",
        "part": "part of the run",
        "leaf": "part of the step",
        "full_step": "memory is full at step",
        "fit_s": "the fit",
        "restart_ms": "one restart takes",
        "seconds": "takes",
        "mib_per_step": "grows by",
        "leaf_ms_per_step": "that part",
        "others_leaf_ms_per_step": "that part elsewhere",
        "own_ms_per_step": "own step",
        "others_own_ms_per_step": "own step elsewhere",
        "step_ms": "mean step",
    }
)
# what no field of the schema says
_MEANS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "exposed_wait_ms_per_step": "idle time of the GPU for want of a batch; without a GPU, the whole wait",
        "host_wait_ms_per_step": "time for which the training thread waited for a batch, also while the GPU was still "
        "busy with earlier steps",
        "step_ms": "the mean over the counted steps, which shares are relative to",
        "median_step_ms": "half of the counted steps are shorter",
        "steps": "counted steps: without warm-up, recorded steps, and those that could not be timed",
        "line": "where most of the samples of the training thread's stack were taken meanwhile",
        "line_pct": "share of those samples in that line",
        "where": "the function that most of the time was spent in",
        "loader": "class of the training DataLoader",
        "usable_cores": "cores that this rank's process may use",
        "try_num_workers": "what is advised: loading and training together fit on the cores",
        "share_of_recorded_step_pct": "the same in the recorded steps, which recording makes longer",
        "recorded_there_ms_per_step": "time in that function in the recorded steps",
        "blocked_ms_per_step": "time for which the training thread neither ran Python nor computed",
        "gpu_paced_ms_per_step": "time in which the GPU, not the host, sets the pace",
        "host_paced_ms_per_step": "time in which the GPU had caught up and waited for the next launch",
        "idle_in_launches_ms_per_step": "idle time of the GPU during launches of 0.1 ms or more",
        "mean_kernel_us": "mean time of a kernel: short ones end before the next is launched",
        "transfer_ms_per_step": "time on the GPU from the fetch of the batch until it has been copied",
        "transfer_host_ms_per_step": "time on the host until the copy of the batch has been issued",
        "exposed_copy_ms_per_step": "time in which the GPU does nothing but copy from the host",
        "optimizer_host_ms_per_step": "time on the host in the update",
        "others_wait_ms_per_step": "time for which the other ranks wait for this one in collectives",
        "own_wait_ms_per_step": "time for which this rank waits for others",
        "own_ms_per_step": "the step of this rank without waiting for others",
        "others_own_ms_per_step": "the same of the other ranks, in the median",
        "leaf": "the part of its step that is longer than the others'",
        "leaf_ms_per_step": "time in that part",
        "others_leaf_ms_per_step": "time of the other ranks in that part, in the median",
        "waiting_for_ranks_ms_per_step": "communication time that is waiting for the last rank to join",
        "part": "part of the ledger of the fit's wall time",
        "seconds": "time in it over the fit, without what is a part itself",
        "fit_s": "wall time of the fit",
        "times": "how often it ran",
        "cpu_pressure_pct": "share of the time in which some task waited for a core",
        "waits_ms_per_step": "time for which the training thread could run and had no core or no interpreter lock",
        "used_cores": "cores that all threads of this process used, on average",
        "compute_ms_per_step": "time of the GPU's kernels but communication",
        "workers": "processes started anew each time",
        "idle_after_allocator_ms_per_step": "idle time of the GPU that cudaMalloc, cudaFree and the like cause",
        "hidden_pct": "share of the communication during which another kernel runs",
        "holds_up_ms_per_step": "exposed communication that the next kernel or the host waits for",
        "exposed_ms_per_step": "communication during which no other kernel runs",
        "idle_ms_per_step": "idle time of the GPU that no other finding explains",
        "longest_ms_per_step": "the longest part of it",
        "optimizer_ms_per_step": "time in the optimizer's update, with clipping and `zero_grad`",
        "math_ms_per_step": "time in matrix products, convolutions and attention",
    }
)  # fmt: skip
_DESCRIBED: Final = (LoaderSettings, CpuUse, CpuTime, Communication, Flops, MemoryGrowth, RunTiming, Host)


def evidence(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """What each figure is called, the figure, and what it means, "" if its name says so.

    A time on the host that is the device's, as without a GPU, shows once.
    """
    shown: set[str] = set()
    for name, value in finding.evidence.items():
        words = name.replace("_", " ")
        if isinstance(value, int | float) and not isinstance(value, bool):
            ending = next((each for each in _UNITS if words.removesuffix(each)[-1:] in {"", " ", ","}), "")
            words = words.removesuffix(ending).rstrip(" ,") if ending else words
            divisor, form = _UNITS.get(ending, (1, "{}"))
            text = form.format(_figure(value / divisor))
        else:
            text = str(value)
        if not text.strip() or ("host" in words and text in shown):
            continue
        shown.add(text)
        yield _CALLED.get(name, words), text, _MEANS.get(name) or _field_texts().get(name, "")


def _figure(value: float) -> str:
    """Whole numbers as they are, others with three digits."""
    whole = float(value).is_integer()
    return f"{value:,.0f}" if whole else f"{'-' if value < 0 else ''}{digits(abs(value))}"


@cache
def _field_texts() -> dict[str, str]:
    texts: dict[str, str] = {}
    for kind in _DESCRIBED:
        for name, text in field_texts(inspect.getdoc(kind) or "").items():
            texts[name] = text.partition("; None ")[0].partition('; ""')[0].rstrip(".")
    return texts
