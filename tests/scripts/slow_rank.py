"""Train with two CPU processes, of which rank 1, or with `both` each, takes 20 ms longer in one place of its step.

The folder; the place: `data`, `forward`, `backward`, `optimizer`, `callback`, `epoch` for 25 times as long at the end
of each of four epochs, `checkpoint` likewise in what the module adds to each of four, `export` for 25 times as long at
the end of a window, `validation` in each of 100 batches of a validation whose loss is logged with `sync_dist`, or none;
any of `both`, `turns` for the one rank in even steps and the other in odd ones, `window`, `metered` for a simulated GPU
for each process, and `long` for minutes instead of seconds.
"""

import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.gpu.nvml import GpuReader, find_device
from lightning_forge_profiling.profiler import child
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.telemetry import RunTelemetry
from tests.fake_nvml import UUID, FakeBoard, FakeNvml
from tests.models import busy, loader, quiet_trainer

SLOW_MS = 20.0
PLACE, OPTIONS = sys.argv[2], sys.argv[3:]


calls = itertools.count()


def is_slow():
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return next(calls) % 2 == rank if "turns" in OPTIONS else "both" in OPTIONS or rank == 1


def slow(place):
    """Sleep, or in backward compute: a wait there could be one for the other rank."""
    if place == PLACE and is_slow():
        if place == "backward":
            busy(SLOW_MS)
        else:
            time.sleep(SLOW_MS / 1e3)


def collate(samples):
    slow("data")
    return torch.utils.data.default_collate(samples)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        slow("backward")
        return gradient


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        slow("optimizer")
        return loss


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch):
        slow("forward")
        return torch.nn.functional.cross_entropy(SlowBackward.apply(self.layer(batch[0])), batch[1])

    def validation_step(self, batch):
        slow("validation")
        self.log("loss", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return SlowOptimizer(self.parameters(), 0.1)

    def on_save_checkpoint(self, _):
        for _ in range(25):
            slow("checkpoint")


class SlowCallback(L.Callback):
    def on_train_batch_end(self, *_):
        slow("callback")

    def on_train_epoch_end(self, *_):
        for _ in range(25):
            slow("epoch")


class MeteredGpu(FakeNvml):
    """Each sample finds 2 J more on its meter."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802  (NVML's name)
        handle.millijoules += 2000
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


def export_late(profiler, raw, *, export=child.export_trace):
    for _ in range(25):
        slow("export")
    export(profiler, raw)


def start_metered(rows, _device, _period_s):
    gpu = MeteredGpu(FakeBoard())
    reader = GpuReader(gpu, find_device(gpu, UUID, environ={}), pid=1)
    rows._telemetry = RunTelemetry(lambda: reader, AllocatorReading, period_s=0.01)
    rows._telemetry.start()


if __name__ == "__main__":
    folder = sys.argv[1]
    if "metered" in OPTIONS:
        FitLog._start_telemetry = start_metered
    child.export_trace = export_late
    window = [ForgeProfilerCallback(30, 33)] if "window" in OPTIONS else []
    saves = [ModelCheckpoint(folder, every_n_train_steps=20, save_top_k=-1)] if PLACE == "checkpoint" else []
    trainer = quiet_trainer(
        *window,
        *saves,
        ThroughputCallback(),
        SlowCallback(),
        enable_checkpointing=bool(saves),
        devices=2,
        strategy="ddp",
        logger=CSVLogger(folder, name="csv"),
        default_root_dir=folder,
        log_every_n_steps=10,
        max_epochs=4 if PLACE == "epoch" else 1,
    )
    count = 8000 if "long" in OPTIONS else 400 if "turns" in OPTIONS else 80
    model, batches = Model(), loader(count * 8, collate_fn=collate)
    if PLACE == "validation":  # with a sanity check before, and a fit without callbacks after it
        trainer.fit(model, batches, loader(200 * 4))
        trainer.callbacks.clear()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches, loader(4))
    else:
        trainer.fit(model, batches)
