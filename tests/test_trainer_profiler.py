"""`Trainer(profiler=ForgeProfiler())`: what the callbacks do, where users of Lightning's profilers look for it."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner

from lightning_forge_profiling import ForgeProfiler, ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.errors import ConfigurationError
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture
def fitted(make_trainer):
    def fit(profiler, *callbacks, model=None, samples=160):
        trainer = make_trainer(*callbacks, profiler=profiler, logger=False)
        trainer.fit(model or Classifier(), loader(samples, slow="data"))
        return trainer

    return fit


def test_it_finds_prints_and_records_what_the_callbacks_do(fitted, tmp_path, capsys):
    profiler = ForgeProfiler(start_step=20, end_step=23, trace_dir=tmp_path / "traces")
    trainer = fitted(profiler)
    analysis = profiler.analysis()
    assert {"input-bound", "slow-call"} & {finding.code for finding in analysis.findings}
    assert {"data", "transfer", "forward", "backward", "optimizer", "other"} <= {*analysis.run.timing.regions}
    assert profiler.callbacks[0].trace_report().steps == (20, 21, 22)
    assert trainer.profiler is profiler
    printed = capsys.readouterr().out
    assert printed.count("Where a step of Classifier goes") == 1
    assert "input-bound" in profiler.summary()
    assert "Where a step" not in ForgeProfiler().summary()


def test_callbacks_of_the_user_come_first(fitted, tmp_path):
    own = ThroughputCallback(warmup_steps=3, record=False)
    profiler = ForgeProfiler(start_step=20, end_step=23, trace_dir=tmp_path / "traces")
    trainer = fitted(profiler, own)
    ours = [
        callback for callback in trainer.callbacks if isinstance(callback, ForgeProfilerCallback | ThroughputCallback)
    ]
    assert ours == [profiler.callbacks[0], own]
    assert own.analysis().run.timing.steps > 30


def test_those_of_forge_profiling_run_give_way(fitted, tmp_path):
    injected = [ForgeProfilerCallback(), ThroughputCallback()]
    for callback in injected:
        callback.settings = callback.settings.under_run()
    profiler = ForgeProfiler(start_step=20, end_step=23, trace_dir=tmp_path / "traces")
    fitted(profiler, *injected)
    assert profiler.callbacks[0].trace_report().steps == (20, 21, 22)
    assert profiler.analysis() is not None
    assert "Where a step" in repr(profiler)
    assert "<table" in profiler._repr_html_()


def test_the_fits_of_the_tuner_are_no_fits_of_the_user(make_trainer, tmp_path, capsys):
    class WithRate(Classifier):
        lr = 1e-3

    profiler = ForgeProfiler(start_step=20, end_step=23, trace_dir=tmp_path / "traces")
    trainer = make_trainer(profiler=profiler, logger=False)
    Tuner(trainer).lr_find(WithRate(), loader(160), num_training=12, early_stop_threshold=None)
    assert "Where a step" not in capsys.readouterr().out
    assert profiler.analysis() is None


def test_a_second_fit_adds_no_second_pair(make_trainer, tmp_path):
    profiler = ForgeProfiler(start_step=5, end_step=8, trace_dir=tmp_path / "traces")
    trainer = make_trainer(profiler=profiler, logger=False)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Classifier(), loader(48))
    assert [type(callback) for callback in trainer.callbacks].count(ForgeProfilerCallback) == 1
    assert len([*(tmp_path / "traces").iterdir()]) == 2


def test_it_may_be_switched_off_and_validates_nothing(fitted, capsys):
    trainer = fitted(ForgeProfiler(enabled=False))
    trainer.validate(Classifier(), loader(4), verbose=False)
    assert trainer.profiler.analysis() is None
    assert trainer.profiler.summary() == ""
    assert "Where a step" not in capsys.readouterr().out


def test_training_is_the_same(fitted, tmp_path):
    def weights(profiler):
        L.seed_everything(1, verbose=False)
        model = Classifier()
        fitted(profiler, model=model, samples=48)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(None), weights(ForgeProfiler(start_step=5, end_step=8, trace_dir=tmp_path / "traces")))


def test_wrong_arguments_are_refused_where_it_is_built():
    with pytest.raises(ConfigurationError, match="end_step must be greater than start_step"):
        ForgeProfiler(8, 8)
    with pytest.raises(TypeError, match="windows"):
        ForgeProfiler(windows=3)


def test_it_is_one_of_lightnings_profilers_and_can_be_copied():
    assert isinstance(ForgeProfiler(), Profiler)
    assert isinstance(pickle.loads(pickle.dumps(ForgeProfiler(5, 8))), ForgeProfiler)  # noqa: S301  (our own)


@pytest.mark.slow
def test_the_command_line_of_lightning_takes_it(tmp_path):
    options = ("--trainer.profiler=lightning_forge_profiling.ForgeProfiler", "--trainer.profiler.start_step=5")
    fit = ("fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false")
    command = [sys.executable, "-m", "tests.scripts.cli", *fit, *options, f"--trainer.profiler.trace_dir={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Where a step of " in done.stdout
    assert [*tmp_path.rglob("summary.json")]
