"""Train the GPT on two GPUs with the strategy named on the command line; rank 0 prints what was logged as JSON."""

import json
import sys

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from benchmarks.workloads import GPT, random_tokens
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

if __name__ == "__main__":
    strategy, root = sys.argv[1:]
    throughput = ThroughputCallback(warmup_steps=5)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=30,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=CSVLogger(root),
        callbacks=[ForgeProfilerCallback(10, 13), throughput],
    )
    trainer.fit(GPT(layers=4), random_tokens(60, batch_size=8))
    if trainer.is_global_zero:
        print("SUMMARY", json.dumps(throughput.summary()))
