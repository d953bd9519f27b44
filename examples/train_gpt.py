"""Train a small character-level GPT on Shakespeare's sonnets and see where the time went.

Run it with::

    python examples/train_gpt.py --steps 200 --accelerator cpu
"""

import argparse
import math
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback, count_flops, region

SONNETS = Path(__file__).parent / "data" / "sonnets.txt"


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of ``context`` characters, with the character that follows each of them as its target."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class SonnetData(L.LightningDataModule):
    """The sonnets as numbered characters; the last tenth is kept for validation."""

    def __init__(self, context: int, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        text = SONNETS.read_text(encoding="utf-8")
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        tokens = torch.tensor([number[character] for character in text])
        cut = len(tokens) * 9 // 10
        self.train_windows = Windows(tokens[:cut], context)
        self.val_windows = Windows(tokens[cut:], context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.val_windows, shuffle=False)

    def _loader(self, windows: Windows, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        # a batch system may leave this process fewer cores than there are
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(4, cores)
        return DataLoader(windows, self.batch_size, shuffle=shuffle, num_workers=workers, persistent_workers=True)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Names this stretch in the traces and gives it a line of its own in the table at the end.
        with region("attention"):
            batch, length, width = x.shape
            heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(L.LightningModule):
    """Predicts the next character. Nothing in it knows that it is being profiled, but for one ``region``."""

    def __init__(self, vocabulary: int, context: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) / math.sqrt(width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="characters seen at once (default: %(default)s)")
    parser.add_argument("--accelerator", default="auto", help="auto (default), cpu, gpu, mps")
    parser.add_argument("--devices", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("demo_runs"), help="default: %(default)s")
    args = parser.parse_args()

    L.seed_everything(0)
    data = SonnetData(args.context, args.batch_size)
    model = GPT(len(data.characters), args.context)
    with torch.device("meta"):  # a copy without data: nothing is computed
        characters = torch.zeros(args.batch_size, args.context, dtype=torch.long)
        flops = count_flops(GPT(len(data.characters), args.context), (characters, characters)).total
    trainer = L.Trainer(
        max_steps=args.steps,
        accelerator=args.accelerator,
        devices=args.devices,
        logger=TensorBoardLogger(args.out, name="gpt"),
        log_every_n_steps=10,
        val_check_interval=max(1, args.steps // 2),
        check_val_every_n_epoch=None,  # the interval counts steps, also across epochs
        limit_val_batches=10,
        callbacks=[
            ForgeProfilerCallback(start_step=5, end_step=8),
            ThroughputCallback(tokens_fn=lambda batch: batch[0].numel(), flops_per_batch=flops),
        ],
    )
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
