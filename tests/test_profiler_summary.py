"""`print_profiler_summary` for profilers of one's own."""

import json

import pytest
import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.profiler import print_profiler_summary


def work():
    return torch.randn(64, 64) @ torch.randn(64, 64)


def test_it_prints_the_verdict_and_writes_trace_and_reports(tmp_path, capsys):
    with profile() as prof:
        work()

    analysis = print_profiler_summary(prof, tmp_path / "traces")

    printed = capsys.readouterr().out
    assert analysis.verdict in printed.lower()
    assert str(tmp_path / "traces" / "report.html") in printed.replace("\n", "")
    names = {path.name for path in (tmp_path / "traces").iterdir()}
    assert names == {"rank0.trace.json.gz", "summary.json", "summary.md", "report.html"}
    assert json.loads((tmp_path / "traces" / "summary.json").read_text())["verdict"] == analysis.verdict


def test_traces_that_a_handler_has_written_are_analysed(tmp_path):
    windows = schedule(wait=0, warmup=1, active=2, repeat=2)
    with profile(schedule=windows, on_trace_ready=tensorboard_trace_handler(str(tmp_path))) as prof:
        for _ in range(6):
            work()
            prof.step()

    analysis = print_profiler_summary(prof, tmp_path)

    assert [step.number for step in analysis.ranks[0].per_step] == [1, 2, 4, 5]


def test_other_ranks_write_their_trace_and_say_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with profile() as prof:
        work()

    assert print_profiler_summary(prof, tmp_path) is None

    assert [path.name for path in tmp_path.iterdir()] == ["rank3.trace.json.gz"]
    assert capsys.readouterr().out == ""


def test_a_trace_dir_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "a_file.py").write_text("")
    with profile() as prof:
        work()
    with pytest.raises(ConfigurationError, match="is a file"):
        print_profiler_summary(prof, tmp_path / "a_file.py")
    with pytest.raises(ConfigurationError, match="trace_dir must be a path"):
        print_profiler_summary(prof, 5)


def test_a_profiler_that_has_not_stopped_is_refused(tmp_path):
    with profile() as prof, pytest.raises(ConfigurationError, match="after its `with` block"):
        print_profiler_summary(prof, tmp_path)
    with pytest.raises(ConfigurationError, match="nothing yet"):
        print_profiler_summary(profile(), tmp_path)
