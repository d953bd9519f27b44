"""Rates of validation, test and prediction: by a clock of the module's own, in rows, summary and table."""

import copy
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, SequentialSampler

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, Samples, loader
from tests.outcomes import logged, summary_of

pytestmark = pytest.mark.real_time  # what is planted is compared with a clock of the test

STEP_S = 0.01
LOOPS = {"validation": "validate", "test": "test", "predict": "predict"}


class Evaluated(Classifier):
    """Takes its time in each step and at the end, and notes when its first step and each run ended."""

    def __init__(self):
        super().__init__()
        self.first_s = self.ended_s = 0.0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        time.sleep(10 * STEP_S if batch_idx == 0 else STEP_S)
        self.log("loss", self(batch[0]).mean())
        if batch_idx == 0:
            self.first_s = time.perf_counter()

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        time.sleep(10 * STEP_S if batch_idx == 0 else STEP_S)
        if batch_idx == 0:
            self.first_s = time.perf_counter()
        return self(batch[0])

    def _epoch_ends(self):
        time.sleep(3 * STEP_S)
        self.ended_s = time.perf_counter()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _epoch_ends

    @property
    def took_s(self):
        return self.ended_s - self.first_s


def rows(tmp_path, loop):
    return logged(tmp_path, f"throughput/{loop}/steps_per_sec")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_alone_has_its_rates(make_trainer, tmp_path, loop):
    model, ours = Evaluated(), ThroughputCallback(tokens_fn=lambda batch: batch[0].numel())
    said = {} if loop == "predict" else {"verbose": False}
    state = torch.random.get_rng_state()
    plain = getattr(make_trainer(logger=False), LOOPS[loop])(model, loader(38), **said)
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    result = getattr(make_trainer(ours), LOOPS[loop])(model, loader(38), **said)

    assert str(result) == str(plain)
    assert torch.equal(torch.random.get_rng_state(), after)
    rates = ours.summary()
    times = {f"time/{loop}/{part}_ms" for part in ("data", "transfer", "step")}
    assert rates.keys() == times | {f"throughput/{loop}/{unit}_per_sec" for unit in ("samples", "tokens", "steps")}
    steps_per_s = rates[f"throughput/{loop}/steps_per_sec"]
    assert steps_per_s == pytest.approx(9 / model.took_s, rel=0.1), "ten batches, without the first"
    assert rates[f"throughput/{loop}/samples_per_sec"] == pytest.approx(34 / 9 * steps_per_s), "the last has two"
    assert rates[f"throughput/{loop}/tokens_per_sec"] == pytest.approx(8 * 34 / 9 * steps_per_s)
    [row] = rows(tmp_path, loop)
    assert row[f"throughput/{loop}/samples_per_sec"] == pytest.approx(rates[f"throughput/{loop}/samples_per_sec"])
    assert copy.copy(ours).summary() == rates
    assert ours.ledger() is None


class Waits(Samples):
    def __getitem__(self, index):
        time.sleep(STEP_S)
        return super().__getitem__(index)


@pytest.mark.parametrize("loop", [*LOOPS, "fit"])
def test_a_loop_is_split_into_data_transfer_and_step(make_trainer, loop):
    ours, model, slow = ThroughputCallback(), Evaluated(), DataLoader(Waits(20), 2)
    trainer = make_trainer(ours, max_epochs=1)
    profiler = trainer.profiler
    if loop == "fit":
        trainer.fit(model, loader(32), slow)
    else:
        getattr(trainer, LOOPS[loop])(model, slow)
    of = "validation" if loop == "fit" else loop
    data_ms, transfer_ms, step_ms = (ours.summary()[f"time/{of}/{part}_ms"] for part in ("data", "transfer", "step"))
    assert 2e3 * STEP_S <= data_ms < 4e3 * STEP_S, "two samples a batch"
    assert 1e3 * STEP_S <= step_ms < 2e3 * STEP_S, "without the first, slow one"
    assert transfer_ms < step_ms
    assert data_ms + transfer_ms + step_ms <= 1e3 / ours.summary()[f"throughput/{of}/steps_per_sec"]
    assert trainer.profiler is profiler


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("slow", ["loader", "step"])
def test_a_loop_alone_that_waits_for_its_loader_says_what_to_do(make_trainer, caplog, loop, slow):
    data = Waits(220) if slow == "loader" else Samples(220)
    getattr(make_trainer(ThroughputCallback()), LOOPS[loop])(Evaluated(), DataLoader(data, 2))
    said = [each.getMessage() for each in caplog.records if "for its loader" in each.getMessage()]
    assert len(said) == (slow == "loader")
    for message in said:
        assert message.startswith(f"{loop} waits ")
        assert "The DataLoader loads in the training process (num_workers=0)" in message


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_fails_leaves_the_profiler_as_it_was(make_trainer, loop):
    class Fails(Evaluated):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("mine")

        test_step = predict_step = validation_step

    trainer = make_trainer(ThroughputCallback())
    profiler = trainer.profiler
    with pytest.raises(RuntimeError, match="mine"):
        getattr(trainer, LOOPS[loop])(Fails(), loader(8))
    assert trainer.profiler is profiler


@pytest.mark.slow
def test_each_validation_of_a_fit_has_its_rates(make_trainer, tmp_path):
    ours = ThroughputCallback(warmup_steps=0)
    model = Evaluated()
    trainer = make_trainer(ours, ForgeProfilerCallback(2, 3, trace_dir=tmp_path), max_epochs=3, num_sanity_val_steps=4)
    trainer.fit(model, loader(32), loader(38))

    each = [row["throughput/validation/samples_per_sec"] for row in rows(tmp_path, "validation")]
    assert len(each) == 3, "the sanity check has none"
    assert each[-1] == pytest.approx(34 / model.took_s, rel=0.1)
    summary = ours.summary()
    assert summary["throughput/validation/samples_per_sec"] == pytest.approx(3 / sum(1 / rate for rate in each))
    assert summary["throughput/steps_per_sec"] > 0
    assert "steps/s in 3 runs (wall time, first batches left out)" in summary_of(tmp_path)

    trainer.test(model, loader(16), verbose=False)
    [tested] = rows(tmp_path, "test")
    of_test = {name: pytest.approx(rate) for name, rate in tested.items() if "/test/" in name}
    assert ours.summary() == summary | of_test
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader(32))
    assert not any("/test/" in name or "/validation/" in name for name in ours.summary())


class SlowStart(SequentialSampler):
    """Takes long until its first sample."""

    def __iter__(self):
        time.sleep(0.3)
        return super().__iter__()


def test_the_first_batch_of_each_loader_is_left_out(make_trainer):
    ours, model, data = ThroughputCallback(), Evaluated(), Samples(12)
    slow = DataLoader(data, 4, sampler=SlowStart(data))
    began = time.perf_counter()
    make_trainer(ours).validate(model, [loader(12), slow, loader(4, 2)], verbose=False)
    took_s = time.perf_counter() - began
    rates = ours.summary()
    steps, samples = (rates[f"throughput/validation/{unit}_per_sec"] for unit in ("steps", "samples"))
    assert samples / steps == pytest.approx((8 + 8 + 2) / 5)
    assert took_s > 0.6
    assert 5 / steps < 8 * STEP_S + 0.15, "neither the slow start nor the slow first steps"


@pytest.mark.parametrize(
    ("count", "options"), [(4, {}), (32, {"limit_val_batches": 1}), (32, {"limit_val_batches": 0})]
)
def test_one_batch_has_no_rate(make_trainer, count, options):
    ours = ThroughputCallback()
    make_trainer(ours, **options).validate(Evaluated(), loader(count), verbose=False)
    assert ours.summary() == {}


def test_samples_that_cannot_be_counted_are_said_once(make_trainer, caplog):
    ours = ThroughputCallback(batch_size_fn=lambda batch: batch["ids"])
    make_trainer(ours, limit_val_batches=4).validate(Evaluated(), loader(32), verbose=False)
    rates = {name for name in ours.summary() if name.startswith("throughput/")}
    assert rates == {"throughput/validation/steps_per_sec"}
    [said] = [record.getMessage() for record in caplog.records if "batch_size_fn" in record.getMessage()]
    assert said.endswith("That rate of validation is not logged.")


def test_a_failing_loop_has_no_rate_and_the_next_one_has(make_trainer, tmp_path):
    class FailsOnce(Evaluated):
        failed = False

        def test_step(self, batch, batch_idx):
            if batch_idx == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("mine")
            super().test_step(batch, batch_idx)

    ours, model = ThroughputCallback(), FailsOnce()
    trainer = make_trainer(ours)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.test(model, loader(32), verbose=False)
    assert ours.summary() == {}
    assert [*tmp_path.rglob("metrics.csv")] == []
    trainer.test(model, loader(32), verbose=False)
    assert ours.summary()["throughput/test/steps_per_sec"] == pytest.approx(7 / model.took_s, rel=0.1)


def test_a_slow_function_of_the_users_is_no_part_of_the_rate_and_named(make_trainer):
    def slow(batch):
        time.sleep(3 * STEP_S)
        return len(batch[0])

    ours, model = ThroughputCallback(warmup_steps=0, batch_size_fn=slow), Evaluated()
    make_trainer(ours, max_epochs=2, logger=False, num_sanity_val_steps=0).fit(model, loader(32), loader(64))
    parts = ours.ledger().parts
    assert parts["callback/ThroughputCallback.batch_size_fn in validation"] == pytest.approx(32 * 3 * STEP_S, rel=0.2)
    assert parts["callback/ThroughputCallback.batch_size_fn"] == pytest.approx(16 * 3 * STEP_S, rel=0.2)
    assert ours.summary()["throughput/validation/steps_per_sec"] > 15 / (model.took_s - 14 * 3 * STEP_S) * 0.8
    named = {found.evidence.get("part") for found in ours.analysis().findings}
    assert {
        "callback/ThroughputCallback.batch_size_fn", "callback/ThroughputCallback.batch_size_fn in validation",
    } <= named  # fmt: skip


def test_a_logger_that_fails_does_not_end_the_validation(tmp_path, make_trainer, caplog):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if any(name.startswith("throughput/") for name in metrics):
                raise OSError("the disk is full")

    ours = ThroughputCallback()
    make_trainer(ours, logger=Full(tmp_path)).validate(Evaluated(), loader(16), verbose=False)
    assert ours.summary()["throughput/validation/steps_per_sec"] > 0
    assert "did not take 1 log entry" in caplog.text


def test_another_callback_of_a_trainer_counts_nothing(make_trainer):
    ours = ThroughputCallback()
    make_trainer(L.Callback()).validate(Evaluated(), loader(16), verbose=False)
    assert ours.summary() == {}
