"""The GPU or the CPU is at work: `compute-bound`, `memory-bandwidth-bound`, `communication-bound`."""

from math import ceil
from typing import Final

from lightning_forge_profiling.analysis.kernels import NO_BANDWIDTH, PRODUCT_KINDS
from lightning_forge_profiling.diagnosis.loader import accumulating
from lightning_forge_profiling.diagnosis.optimizer import slow_update_ms
from lightning_forge_profiling.diagnosis.rule import (
    COMPILE,
    COMPUTE,
    MEASURE,
    Case,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    RunTimes,
    in_ms,
    unpredicted,
)
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.schema import OTHERS, CpuTime, CpuUse

# -- recorded communication --------------------------------------------------------------------------------------------


def _communication_ms(context: RuleContext) -> float:
    comm = context.rank.comm
    return min(comm.holds_up_ms_per_step, comm.exposed_ms_per_step - context.exposed_wait_ms)


def _explain_communication(context: RuleContext) -> Explanation:
    comm = context.rank.comm
    waiting = (
        "including any waits for other ranks, which were not recorded or could not be matched"
        if context.wait_ms is None
        else "waits for other ranks not counted"
    )
    return Explanation(
        f"communication takes {context.of_step(comm.ms_per_step)}, {comm.hidden_pct:.0f} % of it "
        f"hidden; it holds the step up for {in_ms(_communication_ms(context))} ({waiting})",
        {
            "comm_ms_per_step": comm.ms_per_step,
            "exposed_ms_per_step": comm.exposed_ms_per_step,
            "holds_up_ms_per_step": comm.holds_up_ms_per_step,
            "hidden_pct": comm.hidden_pct,
            **({} if context.wait_ms is None else {"waiting_for_ranks_ms_per_step": context.wait_ms}),
        },
        f"Communicate less often: a larger accumulate_grad_batches{accumulating(context.rank.loader)}, since DDP "
        "exchanges gradients only at the last of those batches, or a larger batch per GPU. Or exchange less: bf16 "
        "gradients (DDP's bf16_compress_hook). A larger bucket_cap_mb means fewer calls; with FSDP, prefetching hides "
        "them.",
    )


def _explain_exchange(context: RuleContext) -> Explanation:
    exchange_ms = context.cpu.exchange_ms_per_step
    return Explanation(
        f"gloo, MPI or UCC exchange with other ranks for {context.of_step(exchange_ms)} beside no computing, waits for "
        "a late rank included",
        {"exchange_ms_per_step": exchange_ms},
        f"Communicate less often: a larger accumulate_grad_batches{accumulating(context.rank.loader)}, or a larger "
        "batch. Traces of all ranks show whether one is late.",
    )


# -- recorded kernels --------------------------------------------------------------------------------------------------

_BF16: Final = 'Trainer(..., precision="bf16-mixed")'

# the GPU is the limit where it computes for so much of the step: what else there is cannot gain more than the rest
_GPU_BOUND_PCT: Final = 85.0

# memory traffic is the limit where kernels that hardly compute run twice as long as those that do
_BANDWIDTH_TO_MATH: Final = 2.0
_BANDWIDTH_PCT: Final = 40.0

_ROUNDS_TO_ONE_PCT: Final = 0.5


def _math_ms(context: RuleContext) -> float:
    return sum(kind.ms_per_step for name, kind in context.rank.kinds.items() if name in PRODUCT_KINDS)


def _memory_ms(context: RuleContext) -> float:
    """Kernels that read and write memory and compute little: element-wise, copies, normalization, ..."""
    return sum(kind.ms_per_step for name, kind in context.rank.kinds.items() if name not in NO_BANDWIDTH)


def _gpu_bound(context: RuleContext) -> bool:
    return context.pct(context.compute_ms) >= _GPU_BOUND_PCT


def _bandwidth_ms(context: RuleContext) -> float:
    memory_ms = _memory_ms(context)
    limits = memory_ms > _BANDWIDTH_TO_MATH * _math_ms(context) and context.pct(memory_ms) >= _BANDWIDTH_PCT
    return memory_ms if limits and _gpu_bound(context) else 0.0


def _explain_bandwidth(context: RuleContext) -> Explanation:
    kinds = sorted(
        ((name, kind) for name, kind in context.rank.kinds.items() if name not in NO_BANDWIDTH),
        key=lambda item: -item[1].ms_per_step,
    )
    shares = [(name, context.pct(kind.ms_per_step)) for name, kind in kinds[:3]]
    named = ", ".join(f"{name} {pct:.0f} %" for name, pct in shares if pct >= _ROUNDS_TO_ONE_PCT)
    return Explanation(
        f"kernels that move memory rather than compute take {context.of_step(_memory_ms(context))} ({named})",
        {f"{name}_ms_per_step": kind.ms_per_step for name, kind in kinds[:5]},
        "Fuse them with torch.compile, keep activations in bf16, use fused layers and losses "
        "(scaled_dot_product_attention, fused cross entropy), avoid copies between types and layouts.",
        COMPILE,
    )


def _gpu_compute_ms(context: RuleContext) -> float:
    return context.compute_ms if _gpu_bound(context) and not _bandwidth_ms(context) else 0.0


def _explain_gpu_compute(context: RuleContext) -> Explanation:
    rank, flops, math_ms, memory_ms = context.rank, context.rank.flops, _math_ms(context), _memory_ms(context)
    title = (
        f"the GPU computes for {context.of_step(context.compute_ms)}, "
        f"{in_ms(math_ms)} of it matrix products, convolutions and attention"
    )
    evidence: Evidence = {"compute_ms_per_step": context.compute_ms, "math_ms_per_step": math_ms}
    if flops:
        title += f" at {flops.matmul_tflops:.0f} TFLOP/s"
        evidence |= {"matmul_tflops": flops.matmul_tflops, "dtype": flops.dtype}
        if flops.matmul_pct_of_peak is not None:
            title += f" ({flops.matmul_pct_of_peak:.0f} % of the {flops.dtype} peak)"
            evidence["matmul_pct_of_peak"] = flops.matmul_pct_of_peak
    fix = ""
    if flops and flops.dtype == "tf32":
        fix = _BF16
        advice = (
            'It computes in tf32, on float32 tensors: Trainer(precision="bf16-mixed") doubles the peak, and moves less '
            "in kernels that compute little."
        )
    elif flops and flops.dtype in {"fp32", "fp64"}:
        fix = _BF16
        advice = (
            f'It computes in {flops.dtype}: Trainer(precision="bf16-mixed") or '
            'torch.set_float32_matmul_precision("high") uses the tensor cores.'
        )
    elif memory_ms > math_ms:
        fix = COMPILE
        advice = f"The GPU is busy, but {in_ms(memory_ms)} are kernels that move memory: torch.compile fuses them."
    else:
        compiled = any(kernel.name.startswith("triton_") for kernel in rank.top_kernels)
        left = "a lower precision, more GPUs" if compiled else "a lower precision, torch.compile, more GPUs"
        advice = f"The GPU is well used. What remains: {left}."
    return Explanation(title, evidence, advice, fix)


def _gpu_saving(context: RuleContext) -> float | None:
    """Down to what the counted operations take at the peak of 16-bit floats, or that of a lower precision in use."""
    flops, device = context.rank.flops, find_peak(context.rank.device)
    if flops is None or flops.peak_tflops is None:
        return None
    others = [device.flops[dtype] / 1e12 for dtype in ("bf16", "fp16") if dtype in device.flops] if device else []
    return context.compute_ms - (flops.model_per_step or flops.per_step) / max(flops.peak_tflops, *others, 0.0) / 1e9


# -- recorded operators on a CPU ---------------------------------------------------------------------------------------


def _explain_operators(context: RuleContext) -> Explanation:
    cpu = context.cpu
    shares = ((name, context.pct(ms)) for name, ms in cpu.costliest_ms_per_step.items())
    costliest = ", ".join(f"{name} {pct:.0f} %" for name, pct in shares if pct >= _ROUNDS_TO_ONE_PCT)
    threads = _threads(cpu, None if context.run is None else context.run.machine.cpu)
    numbers = {"intra_op_threads": cpu.intra_op_threads, "usable_cores": cpu.usable_cores}
    return Explanation(
        f"the model's operators take {context.of_step(cpu.operators_ms_per_step, bound=True)} on the CPU",
        {
            "operators_ms_per_step": cpu.operators_ms_per_step,
            "own_time_per_step": ", ".join(f"{name} {in_ms(ms)}" for name, ms in cpu.costliest_ms_per_step.items()),
            "threads_that_run_operators": cpu.operator_threads,
            **{name: number for name, number in numbers.items() if number is not None},
        },
        f"{threads}Cheaper: torch.compile, a smaller model, or a GPU if its operations are large. Largest by their own "
        f"time: {costliest} of the step.",
    )


_BY_TRY: Final = "forge-profiling try --only threads train.py"


def _threads(cpu: CpuTime, use: CpuUse | None) -> str:
    """What to do about the number of threads: more of them only where cores were idle."""
    threads, cores = cpu.intra_op_threads, cpu.usable_cores if use is None else max(int(use.cores), 1)
    if threads is None:
        return f"The number of threads is unknown: measure OMP_NUM_THREADS=1, 2 and 4 ({MEASURE}). "
    if cores is None:
        return ""
    up_to = f"An operator uses up to {threads} "
    if threads > cores:
        fewer = f"OMP_NUM_THREADS={cores} or torch.set_num_threads({cores})"
        return f"{up_to}threads where there are {cores} usable cores: set {fewer}. "
    if use is not None and use.idle is not None:
        return _threads_by_use(threads, cores, use.idle, use.used)
    unknown = f"{up_to}of {cores} usable cores, and whether the others are free is unknown: "
    return f"{unknown}measure OMP_NUM_THREADS={cores} ({_BY_TRY}). " if threads < cores else ""


def _threads_by_use(threads: int, cores: int, idle: float, used: float) -> str:
    more, others = min(threads + int(idle + OTHERS), cores), cores - used - idle
    if others <= OTHERS and more > threads:
        free = f"{idle:.1f} of the {cores} usable cores were free"
        more_of = f"try OMP_NUM_THREADS={more}, which only large operators gain from ({_BY_TRY})"
        of_operator = "threads" if threads > 1 else "thread"
        return f"An operator uses up to {threads} {of_operator}, and {free}: {more_of}. "
    if others > OTHERS and threads > 1:
        fewer = max(threads - ceil(others), 1)
        return (
            f"Other processes, loader workers included, used {others:.1f} of the {cores} usable cores, and a thread "
            f"without a core holds up the others: measure OMP_NUM_THREADS={fewer} ({_BY_TRY}). "
        )
    return ""


# -- the work of a run -------------------------------------------------------------------------------------------------


def _work_ms(run: RunTimes) -> dict[str, float]:
    """By region without a finding of its own what it computes: all of it but known waits."""
    return {name: run.works_ms(name) for name in COMPUTE if name != "optimizer" or not slow_update_ms(run)}


def _gpu_work_ms(run: RunTimes) -> float:
    gpu = run.evidence.machine.telemetry
    # where every step calls cudaMalloc, the GPU may have waited for it; only a trace shows how long
    allocates = gpu is not None and (gpu.device_allocs_per_step or 0.0) >= 1
    return sum(_work_ms(run).values()) if run.host_is_ahead and not run.backward_is_heavy and not allocates else 0.0


def _explain_gpu_work(run: RunTimes) -> Explanation:
    work_ms, regions = _gpu_work_ms(run), ", ".join(_work_ms(run))
    many, starved_pct = run.evidence.ranks.world_size, run.evidence.timing.gpu_starved_pct
    communication = f" (communication of the {many} processes included)" if many > 1 else ""
    return Explanation(
        f"the run is GPU-bound: {run.of_step(work_ms)} are work that the host had queued ahead in "
        f"{regions}{communication}; the GPU had caught up with it at {starved_pct:.0f} % of the batch ends",
        {"gpu_paced_ms_per_step": work_ms},
        'Make the work cheaper: Trainer(precision="bf16-mixed"), torch.compile, fused attention. A recorded '
        "window (ForgeProfilerCallback) shows which kernels take the time.",
        _BF16,
    )


def _explain_cpu_work(run: RunTimes) -> Explanation:
    by_region = _work_ms(run)
    each = ", ".join(f"{name} {in_ms(ms)}" for name, ms in by_region.items())
    what = "computing" if run.waits_are_known else "computing, or waiting in it,"
    return Explanation(
        f"{what} takes {run.of_step(sum(by_region.values()))} on the CPU: {each}",
        {f"{name}_computes_ms_per_step": ms for name, ms in by_region.items()},
        "A recorded window (ForgeProfilerCallback) shows which operators take it. Cheaper: torch.compile, a smaller "
        "model, or a GPU if its operations are large.",
    )


RULES: Final = (
    Rule(
        "communication-bound",
        gpu=Case(_communication_ms, _explain_communication),
        cpu=Case(lambda context: context.cpu.exchange_ms_per_step, _explain_exchange),
    ),
    Rule(
        "compute-bound",
        gpu=Case(_gpu_compute_ms, _explain_gpu_compute, _gpu_saving),
        cpu=Case(lambda context: context.cpu.operators_ms_per_step, _explain_operators, unpredicted),
        run=Case(_gpu_work_ms, _explain_gpu_work, unpredicted),
    ),
    Rule("memory-bandwidth-bound", gpu=Case(_bandwidth_ms, _explain_bandwidth)),
)
# of a run without a GPU, beside other findings
CPU_WORK: Final = Rule(
    "compute-bound", run=Case(lambda run: sum(_work_ms(run).values()), _explain_cpu_work, unpredicted)
)
