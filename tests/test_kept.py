"""What is left of a fit after it: nothing of the user's, results that can be read, callbacks that can be copied."""

import copy
import gc
import os
import pickle
import signal
import weakref

import lightning as L
import pytest
import torch
from torch import nn

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback, region
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler
from tests.models import Classifier, every_step, loader, quiet_trainer
from tests.outcomes import logged, recorded_steps, script, tables, the_trace
from tests.ports import free_port

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

SMALL = 64 * 2**10


def both(**options):
    return ForgeProfilerCallback(2, 4, tensorboard=False), every_step(warmup_steps=1, **options)


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.loaders = []

    def train_dataloader(self):
        self.loaders.append(weakref.ref(made := loader()))
        return made

    def val_dataloader(self):
        return loader(8)


class Large(Classifier):
    """Of 8 MB, and it says what its batches ask for. At its step `at` it does something."""

    flops_per_batch = 1e6

    def __init__(self, at=-1, does=None):
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(2**21))
        self.at, self.does = at, does
        self.batches = []

    def training_step(self, batch):
        self.batches.append(weakref.ref(batch[0]))
        if self.seen == self.at:
            self.does()
        return super().training_step(batch)


def fails():
    raise ValueError("planted")


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


ENDINGS = {"success": (-1, None), "an exception": (3, fails), "Ctrl-C": (3, ctrl_c), "Ctrl-C at first": (0, ctrl_c)}


def fit_and_forget(callbacks, folder, at, does, *, then=()):
    """A fit by a user who keeps the callbacks alone; returns weak references to all else that was in it."""
    model, data = Large(at, does), Data()
    trainer = quiet_trainer(*callbacks, default_root_dir=folder)
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(model, data)
    except (ValueError, SystemExit):
        assert does is not None
    else:
        assert does is None
    finally:
        signal.signal(signal.SIGINT, handler)
    for entry in then:
        getattr(trainer, entry)(model, loader(8), verbose=False)
    assert data.loaders
    assert model.batches
    held = {name: weakref.ref(thing) for name, thing in (("trainer", trainer), ("module", model), ("datamodule", data))}
    held |= {f"optimizer {i}": weakref.ref(optimizer) for i, optimizer in enumerate(trainer.optimizers)}
    held |= {f"loader {i}": ref for i, ref in enumerate(data.loaders)}
    held |= {f"batch {i}": ref for i, ref in enumerate(model.batches)}
    held["its parameters"] = weakref.ref(model.ballast)
    return held


def alive(held):
    gc.collect()
    return [name for name, ref in held.items() if ref() is not None]


@pytest.mark.slow
@pytest.mark.usefixtures("_signals_act")
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("options", [{}, {"flops_per_batch": 1e6}], ids=["module's flops", "a number"])
def test_callbacks_keep_nothing_alive(tmp_path, ending, options):
    callbacks = both(**options)
    assert alive(fit_and_forget(callbacks, tmp_path, *ENDINGS[ending])) == []
    assert callbacks[0].trace_report().status in {"written", "not reached"}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["validate", "test"])
def test_evaluation_after_the_fit_is_not_kept_alive_either(tmp_path, entry):
    callbacks = both()
    assert alive(fit_and_forget(callbacks, tmp_path, -1, None, then=[entry])) == []


@pytest.mark.parametrize("kind", [ForgeProfilerCallback, ThroughputCallback])
def test_one_callback_alone_keeps_nothing_alive(tmp_path, kind):
    callback = kind()
    assert alive(fit_and_forget([callback], tmp_path, -1, None)) == []


def results(callbacks):
    forge, throughput = callbacks
    return forge.trace_report(), forge.analysis(), throughput.analysis(), throughput.summary()


def unpickled(callbacks):
    packed = pickle.dumps(callbacks)
    assert len(packed) < SMALL
    return pickle.loads(packed)  # noqa: S301  (our own)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["success", "an exception"])
def test_they_pickle_before_between_and_after_fits_and_the_results_come_with_them(tmp_path, ending):
    callbacks = unpickled(both(flops_per_batch=1e6))
    assert results(callbacks) == (None, None, None, {})
    for folder in ("first", "second"):
        fit_and_forget(callbacks, tmp_path / folder, *ENDINGS[ending])
        found = results(callbacks)
        assert found[0].status == "written"
        assert found[0].path.exists()
        assert found[1] is found[2] is not None
        callbacks = unpickled(callbacks)
        assert results(callbacks) == found


def test_a_refused_fit_leaves_callbacks_that_pickle(tmp_path):
    (tmp_path / "file").touch()
    callbacks = ForgeProfilerCallback(trace_dir=tmp_path / "file"), ThroughputCallback(flops_per_batch=1e6)
    assert alive(fit_and_forget_refused(callbacks, tmp_path)) == []
    assert unpickled(callbacks)[0].trace_report() is None


def fit_and_forget_refused(callbacks, folder):
    model = Large()
    trainer = L.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, default_root_dir=folder, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match="is a file"):
        trainer.fit(model, loader())
    return {"module": weakref.ref(model), "trainer": weakref.ref(trainer)}


class RaisesToo(L.Callback):
    """Keeps everybody behind it in the list from hearing of an exception."""

    def on_exception(self, *args):
        raise ConnectionError("too")


@pytest.mark.slow
def test_a_fit_whose_exception_no_hook_tells_them_of_is_ended_all_the_same(tmp_path, make_trainer, capsys):
    callbacks = ForgeProfilerCallback(2, 4, tensorboard=False), every_step(warmup_steps=1)
    trainer = make_trainer(RaisesToo(), *callbacks)
    own = trainer.profiler
    with pytest.raises(ConnectionError, match="too"):
        trainer.fit(Large(3, fails), loader())
    assert unpickled(callbacks)[0].trace_report().status == "written"
    assert trainer.profiler is own
    trainer.fit(Classifier(), loader())
    assert trainer.profiler is own
    assert callbacks[0].trace_report().status == "written"
    assert tables(capsys.readouterr().out) == 2
    assert callbacks[1].summary()["time/attention_ms"] > 0


@pytest.mark.slow
def test_spawned_processes_fit_after_a_fit_of_this_one(tmp_path):
    done = script("refit.py", tmp_path, cwd=tmp_path, env={**os.environ, "MASTER_PORT": str(free_port())})
    assert done.returncode == 0, done.stderr
    assert "first: written, second: written" in done.stdout
    assert recorded_steps(the_trace(tmp_path / "spawned", 1)) == [2, 3]
    assert tables(done.stdout) == 3


# -- copies in the middle of a run -------------------------------------------------------------------------------


class Copies(L.Callback):
    """Copies the Trainer and the callbacks at the end of every batch, as a search over hyperparameters may."""

    def __init__(self, how):
        self.how = how
        self.copies = []

    def on_train_batch_end(self, trainer, *args):
        self.copies.append(self.how(trainer))

    def __deepcopy__(self, memo):
        return Copies(self.how)

    def __reduce__(self):
        return Copies, (None,)


HOW = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a callback": lambda trainer: copy.deepcopy(trainer.callbacks[0]),
    "pickle": lambda trainer: pickle.loads(pickle.dumps(trainer)),  # noqa: S301  (our own)
    "copy": lambda trainer: copy.copy(trainer.callbacks[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("copier_first", [True, False])
def test_a_copy_in_the_middle_of_a_run_changes_nothing(tmp_path, make_trainer, capsys, how, copier_first):
    copier, callbacks = Copies(HOW[how]), both()
    trainer = make_trainer(*([copier, *callbacks] if copier_first else [*callbacks, copier]))
    trainer.fit(Classifier(), loader())
    assert len(copier.copies) == 8
    assert tables(capsys.readouterr().out) == 1
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    assert all(row["time/forward_ms"] > 0 for row in logged(tmp_path))
    for made in copier.copies:
        for ours in made.callbacks if isinstance(made, L.Trainer) else [made]:
            assert not hasattr(ours, "analysis") or ours.analysis() is None
        assert not isinstance(getattr(made, "profiler", None), BoundaryProfiler), "the copy has the user's own"


@pytest.mark.slow
def test_the_results_of_copies_reach_the_object_that_the_user_holds(make_trainer):
    """As where darts or neuralforecast copy the arguments for the Trainer."""
    mine = both()
    for epochs in (1, 2):
        forge, throughput = copy.deepcopy(mine)
        make_trainer(forge, throughput, max_epochs=epochs).fit(Classifier(), loader())
        assert mine[0].trace_report() == forge.trace_report() is not None
        assert mine[1].summary() == throughput.summary() != {}
        assert mine[1].ledger() == throughput.ledger() is not None
        assert mine[1].analysis() == throughput.analysis() is not None
    make_trainer(*mine).fit(Classifier(), loader())
    own = mine[1].summary()
    make_trainer(*copy.deepcopy(mine)).fit(Classifier(), loader())
    assert mine[1].summary() == own, "its own fit counts"


@pytest.mark.slow
def test_a_copy_made_in_the_middle_of_a_run_fits_and_records_by_itself(make_trainer, capsys):
    copier, callbacks = Copies(copy.deepcopy), both()
    make_trainer(*callbacks, copier).fit(Classifier(), loader())
    copied = copier.copies[2]
    copied.fit_loop.max_epochs = 3
    copied.fit(Classifier(), loader())
    assert tables(capsys.readouterr().out) == 2
    assert copied.callbacks[0].trace_report().status == callbacks[0].trace_report().status == "written"
    assert copied.callbacks[0].trace_report().path != callbacks[0].trace_report().path


def test_a_fit_inside_a_fit_has_regions_of_its_own(make_trainer):
    class Inner(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                make_trainer(inner, logger=False).fit(Named("inner"), loader(16))

    class Named(Classifier):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def training_step(self, batch):
            with region(self.name):
                return super().training_step(batch)

    inner, outer = every_step(warmup_steps=0), every_step(warmup_steps=0)
    make_trainer(outer, Inner(), logger=False).fit(Named("outer"), loader())
    assert set(regions_of(inner)) == {"inner", "attention"}
    assert set(regions_of(outer)) == {"outer", "attention"}
    assert outer.analysis().run.timing.steps == 8


def regions_of(callback):
    return callback.analysis().run.timing.user_regions


def test_a_module_may_be_copied_while_it_is_in_a_region_of_its_own(tmp_path, make_trainer):
    class Copied(Classifier):
        def __init__(self):
            super().__init__()
            self.part = region("part")

        def training_step(self, batch):
            with self.part:
                twin = copy.deepcopy(self)
                with twin.part:
                    pass
            return super().training_step(batch)

    make_trainer(every_step(warmup_steps=0)).fit(Copied(), loader())
    assert all(row["time/part_ms"] > 0 for row in logged(tmp_path))
