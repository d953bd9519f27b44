"""Exposed communication and waiting by a rank's own events, beside that of a trace of the same run.

DDP with buckets of 1, 25 and 100 MB, with and without accumulation of gradients; three steps of each run are recorded.
The trace's figure is of communication kernels beside which no other ran.

    torchrun --nproc-per-node 2 -m benchmarks.exposed_comm
"""

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.workloads import GPT, random_tokens
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

STEPS, WINDOW = 88, (60, 68)


def fit(bucket_mb: int, accumulate: int, layers: int, batch_size: int) -> str:
    """A row of the table, of one run."""
    throughput = ThroughputCallback(overhead=None, batch_size_fn=len)
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True),
            precision="bf16-mixed",
            accumulate_grad_batches=accumulate,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
            callbacks=[ForgeProfilerCallback(*WINDOW, trace_dir=str(Path(root) / "traces")), throughput],
        )
        trainer.fit(GPT(layers=layers), random_tokens(STEPS, batch_size=batch_size))
    analysis = throughput.analysis()
    if analysis is None or analysis.run is None:
        return ""
    cells = [f"{bucket_mb:4} MB, {accumulate} micro-batches, {layers} layers, batch {batch_size}"]
    for rank, work in zip(analysis.ranks, analysis.run.ranks, strict=False):
        live_ms, trace_ms = sum((work.exposed_ms or {}).values()), rank.comm.exposed_ms_per_step
        off_pct = 100 * (live_ms - trace_ms) / work.step_ms
        cells.append(
            f"rank {work.rank}: step {work.step_ms:6.2f} ({rank.step_ms.mean:6.2f} recorded), exposed {live_ms:5.2f}, "
            f"trace {trace_ms:5.2f} ms, {off_pct:+.1f} % of the step; {dict(work.exposed_ms or {})}"
        )
    return "\n  ".join(cells)


def main() -> None:
    """Print the table on rank 0."""
    for name in ("lightning.pytorch", "lightning_forge_profiling"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdout, out = open(os.devnull, "w"), sys.stdout  # noqa: PTH123, SIM115  (the tables of all fits)
    for layers, batch_size in ((4, 2), (8, 8)):
        for bucket_mb in (1, 25, 100):
            for accumulate in (1, 4):
                said = fit(bucket_mb, accumulate, layers, batch_size)
                if said:
                    print(said, file=out, flush=True)


if __name__ == "__main__":
    main()
