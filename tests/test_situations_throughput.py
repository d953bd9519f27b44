"""What ThroughputCallback logs: names, values, when, and where to."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback
from tests.models import Classifier, Samples, every_step, loader
from tests.outcomes import PARTITION, logged, tables, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

RATES = {f"throughput/{kind}_per_sec" for kind in ("samples", "steps", "optimizer_steps")}
TIMES = {f"time/{region}_ms" for region in ("step", "attention", *PARTITION)} | {"profiling/overhead_us"}
WHOLE_RUN = {"run/goodput", "run/steps_pct", "run/validation_pct", "run/checkpoint_pct", "run/data_loader_pct",
             "run/callbacks_pct", "run/hooks_pct", "run/loggers_pct", "run/compile_pct", "run/gc_pct",
             "run/profiler_pct", "run/startup_pct", "run/other_pct"}  # fmt: skip


def samples_of(row, steps=1):
    """How many samples the steps of a row had, from its rate and its time."""
    return row["throughput/samples_per_sec"] * row["time/step_ms"] / 1e3 * steps


def scalars(folder):
    """The scalars that TensorBoard shows, by name, as (step, value)."""
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_the_names_are_these(tmp_path, make_trainer):
    make_trainer(every_step(warmup_steps=2)).fit(Classifier(), loader())
    for row in logged(tmp_path):
        assert row.keys() == RATES | TIMES | WHOLE_RUN | {"step"}
        assert all(math.isfinite(value) and value >= 0 for value in row.values())


def test_with_a_token_count_there_are_tokens_per_second(tmp_path, make_trainer):
    callback = every_step(warmup_steps=0, tokens_fn=lambda batch: batch[0].numel())
    make_trainer(callback).fit(Classifier(), loader())
    for row in logged(tmp_path):
        tokens = row["throughput/tokens_per_sec"] / row["throughput/samples_per_sec"]
        assert tokens == pytest.approx(8)
        assert not any(name.startswith("throughput/device/") for name in row), "one device: it would say the same"


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_x_axis_is_that_of_self_log(tmp_path, make_trainer, every, own, accumulate):
    callback = every_step(warmup_steps=0, log_every_n_steps=every if own else None)
    options = {"log_every_n_steps": 1 if own else every, "accumulate_grad_batches": accumulate, "max_epochs": 2}
    make_trainer(callback, **options).fit(Classifier(), loader(48))
    mine = [row["step"] for row in logged(tmp_path)]
    theirs = [row["step"] for row in logged(tmp_path, "loss")]
    if own:
        theirs = [step for step in theirs if (step + 1) % every == 0]
    assert mine == sorted(mine)
    # the last row holds what came after the last interval, at the last step
    assert set(mine) <= {*theirs, 24 // accumulate - 1}
    assert set(mine) >= set(theirs[1:])


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_step_is_in_exactly_one_row(tmp_path, make_trainer, every):
    make_trainer(every_step(warmup_steps=0), log_every_n_steps=every).fit(Classifier(), loader(30, 4))
    rows = logged(tmp_path)
    # 7 batches of 4 and one of 2: each row's steps follow from its rate of steps, its samples from its rate of samples
    if every == 1:
        assert [round(samples_of(row), 6) for row in rows] == [4, 4, 4, 4, 4, 4, 4, 2]
    if every == 100:
        assert len(rows) == 1
        assert rows[0]["step"] == 7
        assert samples_of(rows[0], steps=8) == pytest.approx(30)
    for row in rows:
        assert row["throughput/steps_per_sec"] * row["time/step_ms"] == pytest.approx(1000)


def test_batches_of_any_size_are_counted_as_they_are(tmp_path, make_trainer):
    sizes = [1, 7, 3, 5, 2, 6]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput).fit(Classifier(), DataLoader(Samples(24), batch_sampler=batches))
    assert [round(samples_of(row), 6) for row in logged(tmp_path)] == sizes
    assert samples_of(throughput.summary(), steps=len(sizes)) == pytest.approx(sum(sizes))


def test_warm_up_steps_do_not_count(tmp_path, make_trainer, capsys):
    sizes = [1, 1, 1, 5, 6, 7]
    batches = [[i] * size for i, size in enumerate(sizes)]
    throughput = every_step(warmup_steps=3)
    make_trainer(throughput).fit(Classifier(), DataLoader(Samples(24), batch_sampler=batches))
    assert [round(samples_of(row), 6) for row in logged(tmp_path)] == [5, 6, 7]
    assert samples_of(throughput.summary(), steps=3) == pytest.approx(18)
    assert ", 3 of 6 steps on cpu\n" in capsys.readouterr().out


def test_steps_with_the_profiler_on_do_not_count(tmp_path, make_trainer):
    sizes = [1, 1, 1, 1, 5, 6]
    batches = [[i] * size for i, size in enumerate(sizes)]
    # the profiler runs in step 0, its warm-up, to step 3
    trainer = make_trainer(ForgeProfilerCallback(1, 4), every_step(warmup_steps=0))
    trainer.fit(Classifier(), DataLoader(Samples(24), batch_sampler=batches))
    assert [round(samples_of(row), 6) for row in logged(tmp_path)] == [5, 6]


def test_a_run_of_nothing_but_warm_up_steps_logs_them_without_the_first(tmp_path, make_trainer, capsys):
    throughput = every_step()  # 10 warm-up steps
    make_trainer(throughput).fit(Classifier(), loader(20))
    [row] = logged(tmp_path)
    assert samples_of(row, steps=4) == pytest.approx(16)
    assert row["step"] == 4
    assert throughput.summary().keys() == row.keys() - {"step"}
    assert "figures are of the warm-up, of which 5 steps ran" in capsys.readouterr().out


def test_a_run_of_one_step_logs_that_one_and_says_so(tmp_path, make_trainer, capsys):
    throughput = every_step()
    make_trainer(throughput, ForgeProfilerCallback()).fit(Classifier(), loader(4))
    [row] = logged(tmp_path)
    assert samples_of(row, steps=1) == pytest.approx(4)
    assert throughput.summary().keys() == row.keys() - {"step"}
    printed = capsys.readouterr().out
    assert tables(printed) == 1
    assert "only one step ran" in printed


def test_both_loggers_get_the_same(tmp_path, make_trainer):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    make_trainer(every_step(warmup_steps=1), logger=loggers).fit(Classifier(), loader())
    rows = logged(tmp_path)
    shown = scalars(tmp_path / "tb" / "version_0")
    assert shown.keys() >= RATES | TIMES
    for name in ("throughput/samples_per_sec", "time/forward_ms"):
        steps, values = zip(*shown[name], strict=True)
        assert list(steps) == [row["step"] for row in rows]
        assert values == pytest.approx([row[name] for row in rows], rel=1e-6)  # TensorBoard keeps 32 bits


def test_tensorboard_alone(tmp_path, make_trainer):
    make_trainer(every_step(warmup_steps=1), logger=TensorBoardLogger(tmp_path, name="tb")).fit(Classifier(), loader())
    shown = scalars(tmp_path / "tb" / "version_0")
    assert shown.keys() >= RATES | TIMES
    assert {step for step, _ in shown["time/step_ms"]} <= {step for step, _ in shown["loss"]}


def test_without_a_logger_the_table_and_the_summary_are_there(make_trainer, capsys):
    throughput = every_step(warmup_steps=1)
    make_trainer(throughput, logger=False).fit(Classifier(), loader())
    assert throughput.summary().keys() == RATES | TIMES | WHOLE_RUN
    out = capsys.readouterr().out
    assert tables(out) == 1
    assert "samples/s" in out


@pytest.mark.parametrize("every", [0, 2])
def test_log_every_n_steps_of_the_callback_wins(tmp_path, make_trainer, every):
    make_trainer(every_step(warmup_steps=0, log_every_n_steps=every)).fit(Classifier(), loader(32))
    assert len(logged(tmp_path)) == {0: 1, 2: 4}[every], "of 8 steps; 0 logs once, at the end"


def raises(batch):
    raise RuntimeError("no idea")


BAD_COUNTS = {
    "raises": (raises, "no idea"),
    "nan": (lambda batch: float("nan"), "nan"),
    "infinite": (lambda batch: float("inf"), "inf"),
    "negative": (lambda batch: -4, "-4"),
    "text": (lambda batch: "four", "four"),
    "none": (lambda batch: None, "returned None"),
}


@pytest.mark.parametrize("kind", BAD_COUNTS)
@pytest.mark.parametrize("name", ["batch_size_fn", "tokens_fn"])
def test_a_count_that_is_no_number_costs_that_rate_and_one_warning(tmp_path, make_trainer, caplog, name, kind):
    function, message = BAD_COUNTS[kind]
    model = Classifier()
    make_trainer(every_step(warmup_steps=0, **{name: function})).fit(model, loader())
    assert model.seen == 8
    [warning] = warnings_of(caplog)
    assert message in warning
    assert name in warning
    lost = {"batch_size_fn": "samples", "tokens_fn": "tokens"}[name]
    for row in logged(tmp_path):
        assert f"throughput/{lost}_per_sec" not in row
        assert row["throughput/steps_per_sec"] > 0
        assert all(math.isfinite(value) for value in row.values())


def test_a_count_may_be_a_tensor_or_a_float(tmp_path, make_trainer):
    callback = every_step(warmup_steps=0, batch_size_fn=lambda batch: torch.tensor(6), tokens_fn=lambda batch: 2.5)
    make_trainer(callback).fit(Classifier(), loader())
    assert {round(samples_of(row), 6) for row in logged(tmp_path)} == {6}
    assert {round(r["throughput/tokens_per_sec"] / r["throughput/steps_per_sec"], 6) for r in logged(tmp_path)} == {2.5}


class Texts(Classifier):
    """Batches without a tensor."""

    def training_step(self, batch):
        return super().training_step((torch.ones(len(batch), 8), torch.ones(len(batch), dtype=torch.long)))


def test_a_batch_of_unknown_size_names_what_to_do(tmp_path, make_trainer, caplog):
    texts = DataLoader([["a", "b", "c", "d"]] * 4, batch_size=None)
    make_trainer(every_step(warmup_steps=0)).fit(Texts(), texts)
    [warning] = warnings_of(caplog)
    assert "batch_size_fn" in warning
    assert all("throughput/samples_per_sec" not in row for row in logged(tmp_path))
    caplog.clear()
    make_trainer(every_step(warmup_steps=0, batch_size_fn=len)).fit(Texts(), texts)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("sizes", "shown"), [(None, "throughput/samples_per_sec"), (raises, "throughput/steps_per_sec")]
)
def test_the_progress_bar_shows_the_rate_and_the_time(make_trainer, capsys, sizes, shown):
    callback = every_step(warmup_steps=1, prog_bar=True, batch_size_fn=sizes)
    trainer = make_trainer(callback, TQDMProgressBar(), enable_progress_bar=True)
    trainer.fit(Classifier(), loader())
    captured = capsys.readouterr()
    assert {shown, "time/step_ms"} <= trainer.progress_bar_metrics.keys()
    assert f"{shown}=" in captured.out + captured.err
    assert "time/step_ms=" in captured.out + captured.err


def test_to_show_the_rate_nothing_else_is_computed(make_trainer, monkeypatch):
    """At an epoch's end the public property reduces what was logged, by collectives that another rank may not reach."""
    callback = every_step(warmup_steps=1, prog_bar=True)
    trainer = make_trainer(callback)
    monkeypatch.setattr(type(trainer), "progress_bar_metrics", property(raises))
    trainer.fit(Classifier(), loader())
    monkeypatch.undo()
    assert "time/step_ms" in trainer.progress_bar_metrics


def test_without_prog_bar_the_progress_bar_is_left_alone(make_trainer):
    trainer = make_trainer(every_step(warmup_steps=1), enable_progress_bar=True)
    trainer.fit(Classifier(), loader())
    assert not any(name.startswith(("throughput", "time")) for name in trainer.progress_bar_metrics)
