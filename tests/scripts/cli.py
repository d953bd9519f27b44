"""A command line for the tiny classifier."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
from lightning.pytorch.cli import LightningCLI

from tests.models import Classifier, loader


class Data(L.LightningDataModule):
    """Eight batches."""

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(8)


if __name__ == "__main__":
    LightningCLI(Classifier, Data)
