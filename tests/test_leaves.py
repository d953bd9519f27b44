"""Each nanosecond of a step is in one leaf: what was planted comes first, with its share, and no time counts twice."""

import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Samples, quiet_trainer

STEP_S = 0.010
STEPS = 24


class Plain(L.LightningModule):
    """A healthy module; its forward takes most of its step."""

    forward_s = STEP_S

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch):
        time.sleep(self.forward_s)
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def slow(base, **hooks):
    """The class with hooks that sleep so many milliseconds."""
    return type("Slow", (base,), {name: _sleeper(ms) for name, ms in hooks.items()})


def _sleeper(ms):
    return lambda *_, **__: time.sleep(ms / 1e3)


def fitted(model, *callbacks, data=None, validates=None, **options):
    ours = ThroughputCallback(warmup_steps=2, record=False)
    trainer = quiet_trainer(*callbacks, ours, **{"num_sanity_val_steps": 0, **options})
    trainer.fit(model, data, validates)
    analysis = ours.analysis()
    for of in ("step", "run"):
        shares = [found.share_pct for found in analysis.findings if found.of == of and found.source == "run"]
        assert sum(shares) <= 100.5, analysis.findings
    return analysis


def batches(count=STEPS):
    return DataLoader(Samples(4 * count), 4)


def parts(analysis):
    """The parts that are named, with their shares."""
    return {found.evidence["part"]: found.share_pct for found in analysis.findings if "part" in found.evidence}


# -- healthy ---------------------------------------------------------------------------------------------------------


class OverridesStep(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class OverridesBackward(Plain):
    def backward(self, loss):
        loss.backward()


class OverridesMore(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    def transfer_batch_to_device(self, *arguments):
        return super().transfer_batch_to_device(*arguments)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


@pytest.mark.parametrize("model", [Plain, OverridesStep, OverridesBackward, OverridesMore, Manual])
def test_hooks_that_only_call_the_original_are_not_named(model):
    analysis = fitted(model(), data=batches())
    assert not {"slow-hook", "slow-callback", "slow-optimizer"} & {found.code for found in analysis.findings}
    assert analysis.run.ledger.parts["steps"] > 0.7 * STEPS * STEP_S, "forward is no part of the hook"


# -- planted ---------------------------------------------------------------------------------------------------------


class SlowStep(OverridesStep):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        time.sleep(0.015)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class BeforeTransfer(Plain):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        time.sleep(0.015)
        return batch


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (SlowStep, "module/optimizer_step"),
        (BeforeTransfer, "module/on_before_batch_transfer"),
        (slow(Plain, on_before_backward=15), "module/on_before_backward"),
        (slow(Plain, on_before_zero_grad=15), "module/on_before_zero_grad"),
    ],
)
def test_a_slow_hook_is_named_once(model, part):
    analysis = fitted(model(), data=batches())
    assert [found.code for found in analysis.findings] == ["slow-hook"], analysis.findings
    assert parts(analysis) == {part: pytest.approx(58, abs=12)}


def test_each_slow_hook_is_named():
    model = slow(Plain, on_train_batch_start=10, on_before_optimizer_step=10, on_before_zero_grad=10)
    named = parts(fitted(model(), data=batches()))
    assert named.keys() == {
        f"module/{hook}" for hook in ("on_train_batch_start", "on_before_optimizer_step", "on_before_zero_grad")
    }
    assert list(named.values()) == [pytest.approx(24, abs=7)] * 3


def test_each_slow_callback_is_named_the_slower_first():
    one = slow(Callback, on_train_batch_end=20, on_train_batch_start=10)()
    named = parts(
        fitted(Plain(), one, type("Other", (Callback,), {"on_train_batch_end": _sleeper(14)})(), data=batches())
    )
    assert list(named) == [
        "callback/Slow.on_train_batch_end", "callback/Other.on_train_batch_end", "callback/Slow.on_train_batch_start",
    ]  # fmt: skip


class Reloads(Plain):
    def train_dataloader(self):
        time.sleep(0.2)
        return batches(8)


def test_a_slow_train_dataloader_is_named_once():
    analysis = fitted(Reloads(), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert parts(analysis) == {"module/train_dataloader": pytest.approx(68, abs=12)}
    assert [found.code for found in analysis.findings] == ["slow-hook"], analysis.findings


class Logs(Plain):
    forward_s = 0.002

    def training_step(self, batch):
        loss = super().training_step(batch)
        for i in range(60):
            self.log(f"value{i}", loss.detach())
        return loss


def test_many_logged_values_are_named():
    first = fitted(Logs(), data=batches()).findings[0]
    assert (first.code, first.evidence["part"]) == ("slow-logger", "logger/self.log")


class LogsOne(Plain):
    forward_s = 0.04

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("loss", loss)
        return loss


def test_one_logged_value_is_not_named():
    assert "slow-logger" not in {found.code for found in fitted(LogsOne(), data=batches()).findings}


class Validates(Plain):
    def validation_step(self, batch):
        time.sleep(0.03)


def test_the_validation_of_a_single_epoch_is_named():
    analysis = fitted(Validates(), data=batches(), validates=batches(20))
    assert analysis.verdict == "validation-bound"
    assert analysis.findings[0].share_pct == pytest.approx(68, abs=12)


class Schedules(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        of_scheduler = scheduler.step

        def step(*arguments):
            time.sleep(0.3)
            of_scheduler(*arguments)

        scheduler.step = step
        return [optimizer], [scheduler]


def test_a_slow_scheduler_is_named_once():
    analysis = fitted(Schedules(), data=batches(10), max_epochs=3)
    assert "between-regions" not in {found.code for found in analysis.findings}, analysis.findings
    assert analysis.verdict_text.startswith("slow-hook: the learning-rate scheduler's step")


class Computes(Plain):
    """Logs a metric whose computation at the end of an epoch is slow."""

    def __init__(self):
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.metric = torchmetrics.MeanMetric()
        compute = self.metric.compute

        def slowly():
            time.sleep(0.3)
            return compute()

        self.metric.compute = slowly

    def training_step(self, batch):
        self.metric.update(1.0)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch)


def test_a_slow_metric_is_named_once():
    analysis = fitted(Computes(), data=batches(10), max_epochs=3)
    assert parts(analysis).keys() == {"logger/epoch_metrics"}
    assert "between-regions" not in {found.code for found in analysis.findings}, analysis.findings
    assert "(3 times, " in analysis.verdict_text


def test_with_a_window_a_slow_hook_comes_first_and_is_not_python(tmp_path):
    model, forge = slow(Plain, on_before_backward=20)(), ForgeProfilerCallback(10, 13, trace_dir=tmp_path)
    analysis = fitted(model, forge, data=batches())
    first, *others = analysis.findings
    assert (first.code, first.evidence["part"]) == ("slow-hook", "module/on_before_backward")
    assert sum(found.share_pct for found in others if found.of == "step") < 45
