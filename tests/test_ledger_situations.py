"""The ledger in every kind of fit: its parts are counted, they sum to the run, and nothing of it is left behind."""

import time

import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import FIRST_STEP, STEPS
from tests import models
from tests.models import Classifier, Manual, Samples, loader
from tests.outcomes import summary_of

pytestmark = pytest.mark.real_time  # what is planted is compared with a clock of the test

SLOW_S = 0.03


def fit(trainer, model, batches=32, val=None):
    trainer.fit(model, loader(batches), val or loader(8))
    ours = next(callback for callback in trainer.callbacks if isinstance(callback, ThroughputCallback))
    ledger = ours.ledger()
    assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s, abs=1e-8)
    assert abs(ledger.unexplained_s) < 0.1, "a turn or two of a busy machine's scheduler"
    assert all(seconds >= 0 for seconds in ledger.parts.values())
    return ledger


class Slow(Callback):
    """Sleeps in the hook that comes once a batch in any kind of optimization."""

    def __init__(self):
        self.took_s, self.calls = 0.0, 0

    def on_train_batch_end(self, *_):
        began = time.perf_counter()
        time.sleep(SLOW_S)
        self.took_s += time.perf_counter() - began
        self.calls += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Manual, {}),
        (models.GAN, {}),
        (models.ManualClosure, {}),
        (models.LBFGS, {}),
        (models.FromIterator, {}),
        (models.EndsEpochsEarly, {"max_epochs": 8}),
        (Classifier, {"accumulate_grad_batches": 4}),
        (Classifier, {"val_check_interval": 3}),
        (Classifier, {"val_check_interval": 3, "accumulate_grad_batches": 4}),
        (Classifier, {"enable_progress_bar": True}),
        (Classifier, {"reload_dataloaders_every_n_epochs": 1}),
        (Classifier, {"profiler": "simple"}),
    ],
)
def test_a_planted_time_is_found_in_every_kind_of_fit(make_trainer, model, options):
    slow = Slow()
    ledger = fit(make_trainer(ThroughputCallback(overhead=None), slow, **{"max_epochs": 2, **options}), model())
    part = "callback/Slow.on_train_batch_end"
    assert ledger.counts[part] == slow.calls > 0
    assert ledger.parts[part] == pytest.approx(slow.took_s, rel=0.1, abs=0.02)
    assert ledger.counts[STEPS] == 1


class WaitsToValidate(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        time.sleep(SLOW_S)


class SlowMean(MeanMetric):
    def compute(self):
        time.sleep(SLOW_S)
        return super().compute()


class SlowValidation(Classifier):
    def __init__(self):
        super().__init__()
        self.mean = SlowMean()

    def validation_step(self, batch, batch_idx):
        time.sleep(SLOW_S)
        self.mean.update(batch[0])
        self.log("mean", self.mean)


class SlowItems(Samples):
    def __getitem__(self, index):
        time.sleep(SLOW_S)
        return super().__getitem__(index)


@pytest.mark.parametrize(("options", "runs"), [({}, 2), ({"val_check_interval": 2}, 8), ({"limit_val_batches": 0}, 0)])
def test_validation_is_counted_by_its_runs_over_all_its_loaders(make_trainer, options, runs):
    trainer = make_trainer(ThroughputCallback(), max_epochs=2, num_sanity_val_steps=0, **options)
    ledger = fit(trainer, WaitsToValidate(), val=[loader(8), loader(4)])
    assert ledger.counts.get("validation", 0) == runs
    assert ledger.counts.get("validation/step", 0) == 3 * runs
    assert ledger.parts.get("validation/step", 0.0) >= runs * 3 * SLOW_S


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "val_check_interval": 2}])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_validation_is_split_as_a_step_is(make_trainer, options, workers, persistent):
    val = DataLoader(SlowItems(8), num_workers=workers, persistent_workers=persistent)
    trainer = make_trainer(ThroughputCallback(), max_epochs=2, num_sanity_val_steps=2, **options)
    ledger = fit(trainer, SlowValidation(), val=val)
    runs = ledger.counts["validation"]
    assert ledger.counts["validation/step"] == 8 * runs, "without the sanity check, which is a part by itself"
    assert 8 * runs * SLOW_S <= ledger.parts["validation/step"] < 1.5 * 8 * runs * SLOW_S
    assert runs * SLOW_S <= ledger.parts["validation/metrics"] < ledger.parts["validation/step"]
    assert ledger.counts["validation/data"] == (8 - (workers > 0)) * runs
    if workers:  # a batch is made while the one before it is validated on, but the first is waited for
        assert ledger.parts["validation/loader"] >= runs * SLOW_S
        assert ledger.parts["validation/data"] < 0.5 * 8 * runs * SLOW_S
    else:
        assert ledger.parts["validation/data"] >= 8 * runs * SLOW_S
        assert ledger.parts["validation/loader"] < SLOW_S
    assert ledger.first_s["validation/step"] == pytest.approx(ledger.parts["validation/step"] / runs, rel=0.5)
    assert ledger.wholes["validation"] > ledger.parts["validation/step"] + ledger.parts["validation/data"]


def test_each_checkpoint_of_some_steps_is_counted(make_trainer, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    ledger = fit(make_trainer(ThroughputCallback(), saves, enable_checkpointing=True), Classifier())
    assert ledger.counts["checkpoint"] == len(list(tmp_path.glob("*.ckpt"))) == 4


class SlowWrites(TorchCheckpointIO):
    """Takes its time to write, and knows how long."""

    def __init__(self):
        super().__init__()
        self.took_s = 0.0

    def save_checkpoint(self, *args, **kwargs):
        began = time.perf_counter()
        time.sleep(40 * SLOW_S)
        super().save_checkpoint(*args, **kwargs)
        self.took_s += time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_writing_a_checkpoint_counts_as_far_as_it_blocks(make_trainer, tmp_path, beside):
    writes, saves = SlowWrites(), ModelCheckpoint(tmp_path)
    plugins = [AsyncCheckpointIO(writes) if beside else writes]
    ledger = fit(make_trainer(ThroughputCallback(), saves, enable_checkpointing=True, plugins=plugins), Classifier())
    assert list(tmp_path.glob("*.ckpt"))
    assert writes.took_s > 40 * SLOW_S
    if beside:
        assert ledger.parts["checkpoint/write"] < 0.5 * writes.took_s
        assert ledger.parts["teardown"] > 0.5 * writes.took_s, "where Lightning waits for the writer"
    else:
        assert ledger.parts["checkpoint/write"] == pytest.approx(writes.took_s, rel=0.1, abs=0.02)
        assert ledger.parts["checkpoint"] < 0.5 * writes.took_s


@pytest.mark.parametrize(
    ("average", "options", "hook"),
    [
        ("StochasticWeightAveraging", {"swa_lrs": 1e-2, "swa_epoch_start": 1}, "on_train_epoch_start"),
        ("EMAWeightAveraging", {"decay": 0.9}, "on_train_batch_end"),
    ],
)
def test_averages_of_weights_are_parts_of_their_own(make_trainer, average, options, hook):
    if not hasattr(callbacks, average):
        pytest.skip(f"this Lightning has no {average}")
    averages = getattr(callbacks, average)(**options)
    ledger = fit(make_trainer(ThroughputCallback(), averages, max_epochs=3), Classifier())
    assert ledger.counts[f"callback/{average}.{hook}"] >= 3


def test_a_tuners_trials_are_not_the_fits(make_trainer, tmp_path):
    ours = ThroughputCallback(warmup_steps=0)
    trainer, model = make_trainer(ours, max_epochs=2), Classifier()
    model.lr = 1e-2
    Tuner(trainer).lr_find(model, loader(64), num_training=10, min_lr=1e-4)
    ledger = fit(trainer, model)
    assert ledger.counts[STEPS] == 1
    assert ours.analysis().run.timing.all_steps == 16
    assert ours.analysis().run.continues_from == 0


def test_validating_and_testing_leave_the_fits_ledger(make_trainer):
    ours = ThroughputCallback()
    trainer = make_trainer(ours)
    ledger = fit(trainer, Classifier())
    trainer.validate(Classifier(), loader(8), verbose=False)
    trainer.test(Classifier(), loader(8), verbose=False)
    assert ours.ledger() == ledger


def test_a_resumed_fit_begins_anew_and_says_so(make_trainer, tmp_path, capsys):
    first = make_trainer(ThroughputCallback(warmup_steps=0), max_epochs=1)
    first.fit(Classifier(), loader(32))
    assert "training continues" not in capsys.readouterr().out
    first.save_checkpoint(tmp_path / "first.ckpt")

    forge = ForgeProfilerCallback(2, 4, trace_dir=tmp_path / "t")
    ours = ThroughputCallback(warmup_steps=0)
    trainer = make_trainer(ours, forge, max_epochs=3)
    trainer.fit(Classifier(), loader(32), ckpt_path=tmp_path / "first.ckpt")
    said = "training continues from optimizer step 8: the ledger and all figures are of this fit"
    assert said in summary_of(tmp_path, of=2)
    assert said in (forge.trace_report().path.parent / "summary.md").read_text()
    assert (ours.analysis().run.continues_from, ours.analysis().run.timing.all_steps) == (8, 16)


class Raises(Classifier):
    """Raises in one of its hooks."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.fail)

    def fail(self, *_, **__):
        time.sleep(SLOW_S)
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("hook", "part"),
    [
        ("on_train_epoch_end", "module/on_train_epoch_end"),
        ("on_before_optimizer_step", "module/on_before_optimizer_step"),
        ("validation_step", "validation/step"),
        ("on_save_checkpoint", "module/on_save_checkpoint"),
        ("training_step", FIRST_STEP),
    ],
)
def test_after_an_exception_anywhere_the_parts_sum_up(make_trainer, tmp_path, hook, part):
    ours = ThroughputCallback(warmup_steps=0)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    trainer = make_trainer(ours, saves, enable_checkpointing=True, num_sanity_val_steps=0, max_epochs=2)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(Raises(hook), loader(32), loader(8))
    ledger = ours.ledger()
    assert ledger.parts[part] >= 0.9 * SLOW_S
    assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s, abs=1e-8)
    assert ledger == ours.ledger(), "it is closed"
