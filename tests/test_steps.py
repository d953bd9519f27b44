"""Where a step begins and ends on the GPU, and what belongs to it."""

import gzip
import json
from pathlib import Path

import pytest

from lightning_forge_profiling.pipeline import analyze
from tests.synthetic import ADD, AUTOGRAD, GEMM, MAIN, Synthetic

TRACES = Path(__file__).parent / "data" / "traces"


def steps_of(rank):
    """Number, window, time on the host and busy time of each step."""
    return [(step.number, step.ms, step.host_ms, step.busy_ms) for step in rank.per_step]


def test_steps_of_a_host_that_runs_ahead_end_when_the_gpu_has_done_their_work(tmp_path):
    trace = Synthetic()
    trace.step(5, 0, 2)
    trace.step(6, 2, 4)
    trace.kernel(1, 10, launched=1)
    trace.kernel(10, 30, launched=3)
    assert steps_of(trace.rank(tmp_path)) == [(5, 10, 2, 9), (6, 20, 2, 20)]


def test_what_the_warm_up_step_left_in_the_queue_is_in_no_step(tmp_path):
    trace = Synthetic()
    trace.kernel(0, 4, launched=None)
    trace.step(5, 2, 5)
    trace.kernel(4, 9, launched=3)
    assert steps_of(trace.rank(tmp_path)) == [(5, 5, 3, 5)]


def test_a_step_without_gpu_work_lasts_as_long_as_on_the_host(tmp_path):
    trace = Synthetic()
    for number in range(3):
        trace.step(number, 10 * number, 10 * number + 10)
    trace.kernel(1, 6, launched=1)
    trace.kernel(22, 25, launched=21)
    assert steps_of(trace.rank(tmp_path)) == [(0, 6, 10, 5), (1, 14, 10, 0), (2, 5, 10, 3)]


def test_a_first_step_without_gpu_work_does_not_reach_to_the_end(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.step(1, 10, 20)
    trace.kernel(12, 15, launched=11)
    trace.kernel(30, 40, launched=25)
    assert steps_of(trace.rank(tmp_path)) == [(0, 10, 10, 0), (1, 5, 10, 3)]


def test_a_step_on_the_host_lasts_until_the_next_begins(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 8)
    trace.step(1, 10, 18)
    trace.kernel(9, 12, launched=9)
    trace.kernel(12, 15, launched=11)
    assert steps_of(trace.rank(tmp_path)) == [(0, 12, 10, 3), (1, 3, 8, 3)]


def test_a_step_whose_gpu_work_is_not_in_the_file_is_marked_and_does_not_count(tmp_path):
    trace = Synthetic()
    for number in range(3):
        trace.step(number, 10 * number, 10 * number + 10)
        for launched in (1, 2, 3):
            if number < 2:
                trace.kernel(10 * number + launched, 10 * number + launched + 1, launched=10 * number + launched)
            else:
                trace.call("cudaLaunchKernel", 20 + launched, 20.5 + launched)
    rank = trace.rank(tmp_path)
    assert [step.whole for step in rank.per_step] == [True, True, False]
    assert [step.counted for step in rank.per_step] == [False, True, False]
    assert rank.steps == 1
    assert any("step 2" in warning for warning in rank.warnings)


def test_memsets_and_captured_launches_that_leave_no_gpu_work_do_not_cut_a_step_off(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 20)
    trace.kernel(1, 3, launched=1)
    for start in range(2, 6):
        trace.call("cudaMemsetAsync", start, start + 0.1)
    trace.copy(6, 7, launched=6)
    trace.call("cudaStreamBeginCapture", 8, 8.1)
    for start in (9, 10, 11):
        trace.call("cudaLaunchKernel", start, start + 0.1, AUTOGRAD)
    trace.call("cudaStreamEndCapture", 12, 12.1)
    rank = trace.rank(tmp_path)
    assert [step.whole for step in rank.per_step] == [True]
    assert rank.warnings == ()


def capturing(trace, number, start, *, launches=40, takes=30):
    """A step that captures its forward and backward as a CUDA graph: few kernels run, before and after."""
    trace.step(number, start, start + takes)
    trace.kernel(start + 0.2, start + 0.9, launched=start + 0.1)
    trace.call("cudaStreamBeginCapture", start + 1, start + 1.1)
    for at in range(launches):
        trace.call("cudaLaunchKernel", start + 2 + at / 2, start + 2.1 + at / 2)
    trace.call("cudaStreamEndCapture", start + 23, start + 23.1)
    trace.call("cudaGraphInstantiateWithFlags", start + 24, start + 28)
    return start + takes


def replaying(trace, number, start):
    trace.step(number, start, start + 10)
    trace.graph([(start + 1, start + 5), (start + 5, start + 9)], launched=start + 0.5)
    return start + 10


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_step_that_captures_a_graph_does_not_count_and_its_time_is_its_own(place, tmp_path):
    trace, at = Synthetic(), 0
    for number in range(4):
        at = (capturing if number == place else replaying)(trace, number, at)
    found = analyze(trace.write(tmp_path)).analysis
    rank = found.ranks[0]
    assert [step.captures for step in rank.per_step] == [number == place for number in range(4)]
    assert [step.counted for step in rank.per_step] == [number != place and number > 0 for number in range(4)]
    assert all(step.whole for step in rank.per_step), "captured launches lack no kernels"
    assert rank.per_step[place].ms == pytest.approx(30, abs=2)
    assert rank.step_ms.max == pytest.approx(10, abs=1.1)
    assert (rank.gpu.kernels_per_step, rank.host.launches_per_step) == (2, 1)
    assert f"step {place} (capture of a CUDA graph, whose launches run nothing)" in found.findings_note


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_there_is_no_verdict_where_every_step_captures_a_graph(steps, tmp_path):
    trace, at = Synthetic(), 0
    for number in range(steps):
        at = capturing(trace, 7 + number, at)
    found = analyze(trace.write(tmp_path)).analysis
    assert (found.verdict, found.findings) == ("no verdict", ())
    counted = [7] if steps == 1 else [8, 9][: steps - 1]
    which = f"step {counted[0]} captures" if len(counted) == 1 else f"steps {', '.join(map(str, counted))} capture"
    assert found.verdict_text.startswith(
        f"No verdict: {which} a CUDA graph, and {40 * len(counted)} captured launches run "
    )
    assert found.verdict_text.endswith("Record later steps, which replay it.")
    assert found.ranks[0].step_ms.mean == pytest.approx(30, abs=2)
    assert found.ranks[0].host.launches_per_step == 1


@pytest.mark.parametrize("replays", [1, 60])
def test_a_recording_without_marks_may_have_captured_a_graph_before_it_trained(replays, tmp_path):
    trace, at = Synthetic(), capturing(Synthetic(), 0, 0)
    capturing(trace, 0, 0)
    for number in range(replays):
        at = replaying(trace, number, at)
    trace.events = [event for event in trace.events if event["cat"] != "user_annotation"]
    found = analyze(trace.write(tmp_path)).analysis
    assert found.verdict_text.startswith("No verdict: the recording captures a CUDA graph") == (replays == 1)


def test_a_capture_ends_with_its_recording_and_may_have_begun_before_it(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(1, 3, launched=0.5)
    for start in (4, 5, 6):
        trace.call("cudaLaunchKernel", start, start + 0.1)
    trace.call("cudaStreamEndCapture", 7, 7.1)
    replaying(trace, 2, replaying(trace, 1, 10))
    trace.write(tmp_path / "window", "rank0.trace.json")
    rank = analyze(tmp_path / "window").analysis.ranks[0]
    assert [(step.captures, step.whole) for step in rank.per_step] == [(True, True), (False, True), (False, True)]

    first, second = Synthetic(), Synthetic()
    replaying(first, 0, 0)
    replaying(first, 1, 10)
    first.call("cudaStreamBeginCapture", 19, 19.1)
    for number in range(2):
        replaying(second, 2 + number, 10 * number)
    first.write(tmp_path / "windows", "rank0_1.trace.json")
    second.write(tmp_path / "windows", "rank0_2.trace.json")
    rank = analyze(tmp_path / "windows").analysis.ranks[0]
    assert [step.captures for step in rank.per_step] == [False, True, False, False]


def test_a_graph_launch_brings_all_of_its_kernels_into_its_step(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 2)
    trace.step(1, 2, 4)
    trace.graph([(3, 4)], launched=1)
    trace.graph([(4, 5), (6, 7), (7, 11)], launched=3)
    rank = trace.rank(tmp_path)
    assert [step.ms for step in rank.per_step] == [4, 7]
    assert (rank.gpu.kernels_per_step, rank.host.launches_per_step, rank.unlinked_pct) == (3, 1, 0)


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "hipLaunchKernel"])
def test_launches_of_runtime_and_driver_count_alike(tmp_path, call):
    trace = Synthetic()
    trace.step(0, 0, 5)
    trace.kernel(1, 3, launched=1, by=call)
    rank = trace.rank(tmp_path)
    assert (rank.host.launches_per_step, rank.unlinked_pct) == (1, 0)


def test_work_whose_launch_is_missing_belongs_to_the_operator_with_its_external_id(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.step(1, 10, 15)
    trace.step(2, 15, 20)
    trace.kernel(1, 10, launched=1)
    trace.operator("aten::mm", 11, 12, **{"External id": 77})
    trace.kernel(16, 18, launched=None, **{"External id": 77})
    trace.kernel(18, 19, launched=17)
    rank = trace.rank(tmp_path)
    assert [step.ms for step in rank.per_step] == [10, 8, 1]
    assert rank.unlinked_pct == 0
    [operator] = rank.operators
    assert (operator.name, operator.device_ms_per_step) == ("aten::mm", 1), "2 ms in two steps"


def test_an_external_id_counts_only_where_its_operator_lies_around_the_call(tmp_path):
    """Some traces write a call's own correlation id there, which is some other operator's `External id`."""
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.operator("aten::t", 1, 2, **{"External id": 1})
    trace.operator("aten::mm", 3, 5, **{"External id": 9})
    trace.kernel(5, 9, launched=4, **{"External id": 1})
    trace.events[-2]["args"]["External id"] = 1  # of the call
    spent = {operator.name: operator.device_ms_per_step for operator in trace.rank(tmp_path).operators}
    assert spent == {"aten::t": 0, "aten::mm": 4}


def test_work_that_nothing_launched_counts_where_it_ran_and_its_share_is_said(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(1, 2, launched=1)
    trace.kernel(3, 6, launched=None, name=ADD)
    trace.kernel(8, 10, launched=3)
    rank = trace.rank(tmp_path)
    assert (rank.gpu.busy_ms_per_step, rank.unlinked_pct) == (6, 50)


def test_a_correlation_of_nought_joins_nothing(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(1, 2, launched=1)
    trace.call("cudaEventRecord", 2, 3, correlation=0)
    trace.kernel(4, 5, launched=None)
    trace.events[-1]["args"]["correlation"] = 0
    trace.kernel(6, 7, launched=6)
    assert trace.rank(tmp_path).unlinked_pct == pytest.approx(100 / 3)


def test_autograds_thread_launches_for_the_same_step(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 4)
    trace.step(1, 4, 8)
    trace.kernel(1, 9, launched=1, thread=AUTOGRAD)
    trace.kernel(9, 10, launched=5, thread=AUTOGRAD)
    assert [step.ms for step in trace.rank(tmp_path).per_step] == [9, 1]


def marked(trace, numbers, *, thread=MAIN, offset=0):
    for place, number in enumerate(numbers):
        trace.mark(f"ProfilerStep#{number}", 10 * place + offset, 10 * place + 10 + offset, thread)


@pytest.mark.parametrize("thread", [MAIN, AUTOGRAD], ids=["same thread", "another thread"])
@pytest.mark.parametrize("offset", [-3, -0.01, 0, 0.01, 3])
@pytest.mark.parametrize("others", [(0, 1, 2), (4, 5, 6), (5, 6, 7), (6, 7, 8), (105, 106, 107)])
def test_steps_that_two_profilers_number_apart_count_once(others, offset, thread, tmp_path):
    trace = Synthetic()
    marked(trace, (5, 6, 7))
    marked(trace, others, thread=thread, offset=offset)
    for place in range(3):
        begin = 10 * place
        trace.operator("aten::mm", begin + 4, begin + 5)
        trace.kernel(begin + 5, begin + 9, launched=begin + 4.5)
    rank = trace.rank(tmp_path)
    assert len(rank.per_step) == 3
    assert [round(step.host_ms) for step in rank.per_step] == [10, 10, 10]
    assert rank.gpu.busy_ms_per_step == pytest.approx(4)
    assert any("two profilers or threads marked steps" in warning for warning in rank.warnings)
    if thread != MAIN:
        assert [step.number for step in rank.per_step] == [5, 6, 7]


def test_of_marks_around_marks_the_inner_ones_are_the_steps(tmp_path):
    trace = Synthetic()
    trace.step(1, 0, 30)
    trace.step(2, 30, 60)
    for number in range(6):
        trace.step(number, 10 * number, 10 * number + 10)
        trace.kernel(10 * number + 2, 10 * number + 6, launched=10 * number + 1)
    assert [step.number for step in trace.rank(tmp_path).per_step] == [0, 1, 2, 3, 4, 5]


def test_steps_that_overlap_and_count_on_are_all_of_one_profiler(tmp_path):
    trace = Synthetic()
    for number in range(4):
        trace.step(number, 10 * number, 10 * number + 12)
        trace.kernel(10 * number + 2, 10 * number + 6, launched=10 * number + 1)
    rank = trace.rank(tmp_path)
    assert [step.number for step in rank.per_step] == [0, 1, 2, 3]
    assert rank.warnings == ()


def test_kernels_of_two_streams_count_once_where_they_overlap(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(0, 6, launched=0)
    trace.kernel(4, 10, launched=1, stream=20, name=ADD)
    rank = trace.rank(tmp_path)
    assert rank.gpu.busy_pct == 100
    assert {name: share.ms_per_step for name, share in rank.categories.items() if share.pct} == {
        "matmul": 6,
        "other": 4,
    }
    assert sum(kernel.ms_per_step for kernel in rank.top_kernels) == 12


def test_validation_and_checkpoints_are_taken_out_on_the_host_and_on_the_gpu(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.kernel(1, 15, launched=1)
    trace.step(1, 10, 100)  # validation comes after a batch, and so inside the next step
    trace.mark("forge.validation", 12, 60)
    trace.kernel(20, 65, launched=13, name=ADD)
    trace.mark("forge.checkpoint", 60, 80)
    trace.mark("forge.forward", 85, 95)
    trace.kernel(90, 94, launched=86)
    rank = trace.rank(tmp_path)
    # on the host validation begins at 12, after other callbacks; on the GPU when the step before is done, at 15
    assert steps_of(rank) == [(0, 15, 10, 14), (1, 94 - 80, 90 - 68, 4)]
    assert rank.host.launches_per_step == 1
    assert [kernel.name for kernel in rank.top_kernels] == [GEMM]


def test_work_of_unknown_origin_does_not_bring_validation_back(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.mark("forge.checkpoint", 10, 60)
    trace.kernel(70, 80, launched=65)
    trace.kernel(85, 95, launched=None)
    trace.kernel(96, 99, launched=90)
    assert steps_of(trace.rank(tmp_path)) == [(0, 50, 50, 23)], "the only step lasts as its mark"


def test_a_trace_without_steps_is_one_and_says_so(tmp_path):
    trace = Synthetic()
    trace.kernel(2, 5, launched=1)
    trace.kernel(5, 9, launched=2)
    rank = trace.rank(tmp_path)
    assert (rank.steps, rank.step_ms.mean, rank.gpu.busy_ms_per_step) == (1, 8, 7)
    assert any("no ProfilerStep" in warning for warning in rank.warnings)


def three_steps(first=5):
    """Steps of 10, 20 and 30 ms."""
    trace, start = Synthetic(), 0
    for number in range(3):
        end = start + 10 * (number + 1)
        trace.step(first + number, start, end)
        trace.kernel(start + 1, end, launched=start + 0.5)
        start = end
    return trace


@pytest.mark.parametrize(
    ("chosen", "found"), [((5, 7), [10, 20]), ((6, 8), [20, 30]), ((7, 99), [30]), (None, [10, 20, 30])]
)
def test_steps_can_be_chosen_by_number(tmp_path, chosen, found):
    rank = three_steps().rank(tmp_path, steps=chosen)
    assert [step.ms for step in rank.per_step] == found
    counted = found[found[0] == 10 :]  # without the first that was recorded
    assert [step.ms for step in rank.per_step if step.counted] == counted
    assert rank.step_ms.mean == sum(counted) / len(counted)
    assert (rank.steps, rank.top_kernels[0].calls_per_step) == (len(counted), 1)


def warmed_up(trace):
    """A step of 10 ms that is recorded while the GPU still works on the profiler's warm-up step."""
    trace.kernel(1, 12, launched=None)  # first, so that its correlation id is below all others
    trace.kernel(12, 14, launched=None)
    trace.step(1, 0, 10)
    return trace


def test_warm_up_work_belongs_to_no_step_however_late_it_runs(tmp_path):
    trace = warmed_up(Synthetic())
    trace.kernel(15, 20, launched=5)
    rank = trace.rank(tmp_path)
    assert steps_of(rank) == [(1, 6, 10, 5)]
    assert (rank.gpu.kernels_per_step, rank.unlinked_pct) == (1, 0)


def test_each_of_several_windows_has_warm_up_work(tmp_path):
    for number in range(2):
        trace = warmed_up(Synthetic())
        trace.kernel(15, 20, launched=5)
        trace.write(tmp_path, f"rank0_{number}.trace.json")
    (rank,) = analyze(tmp_path).analysis.ranks
    assert steps_of(rank) == [(1, 6, 10, 5)] * 2


def test_a_stream_that_begins_beside_the_warm_up_work_does_not_begin_the_step(tmp_path):
    trace = warmed_up(Synthetic())
    trace.copy(4, 6, launched=3, stream=20)
    trace.kernel(15, 20, launched=5)
    rank = trace.rank(tmp_path)
    assert steps_of(rank) == [(1, 6, 10, 5)]


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_step_without_gpu_work_does_not_count_among_others(tmp_path, idle):
    trace = Synthetic()
    for number in range(3):
        trace.step(number, 10 * number, 10 * number + 10)
        if number != idle:
            trace.kernel(10 * number + 4, 10 * number + 9, launched=10 * number + 1)
    found = analyze(trace.write(tmp_path, "rank0.trace.json")).analysis
    (rank,) = found.ranks
    assert [step.counted for step in rank.per_step] == [number not in {0, idle} for number in range(3)]
    assert f"step {idle} (no GPU work)" in found.findings_note
    assert found.verdict != "nothing stands out"


def test_a_first_step_is_not_spared_for_one_without_gpu_work(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 10)
    trace.step(1, 10, 20)
    trace.kernel(5, 9, launched=5)
    assert [step.counted for step in trace.rank(tmp_path).per_step] == [True, False]


def test_a_chosen_step_still_begins_where_the_one_before_it_ended(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 2)
    trace.step(1, 2, 4)
    trace.kernel(1, 10, launched=1)
    trace.kernel(12, 15, launched=3)
    assert steps_of(trace.rank(tmp_path, steps=(1, 2))) == [(1, 5, 2, 3)]


@pytest.mark.parametrize("second", [8, 7, 2, 5])
def test_two_windows_of_a_rank_are_put_together(tmp_path, second):
    three_steps(5).write(tmp_path, "rank0.a.trace.json")
    three_steps(second).write(tmp_path, "rank0.b.trace.json")
    found = analyze(tmp_path).analysis
    (rank,) = found.ranks
    assert [step.counted for step in rank.per_step] == [False, True, True] * 2
    assert f"step {second} (the first of a later window: an empty GPU queue" in found.findings_note
    assert [step.number for step in rank.per_step] == [5, 6, 7, second, second + 1, second + 2]
    assert [step.ms for step in rank.per_step] == [10, 20, 30, 10, 20, 30]
    assert (rank.gpu.idle_ms_per_step, rank.unlinked_pct) == (1, 0)


def test_the_live_step_time_is_the_recorded_one():
    """`live.json` was measured without a profiler; where the GPU is the limit a recording changes little."""
    for case in ("validation_inside", "input_hidden", "attention_long", "elementwise", "conv_net", "compiled"):
        live = json.loads((TRACES / case / "live.json").read_text())
        (rank,) = analyze(TRACES / case).analysis.ranks
        assert rank.step_ms.p50 == pytest.approx(live["time/step_ms"], rel=0.1), case


def test_the_live_regions_are_the_recorded_ones():
    """What a region launched runs for as long as between the events that the callbacks put around it."""
    for case in ("validation_inside", "attention_long", "elementwise", "conv_net", "pinned_copies"):
        live = json.loads((TRACES / case / "live.json").read_text())
        for region in analyze(TRACES / case).analysis.ranks[0].regions:
            if region.name in {"forward", "backward", "optimizer"}:
                recorded = region.gpu_ms_per_step + region.idle_ms_per_step
                assert recorded == pytest.approx(live[f"time/{region.name}_ms"], rel=0.05, abs=0.02), (
                    case,
                    region.name,
                )


@pytest.mark.slow
def test_the_profilers_annotations_on_the_gpu_add_nothing(tmp_path):
    events = json.loads(gzip.decompress((TRACES / "validation_inside" / "rank0.trace.json.gz").read_bytes()))
    kept = [event for event in events["traceEvents"] if event.get("cat") != "gpu_user_annotation"]
    bare = tmp_path / "bare.trace.json"
    bare.write_text(json.dumps(events | {"traceEvents": kept}))
    assert analyze(bare).analysis.ranks[0].per_step == analyze(TRACES / "validation_inside").analysis.ranks[0].per_step


def lost(steps):
    """Five steps of ten launches; of the first three of some of them the profiler has lost the kernels."""
    trace = Synthetic()
    for number in range(5):
        begins = 20 * number
        trace.step(number, begins, begins + 20)
        for launch in range(10):
            at = begins + 2 * launch
            if number in steps and launch < 3:
                trace.call("cudaLaunchKernel", at, at + 0.1)
            else:
                trace.kernel(at + 0.2, at + 1.9, launched=at)
    return trace


def test_a_step_of_which_the_profiler_lost_kernels_does_not_count(tmp_path):
    found = analyze(lost({0, 1}).write(tmp_path)).analysis
    assert [step.counted for step in found.ranks[0].per_step] == [False, False, True, True, True]
    assert "steps 0, 1 (not all of its GPU work is in the trace)" in found.findings_note
    [warning] = found.warnings
    assert "GPU work is missing in step 0, 1, as 6 launches have no kernel. The profiler loses kernels" in warning


def test_where_it_lost_kernels_of_every_step_there_is_no_verdict(tmp_path):
    found = analyze(lost(range(5)).write(tmp_path)).analysis
    assert found.verdict == "no verdict"
    assert "in no step have all launches a kernel" in found.verdict_text
