"""Beside everything else that Lightning does: its profilers, several fits, resuming, the numbers it trains to."""

import random
import re

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from torch import nn

from lightning_forge_profiling import ForgeProfilerCallback, region
from tests import models
from tests.models import Classifier, Fails, every_step, loader
from tests.outcomes import logged, read_trace, recorded_steps, script, spans, summary_of, tables, the_trace, traces

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


OWN = ("ForgeProfilerCallback", "ThroughputCallback")


def both(start=2, end=4, **options):
    return ForgeProfilerCallback(start, end, **options), every_step(warmup_steps=1)


# -- the user's own profiler -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_the_users_profiler_gives_its_normal_report(tmp_path, make_trainer, kind):
    actions = {}
    for name, callbacks in (("with", both()), ("without", ())):
        profiler = kind(dirpath=tmp_path, filename=name)
        make_trainer(*callbacks, profiler=profiler).fit(Classifier(), loader(), loader(8))
        [report] = tmp_path.glob(f"*{name}.txt")
        found = set(re.findall(r"\[\w+\][\w.]+|run_training_batch", report.read_text()))
        actions[name] = {action for action in found if not any(own in action for own in OWN)}
    assert {"run_training_batch", "[_TrainingEpochLoop].train_dataloader_next"} <= actions["without"]
    assert actions["with"] == actions["without"]


def test_the_users_profiler_counts_every_action_as_often_as_without(make_trainer):
    counts = {}
    for name, callbacks in (("with", both()), ("without", ())):
        profiler = SimpleProfiler()
        make_trainer(*callbacks, profiler=profiler).fit(models.GAN(), loader(), loader(8))
        recorded = profiler.recorded_durations.items()
        counts[name] = {action: len(times) for action, times in recorded if not any(own in action for own in OWN)}
    assert counts["with"] == counts["without"]


@pytest.mark.slow
@pytest.mark.parametrize("profiler", [None, SimpleProfiler()], ids=["none", "simple"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_the_users_profiler_is_back_in_place_after_an_exception(make_trainer, profiler, at):
    trainer = make_trainer(*both(), profiler=profiler)
    own = trainer.profiler
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Fails(at, ValueError("mine")), loader())
    assert trainer.profiler is own


@pytest.mark.slow
def test_actions_of_the_users_module_reach_their_profiler(make_trainer):
    class Named(Classifier):
        def training_step(self, batch):
            with self.trainer.profiler.profile("my action"):
                return super().training_step(batch)

    profiler = SimpleProfiler()
    make_trainer(*both(), profiler=profiler).fit(Named(), loader())
    assert len(profiler.recorded_durations["my action"]) == 8
    without = make_trainer(*both())
    assert isinstance(without.profiler, PassThroughProfiler)
    without.fit(Named(), loader())


# -- several fits ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_fits_of_one_trainer_record_and_count_anew(tmp_path, make_trainer, capsys):
    forge, throughput = both()
    trainer, model = make_trainer(forge, throughput), Classifier()
    for fits in (1, 2, 3):
        trainer.fit_loop.max_epochs = fits
        trainer.fit(model, loader())
        assert forge.trace_report().status == "written"
        assert forge.trace_report().steps == (2, 3)
        out = capsys.readouterr().out
        assert tables(out) == 1
        assert "of 8 steps" in " ".join(out.split())
        assert len(traces(tmp_path)) == fits
    assert all(recorded_steps(read_trace(path)) == [2, 3] for path in traces(tmp_path))


@pytest.mark.slow
def test_one_callback_may_serve_two_trainers_one_after_the_other(tmp_path, make_trainer):
    forge, throughput = both()
    for steps in (8, 5):
        make_trainer(forge, throughput).fit(Classifier(), loader(4 * steps))
        assert forge.trace_report().status == "written"
    assert [recorded_steps(read_trace(path)) for path in traces(tmp_path)] == [[2, 3], [2, 3]]


def test_after_an_exception_the_same_callbacks_work_again(tmp_path, make_trainer):
    forge, throughput = both()
    with pytest.raises(ValueError, match="mine"):
        make_trainer(forge, throughput).fit(Fails(0, ValueError("mine")), loader())
    make_trainer(forge, throughput).fit(Classifier(), loader())
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    assert throughput.summary()["throughput/steps_per_sec"] > 0


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_the_callbacks_does_not_matter(tmp_path, make_trainer, capsys, reverse):
    callbacks = both()
    make_trainer(*(reversed(callbacks) if reverse else callbacks)).fit(Classifier(), loader())
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    assert tables(capsys.readouterr().out) == 1
    assert "beside it: 2 steps" in summary_of(tmp_path)
    assert len(logged(tmp_path)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("save", [{"every_n_epochs": 1}, {"every_n_train_steps": 3}], ids=["end of epoch", "mid-epoch"])
def test_a_resumed_fit_counts_its_own_steps_and_logs_on_at_lightnings(tmp_path, make_trainer, save):
    saver = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, save_last=True, **save)
    make_trainer(*both(trace_dir=tmp_path / "first"), saver, enable_checkpointing=True, logger=False).fit(
        Classifier(), loader()
    )
    forge, throughput = both(trace_dir=tmp_path / "second")
    trainer = make_trainer(forge, throughput, max_epochs=2)
    trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert recorded_steps(the_trace(tmp_path / "second")) == [2, 3]
    steps = {row["step"] for row in logged(tmp_path)}
    assert steps <= {row["step"] for row in logged(tmp_path, "loss")}
    assert min(steps) >= 6


@pytest.mark.slow
def test_checkpoints_of_runs_with_and_without_the_callbacks_are_exchangeable(tmp_path, make_trainer):
    for name, callbacks in (("with", both()), ("without", ())):
        trainer = make_trainer(*callbacks, logger=False)
        trainer.fit(Classifier(), loader())
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    for name, callbacks in (("with", ()), ("without", both())):
        trainer = make_trainer(*callbacks, max_epochs=2, logger=False)
        trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert trainer.global_step == 16


# -- the same numbers --------------------------------------------------------------------------------------------


class Compiled(Classifier):
    """Its parts are compiled as one graph, with a region inside."""

    backend = "eager"

    def __init__(self, slow=""):
        super().__init__(slow)
        self.whole = torch.compile(self.parts, fullgraph=True, backend=self.backend)

    def parts(self, x):
        with region("inside"):
            return self.decorated(self.inner(x).relu())

    @region("decorated")
    def decorated(self, x):
        return self.head(x)

    def forward(self, x):
        return self.whole(x)


class Dropout(Classifier):
    """Draws random numbers in every step."""

    def __init__(self, slow=""):
        super().__init__(slow)
        self.inner = nn.Sequential(self.inner, nn.Dropout(0.3))


def train(make_trainer, kind, *callbacks, **options):
    """The weights and the states of all generators of random numbers after a training run."""
    L.seed_everything(7)
    model = kind()
    trainer = make_trainer(*callbacks, max_epochs=2, logger=False, **options)
    trainer.fit(model, loader(shuffle=True), loader(8))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return model.state_dict(), states


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Dropout, models.GAN, models.LBFGS, models.ManualClosure, Compiled])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}], ids=["", "clip"])
def test_weights_and_random_states_are_the_same_bit_by_bit(make_trainer, kind, options):
    if options and kind in {models.GAN, models.ManualClosure}:
        options = {}
    plain, states = train(make_trainer, kind, **options)
    ours, our_states = train(make_trainer, kind, *both(2, 11, with_stack=True), **options)
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    assert torch.equal(states[0], our_states[0])
    assert states[1:] == our_states[1:]


def test_a_region_inside_a_compiled_graph_is_skipped_and_breaks_nothing(tmp_path, make_trainer):
    torch._dynamo.reset()
    make_trainer(*both()).fit(Compiled(), loader())
    assert not {"inside", "decorated"} & set(spans(the_trace(tmp_path)))
    assert not any({"time/inside_ms", "time/decorated_ms"} & row.keys() for row in logged(tmp_path))


@pytest.mark.slow
def test_a_module_compiled_as_a_whole_trains_and_is_recorded(tmp_path, make_trainer):
    class Unlogged(Classifier):  # self.log inside a compiled training_step is beyond torch.compile
        def training_step(self, batch):
            return self.loss(batch)

    torch._dynamo.reset()
    make_trainer(*both()).fit(torch.compile(Unlogged(), backend="eager"), loader())
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    assert logged(tmp_path)[-1]["time/forward_ms"] > 0


# -- ways to start -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after", "lightning-first"])
def test_pytorch_lightning_by_its_other_name(tmp_path, order):
    done = script("other_name.py", order, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tables(done.stdout) == 1
    assert recorded_steps(the_trace(tmp_path)) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_one_callback_alone_needs_no_list(tmp_path, order):
    done = script("other_name.py", order, "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [1, 2]


@pytest.mark.slow
def test_lightning_cli_takes_both_from_a_yaml_file(tmp_path):
    (tmp_path / "config.yaml").write_text(
        f"""
        trainer:
          accelerator: cpu
          max_epochs: 1
          default_root_dir: {tmp_path}
          enable_progress_bar: false
          callbacks:
            - class_path: lightning_forge_profiling.ForgeProfilerCallback
              init_args:
                start_step: 1
                end_step: 3
                regions: [forward, backward]
                ranks: [0]
            - class_path: lightning_forge_profiling.ThroughputCallback
              init_args:
                warmup_steps: 2
                log_every_n_steps: 2
        """
    )
    done = script("cli.py", "fit", "--config", tmp_path / "config.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [1, 2]
    assert tables(done.stdout) == 1
    [saved] = tmp_path.rglob("version_0/config.yaml")
    again = script("cli.py", "fit", "--config", saved, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(traces(tmp_path)) == 2


@pytest.mark.slow
def test_lightning_cli_refuses_a_bad_window_before_anything_starts(tmp_path):
    callback = '{"class_path": "lightning_forge_profiling.ForgeProfilerCallback", "init_args": {"end_step": 2}}'
    done = script("cli.py", "fit", "--trainer.callbacks", f"[{callback}]", cwd=tmp_path)
    assert done.returncode != 0
    assert "end_step=2 needs a start_step" in done.stderr
    assert list(tmp_path.iterdir()) == []
