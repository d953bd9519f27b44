"""A script that takes its time in each part of its startup, and says by its own clock how long it did."""

import json
import sys
import time

time.sleep(0.4)  # an import that takes long

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

ADDED = "added" in sys.argv
if not ADDED:
    from lightning_forge_profiling import ThroughputCallback

IMPORTED = time.perf_counter()
TOOK_S = {}


def planted(part, seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    TOOK_S[part] = TOOK_S.get(part, 0.0) + time.perf_counter() - began


class Data(L.LightningDataModule):
    def prepare_data(self):
        planted("startup/datamodule.prepare_data", 0.3)

    def setup(self, stage):
        planted("startup/datamodule.setup", 0.5)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(32, 8)), 4)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def prepare_data(self):
        planted("startup/module.prepare_data", 0.6)

    def setup(self, stage):
        planted("startup/module.setup", 0.2)


class Other(L.Callback):
    def setup(self, trainer, module, stage):
        planted("startup/callback.Other.setup", 0.4)


planted("startup/script", 0.7)
ours = [] if ADDED else [ThroughputCallback(warmup_steps=0)]
built = time.perf_counter()
trainer = L.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[Other(), *ours],
)  # fmt: skip
planted("startup/trainer", 0.6)
torch.manual_seed(0)
trainer.fit(Model(), datamodule=Data())
ledger = next(one for one in trainer.callbacks if type(one).__name__ == "ThroughputCallback").ledger()
said = {
    "took_s": TOOK_S, "imported": IMPORTED, "built": built, "parts": ledger.parts, "wall_s": ledger.wall_s,
    "unexplained_s": ledger.unexplained_s, "ended": time.perf_counter(),
}  # fmt: skip
sys.stdout.write(f"{json.dumps(said)}\n")
