"""The record that a fit leaves: its lines against what was logged and printed, its files, its limits."""

import json
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import jsonschema
import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks.lightning_training import LightningTraining
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.cli.show import schema_json
from lightning_forge_profiling.record.reader import read_rank, read_run
from lightning_forge_profiling.record.writer import RecordWriter, Segments, command_line, git_commit
from lightning_forge_profiling.report.terminal import print_end
from lightning_forge_profiling.run import run_record
from lightning_forge_profiling.run.host_readings import HostReadings
from lightning_forge_profiling.run.run_record import RecordFolder, RunRecorder
from lightning_forge_profiling.run.run_report import run_report
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.schema import Begin, EventLine, State
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.counters import bucket, is_split, percentile_ms, step_total_ms, total
from lightning_forge_profiling.timing.estimate import timing_of
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork
from tests.models import Classifier, Fails, Manual, every_step, loader, quiet_trainer
from tests.outcomes import HANGS_S, logged

VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema_json(of_record=True)))


def the_record(folder, name="forge_record"):
    """The record of the one rank, which could be read whole."""
    [found] = folder.rglob(name)
    [record] = read_run(found).ranks
    assert record.problems == ()
    return record


@pytest.fixture
def every_entry(monkeypatch):
    """Each log entry is a line of its own, however soon after the one before."""
    monkeypatch.setattr(run_record, "_INTERVAL_S", 0)
    monkeypatch.setattr(run_record, "_STATE_COST", float("inf"))
    monkeypatch.setattr(run_record, "_INTERVAL_COST", float("inf"))


# -- what is in it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with a window, validation, checkpoints and a region; its folder and its callback."""
    folder = tmp_path_factory.mktemp("run")
    throughput = ThroughputCallback(warmup_steps=4, tokens_fn=lambda batch: batch[0].numel())
    trainer = quiet_trainer(
        ForgeProfilerCallback(10, 12),
        throughput,
        max_epochs=2,
        logger=CSVLogger(folder, name="csv"),
        default_root_dir=folder,
        log_every_n_steps=2,
        enable_checkpointing=True,
    )
    trainer.fit(Classifier(), loader(80), loader(8))
    return folder, throughput


def test_it_is_in_the_log_folder_and_has_begun_and_ended(run):
    folder, _ = run
    record = the_record(folder)
    assert record.path == folder / "csv" / "version_0" / "forge_record" / "rank0.jsonl"
    assert [path.name for path in record.path.parent.iterdir()] == ["rank0.jsonl"]
    begin, end = record.begin, record.end
    assert (begin.rank, begin.world_size, begin.segment, begin.device) == (0, 1, 0, "cpu")
    assert {"python", "torch", "lightning", "lightning_forge_profiling"} <= begin.versions.keys()
    assert begin.settings["strategy"] == "SingleDeviceStrategy"
    assert begin.settings["precision"] == "32-true"
    assert begin.settings["log_every_n_steps"] == 2
    assert begin.loader.batch_size == 4
    assert begin.restored_from == begin.continues == ""
    assert (end.step, end.outcome, end.exception) == (40, "finished", "")
    times = [begin.at, *(line.at for line in record.lines)]
    assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_set_in_the_middle_changes_no_duration(tmp_path, monkeypatch, capsys, every_entry, hours):
    real, seen = time.time, []

    def summary():
        capsys.readouterr()
        main(["show", str(tmp_path), "--json"])
        return json.loads(capsys.readouterr().out)

    def look(trainer, module, outputs, batch, index):
        if index == 10:
            monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
        elif index == 30:
            deadline = time.monotonic() + HANGS_S
            while (so_far := summary())["step"] <= 20:
                assert time.monotonic() < deadline
            seen.append(so_far)

    watching = LambdaCallback(on_train_batch_end=look)
    trainer = quiet_trainer(
        ThroughputCallback(warmup_steps=2), watching, max_steps=40, log_every_n_steps=1, logger=CSVLogger(tmp_path)
    )
    trainer.fit(Classifier(), loader(200))
    [running], finished = seen, summary()
    assert (running["outcome"], finished["outcome"]) == ("running", "finished")
    assert (running["progress"]["left_s"] or 0) < 600
    for one in running, finished:
        assert 0 < one["at"] - one["began"] < 600
        assert abs(one["at"] - time.time()) < 600


def test_its_intervals_add_up_to_its_totals(run):
    folder, throughput = run
    record = the_record(folder)
    steady = record.state.report.run.timing
    assert steady.steps == 40 - 4 - 3  # without the warm-up, the profiler's and the recorded; odd: one is the median
    assert sum(interval.counted for interval in record.intervals) == steady.steps
    counters = total(interval.counters for interval in record.intervals)
    assert (counters.samples, counters.tokens) == (steady.samples, steady.tokens)
    assert step_total_ms(counters) == pytest.approx(steady.total_ms)
    assert counters.steps_us == record.state.counters.steps_us
    assert all(sum(one.counters.steps_us.values()) == one.counted for one in record.intervals)
    assert sum(record.state.counters.steps_us.values()) == steady.steps
    blocks = record.state.blocks
    assert len(blocks) == steady.steps, "a short run has a block for each step"
    counters = total(blocks)
    assert (counters.steps, counters.samples, counters.tokens) == (steady.steps, steady.samples, steady.tokens)
    assert step_total_ms(counters) == pytest.approx(steady.total_ms)
    assert counters.steps_us == record.state.counters.steps_us
    p50 = record.state.report.run.timing.step_ms.p50
    assert percentile_ms(record.state.counters.steps_us, 50) == pytest.approx(p50, rel=0.01 + 1e-9)
    assert record.state.metrics == pytest.approx(throughput.summary())
    spent = sum(sum(interval.ledger_s.values()) for interval in record.intervals)
    assert 0 < spent <= throughput.ledger().wall_s


def test_it_has_the_logged_values(run):
    folder, _ = run
    record = the_record(folder)
    rows = {row["step"]: row for row in logged(folder)}
    assert record.intervals[0].logger_step in rows
    for interval in record.intervals:
        row = rows.get(interval.logger_step, {})
        assert {name: row[name] for name in interval.metrics if name in row} == pytest.approx(
            interval.metrics, rel=1e-5
        )


def test_the_first_interval_brings_the_first_totals(run):
    folder, _ = run
    kinds = [type(line).__name__ for line in the_record(folder).lines]
    assert kinds[:2] == ["IntervalLine", "State"]
    assert kinds[-2:] == ["State", "End"]


def test_it_tells_of_the_window_and_of_what_lies_between_steps(run):
    folder, _ = run
    events = the_record(folder).events
    kinds = [event.kind for event in events]
    assert Counter(kinds) == {"window": 2, "validation": 2, "checkpoint": 2}
    started, written = (event for event in events if event.kind == "window")
    assert started.step <= 10 < written.step
    assert written.text.startswith("steps 10, 11 were recorded to ")
    assert all(event.seconds > 0 for event in events)


def test_what_lies_between_steps_ended_before_the_interval_that_follows_it(run):
    record = the_record(run[0])
    before = record.begin.at
    for index, event in enumerate(record.lines):
        if isinstance(event, EventLine) and event.kind in {"validation", "checkpoint"}:
            following = next(line for line in record.lines[index:] if not isinstance(line, EventLine))
            assert before < event.at <= following.at
            assert event.at - event.seconds > record.begin.at


def test_its_last_state_prints_the_table_that_the_fit_printed(tmp_path, make_trainer, capsys):
    forge = ForgeProfilerCallback(5, 7)
    make_trainer(forge, ThroughputCallback(warmup_steps=2)).fit(Classifier(), loader(80))
    printed = capsys.readouterr().out
    state = the_record(tmp_path).state
    print_end(state.report, tmp_path / "csv" / "version_0")
    assert capsys.readouterr().out == printed
    assert state.report.analysis.ranks == (), "the trace's own figures are in its summary.json"


def test_each_line_follows_the_schema(run, capsys):
    folder, _ = run
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    path = the_record(folder).path
    kinds = Counter()
    for text in path.read_bytes().splitlines():
        line = json.loads(text)
        VALIDATOR.validate(line)
        kinds[line["line"]] += 1
        assert not VALIDATOR.is_valid({**line, "at": "noon"})
        assert not VALIDATOR.is_valid({**line, "line": "other"})
    assert kinds.keys() == {"begin", "interval", "event", "state", "end"}
    assert main(["show", "--schema", "record"]) == 0
    assert json.loads(capsys.readouterr().out) == VALIDATOR.schema


@pytest.mark.slow
@pytest.mark.usefixtures("every_entry")
@pytest.mark.parametrize("module", [Classifier, Manual])
@pytest.mark.parametrize("overhead", [None, 0.005])
def test_accumulated_and_broken_cycles_are_in_its_intervals(tmp_path, make_trainer, module, overhead):
    options = {"accumulate_grad_batches": 4} if module is Classifier else {}
    made = module()
    made.accumulate = 4
    callback = ThroughputCallback(warmup_steps=3, overhead=overhead)
    make_trainer(ForgeProfilerCallback(13, 15), callback, **options).fit(made, loader(4 * 50))
    record = the_record(tmp_path)
    steady = record.state.report.run.timing
    assert sum(interval.counted for interval in record.intervals) == steady.steps == 50 - 3 - 3
    counters = total(interval.counters for interval in record.intervals)
    assert counters.optimizer_steps == steady.optimizer_steps
    assert counters.steps_us == record.state.counters.steps_us


@pytest.mark.usefixtures("every_entry")
def test_a_region_of_the_users_is_no_part_of_the_sum(tmp_path, make_trainer):
    callback = every_step(warmup_steps=1)
    make_trainer(callback).fit(Classifier(), loader(40))
    record = the_record(tmp_path)
    assert len(record.intervals) == 9
    for interval in record.intervals:
        timing = timing_of(interval.counters)
        assert timing.total_ms == pytest.approx(interval.metrics["time/step_ms"], rel=1e-4)
        assert interval.counters.host_groups == {}, "without a GPU it would be the same again"
        assert "time/attention_ms" in interval.metrics


def test_a_run_that_logs_no_row_has_its_totals(tmp_path, make_trainer):
    make_trainer(ThroughputCallback(warmup_steps=2, log_every_n_steps=0)).fit(Classifier(), loader(40))
    record = the_record(tmp_path)
    assert [interval.counted for interval in record.intervals] == [8]
    assert record.state.report.run.timing.steps == 8


@pytest.mark.slow
def test_totals_come_between_rows_that_are_far_apart(tmp_path, make_trainer, monkeypatch):
    monkeypatch.setattr(run_record, "_STATE_S", 0)
    monkeypatch.setattr(run_record, "_STATE_COST", float("inf"))
    monkeypatch.setattr(run_record, "_INTERVAL_COST", float("inf"))
    make_trainer(ThroughputCallback(warmup_steps=2), log_every_n_steps=1000).fit(Classifier(), loader(400))
    lines = the_record(tmp_path).lines
    assert isinstance(lines[0], State)
    assert sum(isinstance(line, State) for line in lines) > 3


# -- where it is, and whether ------------------------------------------------------------------------------------------


def test_each_fit_in_a_place_has_a_folder_of_its_own(tmp_path, make_trainer):
    callback = ThroughputCallback(warmup_steps=1)
    for _ in range(3):
        make_trainer(callback, logger=False).fit(Classifier(), loader(16))
    runs = [the_record(tmp_path, name).begin.run for name in ("forge_record", "forge_record.2", "forge_record.3")]
    assert len(set(runs)) == 3


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_others_have_put_in_its_place_is_left_alone(tmp_path, make_trainer, kind):
    place, victim = tmp_path / "forge_record", tmp_path / "victim"
    victim.mkdir()
    {"link": lambda: place.symlink_to(victim), "pipe": lambda: os.mkfifo(place), "file": place.touch}[kind]()
    make_trainer(ThroughputCallback(warmup_steps=1), logger=False).fit(Classifier(), loader(16))
    assert list(victim.iterdir()) == []
    assert the_record(tmp_path, "forge_record.2").end.outcome == "finished"


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        pytest.param(ThroughputCallback(record=False), {}, id="switched off"),
        pytest.param(ThroughputCallback(), {"fast_dev_run": 2}, id="trial"),
        pytest.param(ForgeProfilerCallback(1, 2), {}, id="the other callback"),
        pytest.param(ThroughputCallback(), {"max_steps": 0}, id="nothing to train"),
        pytest.param([ThroughputCallback(), ThroughputCallback()], {}, id="refused"),
    ],
)
def test_no_record_and_no_folder_of_one_is_left(tmp_path, make_trainer, callback, options):
    trainer = make_trainer(*(callback if isinstance(callback, list) else [callback]), logger=False, **options)
    try:
        trainer.fit(Classifier(), loader(16))
    except ValueError as exc:
        assert "ThroughputCallback" in str(exc)  # noqa: PT017
    assert list(tmp_path.rglob("forge_record*")) == []


def test_a_fit_that_fails_in_its_sanity_check_leaves_no_folder(tmp_path, make_trainer):
    class Unsound(Classifier):
        def validation_step(self, batch):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(ThroughputCallback(), logger=False).fit(Unsound(), loader(16), loader(8))
    assert list(tmp_path.rglob("forge_record*")) == []


def test_a_resumed_run_names_the_record_of_the_run_that_wrote_its_checkpoint(tmp_path, make_trainer):
    saves = ModelCheckpoint(filename="last")
    make_trainer(ThroughputCallback(warmup_steps=1), saves, enable_checkpointing=True).fit(Classifier(), loader(16))
    path = saves.best_model_path
    first = the_record(tmp_path)
    trainer = make_trainer(ThroughputCallback(warmup_steps=1), max_epochs=2, logger=CSVLogger(tmp_path, name="second"))
    trainer.fit(Classifier(), loader(16), ckpt_path=path)
    [second] = read_run(tmp_path / "second" / "version_0" / "forge_record").ranks
    assert second.begin.restored_from == path
    assert second.begin.continues == str(first.path.parent)
    assert first.begin.continues == ""


def test_of_several_records_in_a_place_the_one_that_wrote_the_checkpoint_is_named(tmp_path, make_trainer):
    paths = []
    for number in range(3):
        saves = ModelCheckpoint(dirpath=tmp_path / "saved", filename=str(number))
        trainer = make_trainer(ThroughputCallback(warmup_steps=1), saves, enable_checkpointing=True, logger=False)
        trainer.fit(Classifier(), loader(16))
        paths.append(saves.best_model_path)
    trainer = make_trainer(ThroughputCallback(warmup_steps=1), max_epochs=2, logger=False)
    trainer.fit(Classifier(), loader(16), ckpt_path=paths[1])
    assert the_record(tmp_path, "forge_record.4").begin.continues == str(tmp_path / "forge_record.2")


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"max_epochs": 3}, 30),
        ({"max_steps": 25, "max_epochs": -1}, 25),
        ({"max_steps": 7, "max_epochs": -1, "accumulate_grad_batches": 4}, 24),
        ({"max_steps": 100, "max_epochs": 2}, 20),
        ({"max_epochs": 3, "limit_train_batches": 4}, 12),
    ],
)
def test_the_number_of_steps_ahead_is_known_when_a_fit_begins(tmp_path, make_trainer, limits, batches):
    make_trainer(ThroughputCallback(warmup_steps=1), logger=False, **limits).fit(Classifier(), loader(40))
    record = the_record(tmp_path)
    assert (record.begin.batches, record.end.step) == (batches, batches)
    assert record.begin.settings["train_batches"] == limits.get("limit_train_batches", 10)


def test_what_has_no_limit_or_updates_of_its_own_has_no_known_number_of_steps(tmp_path, make_trainer):
    stops = LambdaCallback(on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", True))
    for module, steps in ((Classifier(), -1), (Manual(), 100)):
        folder = tmp_path / type(module).__name__
        callbacks = ThroughputCallback(warmup_steps=1), stops
        make_trainer(*callbacks, logger=False, default_root_dir=folder, max_epochs=-1, max_steps=steps).fit(
            module, loader(16)
        )
        assert the_record(folder).begin.batches is None


@pytest.mark.skipif(L.__version__.startswith("2.4."), reason="Lightning 2.4 trains on otherwise after an epoch's end")
@pytest.mark.parametrize("limits", [{"max_epochs": 4}, {"max_steps": 33, "max_epochs": -1}])
@pytest.mark.parametrize("every", [7, 10])
def test_a_resumed_fit_knows_the_steps_ahead_of_it(tmp_path, make_trainer, limits, every):
    saves = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=every, save_top_k=-1)
    first = make_trainer(ThroughputCallback(warmup_steps=1), saves, enable_checkpointing=True, max_epochs=2)
    first.fit(Classifier(), loader(40))
    for number, path in enumerate(sorted((tmp_path / "saved").glob("*.ckpt"))):
        folder = tmp_path / f"resumed{number}"
        trainer = make_trainer(ThroughputCallback(warmup_steps=1), logger=False, default_root_dir=folder, **limits)
        trainer.fit(Classifier(), loader(40), ckpt_path=path)
        record = the_record(folder)
        done = int(path.stem.rpartition("=")[2])
        assert (record.begin.batches, record.end.step) == (limits.get("max_steps", 40) - done,) * 2
        assert 10 * record.begin.first_epoch + record.begin.first_batch == done or "max_steps" in limits


# -- runs that fail ----------------------------------------------------------------------------------------------------


def test_a_failed_run_says_what_failed(tmp_path, make_trainer):
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(ThroughputCallback(warmup_steps=1)).fit(Fails(6, RuntimeError("mine")), loader(80))
    record = the_record(tmp_path)
    assert [event.text for event in record.events] == ["RuntimeError: mine"]
    assert (record.end.outcome, record.end.exception, record.end.step) == ("failed", "RuntimeError: mine", 6)
    assert record.state.report.run.timing.steps == 5
    assert sum(interval.counted for interval in record.intervals) == 5


@pytest.mark.usefixtures("_signals_act")
def test_a_run_that_is_asked_to_end_says_so(tmp_path, make_trainer):
    class AskedToEnd(Classifier):
        def training_step(self, batch):
            if self.seen == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch)

    with pytest.raises(SystemExit):
        make_trainer(ThroughputCallback(warmup_steps=1)).fit(AskedToEnd(), loader(80))
    record = the_record(tmp_path)
    assert record.end.outcome == "failed"
    assert record.end.exception.startswith("SIGTERMException")
    assert [event.kind for event in record.events] == ["exception"]


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "record" in record.name
    ]


class Removes(L.Callback):
    """Removes the record's file in a step, and waits until its loss was noticed."""

    def __init__(self, folder, caplog):
        self.folder, self.caplog, self.step = folder, caplog, 0

    def on_train_batch_end(self, *_):
        self.step += 1
        if self.step == 5:
            deadline = time.monotonic() + 60
            [path] = wait_for(lambda: list(self.folder.rglob("rank0.jsonl")), deadline)
            path.unlink()
            wait_for(lambda: warnings(self.caplog), deadline)


def wait_for(found, deadline):
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def test_a_record_that_is_removed_is_missed_once(tmp_path, make_trainer, caplog):
    callback = ThroughputCallback(warmup_steps=1)
    make_trainer(callback, Removes(tmp_path, caplog)).fit(Classifier(), loader(80))
    [warning] = warnings(caplog)
    assert "record ends here (FileNotFoundError" in warning
    assert callback.summary()["throughput/steps_per_sec"] > 0


def test_where_no_folder_can_be_there_is_one_warning(make_trainer, caplog, monkeypatch):
    callback = ThroughputCallback(warmup_steps=1)
    trainer = make_trainer(callback, logger=False)
    monkeypatch.setattr(type(trainer), "default_root_dir", property(lambda _: "/dev/null/x"))
    trainer.fit(Classifier(), loader(16))
    [warning] = [each.getMessage() for each in caplog.records if "record" in each.getMessage()]
    assert warning.startswith("This run will have no record: ")
    assert callback.summary()["throughput/steps_per_sec"] > 0


def test_a_failure_of_its_own_is_logged_once_and_ends_the_record(tmp_path, make_trainer, caplog, monkeypatch):
    monkeypatch.setattr(run_record, "kept_counters", lambda *_, **__: 1 / 0)
    callback = ThroughputCallback(warmup_steps=1)
    make_trainer(callback).fit(Classifier(), loader(40))
    [warning] = [each.getMessage() for each in caplog.records if "RunRecord" in each.getMessage()]
    assert warning == "RunRecorder failed and is switched off: ZeroDivisionError: division by zero"
    assert len(logged(tmp_path)) == 9
    assert callback.analysis() is not None
    assert the_record(tmp_path).lines == ()


# -- its size ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("every_entry")
def test_a_hundred_thousand_steps_take_less_than_5_mb_and_their_totals_are_exact(tmp_path, make_trainer):
    trainer = make_trainer(logger=False)
    trainer.fit(Classifier(), loader(16))  # the settings are a real Trainer's
    training = LightningTraining(trainer, trainer.lightning_module, ())
    timer = StepTimer(CUDATimerCollection((), device="cpu"), warmup_steps=10, bucket=bucket)
    fit = SimpleNamespace(
        training=training,
        step_timer=timer,
        ledger=timer.ledger,
        readings=HostReadings(timer),
        log=None,
        trace=lambda: None,
        recompilations=lambda: (),
        memory=None,
        fit_steps=None,
    )
    record = RunRecorder(
        training,
        RecordFolder(tmp_path / "forge_record", "a1"),
        timer,
        report=partial(run_report, fit),
        metrics=lambda: timer.totals.steady().metrics(),
    )
    timer.start()
    for step in range(100_000):
        for region in ("data", "forward", "backward", "optimizer"):
            timer.regions.enter(region)
            timer.regions.exit(region)
        timer.end_step(StepWork(samples=4, optimizer_steps=1))
        if step % 10 == 9:
            timer.deliver()
            rates = timer.totals.take()
            if rates.steps:
                record.log_entry(rates.metrics(), step)
        if time.perf_counter() >= record.state_due_s:
            record.state()
    timer.finish(wait=True)
    record.loop_ended()
    record.close(run_report(fit))

    paths = list((tmp_path / "forge_record").iterdir())
    assert 1e6 < sum(path.stat().st_size for path in paths) < 5e6
    assert len(paths) == 4
    read = the_record(tmp_path)
    steady = read.state.report.run.timing
    assert (read.end.step, steady.steps, steady.samples) == (100_000, 99_990, 4 * 99_990)
    assert sum(read.state.counters.steps_us.values()) == 99_990
    for path in paths:
        begin, state, *_ = map(json.loads, path.read_bytes().splitlines())
        assert begin["line"] == "begin"
        assert state["line"] == ("state" if begin["segment"] else "interval")


def begin_of(rank=0, **fields):
    return Begin(run="a1", rank=rank, world_size=2, at=0.0, versions={}, host="", device="cpu", settings={}, **fields)


def test_segments_are_numbered_and_the_oldest_is_removed(tmp_path):
    files = Segments(tmp_path / "forge_record", begin_of(1), segment_bytes=300, segments=3)
    for step in range(40):
        files.append(EventLine(at=0.0, step=step, kind="epoch"))
    files.close()
    names = sorted(path.name for path in (tmp_path / "forge_record").iterdir())
    newest = files.begun - 1
    assert newest > 10
    assert names == sorted(["rank1.jsonl", f"rank1.{newest}.jsonl", f"rank1.{newest - 1}.jsonl"])
    record = read_rank(tmp_path / "forge_record" / "rank1.jsonl")
    steps = [event.step for event in record.events]
    assert steps == list(range(steps[0], 40))
    assert record.begin.segment == newest - 2


def test_a_rank_that_was_killed_while_it_rotated_is_read(tmp_path):
    files = Segments(tmp_path / "forge_record", begin_of(), segment_bytes=300)
    for step in range(10):
        files.append(EventLine(at=0.0, step=step, kind="epoch"))
    files.close()
    [*_, newest] = sorted((tmp_path / "forge_record").glob("rank0.*.jsonl"))
    (tmp_path / "forge_record" / "rank0.jsonl").unlink()
    [record] = read_run(tmp_path / "forge_record").ranks
    assert record.lines
    assert newest.exists()


def test_a_file_that_is_there_already_is_not_written_to(tmp_path, caplog):
    folder = tmp_path / "forge_record"
    folder.mkdir()
    (folder / "rank0.jsonl").write_text("mine")
    writer = RecordWriter(lambda: Segments(folder, begin_of()))
    assert writer.close(timeout_s=60)
    assert (folder / "rank0.jsonl").read_text() == "mine"
    assert not writer.write(EventLine(at=0.0, step=0, kind="epoch"))
    [warning] = warnings(caplog)
    assert "FileExistsError" in warning


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_lock_that_its_parents_thread_had(tmp_path):
    writer = RecordWriter(lambda: Segments(tmp_path / "forge_record", begin_of()))
    with writer._wake._cond:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            writer.close(timeout_s=0)
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert writer.close(timeout_s=60)


# -- where the run came from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            "--wandb-key k1 --token=t1 --HF_TOKEN t2 --lr 0.1 model.api_key=k2 -v",
            "--wandb-key --token --HF_TOKEN --lr -v",
        ),
        ("--pw secret --auth secret -p secret -psecret --credential secret", "--pw --auth -p --credential"),
        ("--password -dash --x 1 --password --dash --y 2", "--password --x --password --y"),
        ("--tokenizer bert --data https://me:secret@host/x s3://secret", "--tokenizer --data"),
        ("-1 -lr --2x --{secret} --a:secret - = --= -é --é", ""),
    ],
)
def test_of_a_command_line_the_names_are_kept(given, kept):
    assert command_line(["/home/me/src/train.py", *given.split(" ")]) == ("train.py", *kept.split())


def test_no_value_is_kept_however_it_is_quoted():
    given = [
        "--authorization",
        "Bearer secret",
        '--config={"api_key": "secret"}',
        '{"token": "secret"}',
        "--",
        "--secret",
    ]
    assert command_line(["-c", *given]) == ("-c", "--authorization", "--config")
    assert command_line([]) == ()


def test_no_environment_variable_is_in_a_record(tmp_path, make_trainer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-this-test")
    make_trainer(ThroughputCallback(warmup_steps=1)).fit(Classifier(), loader(16))
    assert b"s3cr3t" not in the_record(tmp_path).path.read_bytes()


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_the_one_that_git_tells(tmp_path):
    assert git_commit(tmp_path) == ""
    repository = tmp_path / "repository"
    (repository / "below").mkdir(parents=True)
    git(repository, "init", "--quiet")
    assert git_commit(repository) == "", "nothing is committed yet"
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "one")
    for change in (
        (),
        ("pack-refs", "--all"),
        ("commit", "--quiet", "--allow-empty", "-m", "two"),
        ("checkout", "--quiet", "--detach"),
    ):
        if change:
            git(repository, *change)
        assert git_commit(repository / "below") == git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "--quiet", "--allow-empty", "-m", "three")
    assert git_commit(tmp_path / "other") == git(tmp_path / "other", "rev-parse", "HEAD") != git_commit(repository)


PLANTED_MS = 50.0


class SlowAfterValidation(Classifier):
    """Its first step after a validation run has a forward unlike the others."""

    validated = False

    def on_validation_end(self):
        self.validated = True

    def training_step(self, batch):
        if self.validated:
            time.sleep(PLANTED_MS / 1e3)
        self.validated = False
        return super().training_step(batch)


@pytest.mark.slow
def test_steps_that_had_to_be_split_stand_for_no_others(tmp_path, make_trainer):
    ours = ThroughputCallback(warmup_steps=2, overhead=1e-4, log_every_n_steps=1)
    trainer = make_trainer(ours, val_check_interval=10, max_epochs=1)
    trainer.fit(SlowAfterValidation(), loader(400, slow="data"), loader(8))
    record = the_record(tmp_path)
    chosen = [block.groups["changing"] for block in record.state.blocks if "changing" in block.groups]
    assert any(group.split for group in chosen), "some steps are split"
    assert max(group.regions.get("forward", [0.0])[0] for group in chosen) < PLANTED_MS


def test_an_interval_whose_regions_are_of_other_steps_has_none():
    usual, unlike = {"data": 9.0, "forward": 1.0}, {"data": 1.0, "forward": 50.0}
    totals = RunTotals(bucket=bucket)
    for step in range(10):
        times = StepTimes(step, unlike if step == 5 else usual, {})
        totals.add(times if step == 5 else times.whole(), StepWork(8.0, None, 1), None, StepTiming(chosen=False))
    totals.take()
    counters = totals.take_interval()
    assert not is_split(counters)
    assert step_total_ms(counters) == pytest.approx(9 * 10 + 51)
