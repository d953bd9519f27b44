"""Where others can write too: what they planted is neither followed nor waited for, and their folders are not used."""

import gzip
import json
import os
import stat
import tempfile
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import MemorySnapshot
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler, print_profiler_summary
from lightning_forge_profiling.record.reader import read_works
from lightning_forge_profiling.schema import RankWork
from tests.models import Classifier, loader
from tests.outcomes import REPORTS, read_trace, recorded_steps, summary_of
from tests.test_memory_snapshot import FakeHistory
from tests.test_memory_snapshot import train as run_with_snapshot

NOBODY = 65534
WRITTEN = ("rank0.trace.json.gz", "tensorboard/rank0.pt.trace.json.gz", *sorted(REPORTS))
GUESSED = (
    *(f"{name}{ending}" for name in WRITTEN for ending in ("", ".part", ".tmp", ".partial")),
    ".rank0.raw.json",
    ".rank0.raw.json.tmp",
    ".rank0.clock",
    ".rank0.part",
)
"""Names that a file has while it is written, or had in some version, where another user may wait for it."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that is another user's")


@pytest.fixture
def victim(tmp_path):
    """A file of this user's that no run may touch."""
    file = tmp_path / "victim"
    file.write_text("a file of this user's")
    yield file
    assert file.read_text() == "a file of this user's"


@pytest.fixture
def shared(tmp_path):
    """A folder in which everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def plant(folder, names, victim, kind):
    """What another user would put there: links to the victim, or pipes that hold up who opens them."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(victim)
        if os.geteuid() == 0:
            os.lchown(path, NOBODY, NOBODY)


def record(folder):
    """A plain loop with the window [1, 2)."""
    profiler = build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=folder))
    with profiler:
        for _ in range(3):
            (torch.ones(16, 16) @ torch.ones(16, 16)).sum()
            profiler.step()
    return profiler.report


def assert_written_whole(report):
    assert (report.status, report.message) == ("written", "")
    folder = report.path.parent
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} >= set(WRITTEN)
    for name in WRITTEN:
        assert stat.S_ISREG((folder / name).lstat().st_mode), name
        assert (folder / name).stat().st_uid == os.geteuid()
    assert recorded_steps(read_trace(report.path)) == list(report.steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("names", [GUESSED, [name for name in GUESSED if name not in {WRITTEN[0], ".rank0.raw.json"}]])
def test_nothing_planted_in_the_windows_folder_is_followed_or_waited_for(shared, victim, kind, names):
    plant(shared / "step_1", names, victim, kind)
    (shared / "step_1").chmod(0o777)
    assert_written_whole(record(shared))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_planted_while_a_fit_runs_is_followed_or_waited_for(shared, victim, kind, make_trainer):
    """The folder has a random name, which others see once it is there."""

    class Plants(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            folders = [] if self.done else list(shared.iterdir())
            for folder in folders:
                folder.chmod(0o777)
                plant(folder, GUESSED, victim, kind)
                self.done = True

        done = False

    planting = Plants()
    callback = ForgeProfilerCallback(3, 5, trace_dir=shared)
    counting = ThroughputCallback(warmup_steps=1)  # so that there is a run to report on
    make_trainer(callback, planting, counting).fit(Classifier(), loader(count=64))
    assert planting.done
    assert_written_whole(callback.trace_report())
    assert callback.analysis().run is not None, "read from what this run wrote"


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("kind", ["folder", "link to a folder", "file", "pipe"])
def test_a_folder_of_another_users_is_not_used(shared, tmp_path, kind):
    theirs, taken = tmp_path / "theirs", shared / "step_1"
    theirs.mkdir()
    if kind == "folder":
        taken.mkdir(mode=0o777)
    elif kind == "file":
        taken.touch()
    elif kind == "pipe":
        os.mkfifo(taken)
    else:
        taken.symlink_to(theirs)
    os.lchown(taken, NOBODY, NOBODY)
    report = record(shared)
    assert_written_whole(report)
    assert report.path.parent == shared / "step_1.2"
    assert list(theirs.iterdir()) == []
    assert kind != "folder" or list(taken.iterdir()) == []


@needs_root
def test_copies_for_tensorboard_do_not_go_into_a_folder_of_another_users(shared, make_trainer):
    class Plants(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for folder in shared.iterdir():
                if not (folder / "tensorboard").exists():
                    (folder / "tensorboard").mkdir(mode=0o777)
                    os.chown(folder / "tensorboard", NOBODY, NOBODY)

    callback = ForgeProfilerCallback(3, 5, trace_dir=shared)
    make_trainer(callback, Plants(), max_steps=8).fit(Classifier(), loader())
    report = callback.trace_report()
    assert report.path.exists()
    assert report.plugin_path is None
    assert "tensorboard belongs to another user" in report.message
    assert list((report.path.parent / "tensorboard").iterdir()) == []


def test_others_cannot_write_into_a_windows_folder_whatever_the_umask(shared):
    before = os.umask(0)
    try:
        report = record(shared)
    finally:
        os.umask(before)
    for folder in (report.path.parent, report.plugin_path.parent):
        assert not folder.stat().st_mode & stat.S_IWOTH


def test_ranks_of_one_user_share_the_windows_folder(shared):
    """Whoever comes first makes it."""
    config = ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=shared, tensorboard=False, analyze=False)
    for rank in (1, 0):
        with build_profiler(config, rank=rank) as profiler:
            for _ in range(3):
                profiler.step()
        assert profiler.report.path == shared / "step_1" / f"rank{rank}.trace.json.gz"
    assert sorted(path.name for path in (shared / "step_1").iterdir()) == ["rank0.trace.json.gz", "rank1.trace.json.gz"]


@pytest.mark.linux
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_another_ranks_record_is_neither_read_through_a_link_nor_waited_for(tmp_path, victim, kind):
    plant(tmp_path / "record", ["rank1.jsonl"], victim, kind)
    mine = RankWork(rank=0, host="node0", steps=1, step_ms=1.0, leaves_ms={})
    assert read_works(tmp_path / "record", mine, 2, "run", 1, timeout_s=0.0) == ()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_memory_snapshot_is_not_written_through_a_link(tmp_path, victim, kind):
    path = tmp_path / "window" / "rank0.memory.pickle"
    plant(path.parent, [path.name, f"{path.name}.partial"], victim, kind)
    history = FakeHistory()
    run_with_snapshot(snapshot := MemorySnapshot(2, path, history), history)
    assert (snapshot.problem, snapshot.written) == ("", path)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.read_text() == "step2"


@needs_root
def test_a_memory_snapshot_does_not_go_into_a_folder_of_another_users(tmp_path):
    path = tmp_path / "window" / "rank0.memory.pickle"
    path.parent.mkdir(mode=0o777)
    os.chown(path.parent, NOBODY, NOBODY)
    history = FakeHistory()
    run_with_snapshot(snapshot := MemorySnapshot(2, path, history), history)
    assert snapshot.written is None
    assert "belongs to another user" in snapshot.problem
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_print_profiler_summary_follows_nothing(shared, victim, kind, capsys):
    plant(shared, ["rank0.trace.json.gz", *REPORTS], victim, kind)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(16, 16) @ torch.ones(16, 16)
    print_profiler_summary(prof, shared, rank=0)
    assert {path.name for path in shared.iterdir() if stat.S_ISREG(path.lstat().st_mode)} == {
        "rank0.trace.json.gz",
        *REPORTS,
    }
    assert read_trace(shared / "rank0.trace.json.gz")["traceEvents"]


def a_trace(path):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}).encode()))
    return path


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_tensorboard_command_follows_nothing(shared, victim, tmp_path, kind, capsys):
    name = "rank0.pt.trace.json.gz"
    plant(shared, [name, f"{name}.tmp", f"{name}.part"], victim, kind)
    assert main(["export", str(a_trace(tmp_path / "rank0.json.gz")), "--for", "tensorboard", "--out", str(shared)]) == 0
    assert read_trace(shared / name)["traceEvents"]


def test_the_tensorboard_command_leaves_a_file_of_a_users_beside_the_copy(tmp_path, capsys):
    beside = tmp_path / "rank0.pt.trace.json.gz.tmp"
    beside.write_text("a user's")
    assert (
        main(["export", str(a_trace(tmp_path / "rank0.json.gz")), "--for", "tensorboard", "--out", str(tmp_path)]) == 0
    )
    assert beside.read_text() == "a user's"


# --- whether the folder can be written to ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "pipe", "folder"])
def test_what_another_process_left_behind_does_not_stop_a_fit(shared, make_trainer, kind):
    left = shared / f".forge_probe_{os.getpid()}"
    {"file": Path.touch, "pipe": os.mkfifo, "folder": Path.mkdir}[kind](left)
    callback = ForgeProfilerCallback(1, 2, trace_dir=shared)
    make_trainer(callback, max_steps=3).fit(Classifier(), loader())
    assert callback.trace_report().status == "written"
    assert record(shared).status == "written"


def test_threads_that_check_one_folder_do_not_get_in_each_others_way(shared):
    """As Trainers in two threads do, or in containers with equal process numbers."""
    config = ProfilingConfig(enable=True, trace_dir=shared)
    problems = []

    def check():
        for _ in range(300):
            try:
                build_profiler(config)
            except ConfigurationError as exc:
                problems.append(str(exc))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(shared.iterdir()) == []


# --- paths -----------------------------------------------------------------------------------------------------------


class MovesAway(L.Callback):
    """Changes the working directory once training has begun, as a user's code may."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        os.chdir(self.folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rel", "-rel"])
def test_a_relative_folder_is_that_of_the_start(tmp_path, monkeypatch, make_trainer, name):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    callback = ForgeProfilerCallback(2, 4, trace_dir=name)
    make_trainer(callback, MovesAway(tmp_path / "there"), max_steps=6).fit(Classifier(), loader())
    assert_written_whole(callback.trace_report())
    assert callback.trace_report().path.parents[1] == tmp_path / "here" / name
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("name", ["rel", "-rel"])
def test_a_relative_folder_of_a_plain_loop_is_that_of_the_start(tmp_path, monkeypatch, name):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    profiler = build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=name))
    monkeypatch.chdir(tmp_path / "there")
    with profiler:
        for _ in range(3):
            profiler.step()
    assert_written_whole(profiler.report)
    assert profiler.report.path.parents[1] == tmp_path / "here" / name
    assert list((tmp_path / "there").iterdir()) == []


def test_the_hint_for_tensorboard_is_a_relative_loggers_folder(tmp_path, monkeypatch, make_trainer):
    monkeypatch.chdir(tmp_path)
    callback = ForgeProfilerCallback(2, 4)
    make_trainer(callback, ThroughputCallback(), logger=CSVLogger("logs"), max_steps=6).fit(Classifier(), loader())
    folder = tmp_path / "logs" / "lightning_logs" / "version_0"
    assert callback.trace_report().path.parents[2] == folder
    assert f"tensorboard --logdir {folder} " in summary_of(tmp_path)


ODD = [
    'a "quoted" name',
    "back\\slash",
    "two\nlines",
    "with space",
    "Ünï-日本",
    "-dash",
    "tab\there",
    os.fsdecode(b"\xff"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_folder_may_have_any_name_also_the_one_of_temporary_files(tmp_path, monkeypatch, name):
    temporary = tmp_path / "temporary" / name
    temporary.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    report = record(tmp_path / name)
    assert_written_whole(report)
    assert report.path.parents[1] == tmp_path / name
    assert list(temporary.iterdir()) == []
    assert recorded_steps(read_trace(report.plugin_path), category=None) == [1]


@pytest.mark.linux
def test_a_fit_writes_into_a_folder_of_any_name(tmp_path, make_trainer, capsys):
    folder = tmp_path.joinpath(*ODD)
    callback = ForgeProfilerCallback(2, 4, trace_dir=folder)
    make_trainer(callback, ThroughputCallback(warmup_steps=1)).fit(Classifier(), loader(count=64))
    assert_written_whole(callback.trace_report())
    assert callback.trace_report().path.parents[1] == folder
    assert callback.analysis().run is not None


def test_print_profiler_summary_writes_into_a_folder_of_any_name(tmp_path, capsys):
    folder = tmp_path.joinpath(*ODD)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(16, 16) @ torch.ones(16, 16)
    print_profiler_summary(prof, folder, rank=0)
    assert read_trace(folder / "rank0.trace.json.gz")["traceEvents"]
