"""Memory snapshots: of which moment, and that the user's own recording stays as it was."""

import pytest
import torch

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import MemoryHistory, MemorySnapshot, validate_snapshot_step
from lightning_forge_profiling.run import fit_window
from tests.models import Classifier, loader, quiet_trainer


class FakeHistory:
    """Records as PyTorch does; a snapshot lists the allocations that were made while it was on."""

    def __init__(self, *, on=False, full_disk=False):
        self.on, self.full_disk = on, full_disk
        self.seen = []
        self.switched = []

    def allocate(self, name):
        if self.on:
            self.seen.append(name)

    def recording(self):
        return self.on

    def start(self):
        self.on, self.seen = True, []
        self.switched.append("on")

    def stop(self):
        self.on, self.seen = False, []
        self.switched.append("off")

    def dump(self, path):
        path.write_text(" ".join(self.seen))
        if self.full_disk:
            raise OSError(28, "No space left on device")


def run_step(history, step, error):
    history.allocate(f"step{step}")
    if error is not None:
        raise error


def train(snapshot, history, *, steps=5, fails_at=None, error=None):
    """What a callback does around a fit."""
    snapshot.start()
    try:
        for step in range(steps):
            run_step(history, step, error if step == fails_at else None)
            snapshot.end_step(step)
    except BaseException as exc:
        snapshot.on_exception(exc)
    snapshot.close()


def test_a_step_is_recorded_alone_and_recording_is_off_again(tmp_path):
    history = FakeHistory()
    snapshot = MemorySnapshot(2, tmp_path / "new" / "rank0.memory.pickle", history)
    train(snapshot, history)
    assert snapshot.written == tmp_path / "new" / "rank0.memory.pickle"
    assert snapshot.written.read_text() == "step2"
    assert history.switched == ["on", "off"]
    assert [path.name for path in snapshot.written.parent.iterdir()] == ["rank0.memory.pickle"]


def test_the_first_step_can_be_recorded(tmp_path):
    history = FakeHistory()
    train(snapshot := MemorySnapshot(0, tmp_path / "snapshot", history), history)
    assert snapshot.written.read_text() == "step0"


@pytest.mark.parametrize("when", [3, "oom"])
def test_a_recording_of_the_users_stays_as_it_is(tmp_path, when):
    history = FakeHistory(on=True)
    snapshot = MemorySnapshot(when, tmp_path / "snapshot", history)
    train(snapshot, history, fails_at=4, error=torch.OutOfMemoryError("CUDA out of memory"))
    assert snapshot.written is not None
    assert "step0" in snapshot.written.read_text(), "the user's own is what is written"
    assert (history.on, history.switched) == (True, [])


def out_of_memory(wrapped):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if not wrapped:
        return error
    outer = RuntimeError("in compiled code")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize("wrapped", [False, True])
def test_at_an_out_of_memory_error_all_up_to_it_is_written(tmp_path, wrapped):
    history = FakeHistory()
    snapshot = MemorySnapshot("oom", tmp_path / "snapshot", history)
    train(snapshot, history, fails_at=2, error=out_of_memory(wrapped))
    assert snapshot.written.read_text() == "step0 step1 step2"
    assert history.switched == ["on", "off"]


@pytest.mark.parametrize("error", [None, ValueError("another one"), KeyboardInterrupt()])
def test_without_an_out_of_memory_error_nothing_is_written(tmp_path, error):
    history = FakeHistory()
    snapshot = MemorySnapshot("oom", tmp_path / "snapshot", history)
    train(snapshot, history, fails_at=None if error is None else 2, error=error)
    assert (snapshot.written, list(tmp_path.iterdir())) == (None, [])
    assert history.switched == ["on", "off"]


def test_a_step_that_is_never_reached_writes_nothing(tmp_path):
    history = FakeHistory()
    train(snapshot := MemorySnapshot(5, tmp_path / "snapshot", history), history, steps=5)
    assert (snapshot.written, history.switched) == (None, ["on", "off"])
    assert snapshot.problem == "step 5 did not complete"


def test_an_exception_within_the_step_puts_recording_back(tmp_path):
    history = FakeHistory()
    train(snapshot := MemorySnapshot(2, tmp_path / "snapshot", history), history, fails_at=2, error=ValueError())
    assert (snapshot.written, history.on) == (None, False)


def test_a_full_disk_is_logged_and_leaves_nothing_behind(tmp_path, caplog):
    history = FakeHistory(full_disk=True)
    train(snapshot := MemorySnapshot(1, tmp_path / "snapshot", history), history)
    assert [record.message for record in caplog.records] == [
        "No memory snapshot: OSError: [Errno 28] No space left on device"
    ]
    assert "No space left" in snapshot.problem
    assert (snapshot.written, list(tmp_path.iterdir()), history.on) == (None, [], False)


@pytest.mark.parametrize("when", ["OOM", -1, True, 1.5, None])
def test_anything_but_a_step_or_oom_is_refused(when):
    with pytest.raises(ConfigurationError, match='"oom" or the number of a step'):
        validate_snapshot_step(when)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_cuda_it_is_logged_once_and_does_nothing(tmp_path, caplog):
    train(snapshot := MemorySnapshot(1, tmp_path / "snapshot"), FakeHistory())
    assert len(caplog.records) == 1
    assert (snapshot.written, list(tmp_path.iterdir())) == (None, [])


# -- in a fit --------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(monkeypatch):
    """A simulated recording, for the callback to use on a CPU."""
    history = FakeHistory()
    monkeypatch.setattr(fit_window, "MemorySnapshot", lambda when, path: MemorySnapshot(when, path, history))
    monkeypatch.setattr(fit_window.FitWindow, "_no_memory", "")
    return history


class Allocating(Classifier):
    """Allocates in each step, and runs out of memory in one."""

    def __init__(self, history, fails_at=None):
        super().__init__()
        self.history, self.fails_at = history, fails_at

    def training_step(self, batch):
        self.history.allocate(f"step{self.seen}")
        if self.seen == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch)


def callback_in(folder, **options):
    return ForgeProfilerCallback(1, 2, trace_dir=folder, tensorboard=False, analyze=False, **options)


def test_the_callback_writes_the_step_it_was_given(make_trainer, history, tmp_path, capsys):
    callback = callback_in(tmp_path / "traces", memory_snapshot=3)
    make_trainer(callback).fit(Allocating(history), loader(24))
    written = callback.trace_report().memory_path
    assert (written.name, written.read_text()) == ("rank0.memory.pickle", "step3")
    assert written.parent == callback.trace_report().path.parent
    assert str(written) in capsys.readouterr().out
    assert history.switched == ["on", "off"]


def test_the_callback_writes_at_an_out_of_memory_error_which_goes_on(make_trainer, history, tmp_path):
    callback = callback_in(tmp_path / "traces", memory_snapshot="oom")
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(callback).fit(Allocating(history, fails_at=2), loader(24))
    assert callback.trace_report().memory_path.read_text() == "step0 step1 step2"
    assert history.switched == ["on", "off"]


def test_a_fit_without_such_an_error_leaves_no_snapshot(make_trainer, history, tmp_path, capsys):
    callback = callback_in(tmp_path / "traces", memory_snapshot="oom")
    make_trainer(callback).fit(Allocating(history), loader(12))
    assert callback.trace_report().memory_path is None
    assert "memory" not in capsys.readouterr().out
    assert history.switched == ["on", "off"]


def test_the_table_says_that_the_step_never_came(make_trainer, history, tmp_path, capsys):
    make_trainer(callback_in(tmp_path / "traces", memory_snapshot=50)).fit(Allocating(history), loader(12))
    assert "snapshot: step 50 did not complete" in capsys.readouterr().out
    assert history.switched == []


def test_on_a_cpu_the_callback_says_so_once(make_trainer, tmp_path, caplog):
    make_trainer(callback_in(tmp_path / "traces", memory_snapshot="oom")).fit(Classifier(), loader(12))
    said = [record.message for record in caplog.records if "memory snapshot" in record.message]
    assert said == ["No memory snapshot: PyTorch records allocations on CUDA devices, and this is a cpu."]


@pytest.mark.parametrize("when", [6, "oom"])
def test_on_a_cpu_the_table_and_the_report_say_so(make_trainer, tmp_path, capsys, when):
    callback = callback_in(tmp_path / "traces", memory_snapshot=when)
    make_trainer(callback).fit(Classifier(), loader(12))
    message = "PyTorch records allocations on CUDA devices, and this is a cpu"
    assert callback.trace_report().memory_message == message
    assert f"snapshot: {message}" in capsys.readouterr().out


def test_where_the_callback_stands_aside_the_report_says_why_there_is_no_snapshot(make_trainer, tmp_path):
    callback = callback_in(tmp_path / "traces", memory_snapshot=1)
    make_trainer(callback, fast_dev_run=True).fit(Classifier(), loader(12))
    assert callback.trace_report().memory_message == "fast_dev_run is a trial run"


def test_the_callback_refuses_what_is_neither_a_step_nor_oom():
    with pytest.raises(ConfigurationError, match="memory_snapshot must be"):
        ForgeProfilerCallback(memory_snapshot="OOM")


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_step_writes_pytorchs_own_snapshot(tmp_path):
    snapshot = MemorySnapshot(1, tmp_path / "snapshot.pickle")
    snapshot.start()
    kept = []
    for step in range(3):
        kept.append(torch.empty(1 << 20, device="cuda"))
        snapshot.end_step(step)
    snapshot.close()
    content = snapshot.written.read_bytes()
    assert b"device_traces" in content
    assert __file__.encode() in content, "with the Python stacks of the allocations"
    assert not MemoryHistory().recording()


@pytest.mark.gpu
def test_on_a_gpu_an_out_of_memory_error_is_written_and_the_users_recording_goes_on(tmp_path):
    torch.cuda.memory._record_memory_history("all", max_entries=1000)
    try:
        snapshot = MemorySnapshot("oom", tmp_path / "snapshot.pickle")
        snapshot.start()
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as exc:
            snapshot.on_exception(exc)
        assert b"oom" in snapshot.written.read_bytes()
        assert MemoryHistory().recording()
    finally:
        torch.cuda.memory._record_memory_history(None)


class TooMuch(Classifier):
    """Asks for more than any GPU has in its third step."""

    def training_step(self, batch):
        if self.seen == 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        return super().training_step(batch)


@pytest.mark.gpu
def test_on_a_gpu_a_fit_that_runs_out_of_memory_leaves_a_snapshot(tmp_path):
    callback = callback_in(tmp_path / "traces", memory_snapshot="oom")
    trainer = quiet_trainer(callback, accelerator="gpu", default_root_dir=tmp_path)  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(TooMuch(), loader(24))
    content = callback.trace_report().memory_path.read_bytes()
    assert b"oom" in content
    assert b"training_step" in content
    assert not MemoryHistory().recording()
