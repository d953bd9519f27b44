"""What is refused before the first batch, where the callbacks skip recording, and what a failure of theirs does."""

import gzip
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.errors import ConfigurationError
from tests.models import Classifier, Samples, loader
from tests.outcomes import logged, recorded_steps, script, tables, the_trace, traces, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


# -- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_step": 5, "end_step": 5}, "end_step must be greater"),
        ({"start_step": 5, "end_step": 4}, "end_step must be greater"),
        ({"start_step": -1}, "start_step must not be negative"),
        ({"start_step": 0, "end_step": -3}, "end_step must not be negative"),
        ({"start_step": 1.0}, "start_step must be an integer"),
        ({"start_step": 5, "end_step": "8"}, "end_step must be an integer"),
        ({"start_step": True}, "start_step must be an integer"),
        ({"end_step": 8}, "needs a start_step"),
        ({"regions": ["data", "attention"]}, "attention"),
        ({"activities": ["gpu"]}, "gpu"),
        ({"activities": []}, "activities must name some"),
        ({"activities": "cpu"}, "activities"),
        ({"ranks": [-1]}, "ranks must be"),
        ({"ranks": "first"}, "ranks must be"),
        ({"trace_dir": ""}, "trace_dir must not be empty"),
        ({"trace_dir": 5}, "trace_dir must be a path, got 5"),
        ({"trace_dir": ["a"]}, "trace_dir must be a path"),
        ({"trace_dir": b"x"}, "trace_dir must be a path"),
        ({"regions": 5}, "regions must be a list of names, got 5"),
        ({"regions": "data"}, "regions must be a list of names"),
        ({"activities": 5}, "activities must be a list of names or None, got 5"),
        ({"activities": b"cpu"}, "activities must be a list"),
        ({"ranks": 0}, "ranks must be"),
        ({"ranks": 1.5}, "ranks must be"),
    ],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ForgeProfilerCallback(**arguments)


@pytest.mark.parametrize("name", ["warmup_steps", "log_every_n_steps"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_step_numbers_that_cannot_work_are_refused_at_once(name, value):
    with pytest.raises(ConfigurationError, match=name):
        ThroughputCallback(**{name: value})


def test_no_number_of_warm_up_steps_is_refused():
    with pytest.raises(ConfigurationError, match="warmup_steps must be an integer"):
        ThroughputCallback(warmup_steps=None)
    with pytest.raises(ConfigurationError, match="log_every_n_steps must be an integer"):
        ThroughputCallback(log_every_n_steps=False)


@pytest.mark.parametrize(
    "arguments",
    [{"regions": 5}, {"regions": "data"}, {"activities": 5}, {"ranks": 5}, {"trace_dir": 5}, {"memory_snapshot": "x"}],
    ids=str,
)
def test_a_disabled_callback_checks_no_types_either(arguments):
    assert ForgeProfilerCallback(**arguments, enabled=False).trace_report() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_activities_that_this_machine_cannot_record_are_refused_before_the_first_batch(make_trainer, tmp_path):
    model = Classifier()
    with pytest.raises(ConfigurationError, match=r"activities=\['cuda'\]: on this machine PyTorch can record cpu"):
        make_trainer(ForgeProfilerCallback(activities=["cuda"])).fit(model, loader())
    assert model.seen == 0
    assert not list(tmp_path.rglob("*steps*"))


def test_a_disabled_callback_takes_everything_and_does_nothing(tmp_path, make_trainer, capsys):
    callback = ForgeProfilerCallback(8, 5, trace_dir="", regions=["none"], enabled=False)
    make_trainer(callback).fit(Classifier(), loader())
    assert callback.trace_report() is None
    assert not list(tmp_path.rglob("*trace*"))
    assert tables(capsys.readouterr().out) == 0


def test_a_disabled_one_is_no_second_one(tmp_path, make_trainer):
    off = ForgeProfilerCallback(enabled=False)
    make_trainer(off, ForgeProfilerCallback(1, 2), ThroughputCallback()).fit(Classifier(), loader())
    assert recorded_steps(the_trace(tmp_path)) == [1]


class OfTheUsers(ForgeProfilerCallback):
    pass


@pytest.mark.parametrize("order", [1, -1])
def test_a_subclass_beside_its_base_is_a_second_one_too(make_trainer, order):
    model = Classifier()
    with pytest.raises(ConfigurationError, match="pass one"):
        make_trainer(*[ForgeProfilerCallback(), OfTheUsers()][::order]).fit(model, loader())
    assert model.seen == 0


@pytest.mark.parametrize("kind", [ForgeProfilerCallback, ThroughputCallback])
def test_two_callbacks_of_a_kind_are_refused_before_the_first_batch(make_trainer, kind):
    model = Classifier()
    with pytest.raises(ConfigurationError, match=kind.__name__):
        make_trainer(kind(), kind()).fit(model, loader())
    assert model.seen == 0


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_trace_dir_that_is_a_file_is_refused_before_the_first_batch(tmp_path, make_trainer, below):
    (tmp_path / "file").touch()
    model = Classifier()
    callback = ForgeProfilerCallback(trace_dir=tmp_path / "file" / below)
    with pytest.raises(ConfigurationError, match="is a file"):
        make_trainer(ThroughputCallback(), callback).fit(model, loader())
    assert model.seen == 0


@pytest.mark.linux
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a folder that even root cannot write to: /proc")
def test_a_trace_dir_that_cannot_be_written_is_refused_before_the_first_batch(make_trainer):
    model = Classifier()
    with pytest.raises(ConfigurationError, match="not writable"):
        make_trainer(ForgeProfilerCallback(trace_dir="/proc/traces")).fit(model, loader())
    assert model.seen == 0


# -- skips recording---------------------------------------------------------------------------------------------


def stood_aside(callback, caplog, capsys, tmp_path):
    report = callback.trace_report()
    warnings = warnings_of(caplog)
    assert report.status == "skipped"
    assert len(warnings) == 1
    assert report.message in warnings[0]
    assert f"no trace    skipped: {report.message}" in capsys.readouterr().out
    assert traces(tmp_path) == []
    return report.message


def test_it_stands_aside_for_lightnings_own_pytorch_profiler(tmp_path, make_trainer, caplog, capsys):
    callback = ForgeProfilerCallback(1, 3)
    trainer = make_trainer(callback, ThroughputCallback(warmup_steps=1), profiler="pytorch")
    trainer.fit(Classifier(), loader())
    assert 'profiler="pytorch"' in stood_aside(callback, caplog, capsys, tmp_path)
    assert len(logged(tmp_path)) > 0, "times are logged all the same"


def test_it_stands_aside_for_another_torch_profiler_of_the_process(tmp_path, make_trainer, caplog, capsys):
    callback = ForgeProfilerCallback(1, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        make_trainer(callback).fit(Classifier(), loader())
    assert "another torch profiler" in stood_aside(callback, caplog, capsys, tmp_path)
    assert any(event.key == "aten::linear" for event in other.key_averages()), "the other one has recorded"


# theirs waits in step 0, warms up in steps 1 to 3 and records steps 4 and 5; theirs and ours would meet
@pytest.mark.slow
@pytest.mark.parametrize("window", [(1, 2), (2, 4), (3, 9), (4, 6)], ids=str)
def test_it_stands_aside_for_a_profiler_that_has_a_schedule_and_records_later(tmp_path, window):
    done = script("two_profilers.py", *window, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "theirs recorded 4 linear layers, ours: skipped" in done.stdout


def test_a_trial_run_records_nothing(tmp_path, make_trainer, caplog, capsys):
    callback = ForgeProfilerCallback(0, 1)
    make_trainer(callback, ThroughputCallback(), fast_dev_run=2).fit(Classifier(), loader(), loader())
    assert "fast_dev_run" in stood_aside(callback, caplog, capsys, tmp_path)


# -- opens no window that it cannot close ------------------------------------------------------------------------


LOOPS = {"validate": "/validation/", "test": "/test/", "predict": "/predict/"}


@pytest.mark.parametrize("entry", LOOPS)
def test_evaluation_alone_is_left_alone(tmp_path, make_trainer, capsys, entry):
    callback, throughput = ForgeProfilerCallback(0, 1), ThroughputCallback(warmup_steps=0)
    trainer = make_trainer(callback, throughput)
    getattr(trainer, entry)(Classifier(), loader())
    assert callback.trace_report() is None
    assert all(LOOPS[entry] in name for name in throughput.summary()), "its own rates alone"
    assert traces(tmp_path) == []
    assert tables(capsys.readouterr().out) == 0


@pytest.mark.parametrize("entry", LOOPS)
def test_evaluation_after_a_fit_changes_nothing_of_it(tmp_path, make_trainer, capsys, entry):
    callback, throughput = ForgeProfilerCallback(0, 1), ThroughputCallback(warmup_steps=0)
    trainer, model = make_trainer(callback, throughput), Classifier()
    trainer.fit(model, loader())
    report, summary = callback.trace_report(), throughput.summary()
    getattr(trainer, entry)(model, loader())
    of_fit = {name: value for name, value in throughput.summary().items() if LOOPS[entry] not in name}
    assert (callback.trace_report(), of_fit) == (report, summary)
    assert len(traces(tmp_path)) == 1
    assert tables(capsys.readouterr().out) == 1


def test_sanity_checking_is_no_step(tmp_path, make_trainer):
    trainer = make_trainer(ForgeProfilerCallback(0, 2), num_sanity_val_steps=2)
    trainer.fit(Classifier(), loader(), loader())
    assert recorded_steps(the_trace(tmp_path)) == [0, 1]


class Tunable(Classifier):
    """Has what the tuners change."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Samples(64), self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lr_find", "scale_batch_size"])
def test_a_tuner_before_the_fit_leaves_the_window_to_the_fit(tmp_path, make_trainer, capsys, tune):
    callback = ForgeProfilerCallback(1, 3)
    trainer, model = make_trainer(callback, ThroughputCallback()), Tunable()
    options = {"lr_find": {"num_training": 8}, "scale_batch_size": {"max_trials": 2, "steps_per_trial": 2}}[tune]
    getattr(Tuner(trainer), tune)(model, **options)
    assert traces(tmp_path) == []
    assert tables(capsys.readouterr().out) == 0
    trainer.fit(model)
    assert recorded_steps(the_trace(tmp_path)) == [1, 2]
    assert tables(capsys.readouterr().out) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "finder",
    [LearningRateFinder(num_training_steps=8), BatchSizeFinder(steps_per_trial=2, max_trials=2)],
    ids=lambda finder: type(finder).__name__,
)
@pytest.mark.parametrize("first", [True, False])
def test_a_tuner_within_the_fit_leaves_the_window_to_the_fit(tmp_path, make_trainer, capsys, finder, first):
    class Count(L.Callback):  # the tuners put callbacks aside while they try
        steps = 0

        def on_train_batch_end(self, *_):
            self.steps += 1

    ours = [count := Count(), ForgeProfilerCallback(1, 3), ThroughputCallback(warmup_steps=0)]
    make_trainer(*([finder, *ours] if first else [*ours, finder])).fit(Tunable())
    assert recorded_steps(the_trace(tmp_path)) == [1, 2]
    assert f"of {count.steps} steps" in " ".join(capsys.readouterr().out.split())


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run with room enough: the weights it prints, and the size of its trace before it is compressed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = script("full_disk.py", folder, 0, cwd=folder)
    assert done.returncode == 0, done.stderr
    [path] = traces(folder)
    [weights] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    return weights, len(gzip.decompress(path.read_bytes()))


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_full_disk_costs_the_trace_and_nothing_else(tmp_path, undisturbed):
    weights, size = undisturbed
    done = script("full_disk.py", tmp_path / "traces", size // 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights in done.stdout
    assert "no trace    failed: " in done.stdout
    assert "disk full" in done.stdout
    assert files(tmp_path) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_while_compressing_costs_the_trace_and_nothing_else(tmp_path, undisturbed, small_disk):
    weights, size = undisturbed
    disk = small_disk(size * 104 // 100)  # room for the raw trace, but not for its compressed copies as well
    done = script("full_disk.py", disk / "traces", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights in done.stdout
    assert "no trace    failed: " in done.stdout
    assert "No space left" in done.stdout
    assert files(disk) == []
