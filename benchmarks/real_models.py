"""Three real models with the mistakes that people make in them, each with its fix, for `docs/measure_fixes.py`.

A ResNet-50, the GPT of `workloads.py`, and a recommender after DLRM (arXiv 1906.00091): dense features and 26
categories, as in the Criteo data.
"""

from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads import GPT

__all__ = ["Clicks", "Pictures", "RealGPT", "Recommender", "ResNet", "loader", "pictures"]

Reading = Literal["each", "on the GPU", "never"]
"""Whether what a model watches of itself is read each time, stays on the GPU, or is not computed."""


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convs = nn.ModuleList(
            (
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
            )
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (width, width, outputs))
        self.shorter = (
            nn.Identity()
            if (inputs, stride) == (outputs, 1)
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to four times the width in channels."""
        inner = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            inner = norm(conv(inner))
            if number < len(self.convs) - 1:
                inner = inner.relu()
        return (inner + self.shorter(x)).relu()


class ResNet(L.LightningModule):
    """A ResNet-50 by its numbers, trained with SGD; it may watch the norm of each parameter's gradient."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, *, norms: Reading = "never") -> None:
        super().__init__()
        self.norms, self.seen = norms, list[object]()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                layers.append(_Bottleneck(inputs, width * 2**stage, 2 if stage and not number else 1))
                inputs = 4 * width * 2**stage
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Cross entropy of (batch, 3, height, width) pictures, in bytes or normalized, and their labels."""
        pictures, labels = batch
        if pictures.dtype == torch.uint8:
            pictures = (pictures.float() / 255 - 0.45) / 0.225
        return functional.cross_entropy(self.layers(pictures), labels)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        """Watch the gradients."""
        if self.norms == "never":
            return
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        self.seen = [norm.item() if self.norms == "each" else norm for norm in norms]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in the paper."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of 256 x 256 bytes of color, of which a part is cut out, scaled and mirrored."""

    def __init__(self, count: int, side: int = 224) -> None:
        self.count, self.side = count, side
        self.picture = torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(3, side, side) bytes and a label."""
        cut = self.picture[:, index % 64 :, index % 48 :].float()
        scaled = functional.interpolate(cut[None], (self.side, self.side), mode="bilinear", antialias=True)[0]
        return scaled.flip(-1).byte(), index % 1000


def pictures(batches: int, size: int, side: int = 224, *, pin: bool) -> DataLoader[Any]:
    """Batches that are in memory already, pinned or not."""
    batch = torch.randn(size, 3, side, side), torch.arange(size) % 1000
    if pin and torch.cuda.is_available():
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    return DataLoader([batch] * batches, batch_size=None)


def loader(rows: Dataset[Any], size: int, workers: int) -> DataLoader[Any]:
    """Batches of rows, from so many workers; pinned where there is a GPU."""
    return DataLoader(
        rows,
        size,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=1 if workers else None,  # containers have little shared memory
        persistent_workers=bool(workers),
        worker_init_fn=_one_thread,
    )


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


class RealGPT(GPT):
    """The GPT with a check after each block that its activations are numbers, another optimizer, or CUDA graphs."""

    def __init__(
        self,
        *sizes: int,
        checks: Reading = "never",
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        graphed: int = 0,
    ) -> None:
        super().__init__(*sizes)
        self.optimizer, self.graphed = optimizer, graphed
        if checks != "never":
            for block in self.blocks:
                block.register_forward_hook(_raise_if_nan if checks == "each" else _assert_no_nan)

    def on_train_start(self) -> None:
        """Record the blocks' graphs, for batches of `graphed` rows."""
        if self.graphed and self.device.type == "cuda":
            shape = self.graphed, *self.positions.weight.shape
            sample = torch.ones(shape, device=self.device, dtype=self.positions.weight.dtype, requires_grad=True)
            self.blocks: Any = torch.cuda.make_graphed_callables(self.blocks, (sample,))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused AdamW, or another."""
        return super().configure_optimizers() if self.optimizer is None else self.optimizer(self.parameters())


def _raise_if_nan(module: nn.Module, _: object, result: Tensor) -> None:
    if result.isnan().any():
        raise FloatingPointError(f"{type(module).__name__} computed a NaN")


def _assert_no_nan(module: nn.Module, _: object, result: Tensor) -> None:  # noqa: ARG001  (a hook)
    torch._assert_async(~result.isnan().any())  # noqa: SLF001


class _Network(nn.Module):
    """DLRM: an embedding for each category and one of the dense features, multiplied with each other."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.click = nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """(batch, 13) numbers and (batch, tables) rows to (batch,) logits."""
        low = self.below(dense)
        each = torch.stack([low, *(table(categories[:, at]) for at, table in enumerate(self.tables))], 1)
        products = each @ each.mT
        crossed = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        return self.click(self.above(torch.cat([low, crossed], 1))).squeeze(1)  # type: ignore[no-any-return]


class Recommender(L.LightningModule):
    """A DLRM, trained with SGD; it may check the categories, and run as CUDA graphs."""

    def __init__(
        self, tables: int = 26, rows: int = 10_000, width: int = 64, *, checks: Reading = "never", graphed: int = 0
    ) -> None:
        super().__init__()
        self.rows, self.checks, self.graphed = rows, checks, graphed
        self.network: Any = _Network(tables, rows, width)

    def on_train_start(self) -> None:
        """Record the graphs, for batches of `graphed` rows."""
        if self.graphed and self.device.type == "cuda":
            tables = len(self.network.tables)
            dense = torch.ones(self.graphed, 13, device=self.device)
            categories = torch.zeros(self.graphed, tables, dtype=torch.int64, device=self.device)
            self.network = torch.cuda.make_graphed_callables(self.network, (dense, categories))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Whether it was clicked: binary cross entropy."""
        dense, categories, clicked = batch
        if self.checks != "never":
            for column in categories.unbind(1):
                known = (column >= 0).all() & (column < self.rows).all()
                if self.checks == "on the GPU":
                    torch._assert_async(known)  # noqa: SLF001
                elif not known:
                    raise IndexError("a category has no row")
        return functional.binary_cross_entropy_with_logits(self.network(dense, categories), clicked)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clicks(Dataset[tuple[Tensor, Tensor, float]]):
    """Lines of text with 13 numbers and 26 categories in hexadecimal, which are parsed and hashed."""

    def __init__(self, count: int, rows: int = 10_000, tables: int = 26) -> None:
        self.count, self.rows, self.tables = count, rows, tables
        self.line = "\t".join(["1", *map(str, range(13)), *(f"{7919 * at:08x}" for at in range(tables))])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, float]:
        """13 numbers, the row of each category, and whether it was clicked."""
        clicked, *fields = self.line.split("\t")
        dense = torch.tensor([float(each) for each in fields[:13]])
        return (
            dense.log1p(),
            torch.tensor([(int(each, 16) + index) % self.rows for each in fields[13:]]),
            float(clicked),
        )
