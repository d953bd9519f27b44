"""The verdict on a run without any trace: on figures measured on an H200, on a simulated GPU, on real Trainers."""

import dis
import json
import time

import pytest
import torch
from lightning.pytorch import Callback
from msgspec.structs import replace

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.findings import run_findings
from lightning_forge_profiling.diagnosis.hints import run_hints
from lightning_forge_profiling.diagnosis.rule import MIN_STEPS
from lightning_forge_profiling.diagnosis.verdict import decide, in_order, with_lines
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.ranks.stacks import is_in_loop
from lightning_forge_profiling.run.stack_sampler import Place, PlaceTime, sampled_lines, stack_region
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.schema import (
    NO_VERDICT,
    NOTHING_STANDS_OUT,
    CpuUse,
    Distribution,
    Finding,
    OptimizerSettings,
    RegionCpu,
    RunEvidence,
    RunLedger,
    RunRegion,
    SampledLine,
    Saving,
    TelemetrySummary,
    WorkerRestarts,
)
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.run_totals import MEDIAN_OVER, REGIONS_OVER, RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork
from tests.evidence import made_evidence, with_figures
from tests.fakes import FakeDevice
from tests.models import Classifier, busy, every_step, loader
from tests.samples import sample_analysis
from tests.synthetic import Synthetic


def evidence(gpu_starved_pct, *times, on_device=True, world_size=1, steps=48, p50=None):
    """A run whose regions, from `data` to `other`, took (device, host) milliseconds a step."""
    regions = {
        name: RunRegion(device_ms=device, host_ms=host) for name, (device, host) in zip(REGIONS, times, strict=True)
    }
    step = sum(device for device, _ in times)
    p50 = step if p50 is None else p50
    return made_evidence(
        steps=steps,
        on_device=on_device,
        step_ms=Distribution(mean=step, p50=p50, min=p50, max=5 * step),
        regions=regions,
        gpu_starved_pct=gpu_starved_pct,
        world_size=world_size,
    )


# Measured on an H200 with ThroughputCallback alone: (device, host) ms of data, transfer, forward, backward, optimizer
# and other, and at how many batch ends the GPU had caught up.
MEASURED = {
    "launch-bound": evidence(100, (0.04, 0.04), (0.07, 0.07), (1.25, 1.25), (2.9, 2.9), (0.48, 0.48), (0.27, 0.27)),
    # a GPT-2 small on 128 tokens: launches too slow in forward and backward, then the update keeps the GPU busy
    "launches and an update": evidence(
        100, (0.0, 0.04), (0.01, 0.07), (1.41, 2.49), (4.78, 4.78), (3.16, 1.65), (0.0, 0.32)
    ),
    "GPT": evidence(0, (0.0, 0.05), (0.01, 0.07), (14.54, 9.16), (27.59, 33.12), (1.42, 0.82), (0.0, 0.35)),
    # 48 layers: host and device times alike, for the host waits wherever the queue is full
    "deep GPT": evidence(0, (0.0, 0.06), (0.01, 0.08), (23.13, 25.22), (49.39, 47.46), (3.49, 2.31), (0.0, 0.89)),
    # the progress bar reads the loss in every step
    "GPT that is read": evidence(0, (0.05, 0.05), (0.08, 0.08), (14.8, 4.2), (27.56, 6.91), (1.41, 0.87), (0.21, 32)),
    "slow loader": evidence(0, (9.14, 40.29), (0.12, 0.12), (14.94, 4.13), (27.55, 7.27), (1.42, 1.01), (0.11, 0.46)),
    "loader hidden": evidence(0, (0.0, 15.24), (0.01, 0.11), (13.3, 1.76), (27.28, 22.45), (0.51, 1.06), (0.0, 0.46)),
    "pageable": evidence(0, (0.0, 0.03), (11.25, 16.88), (3.22, 0.27), (3.38, 0.61), (0.34, 0.26), (0.09, 0.23)),
    "pinned": evidence(0, (0.0, 0.04), (9.67, 0.07), (5.54, 0.35), (4.3, 8.92), (0.29, 2.43), (0.0, 0.53)),
    "optimizer": evidence(100, (0.04, 0.04), (0.36, 0.07), (0.86, 0.79), (2.26, 1.98), (2.1, 2.68), (0.19, 0.26)),
    ".item()": evidence(92, (0.03, 0.04), (0.37, 0.08), (2.37, 2.59), (1.73, 1.55), (0.3, 0.38), (0.09, 0.25)),
}  # fmt: skip


@pytest.mark.parametrize("part", ["gc/generation_0_1", "logger/self.log"])
def test_on_a_gpu_that_waits_the_host_what_has_a_finding_of_its_own_is_not_also_launching(part):
    """A collection and self.log may be in any region, of which the ledger says nothing."""
    alone = MEASURED["launch-bound"]
    seconds = 0.1 * alone.timing.step_ms.mean * alone.timing.steps / 1e3
    ledger = RunLedger(
        wall_s=10 * seconds,
        parts={"steps": 9 * seconds, part: seconds},
        unexplained_s=0.0,
        counts={part: alone.timing.steps},
        counted_s={part: seconds},
    )
    shares = {each.code: each.share_pct for each in combine(None, replace(alone, ledger=ledger)).findings}
    other = next(share for code, share in shares.items() if code != "launch-bound")
    assert other == pytest.approx(10, abs=0.1)
    assert shares["launch-bound"] + other == pytest.approx(98, abs=1)
    assert combine(None, alone).findings[0].share_pct == pytest.approx(98, abs=1)


@pytest.mark.parametrize(
    ("world_size", "call", "waiting_pct", "reduces"),
    [
        (1, "self.log('loss', loss, sync_dist=True)", 50.0, False),
        (2, "self.log('loss', loss, sync_dist=True)", 0.0, True),
        (2, "self.log_dict(metrics, **options)", 50.0, True),
        (2, "self.log_dict(metrics, **options)", 2.0, False),
        (2, "self.log('loss', loss, on_step=False, on_epoch=True, sync_dist=True)", 50.0, False),
    ],
)
def test_values_that_all_ranks_reduce_one_by_one_are_to_be_reduced_at_once(world_size, call, waiting_pct, reduces):
    run, part = with_figures(MEASURED["launch-bound"], world_size=world_size), "logger/self.log"
    line = SampledLine(file="train.py", line=7, function="Net.training_step", pct=100.0, call=call)
    ledger = RunLedger(wall_s=10.0, parts={"steps": 5.0, part: 5.0}, unexplained_s=0.0, counts={part: 100})
    lines = {part: (replace(line, waiting_pct=waiting_pct),)}
    findings = combine(None, replace(run, ledger=ledger, lines=lines)).findings
    finding = next(each for each in findings if each.code == "slow-logger")
    assert ("Where it has sync_dist=True, each call waits for all ranks" in finding.advice) is reduces
    assert ("Log fewer values" in finding.advice) is not reduces


@pytest.mark.parametrize(
    ("run", "verdict", "others"),
    [
        ("launch-bound", "launch-bound", set()),
        ("launches and an update", "slow-optimizer", {"launch-bound"}),
        ("GPT", "compute-bound", set()),
        ("deep GPT", "compute-bound", set()),
        ("GPT that is read", "compute-bound", set()),
        ("slow loader", "input-bound", {"compute-bound"}),
        ("loader hidden", "compute-bound", set()),
        ("pageable", "transfer-bound", {"compute-bound"}),
        ("pinned", "transfer-bound", {"compute-bound"}),
        ("optimizer", "slow-optimizer", {"transfer-bound"}),
        (".item()", "launch-bound", {"transfer-bound"}),
    ],
)
def test_the_regions_of_real_runs_give_their_verdict(run, verdict, others):
    analysis = combine(None, MEASURED[run])
    assert analysis.verdict == verdict
    assert {found.code for found in analysis.findings} == {verdict, *others}
    assert sum(found.share_pct for found in analysis.findings) <= 100.001, "the same time is not counted twice"
    assert all(found.source == "run" for found in analysis.findings)


def the(code, run):
    [found] = [found for found in run_findings(run) if found.code == code]
    return found


def test_a_finding_has_its_numbers_and_names_the_setting():
    found = the("input-bound", MEASURED["slow loader"])
    assert found.title == (
        "the GPU waits 9.14 ms of each 53.3 ms step for the data loader (host wait 40.3 ms, 31.1 ms of it hidden)"
    )
    assert found.share_pct == pytest.approx(100 * 9.14 / 53.28)
    assert found.evidence["exposed_wait_ms_per_step"] == 9.14
    for setting in ("num_workers", "persistent_workers", "pin_memory"):
        assert setting in found.advice


def test_memory_that_is_pinned_already_is_not_advised_to_be():
    assert "pin_memory=True" in the("transfer-bound", MEASURED["pageable"]).advice
    assert "pin_memory" not in the("transfer-bound", MEASURED["pinned"]).advice


def test_an_optimizer_that_is_named_has_no_part_in_other_findings():
    run = MEASURED["launches and an update"]
    assert the("slow-optimizer", run).share_pct == pytest.approx(100 * 3.16 / 9.36)
    assert the("launch-bound", run).share_pct == pytest.approx(100 * (1.41 + 4.78) / 9.36)


IDLE = (0.0, 0.0)
LIGHTNINGS = (("strategies/strategy.py", "training_step"), ("loops/evaluation_loop.py", "run"))


def test_a_loader_that_drains_the_gpu_of_a_small_model_is_distinguished_from_slow_launches():
    run = evidence(100, (12.0, 12.1), IDLE, (1.0, 1.0), (2.0, 2.0), (0.3, 0.3), (0.2, 0.2))
    shares = {found.code: found.share_pct for found in run_findings(run)}
    assert shares["input-bound"] == pytest.approx(100 * 12 / 15.5)
    assert shares["launch-bound"] == pytest.approx(100 * 3.5 / 15.5)


def test_less_than_a_twentieth_of_a_step_is_not_named():
    assert run_findings(evidence(40, (0.4, 3.0), (0.4, 3.0), (4.5, 4.5), (4.5, 4.5), (0.1, 0.1), (0.1, 0.1))) == ()
    assert (
        combine(None, evidence(40, (0.4, 3.0), IDLE, (4.6, 4.6), (5.0, 5.0), IDLE, IDLE)).verdict == NOTHING_STANDS_OUT
    )


def test_without_an_answer_of_the_gpu_no_wait_is_claimed():
    run = evidence(None, (6.0, 25.0), IDLE, (14.0, 9.0), (28.0, 33.0), (1.4, 0.8), IDLE)
    assert [found.code for found in run_findings(run)] == ["input-bound"]


def test_on_a_cpu_loader_and_optimizer_are_all_that_is_judged():
    run = evidence(None, (5.0, 5.0), (5.0, 5.0), (5.0, 5.0), (5.0, 5.0), (9.0, 9.0), IDLE, on_device=False)
    found, optimizer = run_findings(run)
    assert (found.code, optimizer.code) == ("input-bound", "slow-optimizer")
    assert found.title == "training waits 5.00 ms of each 29.0 ms step for the data loader"
    assert "num_workers" in found.advice
    assert "pin_memory" not in found.advice, "which is for copies to a GPU"


def test_no_workers_are_advised_where_handing_a_batch_over_takes_as_long_as_making_it():
    for on_device in (True, False):
        run = evidence(None, (0.5, 0.6), IDLE, (2.0, 2.0), IDLE, IDLE, IDLE, on_device=on_device)
        [found] = run_findings(run)
        assert "num_workers" not in found.advice
        assert "make batches larger or cheaper" in found.advice


@pytest.mark.parametrize(("wait_ms", "verdict"), [(0.6, NOTHING_STANDS_OUT), (1.6, "input-bound")])
def test_on_a_cpu_a_short_wait_is_no_verdict_beside_a_step_that_computes(wait_ms, verdict):
    rest = 10 - wait_ms - 0.1
    times = ((wait_ms, wait_ms), IDLE, (0.4 * rest, 0.4 * rest), (0.6 * rest, 0.6 * rest), IDLE, (0.1, 0.1))
    analysis = combine(None, evidence(None, *times, on_device=False))
    assert analysis.verdict == verdict
    beside = [] if verdict == NOTHING_STANDS_OUT else ["compute-bound"]  # else the verdict's text has it
    assert [found.code for found in analysis.findings] == ["input-bound", *beside]
    if verdict == NOTHING_STANDS_OUT:
        assert "forward, backward and optimizer take 93 % of the step" in analysis.verdict_text
        assert "costs 6 %: input-bound" in analysis.verdict_text


@pytest.mark.parametrize(
    ("cpu", "what"),
    [
        (None, "computing, or waiting in it,"),  # the run was too short to read CPU times
        (
            CpuUse(
                cores=2,
                used=0.4,
                threads=2,
                regions={"forward": RegionCpu(used_pct=30.0, waits_pct=5.0, blocked_pct=65.0)},
            ),
            "computing, or waiting in it,",
        ),
        (
            CpuUse(
                cores=2,
                used=1.0,
                idle=1.0,
                regions={"forward": RegionCpu(used_pct=100.0, waits_pct=0.0, blocked_pct=0.0)},
            ),
            "computing",
        ),
    ],
)
def test_the_work_of_a_cpu_comes_after_what_can_be_removed_and_says_what_may_be_a_wait(cpu, what):
    times = ((0.1, 0.1), IDLE, (2.6, 2.6), (0.1, 0.1), IDLE, (0.37, 0.37))  # 2 ms of forward may be a sleep
    found = combine(None, with_figures(evidence(None, *times, on_device=False), cpu=cpu))
    assert [one.code for one in found.findings] == ["between-regions", "compute-bound"]
    assert found.findings[1].title.startswith(f"{what} takes 2.70 ms of each 3.17 ms step on the CPU: forward 2.60 ms")


def costs(code, pct, low_pct=None, high_pct=None, **more):
    """A finding of a run."""
    return Finding(
        code=code,
        share_pct=pct,
        rank=None,
        source=more.pop("source", "run"),
        title="it does",
        evidence={},
        advice="",
        low_pct=low_pct,
        high_pct=high_pct,
        **more,
    )


def test_what_is_not_certain_is_no_verdict_however_large_it_may_be():
    unsure, launches = costs("input-bound", 65.0, 0.0, 81.0), costs("launch-bound", 7.0, 6.0, 8.0)
    assert decide(in_order([unsure, launches]), steps=150)[0] == "launch-bound"
    sure = replace(unsure, low_pct=40.0)
    assert decide(in_order([launches, sure]), steps=150)[0] == "input-bound"
    verdict, text = decide(in_order([costs("transfer-bound", 11.0, 2.0, 20.0), unsure]), steps=150)
    assert verdict == NO_VERDICT
    assert text == (
        "Not enough steps to tell: input-bound takes 65 % of the step (0 to 81 %). 150 steps counted, about 180 needed."
    )


def saves_pct(pct, *, at_most=True):
    return Saving(ms_per_step=pct / 10, pct=pct, at_most=at_most, text="")


@pytest.mark.parametrize(
    ("found", "gpu"),
    [
        # a measured set-up each, in the order that its fixes showed to be right
        ([costs("worker-restarts", 57.0), costs("launch-bound", 34.0)], True),
        (
            [
                costs("input-bound", 35.7, source="trace"),
                costs("transfer-bound", 33.6, source="trace"),
                costs("launch-bound", 29.0, source="trace"),
            ],
            True,
        ),
        ([costs("sync-bound", 8.0, source="trace"), costs("launch-bound", 80.0, source="trace")], True),
        # what a fix saves decides, not what the cause takes; a bound counts no more than that
        (
            [
                costs("slow-callback", 20.0, of="run", saves=saves_pct(20.0)),
                costs("input-bound", 60.0, saves=saves_pct(15.0)),
                costs("transfer-bound", 12.0, saves=saves_pct(70.0)),
                costs("compute-bound", 40.0),
                costs("launch-bound", 90.0, saves=saves_pct(30.0)),
            ],
            True,
        ),
        # too small beside the work: a fix that saves next to nothing, and a part of a step on a CPU
        ([costs("launch-bound", 90.0), costs("transfer-bound", 12.0, source="trace", saves=saves_pct(1.0))], True),
        ([costs("compute-bound", 80.0), costs("input-bound", 8.0)], False),
        ([costs("launch-bound", 94.0), costs("memory-near-limit", 96.0, of="memory")], True),
        # what nothing measures comes after what is measured, and before the work
        ([costs("slow-optimizer", 44.0), costs("checkpointing", 0.0), costs("launch-bound", 50.0)], True),
        # time in one function of the user's is a call
        ([replace(costs("python-bound", 73.0), evidence={"where": "train.py:8"}), costs("input-bound", 24.0)], False),
        ([costs("input-bound", 24.0), costs("python-bound", 73.0)], False),
    ],
)  # fmt: skip
def test_what_can_be_removed_comes_before_the_work_by_what_the_fit_loses(found, gpu):
    assert [one.code for one in in_order(found[::-1], gpu=gpu)] == [one.code for one in found]


def test_regions_that_are_not_timed_apart_are_not_called_loggers():
    run = evidence(None, (0.4, 0.4), IDLE, IDLE, IDLE, IDLE, (9.6, 9.6), on_device=False)
    assert [found.code for found in run_findings(run)] == ["between-regions"]
    told_apart = {name: run.timing.regions[name] for name in ("data", "other")}
    assert run_findings(with_figures(run, regions=told_apart)) == ()


def test_a_wait_of_a_twentieth_is_no_verdict_where_half_of_the_step_is_lightning_and_its_callbacks():
    times = ((0.05, 0.05), (0.01, 0.01), (0.12, 0.12), (0.15, 0.15), (0.09, 0.09), (0.44, 0.44))
    for on_device in (True, False):
        analysis = combine(None, evidence(100 if on_device else None, *times, on_device=on_device))
        assert analysis.verdict == "between-regions"
        assert analysis.verdict_text.startswith("between-regions: 0.44 ms of each 0.86 ms step")
        assert "input-bound" in {found.code for found in analysis.findings}
        assert sum(found.share_pct for found in analysis.findings) <= 100.001, "the same time is not counted twice"


def test_too_few_steps_give_no_verdict_and_say_so():
    run = evidence(100, (12.0, 12.0), IDLE, IDLE, IDLE, IDLE, IDLE, steps=MIN_STEPS - 1)
    analysis = combine(None, run)
    assert analysis.verdict == NO_VERDICT
    assert analysis.verdict_text == "No verdict: 4 steady steps, at least 5 needed."


def test_with_several_processes_a_long_backward_is_not_called_compute():
    times = ((0.0, 0.05), (0.0, 0.05), (5.0, 1.0), (40.0, 2.0), (1.0, 1.0), (0.1, 40.0))
    together = evidence(0, *times, world_size=4)
    assert run_findings(together) == ()
    assert [hint.code for hint in run_hints(together)] == ["backward-heavy"]
    assert [found.code for found in run_findings(evidence(0, *times))] == ["compute-bound"]


def test_with_several_processes_it_says_that_communication_is_in_it_and_whose_figures_they_are():
    run = evidence(0, (0.0, 0.1), (0.0, 0.1), (14.0, 3.0), (28.0, 6.0), (1.0, 1.0), (0.1, 30.0), world_size=4)
    found = the("compute-bound", run)
    assert "communication of the 4 processes included" in found.title
    assert found.rank == 0


def test_uneven_steps_are_hinted_at():
    times = ((0.0, 0.0), IDLE, (10.0, 10.0), IDLE, IDLE, IDLE)
    assert [hint.code for hint in run_hints(evidence(0, *times, p50=4.0))] == ["uneven-steps"]
    assert run_hints(evidence(0, *times, p50=9.9)) == ()


def test_a_run_that_stops_accumulating_after_thousands_of_steps_has_even_ones():
    """Of single steps the latest few thousand are kept, among which none accumulates any more."""
    totals = RunTotals()
    for step in range(10_000):
        totals.add(StepTimes(step, {"step": 10.0}, {"step": 10.0}), StepWork(optimizer_steps=int(step >= 5000)), None)
    summary = totals.timing(steps=10_000, before_first_s=0.0, wall_s=100.0)
    assert summary.typical_mean_ms == pytest.approx(10.0)


@pytest.mark.parametrize("package", ["lightning/pytorch", "pytorch_lightning"])
def test_the_regions_of_sampled_lines_are_those_of_either_package(package):
    of = {file: stack_region(f"/v/site-packages/{package}/{file}", name) for file, name in LIGHTNINGS}
    assert [*of.values()] == ["forward", ""]


def test_gradients_are_not_advised_to_be_accumulated_by_lightning_where_it_refuses_to():
    run = evidence(0, (0.1, 0.1), IDLE, (1.0, 1.0), (1.0, 1.0), (8.0, 8.0), IDLE, on_device=False)
    for manual, advised in ((False, True), (True, False)):
        optimizer = OptimizerSettings(
            kind="Lion", fused=False, tensors=4, elements=90, median_elements=12, manual=manual
        )
        found = the("slow-optimizer", with_figures(run, optimizer=optimizer))
        assert ("accumulate_grad_batches" in found.advice) is advised
        assert "fused" not in found.advice, "an optimizer that is not PyTorch's may have no such argument"


def test_parameter_groups_of_a_tensor_each_are_to_be_one_first():
    run = evidence(0, (0.1, 0.1), IDLE, (1.0, 1.0), (1.0, 1.0), (8.0, 8.0), IDLE, on_device=False)
    settings = {"kind": "AdamW", "tensors": 602, "elements": 9000, "median_elements": 12}
    found = the("slow-optimizer", with_figures(run, optimizer=OptimizerSettings(fused=False, groups=602, **settings)))
    assert found.advice.startswith("Its 602 tensors are in 602 parameter groups, and foreach or fused,")
    assert "fused=True" in found.advice
    assert (found.fix, found.evidence["parameter_groups"]) == ("", 602)
    fused = the("slow-optimizer", with_figures(run, optimizer=OptimizerSettings(fused=True, groups=602, **settings)))
    assert fused.advice.endswith("put parameters with the same settings into one."), "and nothing else"
    two = the("slow-optimizer", with_figures(run, optimizer=OptimizerSettings(fused=False, groups=2, **settings)))
    assert "groups" not in two.advice


def test_a_wait_is_said_beside_the_calls_that_it_has_without():
    run = evidence(0, (8.0, 8.0), IDLE, (1.0, 1.0), (1.0, 1.0), (0.1, 0.1), IDLE, on_device=False)
    where = {"file": "data.py", "function": "Set.__getitem__", "samples": 400}
    slow = SampledLine(line=7, pct=55.0, call="self.load(index)", callee="Set.load", **where)
    known = SampledLine(line=9, pct=40.0, call="torch.tensor(rows)", callee="tensor", **where)
    ledger = RunLedger(wall_s=0.5, parts={"steps": 0.48}, unexplained_s=0.0, counts={})

    def findings(*lines):
        found = combine(None, with_figures(run, ledger=ledger, lines={"data": lines})).findings
        return {each.code: each.title for each in found}

    both, alone = findings(slow, known), findings(slow)
    assert "training waits 4.80 ms of each" in both["input-bound"]
    assert "of it in self.load(index) at data.py:7; beside 3.20 ms in torch.tensor(rows) at" in both["input-bound"]
    assert "3.20 ms of each" in both["slow-call"]
    assert "training waits 8.00 ms" in alone["input-bound"]
    assert "beside" not in alone["input-bound"]


def is_loaded(data):
    return [
        len(data),
        min(data),
    ]


def loops(many):
    for one in many:
        one.norm()
    return many.norm() + sum(each.norm() for each in many)


def test_a_call_in_a_loop_is_told_from_one_behind_it():
    [inner] = [const for const in loops.__code__.co_consts if hasattr(const, "co_code")]
    calls = [each for each in dis.get_instructions(loops) if each.opname == "CALL" and each.positions.lineno]
    lines = [is_in_loop(loops.__code__, each.offset) for each in calls]
    assert lines[0] is True
    assert lines[1:] == [False] * len(lines[1:])
    assert [is_in_loop(inner, each.offset) for each in dis.get_instructions(inner) if each.opname == "CALL"] == [True]


def test_a_call_over_lines_is_known_by_the_line_and_name_of_each():
    calls = [each for each in dis.get_instructions(is_loaded) if each.opname == "CALL"]
    places = [Place(is_loaded.__code__, each.offset) for each in calls]
    lines = sampled_lines({(0, place.instruction, 1): PlaceTime(place, 10**9, 0, 50) for place in places})
    assert [(line.call, line.callee) for line in lines] == [("len(data)", "len"), ("min(data)", "min")]
    assert [line.line for line in lines] == [each.positions.lineno for each in calls]


@pytest.mark.parametrize(
    ("inside", "callee"),
    [
        (torch.nn.Linear.forward, "torch.nn.modules.linear.Linear.forward"),
        (torch.Tensor.norm, "torch._tensor.Tensor.norm"),
        (is_loaded, "norm"),  # one in C may call functions of Python
    ],
)
def test_a_sample_that_finds_a_function_of_python_returned_is_of_its_call(inside, callee):
    call = next(each for each in dis.get_instructions(loops) if each.opname == "CALL")
    late, called = Place(loops.__code__, call.offset), Place(loops.__code__, call.offset, inside.__code__)
    times = {(0, 0, of): PlaceTime(place, ns, 0, 25) for of, (place, ns) in enumerate([(late, 10**9), (called, 10**8)])}
    [line] = sampled_lines(times)
    assert (line.call, line.callee, line.samples) == ("one.norm()", callee, 50)


# -- from the boundaries to the verdict, on a simulated GPU ------------------------------------------------------------


class Loop:
    """A training loop on a simulated GPU: each region takes the host some time, and queues some work."""

    def __init__(self, **options):
        self.device = FakeDevice()
        timers = CUDATimerCollection((), events=self.device, clock_ns=self.device.host_clock_ns)
        self.step_timer = StepTimer(timers, clock_ns=self.device.host_clock_ns, **options)
        self.step_timer.start()

    def pass_time(self, ms):
        self.device.pass_host_time(ms=ms)
        self.device.run(ms=ms)

    def region(self, name, *, host, gpu=0.0, launches=1):
        self.step_timer.regions.enter(name)
        for _ in range(launches):
            self.pass_time(host / launches)
            if gpu:
                self.device.enqueue(gpu / launches)
        self.step_timer.regions.exit(name)

    def step(self, regions):
        for name, options in regions.items():
            self.region(name, **options)
        self.pass_time(0.05)  # what Lightning does until the end of the batch
        self.step_timer.end_step(StepWork())

    def evidence(self, steps, **regions):
        for _ in range(steps):
            self.step(regions)
        self.step_timer.finish(wait=True)
        return RunEvidence(timing=self.step_timer.timing())


def test_small_kernels_leave_the_gpu_drained_at_every_batch_end():
    run = Loop(warmup_steps=2).evidence(
        20,
        data={"host": 0.1},
        forward={"host": 4, "gpu": 0.4, "launches": 40},
        backward={"host": 8, "gpu": 0.8, "launches": 40},
        optimizer={"host": 1, "gpu": 0.1, "launches": 10},
    )
    assert run.timing.steps == 18
    assert run.timing.gpu_starved_pct == 100
    assert combine(None, run).verdict == "launch-bound"


def test_a_host_that_runs_ahead_never_sees_the_gpu_drained():
    run = Loop(warmup_steps=2).evidence(
        20,
        data={"host": 1},
        forward={"host": 2, "gpu": 10},
        backward={"host": 3, "gpu": 20},
        optimizer={"host": 1, "gpu": 1},
    )
    assert run.timing.gpu_starved_pct == 0
    assert combine(None, run).verdict == "compute-bound"


def test_where_the_gpu_waits_for_a_line_that_waits_that_line_is_the_advice():
    times = {"forward": (22.0, 22.0), "backward": (2.9, 2.9)}
    run = evidence(100, (0.04, 0.04), (0.07, 0.07), *times.values(), (0.48, 0.48), (0.27, 0.27))
    waits = SampledLine(file="train.py", line=6, function="M.training_step", pct=90.0, waiting_pct=97.0)
    lines = ({"forward": (waits,)}, {"forward": (replace(waits, waiting_pct=3.0),)})
    held_up, busy = (combine(None, replace(run, lines=of)).findings[0] for of in lines)
    assert held_up.code == busy.code == "launch-bound"
    assert "train.py:6 M.training_step (waiting, not computing)" in held_up.title
    assert "what waits: a lock" in held_up.advice
    assert not held_up.fix
    assert "CUDA graphs" in busy.advice
    several = combine(None, with_figures(run, lines={"forward": (waits,)}, world_size=2)).findings[0]
    assert "what waits" not in several.advice, "it may wait for the other rank"


def test_where_a_trace_shows_only_that_the_host_works_the_runs_line_is_the_advice(tmp_path):
    trace = Synthetic()
    trace.step(0, 0, 100)
    trace.kernel(60, 100, launched=60)
    [recorded] = analyze(trace.write(tmp_path)).analysis.findings
    assert (recorded.code, "No fix is known" in recorded.advice) == ("gpu-idle", True)
    line = SampledLine(file="train.py", line=6, function="M.training_step", pct=90.0, waiting_pct=3.0)
    run = evidence(100, *[(22.0, 22.0)] * 6)
    [finding] = with_lines([recorded], replace(run, lines=dict.fromkeys(("forward", "other"), (line,))))
    assert "train.py:6 M.training_step" in finding.title
    assert finding.advice == "Make that line cheaper, or do what it does once, ahead of time."


PYTHON_BOUND = replace(
    sample_analysis().findings[0],
    code="python-bound",
    share_pct=60.0,
    title="60 ms are Python",
    advice="A larger batch.",
)


def test_python_between_operators_names_the_function_that_it_is_in_and_no_module_that_is_called():
    def line(number, function, pct, callee):
        return SampledLine(file="train.py", line=number, function=function, pct=pct, callee=callee)

    lines = (
        line(38, "M.training_step", 40.0, "torch.nn.modules.module.Module._call_impl"),
        line(33, "M.tokenize.<locals>.<listcomp>", 25.0, ""),
        line(33, "M.tokenize", 20.0, "re.findall"),
        line(20, "M.crop", 10.0, ""),
    )
    run = evidence(100, *[(ms, ms) for ms in (0.0, 0.0, 80.0, 10.0, 5.0, 5.0)])
    [finding] = with_lines([PYTHON_BOUND], replace(run, lines={"forward": lines}))
    assert finding.title == "60 ms are Python; 36.0 ms of it in M.tokenize at train.py:33"
    assert finding.advice == "Make that function cheaper, or call it once, ahead of time, or in the loader's workers."
    [of_module] = with_lines([PYTHON_BOUND], replace(run, lines={"forward": lines[:1]}))
    assert of_module == PYTHON_BOUND


def loop_that_ends_in_a_branch(numbers):
    total = 0
    for number in numbers:
        total += number
        if total > 1000:
            total = 0
    return total


def test_the_jump_back_of_a_loop_has_the_loops_line():
    code = loop_that_ends_in_a_branch.__code__
    jumps = [each.offset for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname]
    assert jumps
    for offset in jumps:
        _, line, function = PlaceTime(Place(code, offset)).line
        assert code.co_firstlineno + 2 <= line <= code.co_firstlineno + 5
        assert function == "loop_that_ends_in_a_branch"


def test_an_update_that_outlasts_its_launches_does_not_hide_that_the_gpu_waited_before():
    run = Loop(warmup_steps=2).evidence(
        20,
        data={"host": 0.1},
        forward={"host": 4, "gpu": 0.4, "launches": 40},
        backward={"host": 8, "gpu": 0.8, "launches": 40},
        optimizer={"host": 0.3, "gpu": 2},
    )
    assert run.timing.gpu_starved_pct == 100
    assert combine(None, run).verdict == "launch-bound"


def test_without_an_update_in_the_step_its_last_region_is_asked():
    """As in the steps of gradient accumulation that update nothing."""
    run = Loop(warmup_steps=2).evidence(
        20, data={"host": 0.1}, forward={"host": 2, "gpu": 3}, backward={"host": 3, "gpu": 6}
    )
    assert run.timing.gpu_starved_pct == 0


def test_a_slow_loader_is_input_bound_by_what_is_exposed_of_it():
    run = Loop(warmup_steps=2).evidence(
        20,
        data={"host": 25},
        forward={"host": 2, "gpu": 6},
        backward={"host": 3, "gpu": 12},
        optimizer={"host": 1, "gpu": 1},
    )
    assert run.timing.regions["data"].host_ms == pytest.approx(25)
    assert run.timing.regions["data"].device_ms < 25
    assert combine(None, run).verdict == "input-bound"


@pytest.mark.parametrize("regions", [("data", "forward"), ()])
def test_where_not_all_regions_are_timed_the_gpu_is_not_asked(regions):
    run = Loop(regions=regions).evidence(20, forward={"host": 1, "gpu": 1}, backward={"host": 1, "gpu": 1})
    assert run.timing.gpu_starved_pct is None


def test_asking_costs_one_call_a_step_and_never_waits():
    loop = Loop()
    for _ in range(15):
        loop.step({"forward": {"host": 1, "gpu": 5}})
    loop.step({})  # the 16th, when what has completed is read
    calls = []
    for _ in range(10):
        began = loop.device.calls
        loop.step({"forward": {"host": 1, "gpu": 5}})
        calls.append(loop.device.calls - began)
    assert calls == [3] * 10, "two marks, one question"
    assert loop.device.waits == 0


def test_nothing_is_asked_while_a_cuda_graph_is_captured():
    loop = Loop()
    loop.device.is_capturing = True
    before = loop.device.calls
    loop.step({"forward": {"host": 1, "gpu": 1}})
    assert loop.device.calls == before


def test_the_spread_is_over_the_steps_that_count_and_bounded_in_memory():
    totals = RunTotals()
    for step, ms in enumerate([500.0, 3.0, 9.0, 1.0, *[5.0] * MEDIAN_OVER]):
        totals.add(StepTimes(step, {"forward": ms}, {}), StepWork(), None if step else "warm-up")
    spread = totals.timing(steps=0, before_first_s=0, wall_s=1).step_ms
    assert (spread.p50, spread.min, spread.max) == (5.0, 1.0, 9.0)


def test_percentiles_of_regions_are_over_the_steps_that_speak_for_the_others():
    totals = RunTotals()
    for step in range(200):
        chosen, fetch_ms = step % 2 == 0, float(step)
        times = StepTimes(step, {"data": fetch_ms, "forward": 1.0}, {})
        if not chosen and step % 10 != 1:
            times = times.whole()
        # each tenth step follows a validation: it is split whether or not it is chosen, and its loader starts anew
        late = {} if chosen or not times.split else {"loader start": 5000.0}
        times = times._replace(device_ms={**times.device_ms, **late})
        totals.add(times, StepWork(), None, StepTiming(chosen=chosen))
    found = totals.timing(steps=200, before_first_s=0, wall_s=1).regions
    assert (found["data"].p50_ms, found["data"].p95_ms) == (99.0, pytest.approx(188.1))
    assert found["forward"].p50_ms == found["forward"].p95_ms == 1
    assert found["optimizer"].p50_ms == found["optimizer"].p95_ms == 0


def test_where_every_step_is_split_loader_starts_count_to_the_percentiles_of_data():
    totals = RunTotals()
    for step in range(40):
        start = {"loader start": 100.0} if step % 4 == 0 else {}
        totals.add(StepTimes(step, {"data": 1.0, **start}, {}), StepWork(), None, StepTiming(chosen=not start))
    evidence = RunEvidence(timing=totals.timing(steps=40, before_first_s=0, wall_s=1))
    assert (evidence.timing.regions["data"].p50_ms, evidence.timing.regions["data"].p95_ms) == (1.0, 101.0)


def test_percentiles_of_regions_cover_the_latest_steps_and_no_more_memory():
    totals = RunTotals()
    for step in range(3 * REGIONS_OVER):
        totals.add(StepTimes(step, {"forward": 1.0 + step // REGIONS_OVER}, {}), StepWork(), None)
        if step % 100 == 0:
            totals.take()
    found = totals.timing(steps=0, before_first_s=0, wall_s=1).regions["forward"]
    assert (found.p50_ms, found.p95_ms) == (3.0, 3.0)


# -- on real Trainers -------------------------------------------------------------------------------------------------


def test_a_slow_dataset_ends_in_its_verdict_with_throughput_callback_alone(make_trainer, capsys):
    callback = ThroughputCallback(warmup_steps=2)
    assert callback.analysis() is None
    make_trainer(callback, logger=False).fit(Classifier(), loader(200, 20, slow="data"))
    [verdict] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict")]
    assert verdict.startswith("verdict     input-bound: training waits ")
    analysis = callback.analysis()
    assert analysis.verdict == "input-bound"
    assert analysis.findings[0].share_pct > 50
    assert analysis.run.timing.steps == 8


def test_a_slow_callback_is_the_verdict_and_not_the_short_wait_for_data(make_trainer):
    class Slow(Callback):
        def on_train_batch_end(self, *_):
            busy(20)

    callback = every_step(2)
    make_trainer(callback, Slow(), logger=False).fit(Classifier(), loader(30, 1, slow="data"))
    analysis = callback.analysis()
    assert analysis.verdict == "slow-callback"
    first = analysis.findings[0]
    assert first.title.startswith("callback Slow.on_train_batch_end takes ")
    assert first.evidence["seconds"] >= 29 * 20e-3, "all but the first call, if that took much longer"
    assert first.saves.at_most
    assert "between-regions" not in {found.code for found in analysis.findings}, "the same time is named once"
    assert first.saves.text in analysis.verdict_text


def test_a_short_run_says_why_there_is_no_verdict(make_trainer, capsys):
    make_trainer(ThroughputCallback(), logger=False).fit(Classifier(), loader(16))
    assert "verdict     not enough steps: 0 after warm-up, at least 5 needed" in capsys.readouterr().out


@pytest.mark.slow
def test_both_callbacks_give_one_verdict_also_where_no_trace_is_recorded(make_trainer, capsys, tmp_path):
    throughput, forge = ThroughputCallback(warmup_steps=2), ForgeProfilerCallback(90, 93, trace_dir=tmp_path / "t")
    make_trainer(throughput, forge, logger=False).fit(Classifier(), loader(200, 20, slow="data"))
    assert capsys.readouterr().out.count("verdict ") == 1
    assert forge.analysis() is throughput.analysis()
    assert forge.analysis().verdict == "input-bound"


def test_allocations_in_every_step_are_not_called_compute():
    """What the GPU waits for cudaMalloc is within the regions' times."""
    run = MEASURED["GPT"]
    assert combine(None, run).verdict == "compute-bound"
    churning = with_figures(run, telemetry=TelemetrySummary(device="NVIDIA H200", device_allocs_per_step=12.0))
    found = combine(None, churning)
    assert found.verdict == NOTHING_STANDS_OUT
    assert "12.0 times a step" in next(hint.text for hint in found.hints if hint.code == "cuda-malloc-steady")
    assert "recorded window" in next(hint.text for hint in found.hints if hint.code == "cuda-malloc-steady")
    rarely = with_figures(run, telemetry=TelemetrySummary(device="NVIDIA H200", device_allocs_per_step=0.2))
    assert combine(None, rarely).verdict == "compute-bound"


class TestWorkerRestarts:
    """Of the wait for data, what ending and starting workers takes is a cause of its own."""

    RUN = with_figures(
        evidence(50, (6.0, 7.0), IDLE, (6.0, 6.0), (7.0, 7.0), (0.5, 0.5), (0.5, 0.5), p50=14.0),
        worker_restarts=WorkerRestarts(count=12, workers=4, device_ms=4.0, host_ms=5.0),
        typical_mean_ms=16.0,
    )

    def test_it_is_named_with_its_figures_and_input_bound_is_of_the_rest(self):
        found = the("worker-restarts", self.RUN)
        assert found.title == (
            "the DataLoader ends its 4 workers and starts new ones each epoch: 20.0 ms each time until the first "
            "batch, 192 ms of the 960 ms that 48 steps take"
        )
        assert found.share_pct == pytest.approx(20)
        assert "persistent_workers=True" in found.advice
        assert not found.saves.at_most, "all of it: persistent workers are started once"
        assert the("input-bound", self.RUN).share_pct == pytest.approx(10)

    def test_it_makes_no_steps_uneven(self):
        assert "uneven-steps" not in {hint.code for hint in run_hints(self.RUN)}, "20 ms less 4, where 16 are usual"
        assert "uneven-steps" in {hint.code for hint in run_hints(with_figures(self.RUN, worker_restarts=None))}

    def test_a_trace_that_does_not_know_of_it_does_not_hide_it(self):
        recorded = sample_analysis()
        both = combine(recorded, with_figures(self.RUN, step_ms=replace(self.RUN.timing.step_ms, mean=53.3, p50=53.3)))
        assert "worker-restarts" in {found.code for found in both.findings}


def test_analyze_of_a_runs_own_folder_gives_the_runs_verdict(make_trainer, tmp_path, capsysbinary):
    """A trace does not tell what is the callbacks' time; the run around it does, and lies beside it."""

    class Slow(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.02)

    forge = ForgeProfilerCallback(5, 9, trace_dir=tmp_path / "t")
    make_trainer(ThroughputCallback(warmup_steps=2), forge, Slow()).fit(Classifier(), loader(4 * 40))
    folder = forge.trace_report().path.parent
    at_its_end = json.loads((folder / "summary.json").read_text())
    assert at_its_end["verdict"] == "slow-callback"

    def analyzed(*options):
        capsysbinary.readouterr()
        assert main(["show", str(folder), "--json", *options]) == 0
        return json.loads(capsysbinary.readouterr().out)

    again = analyzed()
    assert (again["verdict"], again["run"]) == ("slow-callback", at_its_end["run"])
    alone = analyzed("--steps", "6:9")
    assert alone["run"] is None
    assert alone["verdict"] != "slow-callback"
    (folder / "summary.json").write_text('{"of": "another program"}')
    assert analyzed()["run"] is None


def test_an_update_of_lbfgs_is_several_passes():
    run = evidence(0, (0.1, 0.1), IDLE, (1.0, 1.0), (1.0, 1.0), (8.0, 8.0), IDLE, on_device=False)
    optimizer = OptimizerSettings(kind="LBFGS", fused=False, tensors=4, elements=90, median_elements=12, manual=False)
    found = the("slow-optimizer", with_figures(run, optimizer=optimizer))
    assert "forward and backward up to max_iter times" in found.advice
    assert found.fix == "LBFGS(..., max_iter=4)"
