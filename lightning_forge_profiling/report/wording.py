"""Phrases that the reports share, and the evidence of findings: figures with their names, units and meanings."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import floor, log10
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.diagnosis.machine_rules import UNRELIABLE
from lightning_forge_profiling.diagnosis.ranks import rank_list
from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.json_layout import field_texts
from lightning_forge_profiling.report.screen import Text
from lightning_forge_profiling.schema import (
    NOTHING_STANDS_OUT,
    Analysis,
    Communication,
    CpuTime,
    CpuUse,
    Distribution,
    Finding,
    Flops,
    Host,
    LoaderSettings,
    MemoryGrowth,
    RankSummary,
    RunTiming,
)

# host activity while the GPU was idle, by `IDLE_CAUSES`
IDLE_WORDS: Final = MappingProxyType(
    {
        "data": "in the data loader",
        "sync": "host waits for the GPU",
        "launch": "in a launch of 0.1 ms or more",
        "allocator": "in cudaMalloc or cudaFree",
        "copy": "in a copy call",
        "python": "in Python between launches",
        "gpu": "next kernel already launched",
        "others": "other GPUs of the process work",
    }
)
STACKS_NOTE: Final = "Recorded with stacks, which slow each Python call: functions that make many calls are overstated"

_USERS_SHOWN: Final = 3
_SAME_WORK: Final = 0.001
_MOST_COUNTED_PCT: Final = 90.0
_RARE: Final = 0.1


def used_gpu(rank: RankSummary) -> bool:
    """Whether GPU work was recorded; without it, busy and idle mean nothing."""
    return rank.gpu.busy_ms_per_step > 0


def verdict(analysis: Analysis) -> Text:
    """The verdict's sentences with its name marked, in green if nothing stands out."""
    style = "bold green" if analysis.verdict == NOTHING_STANDS_OUT else "bold yellow"
    name = re.search(re.escape(analysis.verdict), analysis.verdict_text, re.IGNORECASE)
    return Text(analysis.verdict_text, style if name else "", marked=name[0] if name else "")


def slowest_rank(ranks: Sequence[RankSummary]) -> RankSummary:
    """The rank with the longest median step (one odd step moves a mean); one that is cut off only if all are."""
    return max(ranks, key=lambda rank: (not rank.cut_off, rank.step_ms.p50))


def rank_name(rank: RankSummary) -> str:
    """A rank's number, marked where its figures are of a file that is cut off."""
    return f"{rank.rank} (cut off)" if rank.cut_off else str(rank.rank)


def slowest(ranks: Sequence[RankSummary]) -> str:
    """A remark for the number of `slowest_rank`; "" if there is one rank."""
    return ", the slowest by its median" if len(ranks) > 1 else ""


def between(finding: Finding) -> str:
    """The interval of a finding's share in brackets: ` (38 to 47)`; "" if it is unknown."""
    known = finding.low_pct is not None and finding.high_pct is not None
    return f" ({finding.low_pct:.0f} to {finding.high_pct:.0f})" if known else ""


def findings_note(analysis: Analysis) -> str:
    """What to know of the findings' shares; "" if that is nothing, or if no finding is from the trace it is about."""
    about = any(finding.source == "trace" or finding.code in UNRELIABLE for finding in analysis.findings)
    return f"Note: {analysis.findings_note}" if analysis.findings_note and about else ""


def ranks_note(analysis: Analysis) -> str:
    """Where not all ranks are shown: which are, and how all of them spread; "" else."""
    if analysis.all_ranks <= len(analysis.ranks):
        return ""
    words = {"step": "a step takes {}", "busy": "the GPU is busy for {}", "waits": "a rank waits {} for others"}
    said = [words[name].format(_range(times)) for name, times in analysis.spread.items() if name in words and times.max]
    return (
        f"{len(analysis.ranks)} of {analysis.all_ranks:,} ranks are shown: rank 0, those that are named, a typical one "
        f"and the worst. Over all ranks {', '.join(said)}; shares of findings are means over all of them"
    )


def _range(times: Distribution) -> str:
    least, mid, most = map(in_ms, (times.min, times.p50, times.max))
    return most if least == most else f"{least} to {most} (median {mid})"


def findings_remarks(analysis: Analysis) -> Iterator[str]:
    """What to know to read the findings: where the tables count otherwise."""
    codes = {finding.code for finding in analysis.findings if finding.source == "trace"}
    if named := sorted(codes & {"allocator-churn", "sync-bound"}):
        yield f"Tables count idle time inside the call alone; {' and '.join(named)}, the whole gap that began in it."
    if "communication-bound" in codes and analysis.rank_waits:
        yield "Tables count waiting for other ranks as communication; communication-bound does not."


def share_of(analysis: Analysis, finding: Finding) -> str:
    """A finding's share, and its interval. Shares of a trace are means over the ranks."""
    interval = between(finding) if finding.of == "step" else ""
    averaged = len(analysis.ranks) > 1 and finding.source == "trace" and finding.code != "straggler"
    mean = ", mean of the ranks" if averaged and finding.of == "step" and not interval else ""
    return f"{finding.share(1)}{interval}{mean}"


def steps_of(rank: RankSummary) -> str:
    """The number of steps, their length and the device."""
    times = rank.step_ms
    steps = "1 step" if rank.steps == 1 else f"{rank.steps} steps"
    spread = f", {times.min:.3f} to {times.max:.3f} ms, median {times.p50:.3f} ms" if rank.steps > 1 else ""
    cut = "; its file is cut off" if rank.cut_off else ""
    if used_gpu(rank):
        return f"{steps}{spread} on {rank.device or 'an unnamed device'}{cut}"
    nothing = ", without GPU work" if rank.cut_off else "; no GPU events in the trace"
    return f"{steps}{spread}{f' on {rank.device}' if rank.device else ''}{cut}{nothing}"


def calls(per_step: float) -> str:
    """How often something happens in a step."""
    return f"{per_step:.{2 if per_step >= _RARE else 4}f}".rstrip("0").rstrip(".")


def linked(rank: RankSummary) -> str:
    """The share of GPU time that can be joined to its launch; "" without GPU work."""
    if not used_gpu(rank):
        return ""
    return f"{100 - rank.unlinked_pct:.1f} % of the GPU time is joined to its launch, {rank.unlinked_pct:.1f} % is not"


def cpu_threads(rank: RankSummary) -> str:
    """Threads that ran operators on the CPU, and the usable cores; "" if a GPU did, or nothing ran."""
    cpu = rank.cpu
    if cpu is None:
        return ""
    ran = f"operators ran on {cpu.operator_threads} thread{'s' if cpu.operator_threads > 1 else ''}"
    inner = "" if cpu.intra_op_threads is None else f"; intra-op threads: {cpu.intra_op_threads}"
    return ran + inner + ("" if cpu.usable_cores is None else f"; usable cores: {cpu.usable_cores}")


def efficiency(rank: RankSummary) -> str:
    """FLOP/s in matrix products and while busy, or why they are unknown; "" for training on the CPU."""
    flops = rank.flops
    if flops is None:
        return "" if rank.cpu is not None else f"FLOPs unknown: {rank.flops_note}"
    if flops.counted_pct < _MOST_COUNTED_PCT:  # what is known of the rest is no rate over the busy time
        without = f" (not of {', '.join(flops.uncounted)})" if flops.uncounted else ""
        speed = f"{_tflops(flops.matmul_tflops)} TFLOP/s in the {flops.counted_pct:.0f} % of matrix products"
        speed += f" whose FLOPs are known{without}"
        if flops.peak_tflops is None or flops.matmul_pct_of_peak is None:
            return f"{speed}, in {flops.dtype}"
        peak = f"the dense {flops.dtype} peak of {flops.peak_tflops:.1f} TFLOP/s"
        return f"{speed}: {flops.matmul_pct_of_peak:.1f} % of {peak}"
    speed = f"{_tflops(flops.matmul_tflops)} TFLOP/s in matrix products, {_tflops(flops.busy_tflops)} while busy"
    if flops.recomputed_pct > 100 * _SAME_WORK:
        speed += f" ({flops.recomputed_pct:.0f} % of the operations recompute activations or are the optimizer's)"
    if flops.peak_tflops is None or flops.matmul_pct_of_peak is None or flops.busy_pct_of_peak is None:
        return f"{speed} ({flops.dtype}; no peak known for {rank.device or 'this device'})"
    return (
        f"{speed}: {flops.matmul_pct_of_peak:.1f} % and {flops.busy_pct_of_peak:.1f} % "
        f"of the dense {flops.dtype} peak of {flops.peak_tflops:.1f} TFLOP/s"
    )


def _tflops(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 10 else digits(rate)  # noqa: PLR2004


def users_functions(rank: RankSummary) -> str:
    """The user's functions that take most of the recorded step; "" without stacks."""
    users = () if rank.python is None else rank.python.users[:_USERS_SHOWN]
    return ", ".join(f"{user.where} {digits(user.own_ms_per_step)} ms" for user in users)


def by_text(messages: Iterable[tuple[int, str]], several: bool) -> Iterator[tuple[str, str]]:
    """Messages about ranks, each text once, after the ranks that it is about."""
    ranks: dict[str, list[int]] = {}
    for rank, text in messages:
        ranks.setdefault(text, []).append(rank)
    for text, said_of in ranks.items():
        yield f"{rank_list(said_of)}: " if several else "", text


def hints(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """The hints, each text once, after the ranks that it is about."""
    return by_text(((hint.rank, hint.text) for hint in analysis.hints), several=len(analysis.ranks) > 1)


def all_warnings(analysis: Analysis) -> list[str]:
    """Warnings of the analysis and of its ranks, each once."""
    warnings = dict.fromkeys(analysis.warnings)
    of_ranks = ((rank.rank, text) for rank in analysis.ranks for text in rank.warnings if text not in warnings)
    return [*warnings, *(where + text for where, text in by_text(of_ranks, several=len(analysis.ranks) > 1))]


def digits(rate: float) -> str:
    """At least three digits of a rate, never an exponent."""
    return f"{rate:,.{max(0, 2 - floor(log10(rate)))}f}" if rate > 0 else "0"


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
        "parts": "in",
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
        "where": "the function or call that most of the time was spent in",
        "mistake": "its name in diagnosis/catalogue.py",
        "parts": "the parts of the fit in which it is called, the longest first",
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
        "first_ms_per_step": "time in the first fifth of the run's blocks of steps",
        "last_ms_per_step": "time in the last fifth",
        "more_ms_per_step": "what the mean step takes more than in the first fifth",
        "kernel_ms_per_step": "time of the training thread in the kernel, which hands out memory",
        "entries": "number of entries at the end",
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
