"""Where the whole run's wall time goes: planted costs are found in their part, and the parts sum to the run."""

import copy
import json
import pickle
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import STEPS
from lightning_forge_profiling.profiler.session import TraceSession
from lightning_forge_profiling.timing.ledger import LedgerClock
from tests.models import Classifier, Fails, loader
from tests.outcomes import HANGS_S, SCRIPTS, tables

pytestmark = pytest.mark.real_time  # what is planted is compared with a clock of the test

SLOW_S = 0.02


class Planted:
    """Sleeps where it is told to, and knows how long it really took."""

    def __init__(self):
        self.took_s = {}

    def __call__(self, where, seconds=SLOW_S):
        began = time.perf_counter()
        time.sleep(seconds)
        self.took_s[where] = self.took_s.get(where, 0.0) + time.perf_counter() - began


class Slow(Callback):
    def __init__(self, planted):
        self.planted = planted

    def on_train_epoch_end(self, trainer, module):
        self.planted("callback/Slow.on_train_epoch_end", 15 * SLOW_S)

    def on_train_batch_end(self, *_):
        self.planted("callback/Slow.on_train_batch_end")


class SlowModule(Classifier):
    def __init__(self, planted):
        super().__init__()
        self.planted = planted

    def on_train_epoch_start(self):
        self.planted("module/on_train_epoch_start", 3 * SLOW_S)

    def validation_step(self, batch):
        checks = self.trainer.sanity_checking  # once, and beside what Lightning sets up there
        self.planted("sanity_check" if checks else "validation/step", (75 if checks else 15) * SLOW_S)

    def on_save_checkpoint(self, checkpoint):
        self.planted("module/on_save_checkpoint", 15 * SLOW_S)


class SlowLogger(CSVLogger):
    planted = None

    def log_metrics(self, metrics, step=None):
        ours = any(name.startswith("throughput/") for name in metrics)
        self.planted("profiler" if ours else "logger/SlowLogger", 3 * SLOW_S)
        super().log_metrics(metrics, step)


def fit(make_trainer, tmp_path, *callbacks, model=None, **options):
    ours = ThroughputCallback(overhead=options.pop("overhead", None), warmup_steps=0)
    options = {"max_epochs": 2, "log_every_n_steps": 4, "enable_checkpointing": True, **options}
    trainer = make_trainer(ours, *callbacks, **options)
    trainer.fit(model or Classifier(), loader(32), loader(8))
    return ours, trainer


def sums_up(ledger):
    return sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s, abs=1e-8)


@pytest.mark.slow
def test_what_is_planted_is_found_in_its_part(make_trainer, tmp_path):
    planted = Planted()
    logger = SlowLogger(tmp_path)
    logger.planted = planted

    ours, _ = fit(
        make_trainer,
        tmp_path,
        Slow(planted),
        ModelCheckpoint(tmp_path),
        model=SlowModule(planted),
        logger=logger,
        num_sanity_val_steps=1,
    )

    ledger = ours.ledger()
    assert {*planted.took_s} <= {*ledger.parts}
    assert ledger.parts["profiler"] >= planted.took_s.pop("profiler"), "our rows, and what else we do"
    for part, took_s in planted.took_s.items():
        assert ledger.parts[part] == pytest.approx(took_s, rel=0.1, abs=0.05), part
    assert ledger.counts["callback/Slow.on_train_batch_end"] == 16
    assert ledger.counts["validation"] == 2
    assert ledger.counts["checkpoint"] == ledger.counts["checkpoint/write"] == 2
    both = ledger.parts["checkpoint"] + ledger.parts["checkpoint/write"]
    assert both < planted.took_s["module/on_save_checkpoint"], "each nanosecond once"
    assert sums_up(ledger)
    assert abs(ledger.unexplained_s) < 0.005 * ledger.wall_s


def started(cwd, *command):
    began = time.perf_counter()  # the same clock in all processes of a machine
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=HANGS_S, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return began, json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"took_s"')))


@pytest.mark.slow
def test_the_time_before_the_first_step_is_split(tmp_path):
    began, run = started(tmp_path, str(SCRIPTS / "startup.py"))

    parts, planted = run["parts"], run["took_s"]
    assert parts["startup/imports"] == pytest.approx(run["imported"] - began, rel=0.1, abs=0.3), "Python's start, too"
    for part, took_s in planted.items():
        assert parts[part] == pytest.approx(took_s, rel=0.1, abs=0.25), part
    assert "startup/process" not in parts
    assert sum(parts.values()) + run["unexplained_s"] == pytest.approx(run["wall_s"], abs=1e-8)
    assert run["wall_s"] == pytest.approx(run["ended"] - began, rel=0.05, abs=0.2)
    assert abs(run["unexplained_s"]) < 0.005 * run["wall_s"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="run replaces its process")
def test_imports_and_script_are_one_part_if_the_callbacks_are_added_later(tmp_path):
    run_it = "-m", "lightning_forge_profiling", "run", "--no-window"
    began, run = started(tmp_path, *run_it, str(SCRIPTS / "startup.py"), "added")

    parts, planted = run["parts"], run["took_s"]
    assert {"startup/imports", "startup/script"}.isdisjoint(parts)
    assert run["imported"] - began + planted.pop("startup/script") < parts["startup/process"] + 0.3
    for part, took_s in planted.items():
        assert parts[part] == pytest.approx(took_s, rel=0.1, abs=0.25), part
    assert sum(parts.values()) + run["unexplained_s"] == pytest.approx(run["wall_s"], abs=1e-8)


class SlowAround(Callback):
    def __init__(self, planted):
        self.planted = planted

    def setup(self, *_, **__):
        self.planted("startup/callback.SlowAround.setup", 5 * SLOW_S)

    def on_fit_start(self, *_):
        self.planted("startup/callback.SlowAround.on_fit_start", 5 * SLOW_S)

    def on_train_end(self, *_):
        self.planted("callback/SlowAround.on_train_end", 5 * SLOW_S)

    def on_fit_end(self, *_):
        self.planted("callback/SlowAround.on_fit_end", 5 * SLOW_S)

    def teardown(self, *_, **__):
        self.planted("callback/SlowAround.teardown", 5 * SLOW_S)

    def on_exception(self, *_):
        self.planted("callback/SlowAround.on_exception", 5 * SLOW_S)


class SlowEnd(CSVLogger):
    planted = None

    def finalize(self, status):
        self.planted("logger/SlowEnd.finalize", 5 * SLOW_S)
        super().finalize(status)


class SlowAroundModule(Classifier):
    def __init__(self, planted):
        super().__init__()
        self.planted = planted

    def prepare_data(self):
        self.planted("startup/module.prepare_data", 5 * SLOW_S)

    def teardown(self, stage):
        self.planted("module/teardown", 5 * SLOW_S)

    def setup(self, stage):
        self.planted("startup/module.setup", 5 * SLOW_S)

    def configure_model(self):
        self.planted("startup/module.configure_model", 5 * SLOW_S)

    def configure_optimizers(self):
        self.planted("startup/module.configure_optimizers", 5 * SLOW_S)
        return super().configure_optimizers()

    def load_state_dict(self, *args, **kwargs):
        self.planted("startup/restore", 100 * SLOW_S)  # reading the checkpoint takes some time, too
        return super().load_state_dict(*args, **kwargs)

    def train_dataloader(self):
        self.planted("module/train_dataloader", 5 * SLOW_S)
        return loader(32)

    def on_train_start(self):
        self.planted("module/on_train_start", 5 * SLOW_S)


@pytest.mark.slow
@pytest.mark.parametrize("profiler", [None, "simple"])
def test_what_is_planted_before_and_after_the_loop_is_found_in_its_part(make_trainer, tmp_path, profiler):
    first = make_trainer(max_epochs=1)
    first.fit(Classifier(), loader(8))
    first.save_checkpoint(tmp_path / "resumed.ckpt")
    planted, ours, logger = Planted(), ThroughputCallback(overhead=None, warmup_steps=0), SlowEnd(tmp_path)
    logger.planted, finalize = planted, SlowEnd.finalize
    trainer = make_trainer(
        *((ours, SlowAround(planted)) if profiler else (SlowAround(planted), ours)),
        max_epochs=3, reload_dataloaders_every_n_epochs=1, profiler=profiler, logger=logger,
    )  # fmt: skip

    trainer.fit(SlowAroundModule(planted), ckpt_path=tmp_path / "resumed.ckpt")

    ledger = ours.ledger()
    assert SlowEnd.finalize is finalize
    assert "callback/SlowAround.teardown" in planted.took_s
    assert {*planted.took_s} <= {*ledger.parts}
    for part, took_s in planted.took_s.items():
        assert ledger.parts[part] == pytest.approx(took_s, rel=0.1, abs=0.05), part
    assert ledger.counts["module/train_dataloader"] == 2, "once for each of the epochs that were left"
    assert sums_up(ledger)
    assert abs(ledger.unexplained_s) < 0.005 * ledger.wall_s


class RaisesToo(Callback):
    def on_exception(self, *_):
        raise ConnectionError("too")


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "configure_optimizers"])
@pytest.mark.parametrize(("before_ours", "error"), [(Callback, RuntimeError), (RaisesToo, ConnectionError)])
def test_a_set_up_that_fails_leaves_nothing(make_trainer, hook, before_ours, error):
    def raises(*_, **__):
        raise RuntimeError("no set-up")

    trainer = make_trainer(before_ours(), ThroughputCallback())
    before = trainer.profiler
    with pytest.raises(error):
        trainer.fit(type("Raises", (Classifier,), {hook: raises})(), loader(8))
    assert trainer.profiler is before
    assert not {"_restore_modules_and_callbacks", "restore_training_state"} & {*vars(trainer._checkpoint_connector)}


@pytest.mark.slow
def test_rare_work_in_a_hook_of_each_batch_is_counted_and_not_estimated(make_trainer, tmp_path, monkeypatch):
    class Rarely(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step % 20 == 0:
                planted("callback/Rarely.on_train_batch_end", 15 * SLOW_S)

    def finish(session, *args, **kwargs):
        began = time.perf_counter()
        try:
            return finished(session, *args, **kwargs)
        finally:
            waits.append(time.perf_counter() - began)

    planted, waits, finished = Planted(), [], TraceSession.finish
    monkeypatch.setattr(TraceSession, "finish", finish)
    forge = ForgeProfilerCallback(20, 23, trace_dir=tmp_path / "t")
    ours, _ = fit(
        make_trainer, tmp_path, Rarely(), forge, overhead=1e-6, max_epochs=-1, max_steps=150, limit_val_batches=0,
        enable_checkpointing=False, logger=False,
    )  # fmt: skip

    ledger, hook = ours.ledger(), "callback/Rarely.on_train_batch_end"
    assert ledger.counts[hook] == 150
    assert ledger.parts[hook] == pytest.approx(planted.took_s[hook], rel=0.1)
    assert all(seconds >= 0 for seconds in ledger.parts.values())
    assert waits
    assert ledger.parts["profiler"] - sum(waits) < (ledger.wall_s - sum(waits)) / 2, "but for the trace's own analysis"
    assert sums_up(ledger)


@pytest.mark.parametrize("error", [RuntimeError("at step 25"), KeyboardInterrupt()])
def test_a_failing_fit_has_its_ledger(make_trainer, error):
    ours, slow = ThroughputCallback(overhead=None), Slow(Planted())
    trainer = make_trainer(ours, slow, max_epochs=1)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        trainer.fit(Fails(25, error), loader(128))
    ledger = ours.ledger()
    assert ledger.parts[STEPS] > 0
    assert sums_up(ledger)
    assert abs(ledger.unexplained_s) < 0.005 * ledger.wall_s


@pytest.mark.parametrize("double_fault", [False, True])
def test_what_follows_an_exception_is_found_in_its_part(make_trainer, tmp_path, capsys, double_fault):
    class Breaks(CSVLogger):
        def finalize(self, status):
            raise OSError("the disk is gone")

    planted, logger = Planted(), SlowEnd(tmp_path)
    logger.planted, ours, finalize = planted, ThroughputCallback(overhead=None), SlowEnd.finalize
    trainer = make_trainer(
        ours, SlowAround(planted), max_epochs=1, logger=[logger, *([Breaks(tmp_path)] if double_fault else [])]
    )
    before = trainer.profiler
    with pytest.raises(OSError if double_fault else RuntimeError):
        trainer.fit(Fails(25, RuntimeError("at step 25")), loader(128))

    ledger = ours.ledger()
    for part in "callback/SlowAround.on_exception", "logger/SlowEnd.finalize":
        assert ledger.parts[part] == pytest.approx(planted.took_s[part], rel=0.1, abs=0.05)
    assert sums_up(ledger)
    assert tables(capsys.readouterr().out) == 1
    assert trainer.profiler is before
    assert SlowEnd.finalize is finalize
    assert "teardown" not in vars(trainer._signal_connector)


class Reads(Callback):
    """Reads the ledger, and copies what a run holds, in the middle of a fit."""

    def __init__(self):
        self.read = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 6:
            ours = next(callback for callback in trainer.callbacks if isinstance(callback, ThroughputCallback))
            self.read = ours.ledger()
            for logger in trainer.loggers:
                pickle.loads(pickle.dumps(logger)).log_metrics({"x": 1.0}, step=1)  # noqa: S301
                copy.deepcopy(logger).log_metrics({"x": 1.0}, step=1)


def test_it_is_read_in_the_middle_of_a_fit_and_goes_on(make_trainer, tmp_path):
    reads = Reads()
    ours, _ = fit(make_trainer, tmp_path, reads, logger=CSVLogger(tmp_path))

    middle, end = reads.read, ours.ledger()
    assert sums_up(middle)
    assert sums_up(end)
    assert 0 < middle.wall_s < end.wall_s
    assert middle.parts[STEPS] < end.parts[STEPS]


def test_a_second_fit_of_a_process_begins_anew(make_trainer, tmp_path):
    fit(make_trainer, tmp_path)
    time.sleep(0.2)
    began = time.perf_counter()
    second, _ = fit(make_trainer, tmp_path)
    assert second.ledger().wall_s < time.perf_counter() - began
    assert {"startup/imports", "startup/process", "startup/trainer"}.isdisjoint(second.ledger().parts)


def test_both_callbacks_have_the_same_one(make_trainer, tmp_path):
    forge = ForgeProfilerCallback(2, 4, trace_dir=tmp_path, analyze=False)
    ours, _ = fit(make_trainer, tmp_path, forge)
    assert forge.ledger() == ours.ledger()
    assert ours.ledger().parts["profiler"] > 0


def test_the_users_profiler_prints_what_it_printed(make_trainer, tmp_path):
    planted = Planted()
    profiler = SimpleProfiler()
    ours, _ = fit(make_trainer, tmp_path, Slow(planted), profiler=profiler)

    hook = "callback/Slow.on_train_epoch_end"
    assert ours.ledger().parts[hook] == pytest.approx(planted.took_s[hook], rel=0.1)
    recorded = next(took for name, took in profiler.recorded_durations.items() if "Slow.on_train_epoch_end" in name)
    assert sum(recorded) == pytest.approx(planted.took_s[hook], rel=0.1)


class OwnOptimizerStep(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


def test_an_overridden_optimizer_step_is_the_steps_own(make_trainer, tmp_path):
    ours, _ = fit(make_trainer, tmp_path, model=OwnOptimizerStep(), logger=False, enable_checkpointing=False)
    parts = ours.ledger().parts
    assert parts.get("module/optimizer_step", 0.0) < parts["steps"] / 5, "forward, backward and update are within it"


def test_a_hook_of_a_lambda_callback_is_a_part(make_trainer, tmp_path):
    planted = Planted()
    part = "callback/LambdaCallback.on_train_epoch_end"
    hook = LambdaCallback(on_train_epoch_end=lambda *_: planted(part, 15 * SLOW_S))
    ours, _ = fit(make_trainer, tmp_path, hook, logger=False, enable_checkpointing=False)
    assert ours.ledger().parts[part] == pytest.approx(planted.took_s[part], rel=0.1)


class Strict(CSVLogger):
    """Its attributes cannot be set from outside."""

    def __setattr__(self, name, value):
        if not name.startswith("_") and name in {"log_metrics", "save"}:
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_loggers_are_left_as_they_are(make_trainer, tmp_path):
    copies = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                copies.append(copy.copy(trainer.logger))
                copies.append(pickle.loads(pickle.dumps(trainer.logger)))  # noqa: S301

    logger, own = Strict(tmp_path), CSVLogger.log_metrics
    ours, trainer = fit(make_trainer, tmp_path, Copies(), logger=logger)
    assert ours.analysis() is not None
    assert "log_metrics" not in vars(logger)
    assert CSVLogger.log_metrics is own
    assert all("log_metrics" not in vars(copied) for copied in copies)
    assert "log_metrics" not in vars(trainer._logger_connector)
    assert ours.ledger().parts["logger/Strict"] > 0


class Compiles(Classifier):
    """Each batch has another length, which compiles once more."""

    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)

    def training_step(self, batch):
        self.compiled(torch.ones(3 + self.global_step))
        return super().training_step(batch)


def test_compilation_is_a_part(make_trainer, tmp_path):
    ours, _ = fit(make_trainer, tmp_path, model=Compiles(), logger=False, enable_checkpointing=False, max_steps=4)
    assert ours.ledger().counts["compile"] == 4, "each is a recompilation, or after the warm-up"
    assert "torch._dynamo.callback" in sys.modules
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415

    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


def test_before_a_fit_and_after_a_mere_validation_there_is_none(make_trainer):
    ours = ThroughputCallback()
    assert ours.ledger() is None
    make_trainer(ours).validate(Classifier(), loader(8), verbose=False)
    assert ours.ledger() is None


def test_a_part_that_was_never_begun_ends_nothing():
    now = iter(range(0, 1000, 10))
    clock = LedgerClock(0, clock_ns=now.__next__)
    clock.enter(STEPS)
    clock.exit("checkpoint")
    clock.enter("validation")
    clock.enter("callback/X.hook")
    clock.exit("validation")  # the hook raised, and its end never came
    ledger = clock.read()
    assert {name: round(s * 1e9) for name, s in ledger.parts.items()} == {
        "steps": 20, "validation": 10, "callback/X.hook": 10,
    }  # fmt: skip
    assert sums_up(ledger)


@pytest.mark.parametrize("steps", [10, 101, 102])
def test_the_marks_end_with_the_step_that_is_under_way(steps):
    """Of many steps only some have a mark, and the last block may end between two of them."""
    now = iter(range(0, 10**9, 10))
    clock = LedgerClock(0, STEPS, clock_ns=now.__next__)
    clock.count_steps(on=True)
    for step in range(steps):
        clock.begin_step(step)
        clock.enter("callback/X.on_train_batch_end")
        clock.exit("callback/X.on_train_batch_end")
    marks = clock.marks()
    assert marks.at(steps) == {"callback/X.on_train_batch_end": 10 * steps}
    assert marks.at(0) == {}


@pytest.mark.parametrize(("otherwise_us", "long_steps"), [(20, 10), (400, 10), (20_000, 60)])
def test_steps_in_which_a_hook_is_only_interrupted_are_not_its_long_ones(otherwise_us, long_steps):
    """60 ms in each 6th step; on a busy machine the hook is interrupted in others."""
    now_ns = 0
    clock = LedgerClock(0, STEPS, clock_ns=lambda: now_ns)
    clock.count_steps(on=True)
    for step in range(61):
        clock.begin_step(step)
        clock.enter("callback/X.on_train_batch_end")
        now_ns += 1000 * (60_000 if step % 6 == 5 else otherwise_us)
        clock.exit("callback/X.on_train_batch_end")
    assert clock.read().long_steps == {"callback/X.on_train_batch_end": long_steps}


@pytest.mark.parametrize(("epochs", "counted"), [(1, 0.0), (3, 0.6)])
def test_what_ends_the_last_epoch_is_in_no_step(epochs, counted):
    """The end of an epoch is in the step after it; the last has none."""
    now_ns = 0
    clock = LedgerClock(0, STEPS, clock_ns=lambda: now_ns)
    clock.count_steps(on=True)
    for step in range(4 * epochs):
        clock.begin_step(step)
        now_ns += 10**6
        if step % 4 == 3:
            clock.enter("module/on_train_epoch_end")
            now_ns += 3 * 10**8
            clock.exit("module/on_train_epoch_end")
    ledger = clock.read()
    assert ledger.parts["module/on_train_epoch_end"] == pytest.approx(0.3 * epochs)
    assert ledger.counted_s.get("module/on_train_epoch_end", 0.0) == pytest.approx(counted)


def test_the_summary_has_it(make_trainer, tmp_path):
    forge = ForgeProfilerCallback(2, 4, trace_dir=tmp_path)
    ours, _ = fit(make_trainer, tmp_path, forge)
    summary = json.loads(forge.trace_report().summary_path.read_text(encoding="utf-8"))
    ledger = summary["run"]["ledger"]
    assert sum(ledger["parts"].values()) + ledger["unexplained_s"] == pytest.approx(ledger["wall_s"])
    assert ledger["wall_s"] <= ours.ledger().wall_s
    assert [*ledger["parts"].values()] == sorted(ledger["parts"].values(), reverse=True)
