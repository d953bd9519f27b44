"""What a finding predicts that its fix saves: by the traces with planted problems, and by hand."""

import json
from pathlib import Path

import pytest

from lightning_forge_profiling.analysis.fixes import compiled
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.rule import in_ms, in_s, measured_pct, saving, saving_of_fit
from lightning_forge_profiling.diagnosis.verdict import WORK, loses_pct
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import Distribution, RunRegion
from lightning_forge_profiling.what_if import predict
from tests.evidence import made_evidence, with_figures
from tests.synthetic import Synthetic

TRACES = Path(__file__).parent / "data" / "traces"

# Milliseconds that the fix saved, measured on an H200 without a profiler: the tables of docs/findings
MEASURED = {
    "transfer-bound": ("pageable_copies", 18.59 - 9.23),
    "sync-bound": ("sync_item", 4.68 - 2.63),
    "allocator-churn": ("allocator_churn", 6.08 - 3.47),
    "slow-optimizer": ("slow_optimizer", 5.25 - 3.49),
    "memory-bandwidth-bound": ("elementwise", 8.76 - 3.53),
}


def live(case):
    """The run that was timed beside the recorded one, as the callbacks hand it over."""
    figures = json.loads((TRACES / case / "live.json").read_text())
    step = figures["time/step_ms"]
    regions = {name: RunRegion(device_ms=figures[f"time/{name}_ms"], host_ms=0.0) for name in REGIONS}
    return made_evidence(
        steps=25,
        on_device=True,
        step_ms=Distribution(mean=step, p50=step, min=step, max=step),
        regions=regions,
        gpu_starved_pct=50.0,
    )


@pytest.fixture
def without_replay(monkeypatch):
    """The analysis of a trace, as if its steps could not be played again."""
    monkeypatch.setattr("lightning_forge_profiling.pipeline.predictions", lambda *_: None)
    return lambda case: analyze(TRACES / case).analysis


def the(code, analysis):
    [found] = [found for found in analysis.findings if found.code == code]
    return found


@pytest.mark.parametrize("code", MEASURED)
def test_the_prediction_for_a_planted_problem_holds(code):
    case, saved_ms = MEASURED[code]
    saves = the(code, combine(analyze(TRACES / case).analysis, live(case))).saves
    within = abs(saves.ms_per_step - saved_ms) <= max(1.0, 0.2 * saved_ms)
    assert within or (saves.at_most and saved_ms <= saves.ms_per_step)
    assert saves.pct == pytest.approx(100 * saves.ms_per_step / live(case).timing.step_ms.mean, rel=0.02)


@pytest.mark.parametrize(
    ("case", "code", "after_ms"),
    [
        ("light_launch_bound", "launch-bound", 3.802),
        ("light_slow_optimizer", "slow-optimizer", 6.384),
        ("light_straggler", "straggler", 15.155),
        ("light_sync_bound", "sync-bound", 3.716),
        ("light_compute_bound", "compute-bound", 14.243),
        ("light_memory_bandwidth_bound", "memory-bandwidth-bound", 3.909),
        ("light_tf32", "compute-bound", 32.152),
        ("pageable_copies", "transfer-bound", 9.23),
        ("allocator_churn", "allocator-churn", 3.47),
        ("slow_optimizer", "slow-optimizer", 3.49),
        ("elementwise", "memory-bandwidth-bound", 3.53),
    ],
)
def test_the_step_after_a_fix_is_as_measured(case, code, after_ms):
    """Of windows and the runs that they are of, and the same without the problem: tests/data/README.md."""
    analysis, run = analyze(TRACES / case).analysis, live(case)
    found = the(code, combine(analysis, run))
    assert run.timing.step_ms.mean - found.saves.ms_per_step == pytest.approx(after_ms, rel=0.1)
    assert not found.saves.at_most
    assert analysis.verdict == code


@pytest.mark.parametrize(
    ("case", "code", "after_ms", "within"),
    [
        ("gpt2_eager", "memory-bandwidth-bound", 28.4, 0.1),
        ("gpt2_unaligned", "launch-bound", 22.2, 0.1),
        ("embedding_adam", "slow-optimizer", 5.72, 0.1),
        (
            "resnet_float32",
            "compute-bound",
            29.8,
            0.25,
        ),  # where the host sets the pace then, and how fast it is is a guess
    ],
)
def test_the_step_of_a_real_model_after_the_named_fix_is_as_measured(case, code, after_ms, within):
    run = live(case)
    found = combine(analyze(TRACES / case).analysis, run)
    saves, step_ms = the(code, found).saves, run.timing.step_ms.mean
    assert found.verdict == code
    assert not saves.at_most
    assert step_ms - saves.ms_per_step == pytest.approx(after_ms, rel=within)
    assert saves.low_pct <= 100 * (1 - after_ms / step_ms) <= saves.high_pct


def test_work_that_fills_a_live_step_is_named_although_recording_let_the_gpu_idle():
    recorded, run = analyze(TRACES / "gpt2_eager").analysis, live("gpt2_eager")
    assert [found.code for found in recorded.findings] == ["launch-bound"]
    assert recorded.ranks[0].gpu.busy_pct < 75
    combined = combine(recorded, run)
    assert combined.verdict == "memory-bandwidth-bound"
    assert "47.6 ms of each 66.6 ms live step" in the("memory-bandwidth-bound", combined).title


@pytest.mark.slow
def test_a_rank_that_waits_for_another_saves_no_more_than_that_one():
    """Played alone it would be faster by 4.8 ms, but its step is as long as that of the rank that computes longer."""
    analysis = analyze(TRACES / "light_straggler").analysis
    together = predict(TRACES / "light_straggler", [compiled])
    for found in (analysis, combine(analysis, live("light_straggler"))):
        assert the("launch-bound", found).saves.at_most
        assert the("launch-bound", found).saves.ms_per_step <= 1.2 * (together.before_ms - together.after_ms)


def test_float32_that_runs_as_tf32_is_advised_bf16_as_plain_float32_is():
    found = the("compute-bound", combine(analyze(TRACES / "light_tf32").analysis, live("light_tf32")))
    assert found.evidence["dtype"] == "tf32"
    assert found.fix == 'Trainer(..., precision="bf16-mixed")'
    assert found.saves.pct < 20, "most of a ResNet's step is norms and convolutions of few operations a byte"


def test_a_bound_holds_for_the_run_and_not_for_the_recorded_steps_alone(without_replay):
    evidence = live("pageable_copies")
    longer = (
        evidence.timing.regions["transfer"].device_ms + 0.03 * evidence.timing.step_ms.mean
    )  # by less than the two may differ
    regions = {**evidence.timing.regions, "transfer": RunRegion(device_ms=longer, host_ms=0.0)}
    found = the("transfer-bound", combine(without_replay("pageable_copies"), with_figures(evidence, regions=regions)))
    assert found.source == "trace"
    assert found.saves.at_most
    assert found.saves.ms_per_step == pytest.approx(longer)
    assert f"at most {longer:.1f} ms" in found.remedy


def test_the_optimizer_s_fix_saves_no_more_than_its_region_in_the_run_and_its_work_on_the_gpu(without_replay):
    evidence, trace = live("slow_optimizer"), without_replay("slow_optimizer")
    region = RunRegion(device_ms=0.8, host_ms=0.9)
    evidence = with_figures(evidence, regions={**evidence.timing.regions, "optimizer": region})
    found = the("slow-optimizer", combine(trace, evidence))
    assert found.saves.at_most
    assert found.saves.ms_per_step == pytest.approx(0.9 + found.evidence["gpu_busy_ms_per_step"])
    assert found.share_pct == pytest.approx(100 * 0.8 / evidence.timing.step_ms.mean), (
        "of the run, which was not slowed"
    )
    assert found.title.startswith("the optimizer takes 0.80 ms of each 5.26 ms step. Recorded, which slows the host: ")


def test_what_ends_waits_alone_saves_what_the_finding_costs_in_a_live_step(without_replay):
    found = the("launch-bound", combine(without_replay("slow_optimizer"), live("slow_optimizer")))
    assert found.saves.pct == pytest.approx(found.share_pct)


@pytest.mark.parametrize("case", ["input_bound", "slow_rank_gpu", "slow_rank_host"])
def test_a_wait_that_goes_away_is_expected_to_be_saved(case):
    first = analyze(TRACES / case).analysis.findings[0]
    assert not first.saves.at_most
    assert first.saves.pct == pytest.approx(first.share_pct, abs=1)


def test_compute_in_16_bits_can_come_down_to_the_peak_and_no_further(without_replay):
    analysis = without_replay("compute_bound")
    [rank] = analysis.ranks
    saves = the("compute-bound", analysis).saves
    at_peak_ms = rank.flops.model_per_step / rank.flops.peak_tflops / 1e9
    assert saves.at_most
    assert saves.ms_per_step == pytest.approx(rank.gpu.busy_ms_per_step - at_peak_ms, rel=0.02)


def test_in_single_precision_the_peak_is_that_of_16_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_forge_profiling.pipeline.predictions", lambda *_: None)
    trace = Synthetic(device="NVIDIA H200")
    for number in range(3):
        start = 10 * number
        trace.step(number, start, start + 10)
        trace.operator("aten::mm", start, start + 0.1, dims=[[4096, 4096], [4096, 4096]], types=["float", "float"])
        trace.kernel(start + 0.05, start + 9.95, launched=start + 0.02, name="sgemm_128x128")
    trace.write(tmp_path)
    analysis = analyze(tmp_path).analysis
    assert analysis.ranks[0].flops.dtype == "fp32"
    at_peak_ms = 2 * 4096**3 / 989.5e12 * 1e3
    assert the("compute-bound", analysis).saves.ms_per_step == pytest.approx(9.9 - at_peak_ms, abs=0.02)


@pytest.mark.parametrize(("case", "code"), [("sync_bound", "sync-bound"), ("sync_stack", "sync-bound")])
def test_a_host_that_calls_no_longer_hold_up_gains_what_it_waited_and_keeps_its_own_work(case, code, without_replay):
    analysis = without_replay(case)
    [rank] = analysis.ranks
    waited_ms = rank.gpu.busy_ms_per_step + rank.host.idle_after_sync_ms_per_step
    assert the(code, analysis).saves.ms_per_step == pytest.approx(waited_ms)
    assert waited_ms < rank.step_ms.mean - the("launch-bound", analysis).saves.ms_per_step, "Python is still there"


@pytest.mark.parametrize("case", ["sync_stack", "allocator_churn", "slow_optimizer", "light_tf32", "input_bound"])
def test_what_comes_first_saves_most_of_what_can_be_removed_and_of_the_work(case):
    found = [(each.code in WORK, -loses_pct(each)) for each in analyze(TRACES / case).analysis.findings]
    assert found == sorted(found)


def test_what_has_no_fix_predicts_nothing():
    assert the("gpu-idle", analyze(TRACES / "gpu_idle").analysis).saves is None


def test_a_saving_is_in_the_verdict_with_its_share():
    analysis = analyze(TRACES / "input_bound").analysis
    assert analysis.verdict_text.endswith(" That saves about 25.3 ms a step (63 %, 52 to 74 %).")


# the step before and after a change that was made, and after it by the prediction; docs/measured.md, "Fixes"
MADE = {
    "waits": [
        (41.95, 8.96, 7.73), (42.70, 9.77, 13.74), (5.37, 3.72, 3.86), (9.36, 4.74, 6.11), (8.05, 4.95, 4.77),
        (22.16, 12.39, 13.63), (51.25, 28.11, 26.14), (26.36, 17.01, 17.51), (5.98, 5.73, 5.66), (11.1, 5.7, 5.9),
        (49.8, 42.0, 33.3), (45.1, 14.9, 14.9), (52.1, 32.6, 34.0),
    ],
    "launch-bound": [
        (7.83, 2.20, 2.38), (86.82, 14.24, 13.72), (11.35, 3.91, 3.93), (38.75, 32.15, 33.53), (86.39, 27.66, 25.08),
        (13.39, 11.81, 11.55), (4.41, 2.38, 2.49), (78.1, 29.8, 35.7), (56.9, 41.6, 30.3), (82.7, 60.1, 54.7),
        (66.9, 28.4, 27.4), (57.8, 22.2, 19.4), (43.1, 19.6, 20.3), (28.2, 16.0, 11.4), (29.7, 4.8, 3.0),
        (21.0, 2.9, 2.9), (134.5, 12.4, 13.2), (13.0, 4.9, 3.8), (11.65, 4.15, 5.0), (8.95, 6.38, 5.8),
    ],
}  # fmt: skip


@pytest.mark.parametrize("code", MADE)
def test_what_changes_saved_lies_within_the_interval(code):
    for before, after, predicted in MADE[code]:
        low_pct, high_pct = measured_pct(100 * (1 - predicted / before), code)
        assert low_pct <= 100 * (1 - after / before) <= high_pct, (before, after, predicted)


def test_no_more_is_saved_than_there_is():
    assert saving(12.0, 10.0, at_most=True).text == "That saves at most 10.0 ms a step (100 %), if all of it goes."
    assert saving(0.0, 10.0, at_most=True) is None
    assert saving(None, 10.0, at_most=True) is None


def test_a_saving_beyond_its_own_cost_is_explained():
    assert saving(29.5, 38.3, at_most=False, cost_ms=29.5).text == "That saves about 29.5 ms a step (77 %)."
    beyond = saving(2.5, 10.0, at_most=True, cost_ms=2.0).text
    assert beyond.startswith("That saves at most 2.50 ms a step (25 %), other waits for the host included: ")


def test_a_saving_of_the_fit_is_in_seconds():
    saves = saving_of_fit(7.6, 10.0, 100, at_most=True)
    assert (saves.ms_per_step, saves.pct) == (pytest.approx(76.0), pytest.approx(76.0))
    assert saves.text == "That saves at most 7.6 s of the fit's 10.0 s (76 %), if all of it goes."


def test_times_have_two_or_three_digits():
    assert list(map(in_ms, (53.27, 9.14, 0.386))) == ["53.3 ms", "9.14 ms", "0.39 ms"]
    assert list(map(in_s, (130.2, 7.61, 0.38, 0.00094))) == ["130 s", "7.6 s", "380 ms", "0.94 ms"]
