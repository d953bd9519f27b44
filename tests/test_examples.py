"""The examples run as their users run them, and leave what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_forge_profiling.report.text import digits
from tests.outcomes import HANGS_S, PARTITION, read_trace, recorded_steps, tables, traces

CHECKOUT = Path(__file__).parents[1]


def example(name, *options, cwd):
    """Run an example in a folder of its own; returns what it printed."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "examples" / name), *map(str, options)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A short run of train_gpt.py: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("gpt")
    options = ("--steps", 14, "--batch-size", 2, "--context", 32, "--accelerator", "cpu", "--out", "runs")
    return folder, example("train_gpt.py", *options, cwd=folder)


@pytest.mark.slow
def test_train_gpt_prints_one_table_whose_regions_add_up(gpt):
    folder, out = gpt
    assert tables(out) == 1
    shares = dict(re.findall(r"^(your attention|\w+) +[█-▏]* +([\d.]+) %(?: +[\d.]+|$)", out, re.MULTILINE))
    attention = float(shares.pop("your attention"))
    assert {"forward", "backward", "optimizer"} <= set(shares) <= {*PARTITION, "rest"}
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.05 * len(PARTITION) + 1e-9)
    assert 0 < attention < float(shares["forward"]) + float(shares["backward"])
    [summary] = folder.rglob("summary.json")
    run = json.loads(summary.read_text())["run"]
    total = sum(run["regions"][region]["device_ms"] for region in PARTITION)
    assert total == pytest.approx(run["step_ms"]["mean"])
    mean = digits(run["step_ms"]["mean"])
    assert f"Where a step goes: {mean} ms, mean of {run['steps']} of 14 steps on cpu, longest " in out
    assert "4 steps with the profiler on" in out
    assert re.search(r"^compute +[\d.]+ TFLOP/s per device, MFU unknown", out, re.MULTILINE)


def test_train_gpt_leaves_its_trace_where_the_table_says(gpt):
    folder, out = gpt
    [path] = traces(folder)
    assert path.parents[1] == folder / "runs" / "gpt" / "version_0" / "profiler_traces"
    assert f"{path.parent.relative_to(folder)}/report.html\n" in out
    assert f"{path.name} beside it: 3 steps, " in out
    assert recorded_steps(read_trace(path)) == [5, 6, 7]
    assert [copy.parent for copy in folder.rglob("*.pt.trace.json.gz")] == [path.parent / "tensorboard"]


def test_train_gpt_logs_for_tensorboard(gpt):
    folder, _ = gpt
    scalars = EventAccumulator(str(folder / "runs" / "gpt" / "version_0")).Reload()
    found = set(scalars.Tags()["scalars"])
    assert {"throughput/samples_per_sec", "throughput/tokens_per_sec", "time/step_ms", "time/attention_ms"} <= found


@pytest.mark.slow
def test_plain_loop_records_its_window_and_the_run(tmp_path):
    options = [str(CHECKOUT / "examples" / "plain_loop.py"), "--steps", "20", "--out", "runs"]
    done = subprocess.run(
        [sys.executable, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    assert tables(done.stderr) == 1
    [path] = traces(tmp_path / "runs")
    assert recorded_steps(read_trace(path)) == [5, 6, 7]
    assert {"rank0.jsonl"} == {each.name for each in (tmp_path / "runs" / "forge_record").iterdir()}


@pytest.mark.slow
def test_plain_pytorch_harvests_its_times_and_records_its_window(tmp_path):
    out = example("plain_pytorch.py", "--steps", 14, "--out", "traces", cwd=tmp_path)
    assert out.startswith("mean of 4 steps")
    assert "; 0 intervals dropped" in out
    times = dict(re.findall(r"^(\w+) +([\d.]+) ms$", out, re.MULTILINE))
    assert list(times) == ["forward", "backward", "optimizer"]
    assert all(float(ms) > 0 for ms in times.values())
    path = tmp_path / "traces" / "steps_5-7" / "rank0.trace.json.gz"
    assert f"trace: {path}" in out
    assert recorded_steps(read_trace(path)) == [5, 6, 7]


@pytest.mark.slow
def test_plain_pytorch_says_so_when_its_window_never_came(tmp_path):
    out = example("plain_pytorch.py", "--steps", 3, "--out", "traces", cwd=tmp_path)
    assert "trace: the run ended after 3 steps, before steps 5-7" in out
    assert traces(tmp_path) == []


@pytest.mark.slow
def test_analyze_trace_finds_the_slow_loader_of_its_loop(tmp_path):
    out = example("analyze_trace.py", "--out", "here", cwd=tmp_path)
    assert re.search(r"^verdict {4}input-bound$", out, re.MULTILINE)
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert summary["verdict"] == "input-bound"
    assert summary["ranks"][0]["steps"] == 2
    assert recorded_steps(read_trace(tmp_path / "here" / "rank0.trace.json.gz")) == [5, 6, 7]
    assert {"report.html", "summary.md"} <= {path.name for path in (tmp_path / "here").iterdir()}
