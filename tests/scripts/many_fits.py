"""Fits modules one after another, as cross-validation and sweeps do: `CLASS:WIDTH ...`."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Small(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(8, width)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Other(Small):
    pass


data = DataLoader(TensorDataset(torch.ones(96, 8)), batch_size=4)
for wanted in sys.argv[1:]:
    kind, width = wanted.split(":")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit({"Small": Small, "Other": Other}[kind](int(width)), data)
