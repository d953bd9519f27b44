"""Mistakes of users, each in one call or switch, with the seconds of a fit with and without it on an idle machine."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC


class Small(L.LightningModule):
    """A small net with a loss of its outputs and targets."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers = [(nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(sizes)]
        self.net = nn.Sequential(*(each for pair in layers for each in pair), nn.Linear(sizes[-1], 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The mean of the squares."""
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The usual one."""
        return torch.optim.Adam(self.parameters())


class MetricInEachStep(Small):
    """Computes a metric that keeps all outputs in each step, and never resets it."""

    def __init__(self) -> None:
        super().__init__(64, 256)
        self.auroc = AUROC(task="binary")

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Update and compute the metric."""
        x, y = batch
        outputs = self.net(x)[:, 0]
        self.auroc.update(outputs.detach(), y)
        self.log("auroc", self.auroc.compute())
        return nn.functional.binary_cross_entropy_with_logits(outputs, y.float())


class KeepsGraphs(Small):
    """Appends a loss with its graph to a list in each step."""

    def __init__(self) -> None:
        super().__init__(64, 64, 4096)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """A second loss is never called backward."""
        hidden = self.net[:-1](batch[0])
        self.losses.append(hidden.square().mean())
        return (self.net[-1](hidden) - batch[1]).square().mean()


class KeepsItsData(Small):
    """Saves its data as a hyperparameter."""

    def __init__(self, series: list[list[float]]) -> None:
        super().__init__(8)
        self.save_hyperparameters()


def loader(rows: int, columns: int, batch_size: int, y: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """Batches of rows with a target."""
    x = torch.randn(rows, columns)
    return DataLoader(TensorDataset(x, y(x)), batch_size, **options)


def total(x: torch.Tensor) -> torch.Tensor:
    """The target of a row."""
    return x.sum(1, keepdim=True)


MISTAKES: Final[dict[str, Callable[[], dict[str, Any]]]] = {  # what is fitted
    # steps grow from 1.8 to 7 ms: 2.75 s, of which the metric takes 2.06
    "metric_in_each_step": lambda: {
        "model": MetricInEachStep(),
        "loader": loader(12_800, 64, 128, lambda x: (x.sum(1) > 0).long()),
        "max_epochs": 6,
    },
    # 3.88 s; with persistent workers 1.16, with none 0.64
    "workers_of_short_epochs": lambda: {
        "model": Small(1, 10),
        "loader": loader(640, 1, 64, torch.sin, shuffle=True, num_workers=2),
        "max_epochs": 60,
    },
    # two epochs take 17.8 s, without it 1.7, with two threads 17.3
    "anomaly_detection": lambda: {
        "model": Small(*[32] * 25),
        "loader": loader(12_800, 32, 32, lambda x: x[:, :1]),
        "detect_anomaly": True,
    },
    # resident memory of 340 to 2,176 MiB and 7.2 s; with the losses' values 4.8 s
    "kept_graphs": lambda: {"model": KeepsGraphs(), "loader": loader(102_400, 64, 128, total)},
    # 2.0 s, of them 1.1 before the first step; without 0.45
    "large_hyperparameters": lambda: {
        "model": KeepsItsData([[float(i * j % 17) for j in range(40)] for i in range(1500)]),
        "loader": loader(6400, 8, 32, total),
        "max_epochs": 3,
    },
}
