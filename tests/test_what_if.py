"""Recorded steps played again: unchanged they take their time, and changed what the change leaves."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_forge_profiling.analysis import fixes
from lightning_forge_profiling.analysis.fixes import ReplaySteps
from lightning_forge_profiling.analysis.recording import prepared, with_steps
from lightning_forge_profiling.analysis.replay import Graph, error_pct, play, step_ns, together
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.pipeline import analyze, counted_steps
from lightning_forge_profiling.what_if import MOST_ERROR_PCT, predict, replayed_trace
from tests.synthetic import Synthetic

TRACES = Path(__file__).parent / "data/traces"
CASES = sorted(
    path.name for path in TRACES.iterdir() if path.is_dir() and path.name not in {"blocking_call", "cpu_mlp"}
)


def recorded(path):
    recording = prepared(read_trace(path))
    recording = with_steps(recording, counted_steps(recording, from_the_start=True))
    return ReplaySteps(recording, Graph.of(recording))


def ranks_of(case):
    return [recorded(path) for path in sorted((TRACES / case).glob("rank*.gz"))]


@pytest.mark.parametrize("case", CASES)
def test_steps_that_are_played_unchanged_take_as_long_as_recorded(case):
    ranks = ranks_of(case)
    recorded_ns = [steps.graph.recorded_ns.mean() for steps in ranks]
    assert [step_ns([steps.graph]) for steps in ranks] == pytest.approx(recorded_ns, rel=MOST_ERROR_PCT / 100)
    # of several ranks together, with the collectives of the one that waited least
    together_ns = step_ns(together([steps.graph for steps in ranks]))
    assert together_ns == pytest.approx(max(recorded_ns), rel=MOST_ERROR_PCT / 100)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_means_of_every_other_step_take_as_long_as_those_did(case):
    errors = [error_pct(steps.graph, steps.recording.trace.calls.name) for steps in ranks_of(case)]
    assert all(error is None or abs(error) <= MOST_ERROR_PCT for error in errors)
    assert case == "sync_stack" or None not in errors, "which has a single step that counts"


@pytest.mark.parametrize("case", CASES)
def test_a_played_step_is_a_trace_with_the_same_work(case):
    [steps, *_] = ranks_of(case)
    [played] = play([steps.graph])
    trace = replayed_trace(steps, played)
    again = Graph.of(prepared(trace))
    assert len(again.call) == len(steps.graph.call)
    assert len(again.work) == len(steps.graph.work)
    assert again.runs.sum() == steps.graph.runs.sum()
    assert step_ns([again]) == pytest.approx(step_ns([steps.graph]), rel=0.02)


# -- what a change leaves, by hand -------------------------------------------------------------------------------------


@pytest.fixture
def host_bound(tmp_path):
    """Steps of 10 ms: `slow` takes 4 ms and launches 1 ms of work, `mine` takes 3, launches 1 ms and waits for it."""
    trace = Synthetic()
    for step in range(4):
        start = 10 * step
        trace.step(step, start, start + 10)
        trace.operator("slow", start + 0.5, start + 4.5)
        trace.kernel(start + 4.1, start + 5.1, launched=start + 4, name="gemm_a")
        trace.operator("mine", start + 5, start + 8)
        trace.kernel(start + 6.1, start + 7.1, launched=start + 6, name="elementwise_kernel")
        trace.call("cudaStreamSynchronize", start + 6.2, start + 7.2)
    return trace.write(tmp_path)


def after_ms(path, *changes):
    return predict(path, changes).after_ms


def test_an_operator_that_is_dropped_takes_its_time_and_its_work_along(host_bound):
    assert after_ms(host_bound) == pytest.approx(10, abs=0.01)
    assert after_ms(host_bound, fixes.without_operators("slow")) == pytest.approx(6, abs=0.05)
    found = predict(host_bound, [fixes.without_operators("mine")])
    assert found.after_ms == pytest.approx(7, abs=0.05)
    [rank] = found.analysis.ranks
    assert rank.gpu.kernels_per_step == 1
    assert "mine" not in {operator.name for operator in rank.operators}


def test_without_its_wait_the_host_goes_on(host_bound):
    # the wait of 1 ms is gone; the last launch, 6 ms after the step's begin, sets the pace
    assert after_ms(host_bound, fixes.without_syncs) == pytest.approx(9, abs=0.05)


def test_without_reads_the_operators_that_wait_are_gone_and_copies_to_the_gpu_stay():
    [steps] = ranks_of("sync_item")
    changed = fixes.without_reads(steps)
    trace = replayed_trace(changed, play([changed.graph])[0])
    names = {trace.names[name] for name in np.unique(trace.operators.name)}
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}
    copies = [trace.names[name] for name in trace.gpu.name.tolist() if "Memcpy" in trace.names[name]]
    assert copies
    assert all("HtoD" in name or "DtoD" in name for name in copies)
    assert step_ns([changed.graph]) < step_ns([fixes.without_syncs(steps).graph])


def test_work_that_takes_longer_than_the_host_sets_the_pace(host_bound):
    # 4.1 ms until it begins, 30 of it, 1 of the other work, 0.1 until the wait for that returns, 2.8 to the step's end
    assert after_ms(host_bound, fixes.scaled(["matmul"], 30.0)) == pytest.approx(38, abs=0.05)
    assert after_ms(host_bound, fixes.without_syncs, fixes.scaled(["matmul"], 30.0)) == pytest.approx(31, abs=0.05)


def test_where_the_gpu_sets_the_pace_the_host_may_be_any_that_is_faster_than_recorded(tmp_path):
    trace = Synthetic()
    for step in range(4):
        start = 10 * step
        trace.step(step, start, start + 10)
        trace.operator("slow", start, start + 4)
        trace.kernel(start + 4.01, start + 14, launched=start + 4, name="gemm_a")
    found = predict(trace.write(tmp_path), [fixes.scaled(["matmul"], 0.01)], live_ms=10.0)
    assert found.hosts == (0.7, 0.55, 0.4)
    # the host's 10 ms, of which it was ahead for none: at 0.4 to 0.7 of their time
    assert (found.low_ms, found.high_ms) == (pytest.approx(4, abs=0.2), pytest.approx(7, abs=0.2))
    assert found.low_ms < found.after_ms < found.high_ms


def test_a_wait_for_data_is_taken_out(tmp_path):
    trace = Synthetic()
    for step in range(4):
        start = 10 * step
        trace.step(step, start, start + 10)
        trace.mark("forge.data", start, start + 6)
        trace.kernel(start + 7, start + 9, launched=start + 6.9)
    found = predict(trace.write(tmp_path), [fixes.without_region("data")])
    assert found.after_ms == pytest.approx(4, abs=0.05)
    assert found.low_ms <= found.after_ms <= found.high_ms


# -- real ranks --------------------------------------------------------------------------------------------------------


def test_ranks_that_are_equal_no_longer_wait_for_each_other():
    found = predict(TRACES / "slow_rank_host", [], equal_ranks=True)
    assert found.ranks == 2
    # rank 1 computes in Python for 15 ms of each step; on its own rank 0 would take 12 to 15
    assert found.recorded_ms - found.after_ms == pytest.approx(13, abs=2)
    assert "straggler" not in {finding.code for finding in found.analysis.findings}


def test_a_rank_that_is_late_is_so_too_when_the_steps_are_played():
    """The others are ready for a collective before it, and wait in it: their GPUs are not idle."""
    found = predict(TRACES / "slow_rank_gpu", [fixes.scaled(["softmax"], 0.99)])
    assert found.analysis.verdict == "straggler"
    recorded = analyze(TRACES / "slow_rank_gpu").analysis
    played, waited = (sum(wait.wait_ms_per_step for wait in of.rank_waits) for of in (found.analysis, recorded))
    assert played == pytest.approx(waited, rel=0.1)


def test_a_change_of_nothing_saves_nothing_with_whatever_host():
    found = predict(TRACES / "slow_rank_gpu", [fixes.without_allocations])
    assert len(found.hosts) > 1
    assert found.after_ms == found.before_ms
    assert "that changes nothing in these steps" in found.notes


def test_communication_that_is_overlapped_is_not_waited_for():
    found = predict(TRACES / "ddp_big_grads", [fixes.overlapped])
    assert found.after_ms < found.recorded_ms - 2
    assert found.analysis is None, "what it then hides behind is not in the trace"


def test_the_update_as_one_launch_saves_what_was_measured():
    """8.8 ms before and 4.8 with a fused optimizer, on an H200."""
    found = predict(TRACES / "slow_optimizer", [fixes.as_graphs("optimizer")])
    assert found.after_ms == pytest.approx(4.8, rel=0.1)


# -- what the host takes without recording -----------------------------------------------------------------------------


def test_a_host_that_recording_slowed_is_played_as_fast_as_the_run(host_bound):
    # 9 of 10 ms are the host's own, and 1 ms waits for the GPU
    found = predict(host_bound, [fixes.without_operators("slow")], live_ms=5.5)
    assert found.before_ms == pytest.approx(5.5, rel=0.02)
    assert found.after_ms == pytest.approx(1 + 0.5 * 5, abs=0.1)


@pytest.mark.parametrize("live_ms", [10.05, 12.0, 1.0])
def test_a_step_that_the_host_does_not_explain_is_played_as_recorded(host_bound, live_ms):
    found = predict(host_bound, [fixes.without_operators("slow")], live_ms=live_ms)
    assert (found.before_ms, found.after_ms) == (pytest.approx(10, abs=0.01), pytest.approx(6, abs=0.05))


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_says_the_step_and_what_bounds_it_then(capsys):
    assert main(["what-if", str(TRACES / "input_bound"), "--without", "data"]) == 0
    out = capsys.readouterr().out
    assert "recorded   40.22 ms a step, mean of 2; played again unchanged 40.25 ms\n" in out
    assert f"trace      {TRACES / 'input_bound/rank0.trace.json.gz'}, steps 13 to 14\n" in out
    assert "live       unknown, so the host is played as recorded" in out
    assert "changed    without waits for data\n" in out
    assert "then       15.00 ms" in out
    assert "and then   launch-bound: " in out


def test_the_command_as_json(capsys):
    arguments = ["--drop", "aten::item", "--graphs", "backward", "--scale", "matmul=0.5", "--overlap-comm", "--json"]
    assert main(["what-if", str(TRACES / "sync_item"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["changes"]) == 4
    assert found["after_ms"] < found["recorded_ms"]
    assert found["verdict"] is None


def test_a_device_of_which_no_float32_peak_is_known_has_a_prediction_for_tf32(tmp_path):
    trace = Synthetic(device="NVIDIA H20")
    for step in range(4):
        start = 10 * step
        trace.step(step, start, start + 10)
        trace.operator("aten::mm", start, start + 0.1, dims=[[4096, 4096], [4096, 4096]], types=["float", "float"])
        trace.kernel(start + 0.05, start + 9.95, launched=start + 0.02, name="sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n")
    found = predict(trace.write(tmp_path), [fixes.in_bf16])
    assert found.after_ms == pytest.approx(0.1 + 9.9 * 1.3 * 74 / 148, abs=0.2)  # by the peaks, and casts


def test_bf16_shortens_products_by_the_peaks(capsys):
    assert main(["what-if", str(TRACES / "pinned_copies"), "--bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # the copies take 9.7 ms and stay; 8.8 ms of products in float32 take 0.6 at 67.0 of 989.5 TFLOP/s, and casts 0.2
    assert (found["before_ms"], found["after_ms"]) == (pytest.approx(19.78, abs=0.05), pytest.approx(10.94, abs=0.05))
    assert found["verdict"] == "transfer-bound"
    assert "67 TFLOP/s in fp32 and 990 in bf16" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "said", "unsaid"),
    [
        (["light_compute_bound", "--bf16"], "% of the bf16 peak", "tf32 peak"),
        (["pageable_copies", "--without", "pageable"], "from pinned memory at 53.0 GB/s", "pageable memory at"),
    ],
)
def test_what_bounds_the_step_then_is_said_of_what_was_changed(capsys, arguments, said, unsaid):
    assert main(["what-if", str(TRACES / arguments[0]), *arguments[1:]]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert unsaid not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sync_item", "--graphs", "forward"], "forward has calls that wait for the GPU or ask CUDA for memory"),
        (["sync_item", "--drop", "Optimizer.step#AdamW.step"], "of the host's time, with all that runs in it"),
        (["compute_bound", "--without", "allocations"], "that changes nothing in these steps"),
        (["sync_item", "--live-ms", "500", "--without", "syncs"], "500.00 ms a step without recording, no less than"),
        (["sync_item", "--live-ms", "1", "--without", "syncs"], "which a faster host does not explain"),
    ],
)
def test_what_to_know_of_a_prediction_is_said(capsys, arguments, message):
    assert main(["what-if", str(TRACES / arguments[0]), *arguments[1:]]) == 0
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compute_bound"], "nothing is changed"),
        (["sync_item", "--drop", "aten::itm"], "did you mean aten::item"),
        (["compute_bound", "--scale", "foo=0.5"], "no kind of GPU work is called 'foo'"),
        (["compute_bound", "--scale", "matmul=-1"], "is not KIND=X with a number of at least 0"),
        (["compute_bound", "--scale", "comm=2", "--scale", "comm=2"], "--scale comm is given twice"),
        (["compute_bound", "--bf16"], "the matrix products of these steps are bf16 already"),
        (["launch_bound", "--bf16"], "the precision of the steps is unknown: the trace has no input shapes"),
        (["compute_bound", "--equal-ranks"], "one rank, and ranks can be equal only where there are several"),
        (["compute_bound", "--graphs", "data"], "'data' is not one of forward"),
        (["cpu_mlp", "--without", "syncs"], "no GPU work"),
        (["ddp", "--equal-ranks", "--rank", "7"], "no trace of rank 7"),
        (["none", "--without", "syncs"], "no such file"),
    ],
)
def test_what_cannot_be_played_is_said(capsys, arguments, message):
    try:
        code = main(["what-if", str(TRACES / arguments[0]), *arguments[1:]])
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_steps_that_take_longer_when_played_predict_nothing(monkeypatch):
    monkeypatch.setattr("lightning_forge_profiling.what_if.MOST_ERROR_PCT", 0.1)
    with pytest.raises(TraceError, match="cannot be played again, so nothing is predicted"):
        predict(TRACES / "sync_item", [fixes.without_syncs])
