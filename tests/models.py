"""Tiny but real modules and data; `slow` names the one place of a step that takes at least `SLOW_MS`."""

import time
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_forge_profiling import ThroughputCallback, region

torch.set_num_threads(1)  # for models this small further threads only get into each other's way

SLOW_MS = 4.0


def busy(ms=SLOW_MS):
    """Keep the processor busy for at least `ms`; a test may rely on the lower bound, never on an upper one.

    It is this thread's time that counts, so that on a busy machine it takes longer as all else does.
    """
    end = time.thread_time() + ms / 1e3
    while time.thread_time() < end:
        pass


def every_step(*arguments, **options):
    """A ThroughputCallback that splits every step into regions: its budget may not allow that in steps of 1 ms."""
    return ThroughputCallback(*arguments, overhead=None, **options)


def quiet_trainer(*callbacks, **options):
    """A Trainer for one epoch on the CPU that prints, logs and saves nothing of its own.

    With a logger, our rows come at its own interval, however short.
    """
    for callback in callbacks if options.get("logger") else ():
        if isinstance(callback, ThroughputCallback):
            callback.settings = replace(callback.settings, log_period_s=0.0, shares_period_s=0.0)
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **{**quiet, **options})


class Samples(Dataset):
    """`count` labelled points."""

    def __init__(self, count=32, *, slow=""):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()
        self.slow = slow

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.slow == "data":
            busy(SLOW_MS)
        return self.x[i], self.y[i]


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, count=32, slow=""):
        self.samples = Samples(count, slow=slow)

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))


def loader(count=32, batch_size=4, *, slow="", **kwargs):
    return DataLoader(Samples(count, slow=slow), batch_size, **kwargs)


class SlowSGD(torch.optim.SGD):
    """Slow after its closure, where there is one: in the part of `step()` that is the optimizer's own."""

    slow = ""

    def step(self, closure=None):
        loss = super().step(closure)
        if self.slow == "optimizer":
            busy()
        return loss


class Classifier(L.LightningModule):
    """Automatic optimization with AdamW, or with `SlowSGD` where the optimizer is to be slow."""

    def __init__(self, slow=""):
        super().__init__()
        self.slow = slow
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.seen = 0

    def forward(self, x):
        with region("attention"):
            x = self.inner(x).relu()
        return self.head(x)

    def loss(self, batch):
        if self.slow == "forward":
            busy()
        x, y = batch
        logits = self(x)
        if self.slow == "backward" and logits.requires_grad:
            logits.register_hook(lambda _: busy())
        return F.cross_entropy(logits, y)

    def on_train_batch_start(self, batch, batch_idx):
        if self.slow == "other":
            busy()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        if self.slow == "transfer":
            busy()
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch):
        self.seen += 1
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        if self.slow == "validation":
            busy()
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch):
        return self(batch[0])

    def configure_optimizers(self):
        return self.slow_sgd() if self.slow == "optimizer" else torch.optim.AdamW(self.parameters(), lr=1e-2)

    def slow_sgd(self):
        optimizer = SlowSGD(self.parameters(), lr=1e-2)
        optimizer.slow = self.slow
        return optimizer


class LBFGS(Classifier):
    """Its optimizer calls the closure several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=3)


class Manual(Classifier):
    """Manual optimization, the gradients of `accumulate` batches at a time."""

    accumulate = 1

    def __init__(self, slow=""):
        super().__init__(slow)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.seen += 1
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)


class ManualClosure(Manual):
    """Forward and backward inside the optimizer's step."""

    def training_step(self, batch, batch_idx):
        self.seen += 1
        optimizer: Any = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        self.log("loss", 0.0)


class GAN(Classifier):
    """Two optimizers take turns in every batch."""

    def __init__(self, slow=""):
        super().__init__(slow)
        self.automatic_optimization = False
        self.generator = nn.Linear(8, 8)

    def training_step(self, batch):
        self.seen += 1
        optimizers: Any = self.optimizers()
        for_generator, for_critic = optimizers
        x, y = batch
        for optimizer, points in ((for_generator, self.generator(x)), (for_critic, self.generator(x).detach())):
            self.toggle_optimizer(optimizer)
            loss = self.loss((points, y))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)

    def configure_optimizers(self):
        parts = self.generator, nn.ModuleList([self.inner, self.head])
        optimizers = [SlowSGD(part.parameters(), lr=1e-2) for part in parts]
        for optimizer in optimizers:
            optimizer.slow = self.slow
        return optimizers


class FromIterator(Classifier):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        self.seen += 1
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class SkipsSome(Classifier):
    """Every other training step has no loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return None if batch_idx % 2 else loss


class EndsEpochsEarly(Classifier):
    """Gives up every epoch at its batch 3."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class Fails(Classifier):
    """Raises `error` in training step `at`."""

    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def training_step(self, batch):
        if self.seen == self.at:
            raise self.error
        return super().training_step(batch)


def some_none(batch):
    """A collate function: the second batch of every four is None."""
    x, y = torch.utils.data.default_collate(batch)
    return None if torch.equal(x[0], Samples(32).x[4]) else (x, y)


class Product(torch.autograd.Function):
    """An operator of the user's own: autograd records it as a whole, and gradients are off in its forward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient
