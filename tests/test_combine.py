"""One list of findings from a trace and from the run around it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.rule import saving
from lightning_forge_profiling.diagnosis.verdict import in_order
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.schema import CpuUse, Distribution, Finding, RunRegion
from tests.evidence import made_evidence, with_figures
from tests.samples import sample_analysis

TRACES = Path(__file__).parent / "data" / "traces"
RECORDED = sample_analysis()  # 53.3 ms a step, 62 % busy; input-bound 16 %, sync-bound 5 %, compute-bound 38 %
STEP_MS = RECORDED.ranks[0].step_ms.mean


def evidence(step_ms=STEP_MS, *, data=0.0, gpu_starved_pct=0.0, host_ms=5.0, steps=100, on_device=True):
    """A run of such steps with `data` ms exposed in each, the rest in forward, which takes the host `host_ms`."""
    return made_evidence(
        steps=steps,
        on_device=on_device,
        step_ms=Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms),
        regions={
            "data": RunRegion(device_ms=data, host_ms=data),
            "forward": RunRegion(device_ms=step_ms - data, host_ms=host_ms),
        },
        gpu_starved_pct=gpu_starved_pct,
    )


def with_findings(**shares):
    """The trace's analysis with these findings instead, `_` for `-` in their codes."""
    findings = in_order(
        Finding(
            code=code.replace("_", "-"), share_pct=share, rank=None, source="trace", title="", evidence={}, advice=""
        )
        for code, share in shares.items()
    )
    return replace(RECORDED, findings=findings, hints=())


def shares(analysis):
    return {found.code: found.share_pct for found in analysis.findings}


def test_means_over_ranks_and_figures_of_one_are_distinguished():
    recorded = replace(with_findings(input_bound=30.0, compute_bound=40.0), ranks=sample_analysis(2).ranks)
    both = combine(recorded, with_figures(evidence(STEP_MS, data=0.1 * STEP_MS), world_size=2))
    assert both.differences == (
        "input-bound: 30 % of the recorded steps (mean of the ranks), 10 % of the run's 100 steps on rank 0",
    )
    slower = combine(recorded, with_figures(evidence(STEP_MS / 1.3, data=0.3 * STEP_MS / 1.3), world_size=2))
    [compute] = [found for found in slower.findings if found.code == "compute-bound"]
    assert compute.title.endswith("of a live step it is 52 % on the mean of the ranks")


def test_a_trace_alone_stays_as_it_is():
    assert combine(RECORDED, None) == RECORDED


def test_nothing_at_all_is_refused():
    with pytest.raises(ValueError, match="needs an analysis"):
        combine(None, None)


def test_where_both_say_the_same_the_trace_with_its_detail_is_kept():
    both = combine(RECORDED, evidence(data=0.16 * STEP_MS))
    assert both.findings == RECORDED.findings
    assert both.verdict == "input-bound"
    assert both.differences == ()
    assert both.run.timing.steps == 100


def test_a_run_too_short_to_judge_changes_nothing():
    both = combine(RECORDED, evidence(data=0.9 * STEP_MS, steps=3))
    assert both == replace(RECORDED, run=both.run)


def test_a_stall_that_the_window_missed_is_the_verdict():
    """As where a loader had batches ready for the few recorded steps."""
    both = combine(with_findings(compute_bound=60.0), evidence(data=0.4 * STEP_MS))
    assert both.verdict == "input-bound"
    assert both.findings[0].source == "run"
    assert both.differences == ("input-bound: under 5 % of the recorded steps, 40 % of the run's 100 steps",)


def test_a_stall_of_the_window_alone_is_kept_and_reported():
    both = combine(with_findings(input_bound=12.0), evidence(data=0.02 * STEP_MS))
    assert shares(both) == {"input-bound": 12.0}
    assert both.differences == ("input-bound: 12 % of the recorded steps, 2 % of the run's 100 steps",)


def test_what_the_run_only_infers_is_left_to_the_trace_which_sees_it():
    both = combine(with_findings(memory_bandwidth_bound=50.0), evidence(gpu_starved_pct=0))
    assert shares(both) == {"memory-bandwidth-bound": 50.0}
    both = combine(with_findings(sync_bound=30.0), evidence(gpu_starved_pct=100, host_ms=STEP_MS))
    assert shares(both) == {"sync-bound": 30.0}
    assert both.differences == ()


def test_contradictions_about_host_and_gpu_are_reported():
    waits = combine(with_findings(compute_bound=60.0), evidence(gpu_starved_pct=98, host_ms=STEP_MS))
    assert waits.verdict == "compute-bound"
    [difference] = waits.differences
    assert difference.startswith("by the whole run's regions the host sets the pace in 98 % of a step, in the recorded")
    ahead = combine(with_findings(launch_bound=31.0), evidence(gpu_starved_pct=2))
    [difference] = ahead.differences
    assert difference == (
        "launch-bound took 31 % of the recorded steps, but in the whole run the GPU still had work queued at 98 % of "
        "the batch ends"
    )


class TestWhereRecordingSlowsTheHost:
    """53.3 ms recorded, of which the GPU is busy for 33.0."""

    BUSY_MS = RECORDED.ranks[0].gpu.busy_ms_per_step

    def test_it_is_said_with_numbers(self):
        both = combine(with_findings(launch_bound=30.0), evidence(40.0))
        assert both.differences[0].startswith(
            "recording made steps 1.3 times slower (53.27 ms recorded, 40.00 ms not); percentages refer to normal steps"
        )

    def test_up_to_a_tenth_is_left_alone(self):
        assert combine(RECORDED, evidence(STEP_MS / 1.09, data=0.16 * STEP_MS)).differences == ()

    def test_a_host_that_keeps_up_live_is_no_finding_any_more(self):
        both = combine(with_findings(launch_bound=30.0, compute_bound=40.0), evidence(self.BUSY_MS + 0.1))
        assert both.verdict == "compute-bound"
        assert both.findings[0].share_pct == pytest.approx(40 * STEP_MS / (self.BUSY_MS + 0.1)), "the same milliseconds"
        assert "launch-bound took 30 % of the recorded steps and at most 0 % of live ones" in both.differences[1]

    def test_waits_share_what_the_gpu_leaves_of_a_live_step(self):
        both = combine(with_findings(launch_bound=20.0, sync_bound=10.0), evidence(45.0, gpu_starved_pct=50))
        left = (45 - self.BUSY_MS) / (STEP_MS - self.BUSY_MS)
        assert shares(both) == pytest.approx(
            {"launch-bound": 20 * STEP_MS / 45 * left, "sync-bound": 10 * STEP_MS / 45 * left}
        )
        before = {found.code: found.evidence["share_of_recorded_step_pct"] for found in both.findings}
        assert before == {"launch-bound": 20.0, "sync-bound": 10.0}

    def test_the_loaders_share_is_the_one_that_the_run_measured(self):
        both = combine(with_findings(input_bound=25.0), evidence(45.0, data=0.5))
        assert "input-bound" not in shares(both)
        both = combine(with_findings(input_bound=25.0), evidence(45.0, data=4.5))
        assert shares(both) == pytest.approx({"input-bound": 10.0})
        assert both.findings[0].source == "run"

    def test_a_host_that_is_ahead_at_batch_ends_waits_for_a_read_alone(self):
        """And then for all that it does until it is ahead again, which no graph takes away."""
        both = combine(with_findings(launch_bound=20.0, sync_bound=10.0), evidence(45.0, gpu_starved_pct=10))
        assert [finding.code for finding in both.findings] == ["sync-bound"]
        idle = RECORDED.ranks[0].idle
        after_reads = sum(idle[cause].ms_per_step for cause in ("sync", "copy", "python", "launch"))
        idle_ms = (45 - self.BUSY_MS) * after_reads / (STEP_MS - self.BUSY_MS)
        saves = both.findings[0].saves
        assert (saves.ms_per_step, saves.at_most) == (pytest.approx(idle_ms), False)
        assert saves.low_pct < saves.pct < saves.high_pct

    def test_both_shares_of_the_trace_are_reported(self):
        both = combine(with_findings(input_bound=20.0, launch_bound=30.0), evidence(STEP_MS / 1.6, data=6.66))
        assert "input-bound: 20 % of the recorded steps (32 % of a live one), 20 % of the run's 100 steps" in (
            both.differences
        )
        ahead = combine(with_findings(launch_bound=30.0), evidence(STEP_MS / 1.2, gpu_starved_pct=2))
        assert ahead.differences[-1].startswith("launch-bound took 30 % of the recorded steps, but in the whole run")

    def test_a_slow_first_step_that_no_finding_is_over_slows_nothing(self):
        rank = RECORDED.ranks[0]
        steps = tuple(replace(rank.per_step[0], number=number, ms=ms) for number, ms in enumerate((200.0, 55.0)))
        rank = replace(rank, per_step=steps, step_ms=Distribution(mean=55.0, p50=55.0, min=55.0, max=55.0))
        recorded = replace(with_findings(launch_bound=30.0), ranks=(rank,))
        assert combine(recorded, evidence(60.0, gpu_starved_pct=100, host_ms=60.0)).differences == ()


def test_a_trace_without_a_gpu_knows_nothing_better_than_the_run():
    rank = RECORDED.ranks[0]
    blind = replace(rank, gpu=replace(rank.gpu, busy_ms_per_step=0.0))
    both = combine(replace(with_findings(), ranks=(blind,)), evidence(gpu_starved_pct=100, host_ms=STEP_MS))
    assert both.verdict == "launch-bound"


class TestWithoutAGpu:
    """The trace is of few steps, and sees no more of waiting than the run."""

    @staticmethod
    def traced(**findings):
        rank = RECORDED.ranks[0]
        blind = replace(rank, gpu=replace(rank.gpu, busy_ms_per_step=0.0))
        return replace(with_findings(**findings), ranks=(blind,))

    def test_a_loader_that_turns_slow_after_the_window_is_found_by_the_run(self):
        both = combine(self.traced(input_bound=9.0), evidence(data=0.8 * STEP_MS, on_device=False))
        assert both.findings[0].source == "run"
        assert both.findings[0].share_pct == pytest.approx(80)
        assert both.differences == ("input-bound: 9 % of the recorded steps, 80 % of the run's 100 steps",)

    def test_a_stall_of_the_window_alone_is_no_verdict(self):
        both = combine(self.traced(input_bound=27.0), evidence(data=0.04 * STEP_MS, on_device=False))
        assert both.findings == ()
        assert both.verdict == "nothing stands out"
        assert both.differences == ("input-bound: 27 % of the recorded steps, 4 % of the run's 100 steps",)

    def test_where_both_agree_it_is_the_runs_figure_with_the_advice_of_the_trace_which_knows_the_loader(self):
        traced = self.traced(input_bound=27.0)
        advised = replace(traced.findings[0], advice="try num_workers=2", evidence={"try_num_workers": 2})
        traced = replace(traced, findings=(advised,))
        both = combine(traced, evidence(data=0.25 * STEP_MS, on_device=False))
        [found] = both.findings
        assert (found.source, found.share_pct, found.advice) == ("run", pytest.approx(25), "try num_workers=2")
        assert found.evidence["try_num_workers"] == 2
        assert both.differences == ()

    def test_findings_of_other_ranks_than_the_runs_are_kept(self):
        traced = self.traced(input_bound=30.0)
        traced = replace(traced, findings=(replace(traced.findings[0], rank=1),))
        both = combine(traced, evidence(data=0.02 * STEP_MS, on_device=False))
        assert shares(both) == {"input-bound": 30.0}
        assert both.differences == (), "they are of two ranks"

    def test_a_rank_without_gpu_work_takes_nothing_from_one_that_has_some(self):
        traced = self.traced(sync_bound=40.0)
        blind, busy = traced.ranks[0], replace(RECORDED.ranks[0], rank=1)
        both = combine(replace(traced, ranks=(blind, busy)), evidence(data=0.2 * STEP_MS))
        assert shares(both) == pytest.approx({"sync-bound": 40.0, "input-bound": 20.0, "compute-bound": 80.0})

    def test_what_is_too_little_over_the_run_is_not_named_for_a_few_steps(self):
        both = combine(self.traced(input_bound=6.0), evidence(data=0.034 * STEP_MS, on_device=False))
        assert both.findings == ()
        assert both.differences == ()


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("live_ms", [STEP_MS, STEP_MS / 1.2])
def test_a_region_that_was_not_timed_does_not_overrule_the_trace(busy, live_ms):
    recorded = with_findings(input_bound=40.0) if busy else TestWithoutAGpu.traced(input_bound=40.0)
    run = evidence(live_ms, on_device=busy)
    run = with_figures(run, regions={"other": run.timing.regions["forward"]})
    both = combine(recorded, run)
    assert both.verdict == "input-bound"
    assert not any("of the run's" in text for text in both.differences)


def test_of_a_live_step_no_more_waiting_is_saved_than_there_is_and_all_of_the_gpu_work():
    live_ms = STEP_MS / 1.5
    traced = with_findings(sync_bound=30, memory_bandwidth_bound=50)
    predicted = {"sync-bound": 18.0, "memory-bandwidth-bound": 20.0}
    findings = tuple(
        replace(found, saves=saving(predicted[found.code], STEP_MS, at_most=True)) for found in traced.findings
    )
    both = combine(replace(traced, findings=findings), evidence(live_ms, gpu_starved_pct=50))
    saves = {found.code: found.saves for found in both.findings}
    idle_ms = live_ms - RECORDED.ranks[0].gpu.busy_ms_per_step
    assert 0 < idle_ms < 18
    assert saves["sync-bound"].ms_per_step == pytest.approx(idle_ms, abs=0.1)
    assert saves["memory-bandwidth-bound"].ms_per_step == pytest.approx(20)
    assert saves["memory-bandwidth-bound"].pct == pytest.approx(100 * 20 / live_ms)


def test_shares_are_converted_by_the_steps_that_they_are_of():
    """Findings are without the first recorded step, which is slow; the milliseconds stay what they were."""
    rank = RECORDED.ranks[0]
    steps = tuple(replace(rank.per_step[0], number=number, ms=ms) for number, ms in enumerate((90.0, 60.0, 60.0)))
    rank = replace(rank, per_step=steps, step_ms=Distribution(mean=60.0, p50=60.0, min=60.0, max=60.0))
    recorded = replace(with_findings(compute_bound=50.0), ranks=(rank,))
    both = combine(recorded, evidence(40.0))
    assert shares(both) == {"compute-bound": pytest.approx(100 * 30 / 40)}


@pytest.mark.parametrize(("launch_bound", "verdict"), [(0, "between-regions"), (60, "input-bound")])
def test_what_passes_between_the_regions_comes_before_a_short_wait_unless_it_is_in_a_finding(launch_bound, verdict):
    run = evidence()
    half = RunRegion(device_ms=0.5 * STEP_MS, host_ms=0.5 * STEP_MS)
    idle = dict.fromkeys(("transfer", "backward", "optimizer"), RunRegion(device_ms=0, host_ms=0))
    wait = RunRegion(device_ms=0.058 * STEP_MS, host_ms=0.058 * STEP_MS)
    run = with_figures(run, regions={**run.timing.regions, **idle, "data": wait, "forward": half, "other": half})
    found = {"input_bound": 5.8} | ({"launch_bound": launch_bound} if launch_bound else {})
    both = combine(with_findings(**found), run)
    assert both.verdict == verdict
    assert ("between-regions" in shares(both)) == (not launch_bound)


def test_hints_of_both_are_kept():
    run = with_figures(evidence(), step_ms=Distribution(mean=STEP_MS, p50=STEP_MS / 2, min=1.0, max=900.0))
    codes = [hint.code for hint in combine(replace(RECORDED, findings=()), run).hints]
    assert codes == ["copy-heavy", "uneven-steps"]


def test_a_loader_that_stalls_every_few_steps_is_not_mistaken_for_slow_recording():
    stalls = evidence(data=0.5 * STEP_MS)
    stalls = with_figures(stalls, step_ms=replace(stalls.timing.step_ms, p50=stalls.timing.step_ms.mean / 3))
    recorded = with_findings(input_bound=50.0)

    both = combine(recorded, stalls)

    assert both.differences == ()
    assert shares(both) == {"input-bound": 50.0}


def test_where_live_steps_are_longer_all_shares_are_of_them_and_the_difference_is_said():
    """Restarted workers come between epochs, and two recorded steps may have none of them."""
    both = combine(RECORDED, evidence(2 * STEP_MS, data=0.1 * STEP_MS))
    said = f"recorded steps were shorter ({STEP_MS:.2f} ms recorded, {2 * STEP_MS:.2f} ms not)"
    assert any(said in text for text in both.differences)
    before, after = shares(RECORDED), shares(both)
    assert after["compute-bound"] == pytest.approx(before["compute-bound"] / 2)
    assert all(found.saves is None or found.saves.ms_per_step <= 2 * STEP_MS for found in both.findings)
    [compute] = [found for found in both.findings if found.code == "compute-bound"]
    assert f"of a live step it is {after['compute-bound']:.0f} %" in compute.title


def test_without_a_gpu_what_comes_between_epochs_is_no_share_of_the_recorded_steps():
    recorded = analyze(TRACES / "cpu_mlp").analysis
    step, update = recorded.ranks[0].step_ms.mean, 0.2 * recorded.ranks[0].step_ms.mean
    regions = {
        "data": 2 * step,
        "forward": 0.3 * step,
        "backward": 0.4 * step,
        "optimizer": update,
        "other": 0.1 * step,
    }
    live = with_figures(
        evidence(3 * step, on_device=False),
        regions={name: RunRegion(device_ms=ms, host_ms=ms) for name, ms in regions.items()},
    )
    both = combine(recorded, live)
    share = shares(both)
    assert both.verdict == "input-bound"
    assert share["input-bound"] == pytest.approx(100 * 2 / 3, abs=1)
    assert share["slow-optimizer"] == pytest.approx(100 * update / (3 * step), abs=1)
    assert sum(share.values()) <= 101
    assert any("lacks what happens only in some steps" in said for said in both.differences)
    busy = with_figures(live, cpu=CpuUse(cores=1.0, used=0.5, waits_pct=40.0))
    assert any(": normal steps also waited for a core; " in said for said in combine(recorded, busy).differences)
    hardly = with_figures(busy, cpu=CpuUse(cores=1.0, used=0.5, waits_pct=8.0))
    assert any("lacks what happens only in some steps" in said for said in combine(recorded, hardly).differences)
