"""A fit whose phases differ: bound by computation, validating, waiting for the loader. On an H200 it takes 55 s.

python -m tests.scripts.phases FOLDER
"""

import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

WIDTH, LAYERS, HEADS, WORDS = 4096, 4, 32, 4096
BATCH, LENGTH = 16, 1024
COMPUTING, WAITING, VALIDATING = 80, 24, 70
SLOW_S = 0.4


class Tokens(IterableDataset):
    """Batches, each of which takes its time; the phases are pairs of how many and how long."""

    def __init__(self, *phases):
        self.phases = phases

    def __iter__(self):
        batch = torch.randint(0, WORDS, (BATCH, LENGTH))
        for steps, seconds in self.phases:
            for _ in range(steps):
                time.sleep(seconds)
                yield batch


class Transformer(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(LAYERS)
            )
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, tokens):
        return F.cross_entropy(self.head(self.layers(self.embedding(tokens))).flatten(0, 1), tokens.flatten())

    def validation_step(self, tokens):
        self.training_step(tokens)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def main(folder):
    training = Tokens((COMPUTING, 0.0), (WAITING, SLOW_S), (COMPUTING, 0.0))
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        val_check_interval=COMPUTING,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[ForgeProfilerCallback(30, 33, trace_dir=folder), ThroughputCallback(batch_size_fn=len)],
    )
    loaders = (DataLoader(tokens, batch_size=None) for tokens in (training, Tokens((VALIDATING, 0.0))))
    trainer.fit(Transformer(), *loaders)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
