"""Where the time of a step goes, in every way to write a training loop with Lightning."""

import time

import lightning as L
import pytest

from lightning_forge_profiling import ForgeProfilerCallback, region
from lightning_forge_profiling.timing.region_clock import ABSORBED_BELOW_NS
from tests import models
from tests.models import SLOW_MS, Classifier, Samples, Stream, busy, every_step, loader
from tests.outcomes import PARTITION, excluded_s, logged, recorded_steps, spans, summary_of, tables, the_trace
from tests.step_clock import StepClock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def least(rows, region):
    """The least time of a region in any row: what did not happen there only takes long when something interferes."""
    return min(row[f"time/{region}_ms"] for row in rows)


KINDS = (Classifier, models.LBFGS, models.Manual, models.ManualClosure, models.GAN, models.SkipsSome)
# torch's LBFGS has no point of its own to be slow at; SkipsSome has steps without a backward pass
IMPOSSIBLE = {(models.LBFGS, "optimizer"), (models.SkipsSome, "backward")}


@pytest.fixture
def _time_passes_in_slow_places(monkeypatch):
    """The callbacks' clock goes on by what a slow place takes, and by a microsecond each time that it is read."""
    clock = StepClock(monkeypatch)
    monkeypatch.setattr(models, "busy", lambda ms=SLOW_MS: clock.pass_time(ms))


@pytest.mark.slow
@pytest.mark.two_clocks
@pytest.mark.usefixtures("_time_passes_in_slow_places")
@pytest.mark.parametrize(
    ("kind", "slow"), [(kind, slow) for kind in KINDS for slow in PARTITION if (kind, slow) not in IMPOSSIBLE]
)
def test_time_goes_to_the_region_in_which_it_passed(tmp_path, make_trainer, kind, slow):
    model = kind(slow)
    if slow == "optimizer" and kind in {models.Manual, models.ManualClosure}:
        model.configure_optimizers = model.slow_sgd
    trainer = make_trainer(every_step(warmup_steps=1), max_steps=16, max_epochs=-1)
    trainer.fit(model, loader(32, 4, slow=slow))
    rows = logged(tmp_path)
    assert least(rows, slow) >= SLOW_MS
    for other in set(PARTITION) - {slow}:
        assert max(row[f"time/{other}_ms"] for row in rows) < SLOW_MS / 10, other


class Clock(L.Callback):
    """Reads the host clock at the end of every batch and around validation."""

    def __init__(self):
        self.read, self.validation_starts, self.validation_ends = [], [], []

    def on_train_batch_end(self, *_):
        self.read.append(time.perf_counter() * 1e3)

    def on_validation_start(self, *_):
        self.validation_starts.append(time.perf_counter() * 1e3)

    def on_validation_end(self, *_):
        self.validation_ends.append(time.perf_counter() * 1e3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {}),
        (models.LBFGS, {}),
        (models.ManualClosure, {}),
        (models.GAN, {}),
        (models.FromIterator, {}),
        (models.SkipsSome, {}),
        (models.EndsEpochsEarly, {"max_epochs": 4}),
        (Classifier, {"max_epochs": 3, "limit_train_batches": 3}),
        (Classifier, {"enable_progress_bar": True}),
    ],
)
def test_the_regions_tile_the_step_without_gap_or_overlap(tmp_path, make_trainer, kind, options):
    before, after, throughput = Clock(), Clock(), every_step(warmup_steps=1)
    trainer = make_trainer(before, throughput, after, **{"max_epochs": 2} | options)
    trainer.fit(kind(), loader())
    metrics = throughput.summary()
    counted = len(before.read) - 1
    total = counted * metrics["time/step_ms"]
    assert sum(metrics[f"time/{region}_ms"] for region in PARTITION) == pytest.approx(metrics["time/step_ms"])
    rows = 1e3 * excluded_s(tmp_path, "profiler")
    early = ABSORBED_BELOW_NS / 1e6  # so much of its end, which is `other`, may count to the next step
    assert before.read[-1] - after.read[0] - early <= total + rows <= after.read[-1] - before.read[0] + early


@pytest.mark.slow
@pytest.mark.parametrize("interval", [2, 3, 8])
def test_validation_is_no_part_of_a_step(tmp_path, make_trainer, interval):
    before, after, throughput = Clock(), Clock(), every_step(warmup_steps=1)
    trainer = make_trainer(before, throughput, after, max_epochs=2, val_check_interval=interval, num_sanity_val_steps=0)
    trainer.fit(Classifier("validation"), loader(), loader(32))
    # from after ours has seen it start until before ours sees it end
    runs = list(zip(after.validation_starts, before.validation_ends, strict=True))
    assert len(runs) == 2 * (8 // interval)
    between = sum(end - start for start, end in runs if end < after.read[-1])
    assert between >= (len(runs) - 1) * 8 * SLOW_MS
    total = 15 * throughput.summary()["time/step_ms"]
    assert total <= after.read[-1] - before.read[0] - between
    validated_s = sum(end - start for start, end in runs) / 1e3
    assert excluded_s(tmp_path, "validation") >= validated_s - 0.005, "the last one, after all steps, counts too"


@pytest.mark.parametrize("manual", [False, True])
def test_with_accumulation_the_optimizer_only_works_in_the_batches_that_step(tmp_path, make_trainer, manual):
    model = models.Manual("optimizer") if manual else Classifier("optimizer")
    model.configure_optimizers = model.slow_sgd
    model.accumulate = 4
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(throughput, max_epochs=3, **({} if manual else {"accumulate_grad_batches": 4}))
    trainer.fit(model, loader(32))
    assert trainer.global_step == 6
    metrics = throughput.summary()
    assert metrics["time/optimizer_ms"] * 24 >= 6 * SLOW_MS
    assert metrics["throughput/steps_per_sec"] / metrics["throughput/optimizer_steps_per_sec"] == pytest.approx(4)
    rows = logged(tmp_path)
    if manual:  # a row is of a whole cycle of four batches
        assert [row["step"] for row in rows] == [3, 7, 11, 15, 19, 23]
        assert all(row["time/optimizer_ms"] * 4 >= SLOW_MS for row in rows)
    else:  # nothing is logged in between, as with self.log
        assert {row["step"] for row in rows} <= {row["step"] for row in logged(tmp_path, "loss")}


def test_with_accumulation_a_trace_shows_one_optimizer_step_for_several_batches(tmp_path, make_trainer):
    make_trainer(ForgeProfilerCallback(4, 8), accumulate_grad_batches=4).fit(Classifier(), loader(64))
    assert spans(the_trace(tmp_path)).count("forge.optimizer") == 1


def test_two_optimizers_in_a_batch_are_one_step(make_trainer):
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput).fit(models.GAN(), loader())
    metrics = throughput.summary()
    assert metrics["throughput/optimizer_steps_per_sec"] == pytest.approx(metrics["throughput/steps_per_sec"])


SITUATIONS = {
    "batches that are None": (Classifier, {"collate_fn": models.some_none}, {}, 8, 28),
    "a dataloader_iter": (models.FromIterator, {}, {}, 8, 32),
    "training steps without loss": (models.SkipsSome, {}, {}, 8, 32),
    "epochs that end early": (models.EndsEpochsEarly, {}, {"max_epochs": 2}, 6, 24),
    "limit_train_batches": (Classifier, {}, {"limit_train_batches": 3, "max_epochs": 2}, 6, 24),
    "a short last batch": (Classifier, {"batch_size": 5}, {}, 7, 32),
    "validation in mid-epoch": (Classifier, {}, {"val_check_interval": 3}, 8, 32),
    "worker processes": (Classifier, {"num_workers": 1}, {}, 8, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_step_and_every_sample_is_counted(tmp_path, make_trainer, situation):
    kind, data, options, steps, samples = SITUATIONS[situation]
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(ForgeProfilerCallback(2, 4, tensorboard=False), throughput, **options)
    trainer.fit(kind(), loader(32, **data), loader(8))
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    out = summary_of(tmp_path)
    # the window's two steps and its warm-up step; where the profiler stops is a step that counts
    assert f"of {steps} steps" in " ".join(out.split())
    assert "3 steps with the profiler on" in out
    make_trainer(alone := every_step(warmup_steps=0), **options).fit(kind(), loader(32, **data), loader(8))
    metrics = alone.summary()
    counted = metrics["throughput/samples_per_sec"] * metrics["time/step_ms"] / 1e3 * steps
    assert counted == pytest.approx(samples)
    assert tables(out) == 1


def test_an_iterable_dataset_without_length(tmp_path, make_trainer):
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(ForgeProfilerCallback(2, 4), throughput, max_epochs=2)
    trainer.fit(Classifier(), models.DataLoader(Stream(32), 4))
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    metrics = throughput.summary()
    assert metrics["throughput/samples_per_sec"] / metrics["throughput/steps_per_sec"] == pytest.approx(4)


def test_a_loader_without_prefetching_is_timed_in_data(tmp_path, make_trainer):
    class Own:
        def __iter__(self):
            samples = Samples(8)
            for _ in range(8):
                busy()
                yield samples.x, samples.y

    make_trainer(every_step(warmup_steps=1)).fit(Classifier(), Own())
    assert least(logged(tmp_path)[:-1], "data") >= SLOW_MS


@pytest.mark.parametrize("left_out", PARTITION[:-1])
def test_a_region_that_is_not_asked_for_falls_into_other(tmp_path, make_trainer, left_out):
    regions = [region for region in PARTITION if region != left_out]
    model = Classifier(left_out)
    trainer = make_trainer(ForgeProfilerCallback(90, 91, regions=regions), every_step(warmup_steps=1))
    trainer.fit(model, loader(slow=left_out))
    rows = logged(tmp_path)
    assert least(rows, "other") >= SLOW_MS
    assert all(f"time/{left_out}_ms" not in row for row in rows), "not measured is not 0"
    assert left_out not in trainer.callbacks[1].analysis().run.timing.regions


def test_a_region_of_the_users_is_logged_and_lies_over_the_built_in_ones(tmp_path, make_trainer, capsys):
    make_trainer(every_step(warmup_steps=1)).fit(Classifier(), loader(), loader(8))
    for row in logged(tmp_path):
        assert 0 < row["time/attention_ms"] <= row["time/forward_ms"]
    assert "your attention" in capsys.readouterr().out


def test_one_region_object_may_serve_a_whole_module_also_inside_itself(tmp_path, make_trainer):
    class Shared(Classifier):
        def __init__(self):
            super().__init__()
            self.part = region("part")

        def training_step(self, batch):
            with self.part, self.part:
                pass
            with self.part:
                with self.part:
                    pass
                busy()
            return super().training_step(batch)

    make_trainer(ForgeProfilerCallback(2, 4), every_step(warmup_steps=0)).fit(Shared(), loader())
    rows = logged(tmp_path)
    assert least(rows, "part") >= SLOW_MS
    assert all(row["time/part_ms"] <= row["time/forward_ms"] for row in rows)
    assert spans(the_trace(tmp_path)).count("part") == 8


def test_a_region_may_have_quotation_marks_in_its_name(tmp_path, make_trainer):
    class Quotes(Classifier):
        def training_step(self, batch):
            with region('load "train"'):
                return super().training_step(batch)

    forge = ForgeProfilerCallback(2, 4)
    make_trainer(forge, logger=False).fit(Quotes(), loader())
    assert spans(the_trace(tmp_path)).count("load 'train'") == 2
    assert forge.trace_report().summary_path is not None
