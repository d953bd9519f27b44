"""The recorded window: which steps, where it lies, what is in it."""

import gzip
import json
import re
from itertools import pairwise

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.profiler.config import StepWindow
from tests.models import Classifier, Fails, every_step, loader
from tests.outcomes import (
    REPORTS,
    read_trace,
    recorded_steps,
    spans,
    summary_of,
    tables,
    the_trace,
    traces,
    wait_for_processes_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def inside_a_step(trace, name):
    """Whether every span `name` lies inside one ProfilerStep span."""
    events = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    return all(
        any(s["ts"] <= e["ts"] and e["ts"] + e["dur"] <= s["ts"] + s["dur"] for s in steps)
        for e in events
        if e["name"] == name
    )


def test_the_default_window_is_six_steps_under_the_loggers_folder(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback()
    trainer = make_trainer(callback, max_steps=12, max_epochs=-1)
    trainer.fit(Classifier(), loader(64))
    [path] = traces(tmp_path)
    assert path.parents[1] == tmp_path / "csv" / "version_0" / "profiler_traces"
    with gzip.open(path) as file:
        text = file.read().decode()
    trace = json.loads(text)
    steps = [4, 5, 6, 7, 8, 9]  # from a third of the run on
    assert recorded_steps(trace) == steps
    assert re.search(r'"distributedInfo": \{[^}]*"rank": 0,', text)
    expected = {"rank": 0, "world_size": 1, "start_step": 4, "end_step": 10, "recorded_steps": steps}
    assert trace["forge_profiling"].items() >= expected.items()
    assert trace["forge_profiling"]["loader"]["batch_size"] == 4
    report = callback.trace_report()
    assert (report.status, report.path, report.steps) == ("written", path, tuple(steps))
    assert report.plugin_path == path.parent / "tensorboard" / "rank0.pt.trace.json.gz"
    assert recorded_steps(read_trace(report.plugin_path), None) == steps
    files = {p.name for p in path.parent.rglob("*") if p.is_file()}
    assert files == {report.plugin_path.name, path.name, *REPORTS}
    assert (report.summary_path, report.report_path) == (path.parent / "summary.json", path.parent / "report.html")
    out = capsys.readouterr().out
    assert tables(out) == 1
    assert f"more        forge-profiling view {tmp_path / 'csv' / 'version_0'}\n" in out


@pytest.mark.parametrize(
    ("batches", "options", "workers", "steps"),
    [
        (200, {"max_epochs": 1}, 0, range(10, 16)),  # after the warm-up
        # and after twice the 2 * 4 batches that the workers hold; whole rounds of the two count
        pytest.param(200, {"max_epochs": 1}, 2, range(26, 33), marks=pytest.mark.slow),
        (60, {"max_epochs": 1}, 2, range(20, 27)),  # by a third of the run
        pytest.param(30, {"max_epochs": 9}, 2, range(23, 30), marks=pytest.mark.slow),  # before the end of an epoch
        (60, {"max_epochs": 9, "max_steps": 4, "accumulate_grad_batches": 9}, 0, range(10, 16)),  # batches are counted
        (3, {"max_epochs": 1}, 0, range(2, 3)),
        (1, {"max_epochs": 1}, 0, range(0)),
    ],
)
def test_the_default_window_comes_when_the_run_is_steady(make_trainer, batches, options, workers, steps):
    more = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
    data = loader(4 * batches, **more)
    callback = ForgeProfilerCallback(analyze=False, tensorboard=False)
    make_trainer(callback, **options).fit(Classifier(), data)
    assert callback.trace_report().steps == tuple(steps)


def test_the_timelines_first_lane_has_forward_and_backward_beside_the_optimizer(tmp_path, make_trainer):
    callback = ForgeProfilerCallback(5, 8, analyze=False)
    make_trainer(callback, max_epochs=1).fit(Classifier(), loader(64))
    [timeline] = analyze(callback.trace_report().path).timelines
    lane = timeline.lanes[0]
    assert lane.name == "host: regions"
    names = [timeline.names[index] for index in lane.name_index]
    assert {"forge.forward", "forge.backward", "forge.optimizer"} <= {*names}
    spans = sorted(zip(lane.start_us, lane.duration_us, names, strict=True))
    for (start, length, name), (following, _, other) in pairwise(spans):
        assert start + length <= following + 0.01, (name, other)


def test_a_start_alone_records_six_steps():
    assert ForgeProfilerCallback(20).settings.window == StepWindow(20, 26)


def test_the_trace_holds_operators_the_built_in_regions_and_the_users_own(tmp_path, make_trainer):
    make_trainer(ForgeProfilerCallback(2, 4)).fit(Classifier(), loader())
    trace = the_trace(tmp_path)
    assert "aten::linear" in spans(trace, "cpu_op")
    found = spans(trace)
    built_in = ("data", "transfer", "forward", "backward", "optimizer")
    assert {name: found.count(f"forge.{name}") for name in built_in} == dict.fromkeys(built_in, 2)
    assert found.count("attention") == 2
    assert inside_a_step(trace, "attention")
    assert inside_a_step(trace, "forge.forward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "steps"),
    [((0, 1), [0]), ((0, 3), [0, 1, 2]), ((1, 2), [1]), ((7, 8), [7]), ((3, 30), list(range(3, 8)))],
)
def test_exactly_the_steps_of_the_window_that_there_were_are_recorded(tmp_path, make_trainer, window, steps):
    callback = ForgeProfilerCallback(*window)
    make_trainer(callback).fit(Classifier(), loader(32))  # 8 steps
    trace = the_trace(tmp_path)
    assert recorded_steps(trace) == steps
    assert callback.trace_report().steps == tuple(steps)
    assert trace["forge_profiling"]["recorded_steps"] == steps


@pytest.mark.slow
def test_a_window_may_cross_the_end_of_an_epoch_with_validation_and_checkpoint(tmp_path, make_trainer):
    saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=1)
    trainer = make_trainer(ForgeProfilerCallback(3, 6), saver, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Classifier(), loader(16), loader(8))  # 4 steps an epoch
    trace = the_trace(tmp_path)
    assert recorded_steps(trace) == [3, 4, 5]
    assert spans(trace).count("forge.validation") == 1
    assert spans(trace).count("forge.checkpoint") == 1
    assert spans(trace).count("forge.forward") == 3


def test_a_window_may_cross_a_validation_run_in_mid_epoch(tmp_path, make_trainer):
    trainer = make_trainer(ForgeProfilerCallback(3, 6), val_check_interval=2)
    trainer.fit(Classifier(), loader(32), loader(8))
    trace = the_trace(tmp_path)
    assert recorded_steps(trace) == [3, 4, 5]
    assert spans(trace).count("forge.validation") == 1  # after step 3; the next one is after step 5
    attention = spans(trace).count("attention")
    assert attention == 3, "a region of the user's is not a part of the step while validation runs"


def test_without_a_logger_it_lies_under_the_default_root_dir(tmp_path, make_trainer):
    make_trainer(ForgeProfilerCallback(1, 2), logger=False).fit(Classifier(), loader(16))
    assert traces(tmp_path)[0].parents[1] == tmp_path / "profiler_traces"


def test_with_tensorboard_it_lies_where_tensorboard_looks(tmp_path, make_trainer):
    logger = TensorBoardLogger(tmp_path, name="tb")
    make_trainer(ForgeProfilerCallback(1, 2), logger=logger).fit(Classifier(), loader(16))
    assert traces(tmp_path)[0].parents[1] == tmp_path / "tb" / "version_0" / "profiler_traces"


@pytest.mark.parametrize("board_first", [True, False])
def test_of_several_loggers_tensorboards_folder_is_taken_and_named(tmp_path, make_trainer, board_first):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    if board_first:
        loggers.reverse()
    make_trainer(ForgeProfilerCallback(1, 2), ThroughputCallback(), logger=loggers).fit(Classifier(), loader(16))
    folder = tmp_path / "tb" / "version_0"
    assert traces(tmp_path)[0].parents[1] == folder / "profiler_traces"
    assert f"tensorboard --logdir {folder} " in summary_of(tmp_path)


def test_without_tensorboard_the_first_loggers_folder_is_taken(tmp_path, make_trainer):
    loggers = [CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="two")]
    make_trainer(ForgeProfilerCallback(1, 2), ThroughputCallback(), logger=loggers).fit(Classifier(), loader(16))
    assert traces(tmp_path)[0].parents[1] == tmp_path / "one" / "version_0" / "profiler_traces"
    assert f"tensorboard --logdir {tmp_path / 'one' / 'version_0'} " in summary_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_trace_dir_is_taken_as_it_is(tmp_path, make_trainer, kind):
    callback = ForgeProfilerCallback(1, 2, trace_dir=kind(tmp_path / "my" / "traces"))
    make_trainer(callback).fit(Classifier(), loader(16))
    assert traces(tmp_path)[0].parents[1] == tmp_path / "my" / "traces"


def test_two_runs_into_one_folder_both_keep_their_trace(tmp_path, make_trainer):
    for _ in range(2):
        callback = ForgeProfilerCallback(1, 2, trace_dir=tmp_path / "traces")
        make_trainer(callback).fit(Classifier(), loader(16))
    first, second = traces(tmp_path)
    assert first.parent != second.parent
    assert recorded_steps(read_trace(first)) == recorded_steps(read_trace(second)) == [1]


def test_ranks_that_name_only_others_record_nothing_and_time_all(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback(1, 2, ranks=[1])
    make_trainer(callback).fit(Classifier(), loader(16))
    assert traces(tmp_path) == []
    assert callback.trace_report() is None
    assert tables(capsys.readouterr().out) == 1


def test_ranks_that_name_this_one_record_it(tmp_path, make_trainer):
    make_trainer(ForgeProfilerCallback(1, 2, ranks=[0])).fit(Classifier(), loader(16))
    assert recorded_steps(the_trace(tmp_path)) == [1]


def test_without_the_plugins_copy_there_is_no_tensorboard_folder(tmp_path, make_trainer, capsys):
    make_trainer(ForgeProfilerCallback(1, 2, tensorboard=False)).fit(Classifier(), loader(16))
    [path] = traces(tmp_path)
    assert {p.name for p in path.parent.iterdir()} == {path.name, *REPORTS}
    assert "tensorboard --logdir" not in capsys.readouterr().out


@pytest.mark.slow
def test_without_the_analysis_there_are_no_reports_and_the_runs_verdict_stays(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback(1, 2, analyze=False)
    make_trainer(callback, every_step(warmup_steps=2)).fit(Classifier(), loader(200, slow="data"))
    assert not REPORTS & {p.name for p in tmp_path.rglob("*")}
    report = callback.trace_report()
    assert (report.status, report.summary_path, report.report_path) == ("written", None, None)
    assert "verdict     input-bound" in capsys.readouterr().out


@pytest.mark.slow
def test_the_reports_tell_of_the_trace_and_of_the_whole_run(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback(4, 7)
    make_trainer(callback, every_step(warmup_steps=2)).fit(Classifier(), loader(200, slow="data"))
    analysis = callback.analysis()
    assert analysis.verdict == "input-bound"
    assert (analysis.ranks[0].steps, analysis.run.timing.steps) == (2, 44)
    folder = callback.trace_report().path.parent
    written = json.loads((folder / "summary.json").read_text())
    assert (written["verdict"], written["run"]["timing"]["steps"]) == ("input-bound", 44)
    for name in ("summary.md", "report.html"):
        assert "training waits" in (folder / name).read_text() or "data loader" in (folder / name).read_text()
    assert "verdict     input-bound: " in capsys.readouterr().out


def test_a_window_that_is_never_reached_is_reported_with_the_number_of_steps(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback(50, 53)
    make_trainer(callback).fit(Classifier(), loader(20))
    assert callback.trace_report().status == "not reached"
    assert "no trace    not reached: the run ended after 5 steps, before steps 50-52" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*trace*"))


@pytest.mark.parametrize("steps", [4, 5])
def test_a_run_that_ends_right_before_or_in_the_windows_warm_up_step_says_so(tmp_path, make_trainer, capsys, steps):
    callback = ForgeProfilerCallback(5, 8)  # step 4 is its warm-up
    make_trainer(callback).fit(Classifier(), loader(4 * steps))
    assert callback.trace_report().status == "not reached"
    assert "no trace" in capsys.readouterr().out
    assert traces(tmp_path) == []


def test_early_stopping_before_the_window(make_trainer, capsys):
    stopper = EarlyStopping("val_loss", patience=1, min_delta=1e9)  # nothing is ever good enough
    trainer = make_trainer(ForgeProfilerCallback(20, 23), stopper, max_epochs=20)
    trainer.fit(Classifier(), loader(16), loader(8))
    assert trainer.current_epoch < 4
    assert f"the run ended after {trainer.global_step} steps, before steps 20-22" in capsys.readouterr().out


class OddError(Exception):
    """One that nobody else raises."""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "steps"), [(0, ()), (4, ()), (5, (5,)), (6, (5, 6)), (8, (5, 6, 7)), (11, (5, 6, 7))])
def test_an_exception_comes_out_as_it_is_and_the_trace_holds_what_there_was(tmp_path, make_trainer, capsys, at, steps):
    error = OddError("mine")
    forge, throughput = ForgeProfilerCallback(5, 8), every_step()
    trainer = make_trainer(forge, throughput)
    with pytest.raises(OddError) as caught:
        trainer.fit(Fails(at, error), loader(64))
    assert caught.value is error
    assert error.__cause__ is None
    assert forge.trace_report().status == ("written" if steps else "not reached")
    assert forge.trace_report().steps == steps
    wait_for_processes_of(tmp_path)  # on a busy machine it may take longer than the end of a failed fit waits
    assert recorded_steps(the_trace(tmp_path)) == list(steps) if steps else traces(tmp_path) == []
    assert tables(capsys.readouterr().out) == 1


def test_an_exception_of_another_callback_before_training_prints_no_table(make_trainer, capsys):
    class Breaks(ModelCheckpoint):
        def on_fit_start(self, trainer, pl_module):
            raise OddError

    trainer = make_trainer(ForgeProfilerCallback(), Breaks(), enable_checkpointing=True)
    with pytest.raises(OddError):
        trainer.fit(Classifier(), loader())
    assert tables(capsys.readouterr().out) == 0
