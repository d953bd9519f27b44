"""Which rank's host is late: a claim about live steps, which recording must not decide."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_forge_profiling.callbacks.rank_clocks import RankFigures, read_figures, write_figures
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.late_rank import late_host, work_ms
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.results.analysis import RankClock, RunEvidence, RunLedger, RunRegion
from lightning_forge_profiling.results.rank import Distribution

CASE = Path(__file__).parent / "data/traces/slow_rank_host"  # two H200s, rank 1 is busy in Python for 15 ms a step
LIVE = json.loads((CASE / "live.json").read_text())
STEP_MS = LIVE["time/step_ms"]
WORKED_MS = LIVE["time_host/step_ms"] - LIVE["time_host/other_ms"]


@pytest.fixture(scope="module")
def recorded():
    return analyze(CASE).analysis


def run(*host_ms, step_ms=STEP_MS):
    """The run's evidence with clocks whose hosts work so long on a step."""
    names = ("data", "transfer", "forward", "backward", "optimizer", "other")
    return RunEvidence(
        steps=60,
        on_device=True,
        step_ms=Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms),
        regions={
            name: RunRegion(device_ms=LIVE[f"time/{name}_ms"], host_ms=LIVE[f"time_host/{name}_ms"]) for name in names
        },
        world_size=2,
        drained_pct=0.0,
        clocks=tuple(
            RankClock(rank=rank, step_ms=step_ms, host_ms=ms, between_ms=step_ms - ms)
            for rank, ms in enumerate(host_ms)
        ),
    )


def test_the_host_that_works_longest_on_a_step_is_late_by_what_it_works_longer(recorded):
    found = late_host(recorded, run(WORKED_MS, WORKED_MS + 15))
    assert found.rank == 1
    assert found.evidence["late_ms_per_step"] == pytest.approx(15)
    assert found.share_pct == pytest.approx(100 * 15 / STEP_MS, abs=6)
    assert "its host is late: it takes 20.6 ms a step, the others' 5.58 ms" in found.title


def test_it_costs_no_more_than_the_others_gpus_have_left(recorded):
    """A host that is late behind a GPU with enough to do delays nobody."""
    enough_ms = 1.01 * work_ms(recorded)[0]
    assert late_host(recorded, run(WORKED_MS, WORKED_MS + 15, step_ms=enough_ms)) is None


def test_hosts_that_differ_little_are_no_finding(recorded):
    assert late_host(recorded, run(WORKED_MS, WORKED_MS + 0.5)) is None
    assert late_host(recorded, run(WORKED_MS)) is None
    assert late_host(recorded, run()) is None


def test_the_clocks_overrule_what_a_trace_says_of_hosts(recorded):
    """The recorded steps have rank 1 late; in these live ones it is rank 0."""
    assert [found.rank for found in recorded.findings if found.code == "straggler"] == [1]
    both = combine(recorded, run(WORKED_MS + 15, WORKED_MS))
    assert [(found.rank, found.source) for found in both.findings if found.code == "straggler"] == [(0, "run")]
    none = combine(recorded, run(WORKED_MS, WORKED_MS))
    assert "straggler" not in {found.code for found in none.findings}
    for found in (*both.findings, *none.findings):
        assert "makes rank 1 late" not in found.advice, "of which there is no word any more"


def test_a_gpu_that_computes_longer_is_the_traces_to_tell():
    slow_gpu = analyze(CASE.with_name("slow_rank_gpu")).analysis
    [found] = [found for found in slow_gpu.findings if found.code == "straggler"]
    both = combine(slow_gpu, run(WORKED_MS, WORKED_MS + 15))
    [told] = [each.title for each in both.findings if each.code == "straggler"]
    assert told.startswith(found.title)


def test_a_late_hosts_own_idle_gpu_is_no_second_cause(recorded):
    assert {found.code for found in recorded.findings} == {"straggler", "launch-bound"}
    both = combine(recorded, run(WORKED_MS, WORKED_MS + 15))
    assert [found.code for found in both.findings] == ["straggler"]
    assert any(told.startswith("launch-bound took 30 % of the recorded steps") for told in both.differences)


@pytest.mark.parametrize("late_ms", [0.0, 4.0])
def test_what_recording_added_to_a_wait_for_the_host_is_taken_off(recorded, late_ms):
    """Launches of steps that recording made half as long again are not what the live step waits for."""
    [launching] = [found for found in recorded.findings if found.code == "launch-bound"]
    live_ms = 27.26 / 1.5
    evidence = replace(run(5.0, 5.0 + late_ms, step_ms=live_ms), drained_pct=100.0)
    both = combine(replace(recorded, findings=(launching,)), evidence)
    idle_ms = live_ms - sum(work_ms(recorded).values()) / 2
    costs = {found.code: found.share_pct * live_ms / 100 for found in both.findings}
    assert costs.get("straggler", 0.0) == pytest.approx(late_ms)
    assert costs.get("launch-bound", 0.0) <= idle_ms - late_ms + 0.01
    [found] = [found for found in both.findings if found.code == "launch-bound"] or [None]
    if found is not None:
        assert found.title.startswith("the GPU waits up to ")
        says = f" of each {live_ms:.1f} ms step for the host on the mean of the ranks. Recorded, which slows the host: "
        assert says in found.title


def test_clocks_are_handed_over_through_the_folder_and_waited_for_briefly(tmp_path):
    ledger = RunLedger(wall_s=2.0, parts={"steps": 2.0}, unexplained_s=0.0, counts={"steps": 1})
    ranks = [
        RankFigures(RankClock(rank=rank, step_ms=5.0, host_ms=1.0 + rank, between_ms=4.0 - rank), ledger)
        for rank in range(3)
    ]
    for figures in (ranks[0], ranks[2]):
        write_figures(tmp_path, figures)
    assert read_figures(tmp_path, [0, 1, 2], patience_s=0.0) == (ranks[0], ranks[2]), "one may be on another node"
    assert list(tmp_path.iterdir()) == []
    assert read_figures(tmp_path, [0], patience_s=60) == (), "alone there is nothing to compare, nor to wait for"
