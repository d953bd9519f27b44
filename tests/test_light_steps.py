"""Steps recorded without operators: what they did, by other steps; and how they are recorded."""

import gzip
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import record_function

from lightning_forge_profiling.analysis.rank_analysis import summarize
from lightning_forge_profiling.analysis.recording import explain, prepare
from lightning_forge_profiling.analysis.steps import named, step_marks
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.profiler import ProfilingConfig
from lightning_forge_profiling.profiler.config import StepWindow
from lightning_forge_profiling.profiler.session import TraceSession

TRACES = Path(__file__).parent / "data/traces"
CASES = sorted(
    path.parent.name
    for path in TRACES.glob("*/rank0*.gz")
    if path.parent.name not in {"blocking_call", "cpu_mlp", "sync_stack"}  # without GPU work, or of two steps
    and not path.parent.name.startswith("light_")
)
SECOND = 1


def without_operators(recording, chosen):
    """The trace as if operators had been left out of the chosen steps: their marks, calls and GPU work stay."""
    trace, host = recording.trace, recording.steps.host

    def within(table):
        return np.append(chosen, False)[host.at(table.start)]

    marks = step_marks(trace) | named(trace, trace.annotations, re.compile(r"forge\..*"))
    calls, launched = within(trace.calls), np.append(chosen, False)[recording.step]
    return replace(
        trace,
        light_steps=tuple(recording.steps.number[chosen].tolist()),
        operators=trace.operators.at(~within(trace.operators)),
        annotations=trace.annotations.at(~within(trace.annotations) | marks),
        calls=replace(trace.calls, external=np.where(calls, -1, trace.calls.external)),
        gpu=replace(
            trace.gpu,
            external=np.where(launched, -1, trace.gpu.external),
            collective=np.where(launched, -1, trace.gpu.collective),
        ),
    )


def figures(rank):
    """Milliseconds of a step by name."""
    return {
        "step": rank.step_ms.mean,
        "busy": rank.gpu.busy_ms_per_step,
        "after syncs": rank.host.idle_after_sync_ms_per_step,
        "launching": rank.host.idle_launching_ms_per_step,
        "exposed": rank.comm.exposed_ms_per_step,
        **{f"idle: {cause}": share.ms_per_step for cause, share in rank.idle.items()},
        **{f"kind: {name}": kind.ms_per_step for name, kind in rank.kinds.items()},
        **{f"region: {region.name}": region.host_ms_per_step for region in rank.regions},
    }


def light_case(case):
    """A real trace with operators in all steps, and the same without those of its second step."""
    whole = prepare(read_trace(next(TRACES.glob(f"{case}/rank0*.gz"))))
    chosen = np.arange(len(whole.steps)) == SECOND
    return whole, prepare(without_operators(whole, chosen)), chosen


@pytest.mark.parametrize("case", CASES)
def test_a_light_step_has_the_figures_that_it_has_with_its_own_operators(case):
    whole, light, chosen = light_case(case)
    assert light.steps.light.tolist() == chosen.tolist()
    recording = explain(light)
    assert recording.steps.explained.tolist() == chosen.tolist()
    expected, found = summarize(whole, 0, chosen), summarize(recording, 0, chosen)
    near = {name: pytest.approx(ms, abs=0.02 * expected.step_ms.mean) for name, ms in figures(expected).items()}
    assert figures(found) == near
    assert [(one.cause, one.lightning, one.per_step) for one in found.host.syncs] == [
        (one.cause, one.lightning, one.per_step) for one in expected.host.syncs
    ]
    # operators that a step runs only once in a while are those of the other step
    assert {one.name for one in found.operators[:5]} <= {one.name for one in expected.operators}
    whole_collectives, own_collectives = (
        np.bincount(each.trace.gpu.collective[each.step == SECOND] + 1) for each in (whole, recording)
    )
    assert own_collectives.tolist() == whole_collectives.tolist()


def test_ranges_that_a_light_step_shows_itself_are_not_taken_from_another():
    whole, light, _ = light_case("sync_item")
    recording = explain(prepare(replace(light.trace, annotations=whole.trace.annotations)))
    assert recording.steps.explained[SECOND]
    annotations = recording.trace.annotations
    assert np.array_equal(annotations.start, whole.trace.annotations.start)
    # and those that it does not show are
    assert len(explain(light).trace.annotations) > len(light.trace.annotations)


def test_a_step_whose_host_is_faster_has_operators_as_much_shorter():
    _, light, _ = light_case("sync_bound")
    bounds = [int(side[SECOND]) for side in (light.steps.host_start, light.steps.host_end)]

    def twice_as_fast(table):
        sides = ("start", "end")
        passed = {side: np.clip(getattr(table, side), *bounds) - bounds[0] for side in sides}
        return replace(table, **{side: getattr(table, side) - passed[side] // 2 for side in sides})

    def operators_ns(trace):
        recording = explain(prepare(trace))
        assert recording.steps.explained[SECOND]
        operators = recording.trace.operators
        return (operators.end - operators.start)[recording.steps.host.at(operators.start) == SECOND].sum()

    tables = ("operators", "calls", "annotations", "gpu")
    faster = replace(light.trace, **{name: twice_as_fast(getattr(light.trace, name)) for name in tables})
    assert operators_ns(faster) == pytest.approx(operators_ns(light.trace) / 2, rel=0.01)


@pytest.mark.parametrize("changed", ["a kernel's name", "a launch"])
def test_a_step_that_launched_something_else_is_not_explained(changed):
    _, light, _ = light_case("compute_bound")
    trace, rows = light.trace, np.flatnonzero(light.step == SECOND)
    if changed == "a launch":
        gpu = trace.gpu.at(np.arange(len(trace.gpu)) != rows[10])
    else:
        name = trace.gpu.name.copy()
        name[rows[10]] = name[rows[10]] + 1
        gpu = replace(trace.gpu, name=name)
    recording = explain(prepare(replace(trace, gpu=gpu)))
    assert not recording.steps.explained.any()
    assert recording.steps.light[SECOND]


LIGHT = ("light_launch_bound", "light_slow_optimizer", "light_straggler")


@pytest.mark.parametrize("case", LIGHT)
def test_light_steps_that_were_recorded_are_explained_and_count(case):
    for rank in analyze(TRACES / case).analysis.ranks:
        assert [step.light for step in rank.per_step] == [True] * 6 + [False] * 2
        assert [step.counted for step in rank.per_step] == [False] + [True] * 5 + [False] * 2
        light, named = ([step.ms for step in rank.per_step[1:] if step.light is part] for part in (True, False))
        assert np.mean(light) < 0.85 * np.mean(named), "operators were recorded at a price"
        assert rank.step_ms.mean == pytest.approx(np.mean(light), rel=0.01)
        assert {region.name for region in rank.regions} >= {"data", "forward", "backward", "optimizer"}
        assert "aten::addmm" in {operator.name for operator in rank.operators}


def test_the_note_says_which_steps_the_figures_are_of():
    note = analyze(TRACES / "light_launch_bound").analysis.findings_note
    assert note.startswith("figures are of the light steps 16 to 20, recorded without operators, 17.13 ms on average; ")
    assert "step 15 (the first recorded step" in note
    assert (
        "steps 21, 22 (with operators, which slow the host and say what the light steps did; 25.17 ms on average)"
        in note
    )


def test_if_the_light_steps_launched_something_else_the_others_count(tmp_path):
    trace = json.loads(gzip.decompress((TRACES / "light_launch_bound/rank0.trace.json.gz").read_bytes()))
    [named_from] = [event["ts"] for event in trace["traceEvents"] if event.get("name") == "ProfilerStep#21"]
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and event["ts"] > named_from:
            event["name"] += "_of_another_shape"
    (tmp_path / "rank0.trace.json").write_text(json.dumps(trace))
    analysis = analyze(tmp_path).analysis
    [rank] = analysis.ranks
    assert [step.number for step in rank.per_step if step.counted] == [21, 22]
    assert rank.step_ms.mean == pytest.approx(25.2, abs=0.1)
    assert "without operators, and the others launched something else" in analysis.findings_note


# -- recording ---------------------------------------------------------------------------------------------------------


def events_of(report):
    return [event for event in json.loads(gzip.decompress(report.path.read_bytes()))["traceEvents"] if "dur" in event]


def run(session, fails_in=None):
    weight = torch.ones(16, 16, requires_grad=True)
    with session:
        for step in range(8):
            with session.marks.begin("forge.forward"):
                loss = (weight @ weight).sum()
            loss.backward()
            if step == fails_in:
                raise RuntimeError("mine")
            session.step()


def session_in(folder):
    config = ProfilingConfig(enable=True, trace_dir=folder, analyze=False, tensorboard=False)
    return TraceSession(config, [folder / "window"], window=StepWindow(2, 6, light=2))


def operators_are_recorded():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2)
    return any(event.key == "aten::ones" for event in profiler.key_averages())


def test_light_steps_show_marks_and_no_operators_and_the_others_both(tmp_path):
    session = session_in(tmp_path)
    run(session)
    events = events_of(session.report)
    marks = {event["name"]: event for event in events if event["name"].startswith("ProfilerStep#")}
    assert sorted(marks) == [f"ProfilerStep#{step}" for step in (2, 3, 4, 5)]
    for number, (_, mark) in enumerate(sorted(marks.items())):
        inside = [
            event
            for event in events
            if mark["ts"] < event["ts"] < mark["ts"] + mark["dur"] and event["tid"] == mark["tid"]
        ]
        assert "forge.forward" in {event["name"] for event in inside}
        operators = {event["name"] for event in inside if event["cat"] == "cpu_op"}
        assert ({"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= operators) is (number >= 2)
        assert bool(operators) is (number >= 2)
    assert operators_are_recorded()


def test_operators_are_recorded_again_after_an_exception_in_a_light_step(tmp_path):
    session = session_in(tmp_path)
    with pytest.raises(RuntimeError, match="mine"):
        run(session, fails_in=2)
    assert session.report.status == "written"
    assert operators_are_recorded()


def test_marks_of_another_thread_do_not_switch_its_operators_off(tmp_path):
    session = session_in(tmp_path)
    session.marks.leave_operators_out()
    try:
        seen = []

        def work():
            with session.marks.begin("forge.forward"):
                pass
            seen.append(operators_are_recorded())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [True]
    finally:
        session.marks.take_operators_in()
    with record_function("after"):
        assert operators_are_recorded()
