"""Folders on `memory://` and other remote places of fsspec, `file://` and `~`: where a run's files are in the end."""

import json
import re
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.profiler import ProfilerActivity, profile

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler, print_profiler_summary
from lightning_forge_profiling.run.folders import finished_files, folder_of, upload
from tests.models import Classifier, Fails, every_step, loader, quiet_trainer
from tests.outcomes import REPORTS, script, tables, traces, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

WINDOW = {"rank0.trace.json.gz", "rank0.pt.trace.json.gz", *REPORTS}


@pytest.fixture
def memory():
    """What is in the memory of this process, by name; empty at first."""
    system = fsspec.filesystem("memory")

    def clear():
        system.store.clear()
        system.pseudo_dirs[:] = [""]

    clear()
    yield lambda: sorted(system.find("/"))
    clear()


@pytest.fixture(autouse=True)
def staging(tmp_path, monkeypatch):
    """The folder for temporary files, beside which relative paths begin."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "staging"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


LOGGERS = {
    "csv": lambda: CSVLogger("memory://bucket/logs", name="gpt"),
    "tensorboard": lambda: TensorBoardLogger("memory://bucket/logs", name="gpt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOGGERS)
def test_traces_of_a_remote_logger_lie_beside_its_rows(memory, staging, make_trainer, capsys, kind):
    callback = ForgeProfilerCallback(5, 7)
    make_trainer(callback, every_step(warmup_steps=2), logger=LOGGERS[kind]()).fit(Classifier(), loader(80))
    url = callback.trace_report().url
    assert url.startswith("memory://bucket/logs/gpt/version_0/profiler_traces/")
    below = [name for name in memory() if name.startswith(url.removeprefix("memory:/"))]
    assert {name.rsplit("/", 1)[1] for name in below} == WINDOW
    assert f"copied to   {url}" in capsys.readouterr().out
    summary = json.loads(fsspec.filesystem("memory").cat_file(f"{url}/summary.json"))
    assert summary["run"]["timing"]["steps"] > 0, "copied once it covers the run too"
    assert [run["name"] for run in summary["tracked"]] == ["gpt"]
    assert not list(Path().glob("*memory*")), "and no folder is named after the URL"
    assert callback.trace_report().path.is_relative_to(staging)


def test_without_a_logger_they_lie_in_a_remote_default_root_dir(memory):
    callback = ForgeProfilerCallback(1, 2)
    trainer = quiet_trainer(callback, default_root_dir="memory://bucket/root")
    trainer.fit(Classifier(), loader(16))
    assert callback.trace_report().url.startswith("memory://bucket/root/profiler_traces/")
    assert len(memory()) == len(WINDOW)


def test_a_remote_trace_dir_is_taken_as_it_is(memory, make_trainer):
    callback = ForgeProfilerCallback(1, 2, trace_dir="memory://traces/mine")
    make_trainer(callback).fit(Classifier(), loader(16))
    assert callback.trace_report().url.startswith("memory://traces/mine/")
    assert {name.split("/")[1] for name in memory()} == {"traces"}


def test_a_fit_that_fails_after_the_window_is_copied_too(memory, make_trainer, caplog):
    callback = ForgeProfilerCallback(1, 2, trace_dir="memory://traces", analyze=False, tensorboard=False)
    with pytest.raises(ValueError, match="mine"):
        make_trainer(callback).fit(Fails(15, ValueError("mine")), loader(80))
    report = callback.trace_report()
    if report.pending:  # on a busy machine, as nothing waits long for a trace while a fit fails
        assert any(
            "not in memory://traces/" in warning and str(report.path.parent) in warning
            for warning in warnings_of(caplog)
        )
    else:
        assert memory() == [f"/{report.url.removeprefix('memory://')}/rank0.trace.json.gz"]


def test_a_place_that_is_not_known_is_refused_before_the_first_batch(make_trainer):
    model = Classifier()
    trainer = make_trainer(ForgeProfilerCallback(1, 2, trace_dir="nowhere://bucket"))
    with pytest.raises(ConfigurationError, match=r"Nothing can be copied to 'nowhere://bucket'.*Protocol not known"):
        trainer.fit(model, loader(16))
    assert model.seen == 0


class Gone(MemoryFileSystem):
    """A bucket that was deleted meanwhile."""

    protocol = "gone"

    def put_file(self, *args, **kwargs):
        raise PermissionError("403 Forbidden")


def test_a_copy_that_fails_costs_one_warning_which_says_where_the_files_are(make_trainer, caplog, capsys, staging):
    fsspec.register_implementation("gone", Gone, clobber=True)
    callback, model = ForgeProfilerCallback(1, 2, trace_dir="gone://bucket"), Classifier()
    make_trainer(callback, every_step(warmup_steps=0)).fit(model, loader(32))
    report = callback.trace_report()
    assert (model.seen, report.url) == (8, "")
    [warning] = warnings_of(caplog)
    assert re.search(r"could not be copied to gone://bucket/\S+ \(PermissionError: 403 Forbidden\)", warning)
    assert warning.endswith(f"They are in {report.path.parent}")
    assert {file.name for file in finished_files(report.path.parent)} == WINDOW
    out = capsys.readouterr().out
    assert tables(out) == 1
    assert "copied to" not in out


def test_a_copy_that_hangs_is_not_waited_for(tmp_path, caplog):
    hangs = threading.Event()

    class Hangs(MemoryFileSystem):
        protocol = "hangs"

        def put_file(self, *args, **kwargs):
            hangs.wait()

    fsspec.register_implementation("hangs", Hangs, clobber=True)
    (tmp_path / "rank0.jsonl").write_text("{}")
    try:
        assert not upload(tmp_path, "hangs://bucket", limit_s=0.05)
    finally:
        hangs.set()
    [warning] = warnings_of(caplog)
    assert "(TimeoutError: not done within 0.05 s)" in warning
    assert str(tmp_path) in warning


def test_a_ranks_files_and_the_others_are_told_apart(tmp_path):
    names = ("rank0.jsonl", "rank1.jsonl", "rank1.1.jsonl", "rank10.jsonl", "summary.json", "tensorboard/rank1.pt.json")
    hidden = (".rank1.raw/x.json", "tensorboard/rank1.pt.json.part")
    for name in (*names, *hidden):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(*arguments, **options):
        return {str(path.relative_to(tmp_path)) for path in finished_files(tmp_path, *arguments, **options)}

    assert found() == set(names)
    assert found(1, others=False) == {"rank1.jsonl", "rank1.1.jsonl"}
    assert found(0) == {"rank0.jsonl", "summary.json", "tensorboard/rank1.pt.json"}


# -- local folders in other words --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_url_is_a_local_folder(tmp_path, make_trainer):
    by_argument = ForgeProfilerCallback(1, 2, trace_dir=f"file://{tmp_path}/mine")
    make_trainer(by_argument).fit(Classifier(), loader(16))
    by_logger = ForgeProfilerCallback(1, 2)
    make_trainer(by_logger, logger=CSVLogger(f"file://{tmp_path}/logs", name="gpt")).fit(Classifier(), loader(16))
    assert by_argument.trace_report().path.parents[1] == tmp_path / "mine"
    assert by_logger.trace_report().path.parents[1] == tmp_path / "logs" / "gpt" / "version_0" / "profiler_traces"
    assert not (tmp_path / "file:").exists()


@pytest.mark.slow
def test_a_tilde_is_the_home_folder(tmp_path, make_trainer, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    by_argument = ForgeProfilerCallback(1, 2, trace_dir="~/mine")
    make_trainer(by_argument).fit(Classifier(), loader(16))
    by_logger = ForgeProfilerCallback(1, 2)
    make_trainer(by_logger, logger=CSVLogger("~/logs", name="gpt")).fit(Classifier(), loader(16))
    assert {trace.parents[1] for trace in traces(tmp_path / "home")} == {
        tmp_path / "home" / "mine",
        tmp_path / "home" / "logs" / "gpt" / "version_0" / "profiler_traces",
    }
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("name", "path", "url"),
    [
        ("/data/runs", "/data/runs", ""),
        ("file:///data/runs", "/data/runs", ""),
        ("file:/data/runs", "/data/runs", ""),
        ("local:///data/runs", "/data/runs", ""),
        (Path("/data/s3:/x"), "/data/s3:/x", ""),
        ("s3://bucket/runs/", None, "s3://bucket/runs"),
        ("simplecache::gs://bucket/../runs", None, "simplecache::gs://bucket/../runs"),
    ],
)
def test_a_name_is_read_as_lightning_reads_it(name, path, url, staging):
    folder = folder_of(name)
    assert folder.url == url
    if path is None:
        assert folder.path.is_relative_to(staging)
        assert ".." not in folder.path.parts
    else:
        assert folder.path == Path(path)


def test_plain_pytorch_takes_a_file_url_and_refuses_a_remote_folder(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(2, 2).mm(torch.ones(2, 2))
    for use in (
        lambda folder: build_profiler(ProfilingConfig(enable=True, trace_dir=folder)),
        lambda folder: print_profiler_summary(prof, folder),
    ):
        with pytest.raises(ConfigurationError, match="trace_dir 's3://bucket/x' is not on this machine"):
            use("s3://bucket/x")
    print_profiler_summary(prof, f"file://{tmp_path}/mine")
    assert (tmp_path / "mine" / "report.html").is_file()


@pytest.mark.slow
def test_two_ranks_copy_each_its_own(tmp_path):
    done = script("remote_ranks.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        *REPORTS,
        *(f"rank{rank}{kind}" for rank in (0, 1) for kind in (".trace.json.gz", ".pt.trace.json.gz", ".summary.json")),
    }
    assert len({path.parent for path in files if path.parent.name != "tensorboard"}) == 1
    [summary] = [path for path in files if path.name == "summary.json"]
    assert [rank["rank"] for rank in json.loads(summary.read_text())["ranks"]] == [0, 1]
    assert tables(done.stdout) == 1
