"""Python functions of the recorded steps: how long, who calls whom, and which of the user's holds a finding's time."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.terminal import print_analysis
from tests.outcomes import HANGS_S, SCRIPTS
from tests.synthetic import Synthetic

TRACE = Path(__file__).parent / "data" / "traces" / "blocking_call"
SERVER = "blocking_call.py:11 call_reward_server"


def stacks(*frames, about=None):
    """One step of 100 ms on the CPU or GPU, in which the training loop calls these functions: name, start, end."""
    trace = Synthetic(about=about)
    trace.step(0, 0, 100)
    trace.frame("train.py(90): main", -5, 105)
    trace.frame("lightning/pytorch/loops/training_epoch_loop.py(153): run", -4, 104)
    for name, start, end in frames:
        trace.frame(name, start, end)
    return trace


def tree_of(python):
    """By stack: milliseconds in all, and in the function itself."""
    paths = []
    for call in python.tree:
        paths.append((*(paths[call.caller] if call.caller >= 0 else ()), call.name))
    return {path: (call.ms_per_step, call.self_ms_per_step) for path, call in zip(paths, python.tree, strict=True)}


def test_calls_of_the_same_stack_are_one_and_their_own_times_sum_to_the_step(tmp_path):
    trace = stacks(
        ("train.py(10): training_step", 10, 70),
        ("train.py(20): score", 20, 50),
        ("<built-in function sleep>", 25, 45),
        ("<string>(2): __init__", 60, 62),
        ("train.py(20): score", 55, 60),
        ("<built-in method item of Tensor object at 0x7fa1>", 56, 57),
        ("<built-in method item of Tensor object at 0x7fa2>", 58, 59),
    )
    trace.operator("aten::add", 80, 81)
    python = trace.rank(tmp_path).python
    assert tree_of(python) == {
        ("run",): (100, 40),  # what is around it contains the step too, and tells nothing about it
        ("run", "training_step"): (60, 23),
        ("run", "training_step", "__init__"): (2, 2),
        ("run", "training_step", "score"): (35, 13),
        ("run", "training_step", "score", "sleep"): (20, 20),
        ("run", "training_step", "score", "Tensor.item"): (2, 2),
    }
    assert [(user.where, user.ms_per_step, user.own_ms_per_step, user.calls_per_step) for user in python.users] == [
        ("train.py:20 score", 35, 35, 2),
        ("train.py:10 training_step", 60, 25, 1),
    ]


def test_a_recursive_function_is_counted_once(tmp_path):
    trace = stacks(
        ("train.py(10): walk", 10, 90), ("train.py(10): walk", 20, 80), ("json/decoder.py(3): decode", 30, 40)
    )  # fmt: skip
    trace.operator("aten::add", 95, 96)
    [walk] = trace.rank(tmp_path).python.users
    assert (walk.ms_per_step, walk.own_ms_per_step) == (80, 80)


def test_validation_between_two_steps_is_in_no_function(tmp_path):
    trace = stacks(("model.py(5): forward", 10, 60))
    trace.mark("forge.validation", 40, 80)
    trace.operator("aten::add", 20, 21)
    [forward] = trace.rank(tmp_path).python.users
    assert forward.ms_per_step == 30


def test_the_innermost_function_of_the_user_that_holds_most_of_the_time_is_named(tmp_path):
    trace = stacks(
        ("src/model.py(10): training_step", 5, 95),
        ("src/client.py(30): ask", 10, 70),
        ("/usr/lib/python3.12/socket.py(700): readinto", 12, 68),
        ("src/model.py(40): small", 75, 90),
    )
    trace.operator("aten::add", 92, 94)
    analysis = analyze(trace.write(tmp_path)).analysis
    [found] = [found for found in analysis.findings if found.code == "python-bound"]
    assert "recorded with stacks, 60.0 ms of 98.0 ms are in src/client.py:30 ask" in found.title
    assert found.evidence["where"] == "src/client.py:30 ask"
    assert found.advice.startswith("Look at src/client.py:30 ask")


@pytest.mark.parametrize("about", [None, {"libraries": ["datasets"]}])
def test_a_package_that_the_trace_says_is_installed_is_not_the_users(tmp_path, about):
    trace = stacks(("train.py(7): make_batch", 10, 80), ("datasets/arrow.py(70): read", 12, 78), about=about)
    trace.operator("aten::add", 90, 91)
    spent = trace.rank(tmp_path).python.spent["python"]
    assert spent.where == ("datasets/arrow.py:70 read" if about is None else "train.py:7 make_batch")


HASH = "c" + "ab2" * 17


@pytest.mark.parametrize(
    "file",
    [
        f"/var/torchinductor_me/b2/{HASH}.py", f"/scratch/cache/b2/{HASH}.py", f"b2/{HASH}.py",
        "torch_compile_debug/run_1/torchinductor/model__0_inference_0.0/output_code.py",
        "<eval_with_key>.5", "<string>", "<frozen importlib._bootstrap>",
        "/opt/env/lib/python3.12/site-packages/someones/model.py", "/usr/lib/python3/dist-packages/someones/model.py",
        "C:\\env\\Lib\\site-packages\\someones\\model.py", "C:\\Python312\\Lib\\socket.py",
        "/usr/lib/python3.12/socket.py",
        "socket.py", "tqdm/std.py", "triton/runtime/jit.py", "transformers/models/llama/modeling_llama.py",
    ],
)  # fmt: skip
@pytest.mark.parametrize("caller", ["train.py(20): score", None])
def test_what_the_user_did_not_write_is_never_named_but_what_calls_it(tmp_path, file, caller):
    """The function of the user that is the next one outwards, for Python's time and for what waits for the GPU."""
    trace = stacks(*([(caller, 10, 80)] if caller else []), (f"{file}(30): call", 11, 79))
    trace.operator("aten::item", 20, 60)
    trace.call("cudaStreamSynchronize", 21, 59)
    trace.operator("aten::add", 85, 86)
    trace.kernel(20, 58, launched=15)
    rank = trace.rank(tmp_path)
    assert {user.where for user in rank.python.users} == ({"train.py:20 score"} if caller else set())
    assert {held.where for held in rank.python.spent.values()} <= {"train.py:20 score"}
    assert [sync.where for sync in rank.host.syncs] == ["train.py:20 score" if caller else "train.py:90 main"]


@pytest.mark.parametrize("file", ["/var/ipykernel_12/3456.py", "<ipython-input-3-ab>", "<stdin>", "models/cab.py"])
def test_a_cell_of_a_notebook_is_the_users(tmp_path, file):
    trace = stacks((f"{file}(30): call", 10, 80))
    trace.operator("aten::add", 85, 86)
    assert [user.where for user in trace.rank(tmp_path).python.users] == [f"{file}:30 call"]


def test_nothing_is_named_where_no_function_holds_half_of_the_time(tmp_path):
    trace = stacks(("train.py(10): training_step", 5, 45))
    trace.operator("aten::add", 92, 94)
    analysis = analyze(trace.write(tmp_path)).analysis
    assert analysis.verdict == "python-bound"
    assert "where" not in analysis.findings[0].evidence
    assert "with_stack" not in analysis.findings[0].advice, "they were recorded"


@pytest.mark.parametrize(("each_ms", "code"), [(70, "gpu-idle"), (5, "launch-bound")])
def test_a_gpu_that_waits_for_python_is_told_in_which_function(tmp_path, each_ms, code):
    trace = stacks(("train.py(10): training_step", 2, 98), ("train.py(20): tokenize", 15, 85))
    for start in (5, *range(20 + each_ms, 90, each_ms), 90):
        trace.operator("aten::mm", start, start + 3)
        trace.kernel(start + 2, start + 6, launched=start + 1)
    analysis = analyze(trace.write(tmp_path)).analysis
    [found] = [found for found in analysis.findings if found.code == code]
    assert found.evidence["where"] == "train.py:20 tokenize"
    assert found.advice.startswith("Look at train.py:20 tokenize first")
    assert found.evidence["recorded_there_ms_per_step"] > (69.9 if each_ms > 5 else 10)


def test_without_stacks_the_advice_is_how_to_record_them(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.operator("aten::add", 92, 94)
    analysis = analyze(trace.write(tmp_path)).analysis
    assert analysis.ranks[0].python is None
    assert "forge-profiling run --stacks" in analysis.findings[0].advice
    assert "Your functions" not in markdown(analysis)


# -- a real step: training_step waits 20 ms in one function, the loader 5 ms in another


def test_a_real_blocking_call_is_named_in_verdict_and_reports(capsys):
    analysis = analyze(TRACE).analysis
    assert analysis.verdict == "python-bound"
    assert SERVER in analysis.verdict_text
    by_code = {found.code: found.evidence["where"] for found in analysis.findings}
    assert by_code == {"python-bound": SERVER, "input-bound": "blocking_call.py:20 make_batch"}
    report = markdown(analysis)
    assert f"| `{SERVER}` | 20." in report
    print_analysis(analysis)
    assert f"functions   {SERVER} 20." in " ".join(capsys.readouterr().out.splitlines())
    assert "which slow each Python call" in report


def test_times_are_those_of_the_events():
    events = json.loads(gzip.decompress((TRACE / "rank0.trace.json.gz").read_bytes()))["traceEvents"]
    steps = {
        event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "ProfilerStep" in event["name"]
    }
    _, second, third = sorted(steps.values())  # of few steps the first does not count
    calls = [event for event in events if event["name"].endswith("call_reward_server")]
    counted = [event["dur"] / 1e3 for event in calls if second[0] <= event["ts"] < third[1]]
    [rank] = analyze(TRACE).analysis.ranks
    [server] = [user for user in rank.python.users if user.where == SERVER]
    assert server.ms_per_step == pytest.approx(sum(counted) / 2, abs=1e-3)

    callees = dict.fromkeys(range(len(rank.python.tree)), 0.0)
    for call in rank.python.tree:
        if call.caller >= 0:
            callees[call.caller] += call.ms_per_step
    assert len(rank.python.tree) <= 200
    assert sum(call.ms_per_step for call in rank.python.tree if call.caller < 0) == pytest.approx(
        rank.step_ms.mean, rel=0.01
    )
    for place, call in enumerate(rank.python.tree):
        assert call.caller < place
        assert call.self_ms_per_step + callees[place] <= call.ms_per_step + 1e-6


@pytest.mark.slow
def test_run_records_stacks_for_an_unchanged_script(tmp_path):
    arguments = ["--stacks", "--window", "8:11"]
    command = [sys.executable, "-m", "lightning_forge_profiling", "run", *arguments, SCRIPTS / "blocking_call.py", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [summary] = tmp_path.rglob("summary.json")
    analysis = read_summary(summary)
    assert SERVER in {user.where for user in analysis.ranks[0].python.users}
    named = [found.evidence.get("where", found.evidence.get("line", "")) for found in analysis.findings]
    assert "call_reward_server" in " ".join(named), "by stacks, or by samples of live steps"
    assert "flameGraph(" in summary.with_name("report.html").read_text(encoding="utf-8")


def test_stacks_without_a_window_are_refused(tmp_path):
    command = [sys.executable, "-m", "lightning_forge_profiling", "run", "--stacks", "--no-window", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "--stacks and --no-window exclude each other" in done.stderr
