"""What Lightning does between two batches: which of it is a step's, which the loader's, and which validation's."""

import time

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.pipeline import analyze
from tests.models import Classifier, FromIterator, Samples, Stream, every_step, loader
from tests.outcomes import PARTITION, excluded_s, logged, the_trace, traces

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

PLANTED_MS = 60.0


class Clock(L.Callback):
    """Reads the clock at the end of every batch and around validation."""

    def __init__(self):
        self.batches, self.starts, self.ends = [], [], []

    def on_train_batch_end(self, *_):
        self.batches.append(time.perf_counter() * 1e3)

    def on_validation_start(self, *_):
        self.starts.append(time.perf_counter() * 1e3)

    def on_validation_end(self, *_):
        self.ends.append(time.perf_counter() * 1e3)


class Later(L.Callback):
    """Comes after ours and takes its time at each fourth batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 4 == 3:
            time.sleep(PLANTED_MS / 1e3)


class SlowLogger(Logger):
    """Takes its time with what the module logs in each fourth batch."""

    name, version = "slow", 0

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics and step % 4 == 3:
            time.sleep(PLANTED_MS / 1e3)


class TenMs(Classifier):
    def training_step(self, batch):
        time.sleep(0.01)
        return super().training_step(batch)


CASES = {
    "a later callback": ([Later()], {}),
    "a logger": ([], {"logger": SlowLogger()}),
    "gradients that go on being accumulated": ([Later()], {"accumulate_grad_batches": 3}),
    "a profiler of the user's": ([Later()], {"profiler": "simple"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_between_a_batch_and_its_validation_is_the_steps(make_trainer, case):
    later, options = CASES[case]
    clock, throughput = Clock(), every_step(warmup_steps=5)
    options = {"logger": False, "val_check_interval": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0} | options
    make_trainer(clock, throughput, *later, **options).fit(TenMs(), loader(104), loader(4))
    metrics = throughput.summary()
    # from the end of the fifth batch to that of the last; the clock sees a little less than all of validation, and much
    # less of the first one, which prepares the loader
    passed = clock.batches[-1] - clock.batches[4] - sum(clock.ends[1:]) + sum(clock.starts[1:])
    assert len(clock.starts) == 6
    assert len(clock.batches) == 26
    assert metrics["throughput/steps_per_sec"] == pytest.approx(21e3 / passed, rel=0.15)
    assert metrics["time/other_ms"] * 21 >= 5 * PLANTED_MS


class AtTheEnd(L.Callback):
    """Comes after ours and takes its time at the end of validation."""

    def on_validation_end(self, *_):
        time.sleep(PLANTED_MS / 1e3)


def test_the_end_of_validation_in_later_callbacks_is_validation(tmp_path, make_trainer):
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(throughput, AtTheEnd(), logger=False, val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(32), loader(4))
    assert excluded_s(tmp_path, "validation") >= 4 * PLANTED_MS / 1e3 - 0.005
    assert throughput.summary()["time/other_ms"] < PLANTED_MS / 4


def test_a_trace_counts_it_likewise(tmp_path, make_trainer):
    forge = ForgeProfilerCallback(2, 10, trace_dir=tmp_path / "t", tensorboard=False)
    trainer = make_trainer(forge, Later(), logger=False, val_check_interval=4, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(48), loader(8))
    [path] = traces(tmp_path)
    [rank] = analyze(path).analysis.ranks
    slow = [step.number for step in rank.per_step if step.ms >= PLANTED_MS]
    assert slow == [4, 8], "what follows the end of batch 3 belongs to step 4, as without validation"
    spans = [e for e in the_trace(tmp_path)["traceEvents"] if e.get("name") == "forge.validation"]
    assert all(span["dur"] < PLANTED_MS * 1e3 for span in spans)


# -- the loader's workers ----------------------------------------------------------------------------------------------


def slow_start(_worker):
    """As a worker that has to import PyTorch, in a process that is not forked."""
    time.sleep(PLANTED_MS / 1e3)


def with_workers(**options):
    return DataLoader(
        Samples(8), 4, num_workers=1, worker_init_fn=slow_start, multiprocessing_context="fork", **options
    )


def test_workers_that_start_anew_each_epoch_are_named(make_trainer, capsys):
    throughput = every_step(warmup_steps=2)
    make_trainer(throughput, logger=False, max_epochs=6).fit(Classifier(), with_workers())
    analysis = throughput.analysis()
    assert analysis.verdict == "worker-restarts"
    found, run = analysis.findings[0], analysis.run
    assert run.worker_restarts.count == 5, "of epochs 1 to 5; that of epoch 0 came before the first step"
    assert run.worker_restarts.workers == 1
    assert run.worker_restarts.device_ms * run.steps >= 5 * PLANTED_MS
    assert found.share_pct == pytest.approx(100 * run.worker_restarts.device_ms / run.step_ms.mean)
    assert "persistent_workers=True" in found.advice
    assert throughput.summary()["time/data_ms"] * 10 >= 5 * PLANTED_MS
    assert sum(found.share_pct for found in analysis.findings) <= 100.001, "input-bound counts the other fetches alone"
    assert "verdict     worker-restarts: " in capsys.readouterr().out


def test_workers_that_stay_are_not(make_trainer):
    throughput = every_step(warmup_steps=2)
    make_trainer(throughput, logger=False, max_epochs=6).fit(Classifier(), with_workers(persistent_workers=True))
    assert throughput.analysis().run.worker_restarts is None
    assert "worker-restarts" not in {found.code for found in throughput.analysis().findings}


class SlowToIterate(DataLoader):
    """Its iterator takes its time to be made, as where workers have to be waited for."""

    def __iter__(self):
        time.sleep(PLANTED_MS / 1e3)
        return super().__iter__()


class Reloading(Classifier):
    def train_dataloader(self):
        time.sleep(PLANTED_MS / 1e3)
        return SlowToIterate(Samples(32), 4)


class LateStart(L.Callback):
    """What is no part of making a loader."""

    def on_train_epoch_start(self, *_):
        time.sleep(PLANTED_MS / 1e3)


@pytest.mark.parametrize(
    ("kind", "data", "options", "anew"),
    [
        (Classifier, SlowToIterate(Samples(32), 4), {}, 1),
        (Classifier, SlowToIterate(Stream(32), 4), {}, 1),
        (FromIterator, SlowToIterate(Samples(32), 4), {}, 1),
        (Classifier, SlowToIterate(Samples(32), 4), {"profiler": "simple"}, 1),
        # Lightning asks the module for a loader, and makes two iterators of it
        (Reloading, None, {"reload_dataloaders_every_n_epochs": 1}, 3),
    ],
)
def test_making_the_loaders_iterator_anew_is_data(make_trainer, kind, data, options, anew):
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput, LateStart(), logger=False, max_epochs=3, **options).fit(kind(), data)
    metrics = throughput.summary()
    assert metrics["time/data_ms"] * 24 >= 2 * anew * PLANTED_MS
    assert metrics["time/other_ms"] * 24 >= 3 * PLANTED_MS, "the callback's time is not the loader's"
    assert metrics["time/data_ms"] * 24 < (2 * anew + 1.5) * PLANTED_MS
    assert sum(metrics[f"time/{region}_ms"] for region in PARTITION) == pytest.approx(metrics["time/step_ms"])
    assert throughput.analysis().run.worker_restarts is None, "there are no workers"


def test_the_budget_does_not_spread_it_over_other_steps(tmp_path, make_trainer):
    """Steps that are not split are taken to divide as others do, and not as the first of an epoch."""
    throughput = every_step(warmup_steps=0)
    throughput.overhead = 1e-6
    trainer = make_trainer(throughput, max_epochs=3, log_every_n_steps=200)
    trainer.fit(Classifier(), SlowToIterate(Samples(800), 4))
    metrics = throughput.summary()
    assert metrics["time/data_ms"] * 600 >= 2 * PLANTED_MS
    starts_ms = [row["time/step_ms"] * 200 for row in logged(tmp_path)]
    assert len(starts_ms) == 3
    assert metrics["time/data_ms"] < metrics["time/step_ms"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


class SlowToRemove(ModelCheckpoint):
    """Removing the checkpoint before takes its time, as that of a file of many gigabytes."""

    def _remove_checkpoint(self, trainer, filepath):
        time.sleep(PLANTED_MS / 1e3)
        super()._remove_checkpoint(trainer, filepath)


@pytest.mark.parametrize("validates", [False, True])
def test_removing_older_checkpoints_is_part_of_the_checkpoint(tmp_path, make_trainer, validates):
    throughput = every_step(warmup_steps=0)
    saves = SlowToRemove(tmp_path / "c", every_n_train_steps=1, save_last=True)
    options = {"val_check_interval": 1, "num_sanity_val_steps": 0} if validates else {}
    trainer = make_trainer(throughput, saves, logger=False, enable_checkpointing=True, **options)
    trainer.fit(Classifier(), loader(48), loader(4) if validates else None)
    assert excluded_s(tmp_path, "checkpoint") >= 11 * PLANTED_MS / 1e3 - 0.005
    assert throughput.analysis().run.regions["other"].p50_ms < PLANTED_MS / 2


class SlowToStart(DataLoader):
    """A loader whose workers take their time to start, in this process."""

    def __iter__(self):
        time.sleep(PLANTED_MS / 1e3)
        return super().__iter__()


@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_start_of_validations_workers_is_validation(accumulated, tmp_path, make_trainer):
    """Also in the middle of an accumulation cycle."""
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(
        throughput, logger=False, val_check_interval=1, num_sanity_val_steps=0, accumulate_grad_batches=accumulated
    )
    trainer.fit(Classifier(), loader(32), SlowToStart(Samples(4)))
    assert excluded_s(tmp_path, "validation") >= 8 * PLANTED_MS / 1e3 - 0.005
    assert throughput.analysis().run.regions["other"].p50_ms < PLANTED_MS / 2
