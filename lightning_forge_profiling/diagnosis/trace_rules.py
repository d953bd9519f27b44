"""Causes of lost time in a trace, as rules on the figures of one rank."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.analysis.kernels import base_name
from lightning_forge_profiling.diagnosis.loader_advice import (
    LoaderWait,
    accumulating,
    loader_advice,
    loader_evidence,
    only_bounded,
    pin_memory_advice,
)
from lightning_forge_profiling.diagnosis.rule import (
    NAMED_FROM_PCT,
    NO_BANDWIDTH,
    RECORD_STACKS,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    in_function,
    in_ms,
    unpredicted,
)
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.results.rank import IdlePart, Region

_EXPLAINED_BY: Final = MappingProxyType(
    {
        "data": {"input-bound"},
        "launch": {"slow-launches"},
        "allocator": {"allocator-churn"},
        "sync": {"sync-bound"},
        "copy": {"transfer-bound"},
        "python": {"launch-bound", "slow-optimizer", "sync-bound", "allocator-churn"},
        "gpu": set(),
    }
)
"""By idle cause the findings of which it is a part."""


def _launch_cost(context: RuleContext) -> float:
    return context.rank.idle["launch"].ms_per_step if "launch" in context.rank.idle else 0.0


def _slow_launches(context: RuleContext) -> Explanation:
    parts = [part for part in context.rank.idle_parts if _cause(part) == "launch"]
    waits = context.rank.idle["launch"].ms_per_step
    where = f", {in_ms(min(parts[0].ms_per_step, waits))} of it in {_activity(parts[0])}" if parts else ""
    title = f"the GPU waits {context.of_step(waits)} inside launch calls of 0.1 ms or more{where}"
    evidence: Evidence = {"idle_in_launches_ms_per_step": waits, **(_evidence(parts[0]) if parts else {})}
    advice = (
        "The first launch of a kernel loads its module: record later steps (a larger start_step), or load all modules "
        "at the start (CUDA_MODULE_LOADING=EAGER, on AMD HIP_ENABLE_DEFERRED_LOADING=0). If later steps show it too, "
        "new kernels keep being loaded: keep shapes constant, look for recompilations (TORCH_LOGS=recompiles)."
    )
    return Explanation(title, evidence, advice)


SLOW_LAUNCHES: Final = Rule("slow-launches", _launch_cost, _slow_launches)


def largest_idle(rules: Sequence[Rule[RuleContext]]) -> Rule[RuleContext]:
    """The rule for the largest part of the idle time, where none of the others explains it."""

    def cost(context: RuleContext) -> float:
        cause = _largest(context)
        explaining = _EXPLAINED_BY.get(cause, set())
        named = any(rule.code in explaining and context.pct(rule.cost(context)) >= NAMED_FROM_PCT for rule in rules)
        return 0.0 if named or not cause else context.rank.idle[cause].ms_per_step

    return Rule("gpu-idle", cost, _unexplained, unpredicted)


def _largest(context: RuleContext) -> str:
    return max(context.rank.idle, key=lambda cause: context.rank.idle[cause].ms_per_step, default="")


def _unexplained(context: RuleContext) -> Explanation:
    cause = _largest(context)
    launched = cause == "gpu"
    idle = context.rank.idle[cause].ms_per_step
    parts = [part for part in context.rank.idle_parts if part.launched == launched]
    title = f"the GPU idles {context.of_step(idle)}"
    title += " although its next work has been launched" if launched else " and waits for the host"
    evidence: Evidence = {"idle_ms_per_step": idle}
    if parts:
        part = parts[0]
        title += f", mostly before {_short(part.following)}" if launched and part.following else ""
        if part.activity or not launched:
            title += f"; for {in_ms(min(part.ms_per_step, idle))} of it the host is in {_activity(part)}"
        evidence |= _evidence(part)
    if launched:
        advice = (
            "The GPU waits for something on its own side: another stream's event, a dependency inside a CUDA graph, "
            "another process on this GPU. The timeline shows what runs on the other streams just before the gap ends."
        )
    else:
        shows = "The Python functions in the report show" if context.has_stacks else f"{RECORD_STACKS} shows"
        advice = f"No fix is known. {shows} what the host is in."
    return Explanation(title, evidence, advice)


def _cause(part: IdlePart) -> str:
    return "launch" if not part.launched and "Launch" in part.activity else ""


def _activity(part: IdlePart) -> str:
    """What the host was in, in words."""
    if not part.activity:
        return f"Python outside of all operators (thread {part.thread})" if part.thread else "no recorded activity"
    around = f" of {part.operator}" if part.operator else ""
    return f"{part.activity}{around} (thread {part.thread})"


def _short(kernel: str) -> str:
    return base_name(kernel).rpartition("::")[2]


def _evidence(part: IdlePart) -> Evidence:
    return {
        "longest_ms_per_step": part.ms_per_step,
        "activity": part.activity,
        "operator": part.operator,
        "thread": part.thread,
        "before": _short(part.following),
    }


_GPU_BOUND_PCT: Final = 85.0
"""The GPU is the limit where it computes for so much of the step: what else there is cannot gain more than the rest."""

_BANDWIDTH_TO_MATH: Final = 2.0
"""Memory traffic is the limit where kernels that hardly compute run twice as long as those that do."""
_BANDWIDTH_PCT: Final = 40.0

_UNFUSED_LAUNCHES: Final = 100
"""A fused optimizer launches 3 to 7 kernels, a foreach one 10 to 50 for the same GPT; a loop over parameters, several
for each of them."""

_ROUNDS_TO_ONE_PCT: Final = 0.5

_SINGLE_PROCESS: Final = "_SingleProcessDataLoaderIter"


def _input_cost(context: RuleContext) -> float:
    rank = context.rank  # without a GPU nothing hides the wait
    return rank.idle["data"].ms_per_step if context.on_gpu else rank.host.data_wait_ms_per_step


def _wait(context: RuleContext) -> LoaderWait:
    rank = context.rank
    return LoaderWait(
        host_ms=rank.host.data_wait_ms_per_step,
        exposed_ms=_input_cost(context),
        step_ms=rank.step_ms.mean,
        on_gpu=context.on_gpu,
        in_process=rank.host.data_loader == _SINGLE_PROCESS,
        pinned=any(copy.direction == "HtoD" and copy.memory == "pinned" for copy in rank.copies),
    )


def _input(context: RuleContext) -> Explanation:
    rank, waits, loads = context.rank, context.rank.idle["data"].ms_per_step, context.rank.host.data_wait_ms_per_step
    if not context.on_gpu:
        title = f"training waits {context.of_step(loads)} for the data loader"
    else:
        title = (
            f"the GPU waits {context.of_step(waits)} for the data loader "
            f"(host wait {in_ms(loads)}, {100 * max(1 - waits / max(loads, waits), 0):.0f} % of it hidden)"
        )
    evidence: Evidence = {"exposed_wait_ms_per_step": waits, "host_wait_ms_per_step": loads}
    return Explanation(title, evidence | loader_evidence(rank.loader), loader_advice(_wait(context), rank.loader))


def _transfer_cost(context: RuleContext) -> float:
    to_device = sum(copy.exposed_ms_per_step for copy in context.rank.copies if copy.direction == "HtoD")
    return to_device + context.rank.idle["copy"].ms_per_step


def _transfer(context: RuleContext) -> Explanation:
    copies = [copy for copy in context.rank.copies if copy.direction == "HtoD"]
    main = max(copies, key=lambda copy: copy.exposed_ms_per_step, default=None)
    size = sum(copy.bytes_per_step for copy in copies)
    memory = f"{main.memory} memory" if main and main.memory else "the host"
    rate = main.gb_per_s if main else 0.0
    title = (
        f"copies to the GPU take {context.of_step(_transfer_cost(context))} "
        f"({size / 1e6:.1f} MB, mostly from {memory} at {rate:.1f} GB/s)"
    )
    less = "copy less (uint8 or bf16 with the conversion on the GPU), or copy the next batch while this one is computed"
    advice = f"{less[0].upper()}{less[1:]}."
    if main and main.memory == "pageable":
        advice = f"{pin_memory_advice(context.rank.loader)}; {less}."
    evidence: Evidence = {
        "exposed_copy_ms_per_step": sum(copy.exposed_ms_per_step for copy in copies),
        "copied_bytes_per_step": size,
        "bandwidth_gb_per_s": rate,
        "from": main.memory if main else "",
        **loader_evidence(context.rank.loader),
    }
    return Explanation(title, evidence, advice)


def _sync_cost(context: RuleContext) -> float:
    host = context.rank.host
    return host.idle_after_sync_ms_per_step if host.device_syncs_per_step else 0.0


def _sync(context: RuleContext) -> Explanation:
    host = context.rank.host
    users = [cause for cause in host.syncs if not cause.lightning]
    first = users[0]
    where = f" from {first.where}" if first.where else ""
    title = (
        f"the host waits for the GPU {host.device_syncs_per_step:.0f} times a step, mostly in {first.cause}{where}: "
        f"the queue runs dry, and the GPU idles {context.of_step(_sync_cost(context))}"
    )
    evidence: Evidence = {
        "idle_after_sync_ms_per_step": _sync_cost(context),
        "device_syncs_per_step": host.device_syncs_per_step,
        "lightning_syncs_per_step": host.lightning_syncs_per_step,
        "cause": first.cause,
    }
    if first.where:
        evidence["where"] = first.where
    more = "" if context.has_stacks else f" {RECORD_STACKS} shows the functions that call them."
    advice = (
        "Keep values on the GPU: detach() instead of item(), log every n steps, no if on a tensor, non_blocking copies."
    )
    return Explanation(title, evidence, advice + more)


def _allocator_cost(context: RuleContext) -> float:
    return context.rank.host.idle_after_allocator_ms_per_step


def _allocator(context: RuleContext) -> Explanation:
    host, cost = context.rank.host, _allocator_cost(context)
    title = (
        f"{host.cuda_mallocs_per_step:.1f} cudaMalloc and {host.cuda_frees_per_step:.1f} cudaFree a step keep the GPU "
        f"waiting {context.of_step(cost)}"
    )
    evidence: Evidence = {
        "idle_after_allocator_ms_per_step": cost,
        "cuda_mallocs_per_step": host.cuda_mallocs_per_step,
        "cuda_frees_per_step": host.cuda_frees_per_step,
    }
    advice = (
        "Remove torch.cuda.empty_cache() from the loop; keep batch shapes constant or pad them to a few sizes; set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; leave some memory free."
    )
    if context.rank.steps == 1:  # which may be the first of the run
        advice = (
            "The allocator grows in the first steps of a run, and a single recorded step does not show whether "
            f"later ones do too: record several steps after the warm-up. If they show it too: {advice[0].lower()}"
            f"{advice[1:]}"
        )
    return Explanation(title, evidence, advice)


def _optimizer_region(context: RuleContext) -> Region | None:
    return next((region for region in context.rank.regions if region.name == "optimizer" and not region.user), None)


def _optimizer_cost(context: RuleContext) -> float:
    region = _optimizer_region(context)
    if region is None or region.launches_per_step < _UNFUSED_LAUNCHES:
        return 0.0
    return region.gpu_ms_per_step + region.idle_ms_per_step


def _optimizer(context: RuleContext) -> Explanation:
    region = _optimizer_region(context)
    if region is None:
        raise ValueError("a step without an optimizer")
    title = (
        f"the optimizer takes {context.of_step(_optimizer_cost(context))}: "
        f"{region.launches_per_step:.0f} launches, {in_ms(region.gpu_ms_per_step)} of GPU work and "
        f"{in_ms(region.idle_ms_per_step)} of waiting"
    )
    evidence: Evidence = {
        "optimizer_ms_per_step": _optimizer_cost(context),
        "gpu_busy_ms_per_step": region.gpu_ms_per_step,
        "gpu_waits_ms_per_step": region.idle_ms_per_step,
        "launches_per_step": region.launches_per_step,
    }
    return Explanation(title, evidence, "Give the optimizer fused=True (or foreach=True where it has no fused kernel).")


def _optimizer_saving(context: RuleContext) -> float:
    """Its GPU work, and waiting for the host, which runs ahead once the update is a few launches.

    The host gains no more lead than the update takes it, so waits of more than that stay.
    """
    region = _optimizer_region(context)
    if region is None:
        return 0.0
    return region.gpu_ms_per_step + min(_waits_for_host(context), region.host_ms_per_step)


def _waits_for_host(context: RuleContext) -> float:
    """All that goes once the host is not held up and gets ahead, so not the calls that take long by themselves."""
    return context.host_idle_ms - SLOW_LAUNCHES.cost(context)


def _held_up(context: RuleContext, cost_ms: float) -> float:
    """What a step is shorter once calls no longer hold the host up.

    The host gains what it waited in them: while the GPU was busy, so no longer than that, and while it was idle. With
    that lead it can close other gaps too, but its own work between the launches stays.
    """
    return min(_waits_for_host(context), context.rank.gpu.busy_ms_per_step + cost_ms)


def _named_optimizer(context: RuleContext) -> bool:
    """Whether the optimizer's part is a finding of its own."""
    return context.pct(_optimizer_cost(context)) >= NAMED_FROM_PCT


def _launch_gaps_ms(context: RuleContext) -> float:
    cost = context.rank.host.idle_launching_ms_per_step
    if _named_optimizer(context):
        cost -= sum(region.idle_ms_per_step for region in context.rank.regions if region.name == "optimizer")
    return max(cost, 0.0)


def _launch(context: RuleContext) -> Explanation:
    rank = context.rank
    named = {"data", "optimizer"} if _named_optimizer(context) else {"data"}
    built_in = [region for region in rank.regions if not region.user and region.name not in named]
    where = max(built_in, key=lambda region: region.idle_ms_per_step)
    kernels = rank.gpu.busy_ms_per_step * 1e3 / max(rank.gpu.kernels_per_step, 1)
    inside = f", most of it in {where.name}" if where.name != "other" else ""  # which names no place
    title = (
        f"the GPU waits {context.of_step(_launch_gaps_ms(context))} for Python between its "
        f"{rank.host.launches_per_step:.0f} launches{inside}; the mean kernel runs {kernels:.1f} µs"
    )
    evidence: Evidence = {
        "idle_launching_ms_per_step": _launch_gaps_ms(context),
        "launches_per_step": rank.host.launches_per_step,
        "mean_kernel_us": kernels,
        "most_in_region": where.name,
    }
    graphs = rank.host.graph_launches_per_step
    advice = 'Launch less: torch.compile(mode="reduce-overhead") or CUDA graphs, a larger batch, fused modules.'
    if graphs:
        single = rank.host.launches_per_step - graphs
        advice = (
            f"CUDA graphs are replayed {graphs:.0f} times a step beside {single:.0f} single launches: capture what is "
            "still outside of them (the optimizer too), or make the batch larger."
            if single >= 1
            else f"All work is launched as CUDA graphs, {graphs:.0f} a step: capture more in each of them, make the "
            "batch larger, or do less in Python between the replays."
        )
        evidence["graph_launches_per_step"] = graphs
    if context.pct(_sync_cost(context)) >= NAMED_FROM_PCT:
        advice += " First fix sync-bound: a CUDA graph cannot contain calls that wait for the GPU."
    held = in_function(rank, "launch-bound")
    first = "" if held is None else f"Look at {held.where} first, which holds most of that time. "
    return Explanation(title, evidence, first + advice)


def _communication_cost(context: RuleContext) -> float:
    return context.rank.comm.exposed_ms_per_step - context.exposed_wait_ms


def _communication(context: RuleContext) -> Explanation:
    comm = context.rank.comm
    waiting = (
        "including any waits for other ranks, which were not recorded or could not be matched"
        if context.wait_ms is None
        else "waits for other ranks not counted"
    )
    title = (
        f"communication takes {context.of_step(comm.ms_per_step)}, {comm.hidden_pct:.0f} % of it "
        f"hidden; {in_ms(_communication_cost(context))} are exposed ({waiting})"
    )
    evidence: Evidence = {
        "comm_ms_per_step": comm.ms_per_step,
        "exposed_ms_per_step": comm.exposed_ms_per_step,
        "hidden_pct": comm.hidden_pct,
    }
    if context.wait_ms is not None:
        evidence["waiting_for_ranks_ms_per_step"] = context.wait_ms
    advice = (
        f"Communicate less often or less: a larger accumulate_grad_batches{accumulating(context.rank.loader)}, of "
        "which DDP exchanges the last batch's alone; a larger batch per GPU, bf16 gradients (DDP's "
        "bf16_compress_hook), a larger bucket_cap_mb; with FSDP, prefetching."
    )
    return Explanation(title, evidence, advice)


def _gpu_bound(context: RuleContext) -> bool:
    return context.pct(context.compute_ms) >= _GPU_BOUND_PCT


def _bandwidth_cost(context: RuleContext) -> float:
    enough = context.pct(context.bandwidth_ms) >= _BANDWIDTH_PCT
    return context.bandwidth_ms if _gpu_bound(context) and enough else 0.0


def _bandwidth(context: RuleContext) -> Explanation:
    kinds = sorted(
        ((name, kind) for name, kind in context.rank.kinds.items() if name not in NO_BANDWIDTH),
        key=lambda item: -item[1].ms_per_step,
    )
    named = ", ".join(f"{name} {kind.pct:.0f} %" for name, kind in kinds[:3] if kind.pct >= _ROUNDS_TO_ONE_PCT)
    title = f"kernels that move memory rather than compute take {context.of_step(context.bandwidth_ms)} ({named})"
    evidence: Evidence = {f"{name}_ms_per_step": kind.ms_per_step for name, kind in kinds[:5]}
    advice = (
        "Fuse them with torch.compile, keep activations in bf16, use fused layers and losses "
        "(scaled_dot_product_attention, fused cross entropy), avoid copies between types and layouts."
    )
    return Explanation(title, evidence, advice)


def _compute_cost(context: RuleContext) -> float:
    limited_by_math = context.bandwidth_ms <= _BANDWIDTH_TO_MATH * context.math_ms
    return context.compute_ms if _gpu_bound(context) and limited_by_math else 0.0


def _compute(context: RuleContext) -> Explanation:
    rank = context.rank
    title = (
        f"the GPU computes for {context.of_step(context.compute_ms)}, "
        f"{in_ms(context.math_ms)} of it matrix products, convolutions and attention"
    )
    evidence: Evidence = {"compute_ms_per_step": context.compute_ms, "math_ms_per_step": context.math_ms}
    if context.bandwidth_ms > context.math_ms:
        memory = in_ms(context.bandwidth_ms)
        advice = f"The GPU is busy, but {memory} are kernels that move memory: torch.compile fuses them."
    else:
        compiled = any(kernel.name.startswith("triton_") for kernel in rank.top_kernels)
        left = "a lower precision, more GPUs" if compiled else "a lower precision, torch.compile, more GPUs"
        advice = f"The GPU is well used. What remains: {left}."
    if rank.flops:
        title += f" at {rank.flops.matmul_tflops:.0f} TFLOP/s"
        evidence |= {"matmul_tflops": rank.flops.matmul_tflops, "dtype": rank.flops.dtype}
        if rank.flops.matmul_pct_of_peak is not None:
            title += f" ({rank.flops.matmul_pct_of_peak:.0f} % of the {rank.flops.dtype} peak)"
            evidence["matmul_pct_of_peak"] = rank.flops.matmul_pct_of_peak
        if rank.flops.dtype in {"fp32", "fp64"}:
            advice = (
                f'It computes in {rank.flops.dtype}: Trainer(precision="bf16-mixed") or '
                'torch.set_float32_matmul_precision("high") uses the tensor cores.'
            )
    return Explanation(title, evidence, advice)


def _compute_saving(context: RuleContext) -> float | None:
    """Down to what the counted operations take at the peak of 16-bit floats, or that of a lower precision in use."""
    flops, device = context.rank.flops, find_peak(context.rank.device)
    if flops is None or flops.peak_tflops is None:
        return None
    others = [device.flops[dtype] / 1e12 for dtype in ("bf16", "fp16") if dtype in device.flops] if device else []
    return context.compute_ms - (flops.model_per_step or flops.per_step) / max(flops.peak_tflops, *others, 0.0) / 1e9


INPUT_BOUND: Final = Rule(
    "input-bound", _input_cost, _input, at_most=lambda context: only_bounded(_wait(context), context.rank.loader)
)
"""The one of these rules that holds without a GPU too; `cpu_rules.py` has the others."""

_RULES: Final = (
    INPUT_BOUND,
    Rule("transfer-bound", _transfer_cost, _transfer),
    Rule("sync-bound", _sync_cost, _sync, lambda context: _held_up(context, _sync_cost(context))),
    Rule("allocator-churn", _allocator_cost, _allocator, lambda context: _held_up(context, _allocator_cost(context))),
    SLOW_LAUNCHES,
    Rule("slow-optimizer", _optimizer_cost, _optimizer, _optimizer_saving),
    Rule("launch-bound", _launch_gaps_ms, _launch),
    Rule("communication-bound", _communication_cost, _communication),
    Rule("compute-bound", _compute_cost, _compute, _compute_saving),
    Rule("memory-bandwidth-bound", _bandwidth_cost, _bandwidth),
)

TRACE_RULES: Final = (*_RULES, largest_idle(_RULES))
"""The rules for a rank with GPU work. A straggler takes all ranks together: `findings.py`."""
