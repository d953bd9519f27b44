"""The examples run as their users run them, and leave what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.report.wording import digits
from tests.outcomes import HANGS_S, PARTITION, read_trace, recorded_steps, summary_of, tables, traces

CHECKOUT = Path(__file__).parents[1]


def started(name, *options, cwd):
    """Run an example in a folder of its own."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "examples" / name), *map(str, options)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )


def example(name, *options, cwd):
    """Run an example in a folder of its own; returns what it printed."""
    done = started(name, *options, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A shorter `make demo`: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, example("demo.py", "--steps", 120, "--accelerator", "cpu", cwd=folder)


def summary(folder, side, version=0):
    """What the demo's run found."""
    [path] = (folder / "demo_runs" / side / f"version_{version}").rglob("summary.json")
    return json.loads(path.read_text())


def gain(out):
    """What the demo says of the gain: predicted and measured milliseconds, the step before and after."""
    predicted, measured = re.search(
        r"^predicted: at most ([\d.]+) ms saved .*; measured: (-?[\d.]+) ms", out, re.MULTILINE
    ).groups()
    before, after = re.search(r"^A step took ([\d.]+) ms, .*; now ([\d.]+) ms", out, re.MULTILINE).groups()
    return [float(ms) for ms in (predicted, measured, before, after)]


@pytest.mark.slow
def test_the_demo_finds_its_slow_loader_and_trains_faster_with_the_workers_that_it_advises(demo):
    folder, out = demo
    before, after = summary(folder, "before"), summary(folder, "after")
    finding = next(finding for finding in before["findings"] if finding["code"] not in MACHINE)
    assert finding["code"] == "input-bound"
    assert before["verdict"] in {"input-bound", *MACHINE}, "on a busy machine that comes first"
    assert "time.sleep(0.002) at demo.py:42" in finding["title"]
    assert finding["evidence"]["line"] == "demo.py:42 Photos.__getitem__"
    workers = finding["evidence"]["try_num_workers"]
    assert f"num_workers={workers} and persistent_workers=True" in finding["advice"]
    assert f"\n2. Apply the fix of input-bound: num_workers={workers}, persistent_workers=True\n" in out
    used = [side["run"]["settings"]["loader"]["num_workers"] for side in (before, after)]
    assert used == [0, workers]
    waits = [side["run"]["timing"]["regions"]["data"]["host_ms"] for side in (before, after)]
    assert waits[1] < waits[0]
    predicted, measured, step_before, step_after = gain(out)
    assert predicted == pytest.approx(finding["saves"]["ms_per_step"], abs=0.05)
    assert step_before == pytest.approx(before["run"]["timing"]["step_ms"]["mean"], abs=0.05)
    assert step_after == pytest.approx(after["run"]["timing"]["step_ms"]["mean"], abs=0.05)
    assert measured == pytest.approx(step_before - step_after, abs=0.11)
    assert step_after < step_before
    assert re.search(r"^step, mean ms +[\d.]+ +[\d.]+ +-\d+ %", out, re.MULTILINE), "the table of compare"


@pytest.mark.slow
def test_the_demo_ends_with_try_which_finds_the_same_fix_by_itself(demo):
    folder, out = demo
    ends = out.partition("\n$ forge-profiling try --yes --budget 1m --only workers ")[2]
    bound = "(input-bound|cpu-starved)$"  # as on a busy machine
    assert re.search(rf"^baseline +\d runs? of \d+ steps: [\d.]+ ms a step .* {bound}", ends, re.MULTILINE)
    assert re.search(r"^try 1 +num_workers=\d+, persistent_workers=True +[\d.]+ ms", ends, re.MULTILINE)
    assert [*folder.glob("forge_trials/*/try.json")], "its record"
    assert {path.name for path in folder.glob("demo_runs/*/*")} == {"version_0"}, "the trials log nothing"


@pytest.mark.slow
@pytest.mark.real_time
def test_the_gain_of_the_demo_is_the_predicted_one(demo):
    predicted, measured, *_ = gain(demo[1])
    assert measured == pytest.approx(predicted, rel=0.5)


@pytest.mark.slow
def test_a_second_demo_in_the_same_folder_compares_its_own_runs(demo):
    folder, _ = demo
    out = example("demo.py", "--steps", 60, "--accelerator", "cpu", cwd=folder)
    assert "$ forge-profiling compare demo_runs/before/version_1 demo_runs/after/version_1\n" in out
    assert gain(out)[2] == pytest.approx(summary(folder, "before", 1)["run"]["timing"]["step_ms"]["mean"], abs=0.05)


@pytest.mark.slow
def test_a_demo_that_is_too_short_for_a_prediction_says_so_and_fails(tmp_path):
    done = started("demo.py", "--steps", 12, "--accelerator", "cpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "No prediction: it takes more --steps" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo_runs" / "after").exists()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A short run of train_gpt.py: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("gpt")
    options = ("--steps", 14, "--batch-size", 2, "--context", 32, "--accelerator", "cpu", "--out", "runs")
    return folder, example("train_gpt.py", *options, cwd=folder)


@pytest.mark.slow
def test_train_gpt_prints_one_table_whose_regions_add_up(gpt):
    folder, printed = gpt
    assert tables(printed) == 1
    out = summary_of(folder)
    shares = dict(re.findall(r"^(your attention|\w+) +[█-▏]* +([\d.]+) %(?: +[\d.]+|$)", out, re.MULTILINE))
    attention = float(shares.pop("your attention"))
    assert {"forward", "backward", "optimizer"} <= set(shares) <= {*PARTITION, "rest"}
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.05 * len(PARTITION) + 1e-9)
    assert 0 < attention < float(shares["forward"]) + float(shares["backward"])
    [summary] = folder.rglob("summary.json")
    run = json.loads(summary.read_text())["run"]["timing"]
    total = sum(run["regions"][region]["device_ms"] for region in PARTITION)
    assert total == pytest.approx(run["step_ms"]["mean"])
    mean = digits(run["step_ms"]["mean"])
    assert f"Where a step of GPT goes: {mean} ms, mean of {run['steps']} of 14 steps on cpu, longest " in out
    assert "4 steps with the profiler on" in out
    assert re.search(r"^compute +[\d.]+ TFLOP/s per device, MFU unknown", out, re.MULTILINE)


@pytest.mark.slow
def test_train_gpt_leaves_its_trace_where_the_table_says(gpt):
    folder, out = gpt
    [path] = traces(folder)
    assert path.parents[1] == folder / "runs" / "gpt" / "version_0" / "profiler_traces"
    assert "more        forge-profiling view runs/gpt/version_0\n" in out
    assert recorded_steps(read_trace(path)) == [5, 6, 7]
    assert [copy.parent for copy in folder.rglob("*.pt.trace.json.gz")] == [path.parent / "tensorboard"]


@pytest.mark.slow
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
