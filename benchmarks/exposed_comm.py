"""Exposed communication and waiting by a rank's own events, beside that of a trace of the same run.

DDP with buckets of 1, 25 and 100 MB, with and without accumulation of gradients; eight steps of each run are recorded.
The trace's figures are of communication kernels beside which no other ran, and of the part of that which holds the step
up: without the time in which the host was yet to launch the next kernel. All are of the recorded steps, without the
first, since recording slows the host.

    torchrun --nproc-per-node 2 -m benchmarks.exposed_comm
"""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.workloads import GPT, ddp_trainer, random_tokens, silenced
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import WAIT_PREFIX
from lightning_forge_profiling.timing.counters import summed
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes

STEPS, WINDOW = 88, (60, 68)


def fit(bucket_mb: int, accumulate: int, layers: int, batch_size: int) -> str:
    """A row of the table, of one run."""
    throughput = ThroughputCallback(overhead=None, batch_size_fn=len)
    recorded: list[StepTimes] = []
    add = RunTotals.add

    def note(totals: RunTotals, times: StepTimes, *others: Any) -> None:
        if times.step in range(*WINDOW):
            recorded.append(times)
        add(totals, times, *others)

    RunTotals.add = note  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as root:
        trainer = ddp_trainer(
            root,
            cpu=not torch.cuda.is_available(),
            strategy=DDPStrategy(bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True),
            precision="bf16-mixed",
            accumulate_grad_batches=accumulate,
            callbacks=[ForgeProfilerCallback(*WINDOW, trace_dir=str(Path(root) / "traces")), throughput],
        )
        trainer.fit(GPT(layers=layers), random_tokens(STEPS, batch_size=batch_size))
    RunTotals.add = add  # type: ignore[method-assign]
    analysis = throughput.analysis()
    if analysis is None or analysis.run is None:
        return ""
    counted, rank = recorded[1:], analysis.ranks[0]
    waits = summed(times.device_ms for times in counted)
    exposed_ms = {name: ms / len(counted) for name, ms in waits.items() if name.startswith(WAIT_PREFIX)}
    step_ms, comm = fmean(times.step_ms for times in counted), rank.comm
    off_pct, alone_pct = (
        100 * (sum(exposed_ms.values()) - trace_ms) / step_ms
        for trace_ms in (comm.holds_up_ms_per_step, comm.exposed_ms_per_step)
    )
    parts = ", ".join(f"{name.removeprefix(WAIT_PREFIX)} {ms:.2f}" for name, ms in exposed_ms.items())
    return (
        f"{bucket_mb:4} MB, {accumulate} micro-batches, {layers} layers, batch {batch_size}: step {step_ms:.2f} ms "
        f"({analysis.run.timing.step_ms.mean:.2f} unrecorded), exposed {sum(exposed_ms.values()):.2f}, by the trace "
        f"{comm.holds_up_ms_per_step:.2f} ms: {off_pct:+.1f} % of the step ({parts}); no kernel beside it for "
        f"{comm.exposed_ms_per_step:.2f} ms: {alone_pct:+.1f} %"
    )


def main() -> None:
    """Print the table on rank 0."""
    out = silenced()
    for layers, batch_size in ((4, 4), (4, 32)):  # the host is behind, and ahead
        for bucket_mb in (1, 25, 100):
            for accumulate in (1, 4):
                said = fit(bucket_mb, accumulate, layers, batch_size)
                if said:
                    print(said, file=out, flush=True)


if __name__ == "__main__":
    main()
