"""Train the GPT on two GPUs: STRATEGY, the folder, and maybe one word.

`late` is for 16 ms of sleep before each backward pass of rank 1, `steady` for the window that comes by default. Rank 0
prints what was logged as JSON.
"""

import json
import sys
import time

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from benchmarks.workloads import GPT, random_tokens
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

LATE_S = 0.016


class LateHost(GPT):
    def on_before_backward(self, loss):
        if self.global_rank == 1:
            time.sleep(LATE_S)


if __name__ == "__main__":
    strategy, root, *words = sys.argv[1:]
    late, steady = "late" in words, "steady" in words
    throughput = ThroughputCallback(warmup_steps=5, batch_size_fn=len)
    steps, window = (80, (40, 43)) if late else (60, ()) if steady else (30, (10, 13))
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=CSVLogger(root),
        callbacks=[ForgeProfilerCallback(*window), throughput],
    )
    trainer.fit(LateHost() if late else GPT(layers=4), random_tokens(100, batch_size=8))
    if trainer.is_global_zero:
        print("SUMMARY", json.dumps(throughput.summary()))
