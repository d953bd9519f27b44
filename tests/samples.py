"""An analysis to report on, made up but consistent: its parts sum as those of a real one do."""

from collections.abc import Sequence
from statistics import mean, median

from lightning_forge_profiling.diagnosis.verdict import decide, in_order
from lightning_forge_profiling.schema import (
    Analysis,
    Collective,
    Communication,
    Copies,
    Distribution,
    Finding,
    Flops,
    Gpu,
    Hint,
    Host,
    Kernel,
    Kind,
    Memory,
    Operator,
    PythonCall,
    PythonFunctions,
    RankSummary,
    RankWait,
    Region,
    Share,
    Step,
    SyncCause,
    UserFunction,
)

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>"
    "(int, float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
    "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, "
    "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false> >(...)"
)
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

# kind, category, share of the step, launches a step, its kernel; communication only with more than one rank.
KINDS = (
    ("matmul", "matmul", 0.38, 96, GEMM),
    ("attention", "other", 0.07, 24, "flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >"),
    ("elementwise", "other", 0.06, 210, ADD),
    ("normalization", "other", 0.035, 50, NORM),
    ("optimizer", "other", 0.025, 8, ADAM),
    ("softmax", "other", 0.01, 2, "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>"),
    ("memcpy", "memory", 0.03, 4, "Memcpy HtoD (Pageable -> Device)"),
    ("memset", "memory", 0.01, 12, "Memset (Device)"),
)
COMM = ("comm", "comm", 0.09, 3, ALLREDUCE)
IDLE = {
    "data": 0.16,
    "launch": 0.0,
    "sync": 0.05,
    "allocator": 0.0,
    "copy": 0.02,
    "python": 0.03,
    "gpu": 0.0,
}  # the last one: the rest


def sample_analysis(ranks: int = 1, *, step_ms: Sequence[float] = (50.0, 51.5, 58.3)) -> Analysis:
    """An input-bound GPT on `ranks` H200s; rank r takes r * 0.2 ms longer than `step_ms` says."""
    summaries = tuple(_rank(rank, [ms + 0.2 * rank for ms in step_ms], ranks) for rank in range(ranks))
    mean_ms = summaries[0].step_ms.mean
    findings = in_order(
        [
            Finding(
                code="input-bound",
                share_pct=16.0,
                rank=None,
                source="trace",
                title="the GPU waits 8.5 ms of each step for the data loader",
                evidence={"idle in the data loader, ms per step": 8.53, "workers": "none"},
                advice="Give the DataLoader num_workers=4 or more, pin_memory=True and persistent_workers=True.",
            ),
            Finding(
                code="sync-bound",
                share_pct=5.0,
                rank=0,
                source="trace",
                title="the host waits for the GPU 12 times a step",
                evidence={"device syncs per step": 12.0, "idle after them, ms per step": 2.66},
                advice="Keep the loss on the device: call .item() every 50 steps instead of every step.",
            ),
            Finding(
                code="compute-bound",
                share_pct=38.0,
                rank=None,
                source="trace",
                title="matrix products take 38 % of the step at 61 % of the device's peak",
                evidence={"matmul, ms per step": 20.2, "TFLOP/s": 603.0},
                advice="Larger matrices or a lower precision would help; the rest is little.",
            ),
        ]
    )
    verdict, verdict_text = decide(findings)
    return Analysis(
        source="runs/gpt/forge",
        verdict=verdict,
        verdict_text=verdict_text,
        findings=findings,
        hints=(Hint(code="copy-heavy", rank=0, text="aten::copy_ takes 6 % of the step: look for dtype changes."),),
        ranks=summaries,
        collectives=_collectives(mean_ms) if ranks > 1 else (),
        rank_waits=tuple(
            RankWait(rank=rank, comm_ms_per_step=0.09 * mean_ms, wait_ms_per_step=0.2 * (ranks - 1 - rank))
            for rank in (range(ranks) if ranks > 1 else ())
        ),
        differences=(),
        warnings=("rank0.trace.json.gz: 2 events with a negative duration were left out",),
    )


def _collectives(mean_ms: float) -> tuple[Collective, ...]:
    return (
        Collective(
            name="allreduce",
            group="default_pg",
            calls_per_step=3.0,
            megabytes_per_step=497.8,
            cost_ms_per_step=0.07 * mean_ms,
            wait_ms_per_step=0.02 * mean_ms,
        ),
    )


def _rank(rank: int, step_ms: list[float], ranks: int) -> RankSummary:
    step = mean(step_ms)
    rows = KINDS + ((COMM,) if ranks > 1 else ())
    kinds = {
        kind: Kind(category=category, ms_per_step=share * step, pct=100 * share, calls_per_step=calls)
        for kind, category, share, calls, _ in rows
    }
    parts = {name: sum(row[2] for row in rows if row[1] == name) for name in ("matmul", "comm", "memory", "other")}
    busy = sum(parts.values())
    idle = IDLE | {"gpu": 1 - busy - sum(IDLE.values())}
    comm = parts["comm"]
    return RankSummary(
        rank=rank,
        file=f"rank{rank}.trace.json.gz",
        device="NVIDIA H200",
        steps=len(step_ms),
        step_ms=Distribution(mean=step, p50=median(step_ms), min=min(step_ms), max=max(step_ms)),
        gpu=Gpu(
            busy_ms_per_step=busy * step,
            busy_pct=100 * busy,
            idle_ms_per_step=(1 - busy) * step,
            idle_pct=100 * (1 - busy),
            kernels_per_step=float(sum(row[3] for row in rows)),
        ),
        categories={name: Share(ms_per_step=part * step, pct=100 * part) for name, part in parts.items()},
        kinds=kinds,
        idle={cause: Share(ms_per_step=part * step, pct=100 * part) for cause, part in idle.items()},
        comm=Communication(
            ms_per_step=1.5 * comm * step,
            exposed_ms_per_step=comm * step,
            holds_up_ms_per_step=comm * step,
            hidden_pct=100 / 3 if comm else 0.0,
            exposed_pct=100 * comm,
        ),
        copies=(
            Copies(
                direction="HtoD",
                memory="pageable",
                calls_per_step=2.0,
                ms_per_step=0.025 * step,
                bytes_per_step=12_582_912.0,
                gb_per_s=12_582_912 / (0.025 * step) / 1e6,
                exposed_ms_per_step=0.02 * step,
            ),
        ),
        host=Host(
            device_syncs_per_step=12.0,
            lightning_syncs_per_step=2.0 if ranks > 1 else 0.0,
            idle_after_sync_ms_per_step=0.05 * step,
            idle_after_allocator_ms_per_step=0.0,
            idle_launching_ms_per_step=0.3,
            launches_per_step=390.0,
            cuda_mallocs_per_step=0.0,
            cuda_frees_per_step=0.0,
            h2d_bytes_per_step=12_582_912.0,
            data_wait_ms_per_step=0.17 * step,
            data_loader="_SingleProcessDataLoaderIter",
            syncs=(
                SyncCause(
                    cause=".item()", where="train.py:88", lightning=False, per_step=12.0, host_ms_per_step=0.05 * step
                ),
            ),
        ),
        memory=Memory(
            peak_allocated_bytes=31_138_512_896,
            peak_reserved_bytes=34_359_738_368,
            allocations_per_step=512.0,
            frees_per_step=512.0,
        ),
        python=PythonFunctions(
            tree=(
                _call(-1, "run", "lightning/pytorch/loops/training_epoch_loop.py:153", "library", step, 0.06 * step),
                _call(
                    0, "_training_step", "lightning/pytorch/loops/optimization/automatic.py:307", "library", 0.9 * step
                ),
                _call(1, "training_step", "train.py:80", "user", 0.88 * step, 0.08 * step),
                _call(2, "log_losses", "train.py:88", "user", 0.8 * step, 0.3 * step),
                _call(3, "Tensor.item", "", "library", 0.5 * step),
                _call(0, "on_train_batch_end", "callbacks/forge_profiler.py:138", "profiler", 0.04 * step),
            ),
            users=(
                UserFunction(
                    where="train.py:88 log_losses",
                    ms_per_step=0.8 * step,
                    own_ms_per_step=0.8 * step,
                    calls_per_step=1.0,
                ),
            ),
        ),
        regions=(
            _region("forward", step, host=0.25, gpu=0.2),
            _region("backward", step, host=0.3, gpu=0.43),
            _region("optimizer", step, host=0.05, gpu=0.03),
            _region("attention block", step, host=0.1, gpu=0.07, user=True),
        ),
        operators=(
            Operator(
                name="aten::mm",
                calls_per_step=96.0,
                host_ms_per_step=4.1,
                self_host_ms_per_step=3.9,
                device_ms_per_step=0.38 * step,
                self_device_ms_per_step=0.38 * step,
                allocated_bytes_per_step=805_306_368.0,
                input_shapes=("[4096, 1024] [1024, 4096]", "[4096, 4096] [4096, 1024]"),
            ),
            Operator(
                name="aten::add_",
                calls_per_step=210.0,
                host_ms_per_step=2.4,
                self_host_ms_per_step=2.4,
                device_ms_per_step=0.06 * step,
                self_device_ms_per_step=0.06 * step,
                allocated_bytes_per_step=None,
                input_shapes=(),
            ),
        ),
        top_kernels=tuple(
            Kernel(
                name=name,
                kind=kind,
                category=category,
                calls_per_step=float(calls),
                ms_per_step=share * step,
                mean_us=1e3 * share * step / calls,
                pct=100 * share,
            )
            for kind, category, share, calls, name in sorted(rows, key=lambda row: -row[2])
        ),
        flops=Flops(
            per_step=12.2e12,
            model_per_step=12.2e12,
            counted_pct=97.5,
            matmul_tflops=12.2 / (0.38 * step / 1e3),
            busy_tflops=12.2 / (busy * step / 1e3),
            step_tflops=12.2 / (step / 1e3),
            dtype="bfloat16",
            peak_tflops=989.5,
            matmul_pct_of_peak=100 * 12.2 / (0.38 * step / 1e3) / 989.5,
            busy_pct_of_peak=100 * 12.2 / (busy * step / 1e3) / 989.5,
            uncounted=("aten::_scaled_mm",),
        ),
        flops_note="",
        per_step=tuple(
            Step(
                number=5 + position,
                ms=ms,
                host_ms=ms - 0.3,
                busy_ms=busy * ms,
                categories_ms={name: part * ms for name, part in parts.items()},
                whole=position + 1 < len(step_ms),
                counted=position + 1 < len(step_ms),
            )
            for position, ms in enumerate(step_ms)
        ),
        unlinked_pct=0.4,
        warnings=("step 7 is cut off by the end of the recording",),
    )


def _call(caller, name, where, kind, *ms):
    return PythonCall(
        caller=caller, name=name, where=where, kind=kind, ms_per_step=ms[0], self_ms_per_step=ms[-1], calls_per_step=1.0
    )


def _region(name: str, step: float, *, host: float, gpu: float, user: bool = False) -> Region:
    return Region(
        name=name,
        user=user,
        calls_per_step=1.0,
        host_ms_per_step=host * step,
        gpu_ms_per_step=gpu * step,
        idle_ms_per_step=0.1,
        pct=100 * gpu,
        launches_per_step=130.0,
    )
