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

pytestmark = [pytest.mark.real_time, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

PLANTED_MS = 60.0
LONG_MS = 400.0
"""Where something has to be shorter than what is planted: longer than a garbage collection on a busy machine."""


class Clock(L.Callback):
    """Reads the clock at the end of every batch and around validation."""

    def __init__(self):
        self.batches, self.starts, self.ends, self.runs = [], [], [], []

    def on_train_start(self, trainer, module):
        loop = trainer.fit_loop.epoch_loop.val_loop
        run = loop.run

        def timed():
            began = time.perf_counter()
            found = run()
            self.runs.append((time.perf_counter() - began) * 1e3)
            return found

        loop.run = timed

    def on_train_batch_end(self, *_):
        self.batches.append(time.perf_counter() * 1e3)

    def on_validation_start(self, *_):
        self.starts.append(time.perf_counter() * 1e3)

    def on_validation_end(self, *_):
        self.ends.append(time.perf_counter() * 1e3)


class Later(L.Callback):
    """Comes after ours and takes its time at each fourth batch."""

    def __init__(self, ms=PLANTED_MS):
        self.ms = ms

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 4 == 3:
            time.sleep(self.ms / 1e3)


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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_comes_between_a_batch_and_its_validation_is_the_steps(tmp_path, make_trainer, case):
    later, options = CASES[case]
    before, behind, throughput = Clock(), Clock(), every_step(warmup_steps=5)
    options = {"logger": False, "val_check_interval": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0} | options
    make_trainer(before, throughput, behind, *later, **options).fit(TenMs(), loader(104), loader(4))
    metrics = throughput.summary()
    took = 21e3 / metrics["throughput/steps_per_sec"] + 1e3 * excluded_s(tmp_path, "profiler")
    assert len(before.starts) == len(before.runs) == 6
    assert len(before.batches) == 26
    # a step of ours ends between the two clocks, and validation within its loop's `run`; the first is in the warm-up
    shortest = before.batches[-1] - behind.batches[4] - sum(before.runs[1:])
    longest = behind.batches[-1] - before.batches[4] - sum(before.ends[1:]) + sum(before.starts[1:])
    assert 0.99 * shortest <= took <= 1.01 * longest
    assert metrics["time/other_ms"] * 21 >= 5 * PLANTED_MS


class AtTheEnd(L.Callback):
    """Comes after ours and takes its time at the end of validation."""

    def on_validation_end(self, *_):
        time.sleep(PLANTED_MS / 1e3)


def test_the_end_of_validation_in_later_callbacks_is_validation(tmp_path, make_trainer):
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(throughput, AtTheEnd(), logger=False, val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(32), loader(4))
    assert excluded_s(tmp_path, "validation") >= 8 * PLANTED_MS / 1e3 - 0.005
    assert throughput.analysis().run.timing.regions["other"].p50_ms < PLANTED_MS / 4


def test_a_trace_counts_it_likewise(tmp_path, make_trainer):
    forge = ForgeProfilerCallback(2, 10, trace_dir=tmp_path / "t", tensorboard=False)
    trainer = make_trainer(forge, Later(LONG_MS), logger=False, val_check_interval=4, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(48), loader(8))
    [path] = traces(tmp_path)
    [rank] = analyze(path).analysis.ranks
    slow = [step.number for step in rank.per_step if step.ms >= LONG_MS]
    assert slow == [4, 8], "what follows the end of batch 3 belongs to step 4, as without validation"
    spans = [e for e in the_trace(tmp_path)["traceEvents"] if e.get("name") == "forge.validation"]
    assert all(span["dur"] < LONG_MS * 1e3 for span in spans)


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
    assert run.timing.worker_restarts.count == 5, "of epochs 1 to 5; that of epoch 0 came before the first step"
    assert run.timing.worker_restarts.workers == 1
    assert run.timing.worker_restarts.device_ms * run.timing.steps >= 5 * PLANTED_MS
    waits_ms = run.timing.worker_restarts.device_ms
    if "num_workers=0" in found.fix:  # a batch takes little: then the waits for all batches are of this finding
        waits_ms = run.timing.regions["data"].device_ms
    else:
        assert "persistent_workers=True" in found.advice
    assert found.share_pct == pytest.approx(100 * waits_ms / run.timing.step_ms.mean, rel=0.02), "without collections"
    assert throughput.summary()["time/data_ms"] * 10 >= 5 * PLANTED_MS
    assert sum(found.share_pct for found in analysis.findings) <= 100.001, "input-bound counts the other fetches alone"
    assert "verdict     worker-restarts: " in capsys.readouterr().out


def test_workers_that_stay_are_not(make_trainer):
    throughput = every_step(warmup_steps=2)
    make_trainer(throughput, logger=False, max_epochs=6).fit(Classifier(), with_workers(persistent_workers=True))
    assert throughput.analysis().run.timing.worker_restarts is None
    assert "worker-restarts" not in {found.code for found in throughput.analysis().findings}


class SlowToIterate(DataLoader):
    """Its iterator takes its time to be made, as where workers have to be waited for."""

    def __iter__(self):
        time.sleep(LONG_MS / 1e3)
        return super().__iter__()


class Reloading(Classifier):
    def train_dataloader(self):
        time.sleep(LONG_MS / 1e3)
        return SlowToIterate(Samples(32), 4)


class LateStart(L.Callback):
    """What is no part of making a loader."""

    def on_train_epoch_start(self, *_):
        time.sleep(LONG_MS / 1e3)


@pytest.mark.slow
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
    assert metrics["time/data_ms"] * 24 >= 2 * anew * LONG_MS
    assert metrics["time/other_ms"] * 24 >= 3 * LONG_MS, "the callback's time is not the loader's"
    assert metrics["time/data_ms"] * 24 < (2 * anew + 1.5) * LONG_MS
    assert sum(metrics[f"time/{region}_ms"] for region in PARTITION) == pytest.approx(metrics["time/step_ms"])
    assert throughput.analysis().run.timing.worker_restarts is None, "there are no workers"


@pytest.mark.slow
def test_the_budget_does_not_spread_it_over_other_steps(tmp_path, make_trainer):
    """Steps that are not split are taken to divide as others do, and not as the first of an epoch."""
    throughput = every_step(warmup_steps=0)
    throughput.overhead = 1e-6
    trainer = make_trainer(throughput, max_epochs=3, log_every_n_steps=200)
    trainer.fit(Classifier(), SlowToIterate(Samples(800), 4))
    metrics = throughput.summary()
    assert metrics["time/data_ms"] * 600 >= 2 * LONG_MS
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
    assert throughput.analysis().run.timing.regions["other"].p50_ms < PLANTED_MS / 2


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
    assert throughput.analysis().run.timing.regions["other"].p50_ms < PLANTED_MS / 2
