"""Fits that come down: nothing of ours waits for long, nothing stays on, and what is known is written and printed."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler
from lightning_forge_profiling.profiler.collector import let_gpu_settle
from tests.models import Classifier, Fails, Samples, loader
from tests.outcomes import (
    HANGS_S,
    recorded_steps,
    tables,
    the_trace,
    traces,
    unwrapped,
    wait_for_processes_of,
    working_on,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("_signals_act", "_ctrl_c_stays"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

PATIENCE_S = HANGS_S / 2
"""Far above what anything may wait, for a busy machine, and far below what it did."""


@pytest.fixture
def _ctrl_c_stays():
    """Lightning ignores it for good after the first."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class OddError(Exception):
    """One that nobody else raises."""


class FailsAt(Classifier):
    """Raises in a hook, where it is called for the n-th time."""

    def __init__(self, hook, nth, error):
        super().__init__()
        self.hook, self.left, self.error = hook, nth, error

    def _may_fail(self, hook):
        if hook == self.hook and not self.trainer.sanity_checking:
            self.left -= 1
            if not self.left:
                raise self.error

    def training_step(self, batch):
        self._may_fail("training_step")
        return super().training_step(batch)

    def validation_step(self, batch):
        self._may_fail("validation_step")
        return super().validation_step(batch)

    def on_train_epoch_start(self):
        self._may_fail("on_train_epoch_start")


PLACES = {  # with workers that were forked after the profiler had been started for step 4, the warm-up
    "validation": ("validation_step", 1, {}),
    "epoch start": ("on_train_epoch_start", 2, {}),
    "warm-up step": ("training_step", 5, {"val_check_interval": 4}),
}


@pytest.mark.parametrize("error", [OddError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("place", PLACES)
def test_with_workers_about_a_fit_that_fails_near_the_warm_up_step_ends(tmp_path, make_trainer, capsys, place, error):
    hook, nth, options = PLACES[place]
    forge = ForgeProfilerCallback(5, 8)
    trainer = make_trainer(forge, limit_train_batches=5, max_epochs=2, num_sanity_val_steps=0, **options)
    validation = loader(16, num_workers=2, persistent_workers=True)
    began = time.monotonic()
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else OddError):
        trainer.fit(FailsAt(hook, nth, error), loader(64), validation)
    assert time.monotonic() - began < PATIENCE_S
    assert forge.trace_report().status == "not reached"
    assert tables(capsys.readouterr().out) == 1
    assert traces(tmp_path) == []
    assert not (tmp_path / "profiler_traces").exists() or not list((tmp_path / "profiler_traces").iterdir())


def fail_in_the_warm_up_step(profiler):
    """A loop with workers that were forked while the profiler ran, and are still about."""
    workers = None
    with profiler:
        for _ in range(4):
            profiler.step()
        workers = iter(DataLoader(Samples(8), num_workers=2))
        raise OddError(workers)


def test_with_workers_about_a_loop_that_fails_in_the_warm_up_step_ends(tmp_path):
    config = ProfilingConfig(enable=True, start_step=5, end_step=8, trace_dir=tmp_path / "traces")
    profiler = build_profiler(config)
    began = time.monotonic()
    with pytest.raises(OddError):
        fail_in_the_warm_up_step(profiler)
    assert time.monotonic() - began < PATIENCE_S
    assert profiler.report.status == "not reached"
    assert not list(tmp_path.rglob("*.json*"))


def child_of(folder):
    """The process that will finish the trace that goes into a folder."""
    deadline = time.monotonic() + HANGS_S
    while not (pids := working_on(folder)):  # its command line is not there at once
        assert time.monotonic() < deadline
    [pid] = pids
    return int(pid)


class Stops(L.Callback):
    """Stops the child process for good in a step, as a machine without a free processor would."""

    def __init__(self, folder, at):
        self.folder, self.at, self.pid = folder, at, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.at:
            self.pid = child_of(self.folder)
            os.kill(self.pid, signal.SIGSTOP)


@pytest.fixture
def stops(tmp_path):
    stops = Stops(tmp_path, at=6)
    yield stops
    with suppress(ProcessLookupError):
        os.kill(stops.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("error", [OddError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_child_process_that_is_not_done_goes_on_alone(tmp_path, make_trainer, capsys, stops, error):
    forge = ForgeProfilerCallback(3, 5)
    began = time.monotonic()
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else OddError):
        make_trainer(stops, forge).fit(Fails(6, error), loader(64))
    assert time.monotonic() - began < PATIENCE_S
    report, table = forge.trace_report(), capsys.readouterr().out
    assert (report.status, report.pending, report.steps) == ("written", True, (3, 4))
    assert traces(tmp_path) == []
    assert tables(table) == 1
    assert f"trace       {report.path} is being written\n" in table
    assert "the run ended before trace and reports were complete" in unwrapped(table)
    os.kill(stops.pid, signal.SIGCONT)
    wait_for_processes_of(tmp_path)
    assert recorded_steps(the_trace(tmp_path)) == [3, 4]
    assert report.path.exists()
    assert report.plugin_path.exists()
    assert (report.path.parent / "report.html").exists()


class Raises(L.Callback):
    """Raises where it hears of an exception."""

    def on_exception(self, trainer, pl_module, exception):
        raise LookupError("another")


@pytest.mark.parametrize("at", [4, 6], ids=["warm-up", "window"])
def test_another_callback_may_raise_in_its_on_exception(tmp_path, make_trainer, capsys, at):
    forge, throughput = ForgeProfilerCallback(5, 8), ThroughputCallback()
    trainer = make_trainer(Raises(), forge, throughput)
    with pytest.raises(LookupError, match="another"):
        trainer.fit(Fails(at, OddError("mine")), loader(64))
    assert not torch._C._autograd._profiler_enabled()
    assert tables(capsys.readouterr().out) == 1
    wait_for_processes_of(tmp_path)
    assert forge.trace_report().status == ("written" if at == 6 else "not reached")
    assert [recorded_steps(the_trace(tmp_path))] == [[5, 6]] if at == 6 else traces(tmp_path) == []
    assert "run" not in vars(trainer.fit_loop), "the training loop is as it was"


def test_the_table_is_printed_once_whichever_callback_fails_last(make_trainer, capsys):
    class EndsBadly(L.Callback):
        def on_train_end(self, trainer, pl_module):
            raise OddError

    for callbacks in ((EndsBadly(), ThroughputCallback()), (ThroughputCallback(), EndsBadly())):
        with pytest.raises(OddError):
            make_trainer(*callbacks).fit(Classifier(), loader(64))
        assert tables(capsys.readouterr().out) == 1


class Removes(L.Callback):
    """Removes the trace once it is there, while the end of the fit waits for its analysis."""

    def __init__(self, folder):
        self.folder = folder
        self.thread = threading.Thread(target=self.remove)

    def remove(self):
        deadline = time.monotonic() + HANGS_S
        while not (found := traces(self.folder)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found[0].unlink()

    def teardown(self, trainer, pl_module, stage):
        self.thread.start()


def test_a_trace_that_somebody_has_removed_is_said_so(tmp_path, make_trainer, capsys):
    forge = ForgeProfilerCallback(1, 3, tensorboard=False)
    removes = Removes(tmp_path)
    make_trainer(removes, forge).fit(Classifier(), loader(64))
    removes.thread.join()
    report = forge.trace_report()
    assert (report.status, report.path) == ("failed", None)
    assert report.message
    assert "no trace    failed: " in capsys.readouterr().out


class NeverDone:
    """An event behind work that does not end, as in a collective that another rank will never join."""

    def __init__(self, device):
        assert device == "cuda"

    def record(self):
        pass

    def query(self):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seconds"), [(1, 4), (2, 1)])
def test_a_gpu_that_stays_busy_is_given_up(monkeypatch, world_size, seconds):
    monkeypatch.setattr(torch, "Event", NeverDone)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"still busy {seconds} s after"):
        let_gpu_settle(world_size)
    assert time.monotonic() - began < PATIENCE_S
