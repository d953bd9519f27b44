"""What the benchmarks and the GPU tests train: a GPU-bound GPT, a launch-bound loop, and loaders of chosen slowness."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["GPT", "SmallKernels", "ddp_trainer", "random_tokens", "silenced", "trainer"]


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(L.LightningModule):
    """A GPT-2 small by its numbers: 12 layers of width 768. 16 x 1024 tokens in bf16 take an H200 some 36 ms."""

    def __init__(self, layers: int = 12, width: int = 768, length: int = 1024, vocabulary: int = 50304) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Next-token loss of a (batch, time + 1) tensor of tokens."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


class SmallKernels(L.LightningModule):
    """A loop of kernels so small that the host cannot keep the GPU busy."""

    def __init__(self, layers: int = 24, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Mean square of what comes out."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)


class _Batches(IterableDataset[torch.Tensor]):
    def __init__(self, batch: torch.Tensor, batches: int, seconds: float) -> None:
        self.batch, self.batches, self.seconds = batch, batches, seconds

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.batches):
            if self.seconds:
                time.sleep(self.seconds)  # what the loader is slow at
            yield self.batch


def random_tokens(
    batches: int, *, batch_size: int = 16, length: int = 1024, vocabulary: int = 50304, seconds: float = 0.0
) -> DataLoader[torch.Tensor]:
    """A loader of `batches` equal batches of (batch_size, length + 1) tokens, each taking `seconds` to come."""
    tokens = torch.randint(0, vocabulary, (batch_size, length + 1))
    return DataLoader(_Batches(tokens.pin_memory() if torch.cuda.is_available() else tokens, batches, seconds), None)


def trainer(root: str, steps: int, **options: Any) -> L.Trainer:
    """A Trainer for `steps` steps on one device, with Lightning's default callbacks but for the progress bar.

    Those belong into a comparison: each callback slows Lightning's loop a little, and hardly a user has a bare one.
    What the bar costs depends on the terminal and varies by more than what is to be measured.
    """
    defaults: dict[str, Any] = {
        "accelerator": "auto",
        "devices": 1,
        "max_steps": steps,
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": root,
    }
    return L.Trainer(**{**defaults, **options})


def ddp_trainer(root: str, *, cpu: bool, **options: Any) -> L.Trainer:
    """A quiet Trainer for one epoch on all ranks of a host that `torchrun` has started."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu" if cpu else "gpu",
        "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
        "strategy": "ddp",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
    }
    return L.Trainer(**{**defaults, **options})


def silenced() -> TextIO:
    """Keep this process from saying anything but errors; returns its standard output, for the results."""
    for name in ("lightning.pytorch", "lightning_forge_profiling"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdout, out = open(os.devnull, "w"), sys.stdout  # noqa: PTH123, SIM115  (the tables of all fits)
    return out
