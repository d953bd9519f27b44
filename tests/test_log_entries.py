"""Which steps a log entry is of: whole accumulation cycles, each once, under an x of its own."""

import time

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback
from tests.models import Classifier, Manual, every_step, loader
from tests.outcomes import logged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def rate_of(row):
    """Optimizer steps a batch."""
    return row["throughput/optimizer_steps_per_sec"] / row["throughput/steps_per_sec"]


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(0.002)
        super().log_metrics(metrics, step)


class Accumulates(Manual):
    accumulate = 3


class Unseen(Manual):
    """Steps an optimizer that Lightning does not know of."""

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self):
        self.own = torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("logger", [CSVLogger, SlowLogger])
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_log_entries_are_of_whole_accumulation_cycles(tmp_path, make_trainer, every, warmup, logger):
    trainer = make_trainer(
        every_step(warmup_steps=warmup),
        accumulate_grad_batches=3,
        log_every_n_steps=every,
        logger=logger(tmp_path, name="csv"),
    )
    trainer.fit(Classifier(), loader(96))
    rows = logged(tmp_path)
    assert len(rows) >= 3
    assert [rate_of(row) for row in rows] == pytest.approx([1 / 3] * len(rows))
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))


def test_a_modules_own_accumulation_is_a_cycle_too(tmp_path, make_trainer):
    make_trainer(every_step(warmup_steps=0)).fit(Accumulates(), loader(96))
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [2, 5, 8, 11, 14, 17, 20, 23]
    assert [rate_of(row) for row in rows] == pytest.approx([1 / 3] * 8)


def test_an_optimizer_that_lightning_does_not_know_ends_no_cycle_and_rows_come_all_the_same(tmp_path, make_trainer):
    make_trainer(every_step(warmup_steps=0), log_every_n_steps=10).fit(Unseen(), loader(400))
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [69, 79, 89, 99]


def test_a_recorded_window_leaves_no_part_of_a_cycle(tmp_path, make_trainer):
    # the profiler runs in steps 3 to 5: of the cycles 0 to 3 and 4 to 7 nothing is in a row
    trainer = make_trainer(
        ForgeProfilerCallback(4, 6), throughput := every_step(warmup_steps=0), accumulate_grad_batches=4
    )
    trainer.fit(Classifier(), loader(64))
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [2, 3]
    assert [rate_of(row) for row in rows] == pytest.approx([0.25, 0.25])
    assert throughput.analysis().run.timing.steps == 13, "in the table they count all the same"


@pytest.mark.parametrize(
    ("count", "steps"), [(80, [19, 39, 59, 79]), (84, [19, 39, 59, 79]), (92, [19, 39, 59, 79, 91])]
)
def test_the_last_row_is_logged_where_it_is_half_an_interval(tmp_path, make_trainer, count, steps):
    trainer = make_trainer(throughput := every_step(), log_every_n_steps=20)
    trainer.fit(Classifier(), loader(count, 1))
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == steps
    sizes = [10, 20, 20, 20, 12][: len(steps)]
    took = sum(size * row["time/step_ms"] for size, row in zip(sizes, rows, strict=True))
    if count != 84:
        assert took == pytest.approx(throughput.summary()["time/step_ms"] * sum(sizes)), "each step is in one row"
    assert throughput.analysis().run.timing.steps == count - 10


def test_what_is_left_at_the_end_is_in_the_summary(make_trainer):
    trainer = make_trainer(
        throughput := every_step(warmup_steps=0, tokens_fn=lambda batch: len(batch[0])), log_every_n_steps=7
    )
    trainer.fit(Classifier(), loader(32, 4))
    metrics = throughput.summary()
    assert metrics["throughput/tokens_per_sec"] * metrics["time/step_ms"] / 1e3 * 8 == pytest.approx(32)
    assert throughput.analysis().run.timing.steps == 8


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "hint"), [(4, False), (1, True)])
def test_steps_are_uneven_among_those_like_them(make_trainer, accumulate, hint):
    """Each fourth step is long: that is no news where each fourth step alone has an optimizer."""

    class Slow(Classifier):
        def optimizer_step(self, *arguments, **options):
            super().optimizer_step(*arguments, **options)
            if accumulate > 1 or self.seen % 4 == 0:
                time.sleep(0.3)  # so long that a busy machine's own unevenness is little beside it

    throughput = every_step(warmup_steps=4)
    trainer = make_trainer(throughput, logger=False, accumulate_grad_batches=accumulate)
    trainer.fit(Slow(), loader(160))
    run = throughput.analysis().run
    assert run.timing.step_ms.mean > 1.2 * run.timing.step_ms.p50
    assert ("uneven-steps" in {hint.code for hint in throughput.analysis().hints}) is hint
