"""`build_profiler` in a plain PyTorch loop, and the process that finishes its trace."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.finish import analyze, publish
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler
from lightning_forge_profiling.profiler.config import Phase, StepWindow
from tests.outcomes import HANGS_S, REPORTS, wait_for_processes_of


def train(profiler, steps, fails_in=None):
    with profiler:
        for step in range(steps):
            (torch.ones(16, 16) @ torch.ones(16, 16)).sum()
            if step == fails_in:
                raise RuntimeError("mine")
            profiler.step()
    return profiler.report


def read(report):
    return json.loads(gzip.decompress(report.path.read_bytes()))


def annotated(report):
    names = {event.get("name", "") for event in read(report)["traceEvents"] if event.get("ph") == "X"}
    return sorted(int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#"))


@pytest.mark.parametrize(
    ("window", "phases"),
    [
        (StepWindow(5, 8), ["wait"] * 4 + ["warm-up"] + ["record"] * 3 + ["done"] * 2),
        (StepWindow(1, 2), ["warm-up", "record", "done"]),
        (StepWindow(0, 1), ["record", "done"]),
    ],
)
def test_a_window_is_half_open_with_one_warm_up_step_before_it(window, phases):
    assert [window.phase(step) for step in range(len(phases))] == [Phase(phase) for phase in phases]


@pytest.mark.slow
@pytest.mark.parametrize("window", [(2, 5), (1, 2), (0, 2)])
def test_exactly_the_window_is_recorded(tmp_path, window):
    config = ProfilingConfig(enable=True, start_step=window[0], end_step=window[1], trace_dir=tmp_path)
    report = train(build_profiler(config), steps=8)
    assert report.status == "written"
    assert annotated(report) == list(report.steps) == list(range(*window))
    assert read(report)["forge_profiling"]["recorded_steps"] == list(range(*window))
    assert report.plugin_path.exists()
    assert report.stall_ms > 0
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "rank0.trace.json.gz",
        "rank0.pt.trace.json.gz",
        *REPORTS,
    }
    assert report.report_path == report.path.parent / "report.html"
    [rank] = json.loads(report.summary_path.read_text())["ranks"]
    assert [step["number"] for step in rank["per_step"]] == list(range(*window))


def test_it_is_none_when_it_is_not_enabled_and_nothing_is_checked():
    assert build_profiler(ProfilingConfig(start_step=9, end_step=1, trace_dir="")) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start_step": 3, "end_step": 3}, "end_step must be greater"),
        ({"start_step": -1}, "must not be negative"),
        ({"trace_dir": ""}, "trace_dir"),
        ({"activities": ["gpu"]}, "activities must name some of cpu, cuda"),
    ],
)
def test_an_enabled_configuration_checks_itself(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        ProfilingConfig(enable=True, **wrong)


def test_a_trace_dir_that_is_a_file_is_refused_before_the_loop(tmp_path):
    (tmp_path / "file").write_text("")
    config = ProfilingConfig(enable=True, trace_dir=tmp_path / "file" / "traces")
    with pytest.raises(ConfigurationError, match="is a file"):
        build_profiler(config)


@pytest.mark.slow
def test_two_runs_into_one_folder_get_a_folder_each(tmp_path):
    config = ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=tmp_path)
    first, second = (train(build_profiler(config), steps=3) for _ in range(2))
    assert [first.path.parent.name, second.path.parent.name] == ["step_1", "step_1.2"]


def test_a_window_that_is_not_reached_says_so_and_leaves_nothing(tmp_path):
    config = ProfilingConfig(enable=True, start_step=5, end_step=8, trace_dir=tmp_path)
    report = train(build_profiler(config), steps=3)
    assert report.status == "not reached"
    assert "the run ended after 3 steps" in report.message
    assert list(tmp_path.iterdir()) == []


def test_an_exception_goes_through_and_what_there_was_is_written(tmp_path):
    profiler = build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=9, trace_dir=tmp_path))
    with pytest.raises(RuntimeError, match="mine"):
        train(profiler, steps=9, fails_in=3)
    assert profiler.report.steps == (1, 2, 3)
    wait_for_processes_of(tmp_path)  # on a busy machine it may take longer than the end of a failed loop waits
    assert annotated(profiler.report) == [1, 2, 3]


@pytest.mark.slow
def test_a_training_process_that_is_killed_in_the_window_leaves_no_raw_trace(tmp_path):
    script = f"""
import os, signal, torch
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler
with build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=9, trace_dir={str(tmp_path)!r})) as profiler:
    for step in range(5):
        profiler.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, timeout=HANGS_S, check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def copies(folder, *ranks, suffix=".part"):
    for rank in ranks:
        (folder / f"rank{rank}.pt.trace.json.gz{suffix}").write_bytes(b"x")


def names(folder):
    return sorted(path.name.replace(".pt.trace.json.gz", "") for path in folder.iterdir())


def test_the_copies_of_all_ranks_appear_together(tmp_path):
    copies(tmp_path, 0)
    publish(tmp_path / "rank0.pt.trace.json.gz", [1, 0], wait_s=0)  # not the first: leaves it to the other
    assert names(tmp_path) == ["rank0.part"]
    copies(tmp_path, 1)
    publish(tmp_path / "rank1.pt.trace.json.gz", [1, 0], wait_s=0)
    assert names(tmp_path) == ["rank0", "rank1"]


def test_a_rank_that_does_not_come_is_not_waited_for_and_may_come_later(tmp_path):
    copies(tmp_path, 0)
    publish(tmp_path / "rank0.pt.trace.json.gz", [0, 1], wait_s=0)
    assert names(tmp_path) == ["rank0"]
    copies(tmp_path, 1)
    publish(tmp_path / "rank1.pt.trace.json.gz", [0, 1], wait_s=0)
    assert names(tmp_path) == ["rank0", "rank1"]


def test_an_analysis_that_fails_costs_the_reports_and_not_the_trace(tmp_path):
    (tmp_path / "step_1" / "summary.json").mkdir(parents=True)  # in its place
    report = train(build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=tmp_path)), steps=3)
    assert report.status == "written"
    assert annotated(report) == [1]
    assert report.plugin_path.exists()
    assert report.message.startswith("the trace could not be analysed: IsADirectoryError")
    assert report.report_path is None


TRACES = Path(__file__).parent / "data" / "traces" / "ddp"


def test_the_reports_are_over_the_traces_of_all_ranks(tmp_path):
    shutil.copytree(TRACES, tmp_path, dirs_exist_ok=True)
    analyze(tmp_path / "rank0.trace.json.gz", [0, 1], wait_s=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert not any("in time" in warning for warning in summary["warnings"])


def test_a_rank_whose_trace_does_not_come_is_left_out_of_the_reports_which_say_so(tmp_path):
    shutil.copy(TRACES / "rank0.trace.json.gz", tmp_path)
    analyze(tmp_path / "rank0.trace.json.gz", [0, 1], wait_s=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    assert "Without rank 1 of 2, which is missing and may be the cause" in summary["warnings"]
    assert "rank 1" in (tmp_path / "summary.md").read_text()
