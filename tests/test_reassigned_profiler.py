"""A callback that assigns `trainer.profiler` during the fit: it is followed, and the newest is there at the end."""

import copy

import lightning as L
import pytest
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler
from tests.models import SLOW_MS, Classifier, Fails, Manual, busy, every_step, loader, quiet_trainer
from tests.outcomes import logged, recorded_steps, spans, tables, the_trace, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

FORWARD = "[Strategy]SingleDeviceStrategy.training_step"


class Assigns(L.Callback):
    """Assigns a profiler in one of its hooks, in some steps."""

    def __init__(self, hook, steps, make):
        self.steps, self.make = steps, make
        setattr(self, hook, self.assigns)

    def assigns(self, trainer, *args):
        if self.steps is None or trainer.fit_loop.epoch_loop.batch_idx in self.steps:
            trainer.profiler = self.make(trainer)


class AsksForItsProfiler(Classifier):
    def training_step(self, batch):
        self.kind = [kind for kind in (SimpleProfiler, PassThroughProfiler) if isinstance(self.trainer.profiler, kind)]
        with self.trainer.profiler.profile(action_name="mine"):
            return super().training_step(batch)


@pytest.mark.parametrize(("profiler", "kind"), [("simple", SimpleProfiler), (None, PassThroughProfiler)])
def test_code_that_uses_the_profiler_by_its_class_and_names_finds_it(make_trainer, profiler, kind):
    module, callback = AsksForItsProfiler(), every_step(warmup_steps=1)
    make_trainer(callback, profiler=profiler).fit(module, loader())
    assert module.kind == [kind]
    assert callback.analysis().run.timing.regions["forward"].device_ms > 0


class Around(Profiler):
    """A profiler of the user's that passes everything on to the one before."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.names = []

    def start(self, action_name):
        self.names.append(action_name)
        self.inner.start(action_name)

    def stop(self, action_name):
        self.inner.stop(action_name)


class Slow(Classifier):
    """So slow in forward that its region cannot be taken for anything else."""

    def training_step(self, batch):
        busy()
        return super().training_step(batch)


@pytest.fixture
def fit(tmp_path):
    """A fit of 12 steps that logs each of them; returns the Trainer."""
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415

    def run(*callbacks, model=None, profiler=None, **options):
        trainer = quiet_trainer(
            *callbacks,
            logger=CSVLogger(tmp_path, name="csv"),
            default_root_dir=tmp_path,
            log_every_n_steps=1,
            profiler=profiler,
            **options,
        )
        trainer.fit(model or Slow(), loader(48), loader(8))
        return trainer

    return run


def steps_without_regions(folder):
    """How many steps have none; in all others the time of forward is where it belongs. A row has one step."""
    rows = logged(folder)
    assert len(rows) == 12
    with_regions = [row for row in rows if "time/forward_ms" in row]
    assert all(row["time/forward_ms"] >= SLOW_MS for row in with_regions)
    return 12 - len(with_regions)


HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end")


@pytest.mark.parametrize(("ours_first", "before"), [(True, None), (False, "simple")], ids=["first", "last"])
@pytest.mark.parametrize("hook", HOOKS)
def test_it_is_followed_from_the_next_step_on(tmp_path, fit, hook, ours_first, before):
    newest, throughput = SimpleProfiler(), every_step(warmup_steps=0)
    assigns = Assigns(hook, {4}, lambda trainer: newest)
    trainer = fit(*([throughput, assigns] if ours_first else [assigns, throughput]), profiler=before)
    assert trainer.profiler is newest
    assert len(newest.recorded_durations[FORWARD]) >= 7, "it has all that came after"
    assert steps_without_regions(tmp_path) <= 1
    assert throughput.summary()["time/forward_ms"] >= SLOW_MS


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end"])
def test_it_is_followed_where_it_is_assigned_in_validation(tmp_path, fit, hook):
    newest = SimpleProfiler()
    trainer = fit(Assigns(hook, None, lambda trainer: newest), every_step(warmup_steps=0), val_check_interval=4)
    assert trainer.profiler is newest
    assert steps_without_regions(tmp_path) <= 3


def test_it_is_followed_in_manual_optimization(tmp_path, fit):
    newest = AdvancedProfiler()
    trainer = fit(
        Assigns("on_train_batch_start", {4}, lambda trainer: newest), every_step(warmup_steps=0), model=Manual()
    )
    assert trainer.profiler is newest
    shown = [row for row in logged(tmp_path) if "time/backward_ms" in row]
    assert len(shown) == 11
    assert all(row["time/backward_ms"] > 0 for row in shown)


@pytest.mark.slow
def test_a_trace_shows_the_regions_of_later_steps(tmp_path, fit):
    forge = ForgeProfilerCallback(4, 8)
    fit(forge, Assigns("on_train_batch_start", {2}, lambda trainer: SimpleProfiler()))
    assert recorded_steps(the_trace(tmp_path)) == [4, 5, 6, 7]
    assert spans(the_trace(tmp_path)).count("forge.forward") == 4


def test_one_that_passes_on_to_the_last_one_gets_everything_once(tmp_path, fit):
    made = []

    def around(trainer):
        made.append(Around(trainer.profiler))
        return made[-1]

    first = SimpleProfiler()
    trainer = fit(every_step(warmup_steps=0), Assigns("on_train_batch_start", {4}, around), profiler=first)
    assert trainer.profiler is made[0]
    assert made[0].names.count(FORWARD) == 8
    assert len(first.recorded_durations[FORWARD]) == 12
    assert steps_without_regions(tmp_path) <= 1


class ForSomeSteps(L.Callback):
    """Puts another profiler in place for some steps and then the one that was there."""

    def __init__(self, other, first, last):
        self.other, self.first, self.last = other, first, last
        self.before = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first:
            self.before, trainer.profiler = trainer.profiler, self.other

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.last:
            trainer.profiler = self.before


@pytest.mark.parametrize("last", [3, 6])
@pytest.mark.parametrize("ours_first", [True, False])
def test_one_that_is_there_for_some_steps_makes_room_for_the_last_one(tmp_path, fit, caplog, ours_first, last):
    first, other = SimpleProfiler(), SimpleProfiler()
    swaps, throughput = ForSomeSteps(other, 3, last), every_step(warmup_steps=0)
    trainer = fit(*([throughput, swaps] if ours_first else [swaps, throughput]), profiler=first)
    assert trainer.profiler is first
    taken = len(other.recorded_durations[FORWARD])
    assert taken == last - 2
    assert len(first.recorded_durations[FORWARD]) == 12 - taken
    assert steps_without_regions(tmp_path) <= 2, "a step at each change"
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("ours_first", [True, False])
def test_where_it_cannot_be_followed_one_warning_says_so_and_whole_steps_are_timed(
    tmp_path, fit, caplog, capsys, ours_first
):
    class InEveryStep(ForSomeSteps):
        """Never there between two steps, where it could be found."""

        def on_train_batch_start(self, trainer, *args):
            self.before, trainer.profiler = trainer.profiler, self.other

        def on_train_batch_end(self, trainer, *args):
            trainer.profiler = self.before

    first = SimpleProfiler()
    swaps, throughput = InEveryStep(SimpleProfiler(), 0, 0), every_step(warmup_steps=0)
    trainer = fit(*([throughput, swaps] if ours_first else [swaps, throughput]), profiler=first)
    assert trainer.profiler is first
    [warning] = warnings_of(caplog)
    assert "trainer.profiler was assigned" in warning
    assert throughput.summary()["time/step_ms"] >= SLOW_MS
    assert steps_without_regions(tmp_path) == 12
    assert tables(capsys.readouterr().out) == 1


def test_it_is_there_after_an_exception_too(fit):
    newest, held = SimpleProfiler(), []

    class Holds(L.Callback):
        def on_exception(self, trainer, *args):
            held.append(trainer)

    with pytest.raises(ValueError, match="mine"):
        fit(
            every_step(),
            Assigns("on_train_batch_start", {4}, lambda trainer: newest),
            Holds(),
            model=Fails(6, ValueError("mine")),
        )
    assert held[0].profiler is newest


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_who_kept_ours_and_assigns_it_at_the_end_has_his_own_after_all(fit, hook):
    class Keeps(L.Callback):
        kept = None

        def on_train_batch_start(self, trainer, *args):
            self.kept = trainer.profiler

    keeps = Keeps()
    setattr(keeps, hook, lambda trainer, *args: setattr(trainer, "profiler", keeps.kept))
    own = SimpleProfiler()
    trainer = fit(every_step(), keeps, profiler=own)
    assert isinstance(keeps.kept, BoundaryProfiler)
    assert trainer.profiler is own
    assert isinstance(copy.deepcopy(keeps.kept), SimpleProfiler)


def test_without_a_profiler_of_the_users_lightnings_is_back(fit):
    assert isinstance(fit(every_step()).profiler, PassThroughProfiler)
