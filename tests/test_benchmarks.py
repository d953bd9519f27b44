"""The benchmarks that run contenders in fresh processes: each prints its table, and a crash is shown."""

import json
import re
import sys
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks import (
    after_window,
    analysis,
    compare_false_alarms,
    duty_cycle,
    fresh,
    ledger,
    overhead,
    own_cost,
    recording,
    short_run,
    try_scripts,
)
from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler
from tests.models import Classifier, loader


@pytest.fixture(autouse=True)
def _on_one_core_and_no_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def rows(text, names):
    found = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    return [found[name] for name in names]


@pytest.mark.slow
def test_steps_after_a_window_are_compared_with_those_before(capsys):
    asked = ["--quick", "--pairs", "1", "--workloads", "small", "--contenders", "window"]
    assert after_window.main(asked) == 0
    control, window = rows(capsys.readouterr().out, ["no window", "window"])
    assert "| 1.0000 (1.0000 to 1.0000) |" in control
    assert window.endswith("| 0, 0 |"), "two traces without kernels on a CPU"


@pytest.mark.slow
def test_the_analysis_fails_its_check_above_its_share_of_json_load(capsys, monkeypatch):
    monkeypatch.setattr(analysis, "MOST_OF_JSON_LOAD", 0.001)
    assert analysis.check(1, 1) == 1
    assert capsys.readouterr().out.count("too slow: more than 0.001 of the CPU time of `json.load`") == 1


@pytest.mark.slow
def test_false_alarms_of_compare_are_counted_on_simulated_and_on_real_runs(capsys, tmp_path):
    compare_false_alarms.simulate(2)
    rows = re.findall(r"(?m)^\| (\w+) \| (none|\+\d+ %) \| (\d) \| (\d+) \| 2 \| (.*)$", capsys.readouterr().out)
    assert {machine for machine, *_ in rows} == {"idle", "shared", "busy", "loader"}
    assert len(rows) == 60
    assert all(shares.startswith("100.0 %") for *_, slow_down, _, _, shares in rows if slow_down == "+900 %")

    for number in range(4):
        short_run.record(tmp_path / f"{number:03}", 100)
    compare_false_alarms.measure(2, tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"Real runs of 100 steps.*\nNeighbouring runs scatter by \d+\.\d %", text)
    assert re.findall(r"(?m)^\| (none|\+\d+ %) \| (\d) \| (\d) \|", text) == [
        (change, size, count) for size, count in (("1", "2"), ("2", "1")) for change in ("none", "+10 %", "+25 %")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(try_scripts.CASES.keys() - {"ddp"}))  # which starts itself again
def test_a_script_for_try_trains_and_is_timed(case, capsys):
    pytest.importorskip("transformers")
    assert try_scripts.main([case, "--small", "--steps", "18"]) == 0
    assert re.search(rf"(?m)^{case}: [\d.]+ ms a step$", capsys.readouterr().out)


@pytest.mark.slow
def test_overhead_is_compared_with_no_callback(capsys):
    asked = ["--quick", "--turns", "1", "--only", "small", "--contenders", "throughput,devicestats"]
    assert overhead.main(asked) == 0
    text = capsys.readouterr().out
    assert "DeviceStatsMonitor: skipped" in text
    control, ours = rows(text, ["no callback", "ThroughputCallback (ours)"])
    assert control.endswith("| 1.0000 (1.0000 to 1.0000) | +0.0 | - | - |")
    assert ours.endswith("of 27 |")


def test_regions_are_compared_by_mean_and_share(capsys):
    budget, every = (
        [fresh.Outcome({"regions": {"forward": ms}, "mean_ms": 4.0}), fresh.Outcome(None, "lost")] for ms in (1.0, 2.0)
    )
    overhead.print_regions(budget, every)
    [row] = rows(capsys.readouterr().out, ["forward"])
    assert row == "| forward | 1.0000 | 2.0000 | 0.5000 (0.5000 to 0.5000) | 25.0 % | 50.0 % |"


def test_switched_off_the_trainer_knows_nothing_of_us(make_trainer):
    blocks = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, *args):
            ours = any(isinstance(callback, ThroughputCallback) for callback in trainer.callbacks)
            blocks.append((ours, isinstance(trainer.profiler, BoundaryProfiler)))

    throughput, toggle = ThroughputCallback(), overhead.OnAndOff(4)
    make_trainer(throughput, Looks(), toggle, logger=False, max_steps=28).fit(Classifier(), loader(4 * 40))
    expected = [kind != overhead.OFF for kind in toggle.kinds]
    assert blocks == [(on, on) for on in expected]
    assert all(expected[4 * block] == expected[4 * block + 3] for block in range(7)), "four steps to a block"
    assert sum(expected) == 16, "the first is on, and one of every two that follow"
    assert throughput.analysis() is not None, "it ends off, and our callback hears of the end all the same"
    assert all(before.elapsed_time(after) > 0 for before, after in pairwise(toggle.ends))


def test_switching_on_and_off_reports_the_difference(tmp_path, capsys):
    overhead.measure("onoff", "small", str(tmp_path), quick=True)
    kinds = json.loads(capsys.readouterr().out.splitlines()[-1])["kinds"]
    assert sum(count for kind, (count, _) in kinds.items() if kind != overhead.OFF) == 30
    assert kinds[overhead.OFF][0] == 30


def test_the_difference_is_of_each_kind_of_step_by_how_many_there_are():
    off = [1000.0 + step % 7 for step in range(700)]
    rows, plain = [2003.0] * 20, [step + 5 for step in off]
    more, error = overhead.difference_us({overhead.OFF: off, "plain": plain[:680], "with a row": rows})
    assert more == pytest.approx((680 * 5 + 20 * 1000) / 700)
    assert 0 < error < 1
    more, _ = overhead.difference_us({overhead.OFF: off, "plain": plain[:699], "with a row": [2003.0]})
    assert more == pytest.approx((699 * 5 + 1000) / 700)


@pytest.mark.slow
def test_recording_is_compared_by_option(capsys):
    assert recording.main(["--quick", "--rounds", "1", "--models", "small"]) == 0
    shown = rows(capsys.readouterr().out, ["CPU and CUDA", "record_shapes", "shapes, memory, flops", "with_stack"])
    assert all(float(row.split(" | ")[2]) > 0 for row in shown)


@pytest.mark.slow
def test_regions_of_some_steps_are_compared_with_those_of_all(capsys):
    assert duty_cycle.main(["--quick"]) == 0
    shown = rows(capsys.readouterr().out, ["step", "forward", "backward", "optimizer"])
    assert all(float(row.split(" | ")[1]) > 0 for row in shown)
    assert shown[0].endswith("| 1.0000 | ± 0.0000 |")


@pytest.mark.slow
def test_what_we_cost_is_compared_with_no_callback(capsys):
    assert own_cost.main(["--quick", "--pairs", "1", "--cores", "1", "--together", "2"]) == 0
    none, both = rows(capsys.readouterr().out, ["none", "both callbacks"])
    assert none.split(" | ")[3] == "-", "no mean of ours"
    assert float(both.split(" | ")[3].split()[0]) > 0


def python(code, **options):
    return fresh.Child((sys.executable, "-c", code), **options)


def test_a_crash_is_shown_in_the_table_and_below_it(capsys):
    outcomes = fresh.in_turns(
        {
            "sound": python("print('noise'); print('{\"machine\": \"M\"}'); print('a summary')"),
            "broken": python("import os, sys; print('boom', file=sys.stderr); print({}); os._exit(3)"),
            "killed": python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            "silent": python("pass"),
        },
        2,
    )
    fresh.print_table("title", ["name", "a", "b"], {name: ["1", "2"] for name in outcomes}, outcomes)
    text = capsys.readouterr().out
    assert "title; M" in text
    assert "| sound | 1 | 2 |" in text
    assert "| broken | crashed (exit code 3) | - |" in text
    assert "broken, turn 2: crashed (exit code 3): boom" in text
    assert "killed, turn 1: crashed (exit code -11): nothing on stderr" in text
    assert "| silent | printed no result (exit code 0) | - |" in text
    assert fresh.failed(outcomes)


def test_a_child_that_hangs_is_ended():
    outcome = fresh.run(python("import time; time.sleep(60)", timeout_s=0.5))
    assert outcome.problem == "timed out after 0 s: nothing on stderr"


def test_a_variable_is_set_or_removed_for_the_child(monkeypatch):
    monkeypatch.setenv("REMOVED", "1")
    code = "import json, os; print(json.dumps({name: os.environ.get(name) for name in ('ADDED', 'REMOVED')}))"
    outcome = fresh.run(python(code, environment={"ADDED": "2", "REMOVED": None}))
    assert outcome.result == {"ADDED": "2", "REMOVED": None}


def test_every_other_turn_is_in_reverse_order(capsys):
    fresh.in_turns({name: python("print({})") for name in "ab"}, 2)
    order = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert order == ["turn 1, a", "turn 1, b", "turn 2, b", "turn 2, a"]


@pytest.mark.slow
def test_a_ledger_sums_to_the_wall_time_of_its_process(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert ledger.main(["--quick", "--turns", "1"]) == 0
    printed = capsys.readouterr().out
    assert {"| `steps`", "| `validation`", "| `checkpoint`"} <= {line.split(" |")[0] for line in printed.splitlines()}
    remainder = float(printed.rpartition("wall time")[0].rpartition("turn: ")[2].removesuffix(" % of its "))
    assert remainder < 0.5
