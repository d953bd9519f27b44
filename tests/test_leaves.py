"""Each nanosecond of a step is in one leaf: what was planted comes first, with its share, and no time counts twice."""

import gc
import time
from contextlib import nullcontext
from statistics import fmean
from types import MappingProxyType

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks.wrapped_methods import WrappedLoggerMethod
from lightning_forge_profiling.profiler.session import TraceSession
from tests.models import Samples, quiet_trainer

pytestmark = pytest.mark.real_time  # what is planted is compared with a clock of the test

STEP_S = 0.010
STEPS = 24


def computes(seconds):
    """Use a core so long, or wait for it."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Plain(L.LightningModule):
    """A healthy module; its forward takes most of its step."""

    forward_s = STEP_S

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.took_ms = []

    def training_step(self, batch):
        began = time.perf_counter()
        computes(self.forward_s)
        self.took_ms.append(1e3 * (time.perf_counter() - began))
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def slow(base, **hooks):
    """The class with hooks that sleep so many milliseconds."""
    return type("Slow", (base,), {name: _sleeper(ms) for name, ms in hooks.items()})


def _sleeper(ms):
    return lambda *_, **__: time.sleep(ms / 1e3)


def fitted(model, *callbacks, data=None, validates=None, given=MappingProxyType({}), **options):
    ours = ThroughputCallback(warmup_steps=2, record=False, **given)
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
    """The parts that are named, with their milliseconds per step: shares depend on what else the machine does."""
    return {found.evidence["part"]: found.saves.ms_per_step for found in analysis.findings if "part" in found.evidence}


def computed_ms(analysis):
    [found] = [found for found in analysis.findings if found.code == "compute-bound"]
    return found.evidence["forward_computes_ms_per_step"]


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


@pytest.mark.slow
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
    module = model()
    analysis = fitted(module, data=batches())
    assert [found.code for found in analysis.findings] == ["slow-hook", "compute-bound"], analysis.findings
    assert parts(analysis) == {part: pytest.approx(15, abs=5)}
    assert computed_ms(analysis) == pytest.approx(fmean(module.took_ms[2:]), rel=0.3), "by a clock of its own"


def test_each_slow_hook_is_named():
    model = slow(Plain, on_train_batch_start=10, on_before_optimizer_step=10, on_before_zero_grad=10)
    named = parts(fitted(model(), data=batches()))
    assert named.keys() == {
        f"module/{hook}" for hook in ("on_train_batch_start", "on_before_optimizer_step", "on_before_zero_grad")
    }
    assert list(named.values()) == [pytest.approx(10, abs=4)] * 3


def test_each_slow_callback_is_named_the_slower_first():
    one = slow(Callback, on_train_batch_end=20, on_train_batch_start=10)()
    named = parts(
        fitted(Plain(), one, type("Other", (Callback,), {"on_train_batch_end": _sleeper(14)})(), data=batches())
    )
    assert list(named) == [
        "callback/Slow.on_train_batch_end", "callback/Other.on_train_batch_end", "callback/Slow.on_train_batch_start",
    ]  # fmt: skip


class SaysFlops(Plain):
    @property
    def flops_per_batch(self):
        time.sleep(0.015)
        return 1e6


def _slow_count(batch):
    time.sleep(0.015)
    return len(batch[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "part"),
    [
        (Plain, "batch_size_fn", "callback/ThroughputCallback.batch_size_fn"),
        (Plain, "tokens_fn", "callback/ThroughputCallback.tokens_fn"),
        (Plain, "flops_per_batch", "callback/ThroughputCallback.flops_per_batch"),
        (SaysFlops, "", "module/flops_per_batch"),
    ],
)
def test_a_slow_function_of_the_users_is_named(model, name, part):
    module = model()
    analysis = fitted(module, data=batches(), given={name: _slow_count} if name else {})
    # a full collection may fall into these steps
    named = [found for found in analysis.findings if found.code != "gc-bound"]
    assert [found.code for found in named] == ["slow-hook", "compute-bound"], analysis.findings
    assert parts(analysis)[part] == pytest.approx(15, abs=5)
    assert part.partition("/")[2] in named[0].title
    assert computed_ms(analysis) == pytest.approx(fmean(module.took_ms[2:]), rel=0.3), "by a clock of its own"
    assert analysis.run.timing.overhead_us < 5000, "the user's time is none of ours"


class SlowFinalize(CSVLogger):
    def finalize(self, status):
        time.sleep(1.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "part", "code"),
    [
        (slow(Plain, teardown=1200), "module/teardown", "slow-hook"),
        (slow(Plain, on_fit_end=1200), "module/on_fit_end", "slow-hook"),
        (Plain, "logger/SlowFinalize.finalize", "slow-logger"),
    ],
)
def test_what_takes_long_at_the_end_of_a_fit_is_named_in_the_table(tmp_path, capsys, model, part, code):
    analysis = fitted(model(), data=batches(), logger=SlowFinalize(tmp_path) if "logger" in part else False)
    [found] = [found for found in analysis.findings if "part" in found.evidence]
    assert (found.code, found.evidence["part"], found.of) == (code, part, "run")
    assert found.evidence["seconds"] == pytest.approx(1.2, abs=0.2)
    assert analysis.verdict == code
    assert f"verdict     {code}: " in capsys.readouterr().out


def test_what_takes_long_after_an_exception_is_said_after_the_table(tmp_path, capsys, caplog):
    class Fails(Plain):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == STEPS - 2:
                raise RuntimeError("mine")

    ours = ThroughputCallback(warmup_steps=2)
    trainer = quiet_trainer(ours, logger=SlowFinalize(tmp_path))
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(Fails(), batches())
    assert "SlowFinalize" not in capsys.readouterr().out
    [said] = [record.getMessage() for record in caplog.records if "After the table" in record.getMessage()]
    assert said.startswith("After the table: slow-logger: the logger SlowFinalize.finalize takes 1.2 s of the fit's ")
    assert "slow-logger" in {found.code for found in ours.analysis().findings}


class Reloads(Plain):
    def train_dataloader(self):
        time.sleep(0.2)
        return batches(8)


def test_a_slow_train_dataloader_is_named_once():
    analysis = fitted(Reloads(), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert parts(analysis) == {"module/train_dataloader": pytest.approx(25, abs=6)}
    assert [found.code for found in analysis.findings] == ["slow-hook", "compute-bound"], analysis.findings


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


class WritesRows(Plain):
    def training_step(self, batch):
        self.logger.log_metrics({"loss": 1.0}, self.global_step)
        return super().training_step(batch)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.015)


def test_a_logger_that_the_module_calls_itself_is_named(tmp_path):
    analysis = fitted(WritesRows(), data=batches(), logger=SlowLogger(tmp_path))
    first = analysis.findings[0]
    assert (first.code, first.evidence["part"]) == ("slow-logger", "logger/SlowLogger.log_metrics")
    assert first.saves.ms_per_step == pytest.approx(15, abs=5)


class SlowSampler(SequentialSampler):
    def __iter__(self):
        for index in super().__iter__():
            time.sleep(0.004)
            yield index


def test_a_slow_sampler_is_not_to_be_helped_by_workers():
    samples = Samples(4 * 120)
    analysis = fitted(Plain(), data=DataLoader(samples, 4, sampler=SlowSampler(samples)))
    [found] = [each for each in analysis.findings if each.code == "input-bound"]
    assert "SlowSampler.__iter__" in found.evidence["line"]
    assert "runs in the training process, whatever num_workers is" in found.advice
    assert found.fix == ""


class LogsLoss(Plain):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("loss", loss.detach())
        return loss


def test_a_logger_is_called_as_often_as_it_gets_metrics(tmp_path):
    options = {"logger": SlowLogger(tmp_path), "log_every_n_steps": 10}
    analysis = fitted(LogsLoss(), data=batches(30), **options)
    assert analysis.run.ledger.counts["logger/SlowLogger"] == 3


class WritesToAnother(Plain):
    """Writes its rows to a logger that is none of the fit's."""

    def __init__(self, logger):
        super().__init__()
        self.own = [logger]

    def training_step(self, batch):
        self.own[0].log_metrics({"loss": 1.0})
        return super().training_step(batch)


def test_a_logger_of_the_modules_own_is_part_of_its_step(tmp_path):
    analysis = fitted(WritesToAnother(SlowLogger(tmp_path)), data=batches(), logger=SlowLogger(tmp_path))
    assert "slow-logger" not in {found.code for found in analysis.findings}, analysis.findings
    assert analysis.findings[0].code == "blocked-forward"


def test_a_logger_class_has_its_own_method_again_however_a_fit_ends(tmp_path):
    class Fails(Plain):
        def training_step(self, batch):
            raise RuntimeError("mine")

    own, seen = SlowLogger.log_metrics, []
    with pytest.raises(RuntimeError, match="mine"):
        fitted(Fails(), data=batches(), logger=SlowLogger(tmp_path))
    assert SlowLogger.log_metrics is own
    timed = WrappedLoggerMethod(SlowLogger, "log_metrics", lambda logger: seen.append(logger) or nullcontext())
    SlowLogger(tmp_path).log_metrics({})
    assert len(seen) == 1
    del timed  # a fit that ends without calling any hook
    gc.collect()
    assert SlowLogger.log_metrics is own


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
    assert analysis.findings[0].saves.ms_per_step == pytest.approx(25, abs=6)


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
    hook_pct = 100 * first.saves.ms_per_step / analysis.run.timing.step_ms.mean
    others_pct = sum(found.share_pct for found in others if found.of == "step")
    assert hook_pct + others_pct < 105, "what the hook takes is no other finding's, too"


# -- the module's own code, the loader, and what comes once or seldom -------------------------------------------------


class WaitsInStep(Plain):
    def training_step(self, batch):
        time.sleep(0.02)
        return super().training_step(batch)


class WaitsInBackward(Plain):
    def training_step(self, batch):
        loss = super().training_step(batch)
        loss.register_hook(lambda _: time.sleep(0.02))
        return loss


class Waiting(torch.optim.SGD):
    wait_s = 0.02

    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(self.wait_s)
        return loss


class WaitsInUpdate(Plain):
    def configure_optimizers(self):
        return Waiting(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("model", "region"), [(WaitsInStep, "forward"), (WaitsInBackward, "backward"), (WaitsInUpdate, "optimizer")]
)
def test_a_wait_in_the_modules_own_code_is_named(model, region):
    first, *others = fitted(model(), data=batches()).findings
    assert first.code == f"blocked-{region}"
    assert first.evidence["blocked_ms_per_step"] == pytest.approx(20, abs=1.5), "also where it then waits for a core"
    codes = {found.code for found in others}
    assert "compute-bound" in codes
    assert "slow-optimizer" not in codes


def test_recorded_too_an_update_that_waits_is_no_slow_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Waiting, "wait_s", 0.08)  # beside which the update's own work is under the limit on any machine
    analysis = fitted(WaitsInUpdate(), ForgeProfilerCallback(10, 13, trace_dir=tmp_path), data=batches())
    assert analysis.findings[0].code == "blocked-optimizer"
    assert "slow-optimizer" not in {found.code for found in analysis.findings}


def test_the_start_of_the_profiler_takes_no_cores_of_the_steps(tmp_path, monkeypatch):
    def step(session, *, real=TraceSession.step):
        starts = not session.running
        real(session)
        if starts and session.running:
            computes(0.15)

    monkeypatch.setattr(TraceSession, "step", step)
    analysis = fitted(WaitsInUpdate(), ForgeProfilerCallback(10, 13, trace_dir=tmp_path), data=batches())
    without = fitted(WaitsInUpdate(), data=batches())
    assert analysis.run.machine.cpu.used < without.run.machine.cpu.used + 0.12, (
        "the planted 0.15 s are 0.2 cores over 18 such steps"
    )


class SlowSamples(Samples):
    def __getitem__(self, index):
        time.sleep(0.003)  # a batch has four
        return super().__getitem__(index)


class Computes18(Plain):
    forward_s = 0.018


@pytest.mark.parametrize(
    ("code", "callbacks", "data"),
    [
        ("input-bound", (), lambda: DataLoader(SlowSamples(4 * STEPS), 4)),
        ("slow-callback", (slow(Callback, on_train_batch_end=12),), batches),
    ],
)
def test_beside_a_larger_forward_both_are_named(code, callbacks, data):
    module = Computes18()
    analysis = fitted(module, *(callback() for callback in callbacks), data=data())
    [ms] = [found.saves.ms_per_step for found in analysis.findings if found.code == code]
    assert ms == pytest.approx(12, abs=4)
    assert computed_ms(analysis) == pytest.approx(fmean(module.took_ms[2:]), rel=0.3), "by a clock of its own"


class StartsSlowly(Plain):
    def training_step(self, batch):
        if not self.global_step:
            time.sleep(1.0)
        return super().training_step(batch)


def test_a_slow_first_step_is_startup_and_no_goodput():
    ledger = fitted(StartsSlowly(), data=batches()).run.ledger
    assert ledger.parts["startup/first_step"] >= 1.0
    assert ledger.goodput <= 1 - 1.0 / ledger.wall_s
    assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s)


class SlowEnds(IterableDataset):
    """Takes its time at both ends of an epoch, and none for a sample."""

    def __iter__(self):
        time.sleep(0.1)
        yield from (Samples(40)[i] for i in range(40))
        time.sleep(0.1)


def test_the_ends_of_an_iterable_dataset_are_not_waits_of_each_step():
    analysis = fitted(Plain(), data=DataLoader(SlowEnds(), 4), max_epochs=3)
    assert "input-bound" not in {found.code for found in analysis.findings}, analysis.findings
    assert parts(analysis) == {"data_loader": pytest.approx(16.7, abs=5)}


class Sometimes(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 6 == 5:
            time.sleep(0.06)


def test_a_callback_that_is_slow_in_some_steps_is_named_and_how_many():
    first = fitted(Plain(), Sometimes(), data=batches(200)).findings[0]
    assert (first.code, first.saves.ms_per_step) == ("slow-callback", pytest.approx(9.6, abs=3))
    assert ", nearly all in 1 of 6 steps" in first.title
