"""Recordings with a planted cause keep their verdict when nothing that matters changes, and what else they say."""

import gzip
import json

import pytest
from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.compute import RULES
from lightning_forge_profiling.diagnosis.findings import find_causes
from lightning_forge_profiling.diagnosis.rule import RuleContext
from lightning_forge_profiling.pipeline import analyze
from tests.golden.verdicts import TRACES, VERDICTS, analysis_of
from tests.samples import sample_analysis
from tests.synthetic import Synthetic

SYNCS = ("sync_bound", "sync_item", "sync_stack")
THREE_STEPS = sorted(VERDICTS)


def codes(analysis):
    return {finding.code for finding in analysis.findings}


def rewritten(case, folder, change):
    """A copy of a case's traces, all of whose events have been through `change`."""
    for file in (TRACES / case).glob("*.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        for event in trace["traceEvents"]:
            change(event)
        (folder / file.stem).write_text(json.dumps(trace))
    return folder


@pytest.mark.parametrize("case", SYNCS)
def test_planted_syncs_are_the_verdict_before_launches_and_to_be_fixed_before_cuda_graphs(case):
    found = {finding.code: finding for finding in analysis_of(TRACES / case).findings}
    assert {"sync-bound", "launch-bound"} <= found.keys()
    assert analysis_of(TRACES / case).verdict == "sync-bound"
    assert "First fix sync-bound: a CUDA graph cannot contain" in found["launch-bound"].advice
    [alone] = [one for one in analysis_of(TRACES / "launch_bound").findings if one.code == "launch-bound"]
    assert "sync-bound" not in alone.advice


def test_a_sync_is_found_with_its_line_where_stacks_were_recorded():
    (finding,) = [one for one in analysis_of(TRACES / "sync_stack").findings if one.code == "sync-bound"]
    assert "planted.py:" in finding.title
    assert "planted.py:" in str(finding.evidence["where"])


def test_cuda_graphs_are_not_advised_where_there_are_some():
    (finding,) = [one for one in analysis_of(TRACES / "cuda_graph").findings if one.code == "launch-bound"]
    assert "CUDA graphs are replayed 2 times a step beside " in finding.advice
    assert "reduce-overhead" not in finding.advice


@pytest.mark.parametrize(
    ("launches", "expected"), [(0, "All work is launched as CUDA graphs, 2 a step"), (3, "beside 3 ")]
)
def test_a_model_that_replays_cuda_graphs_gets_other_advice(tmp_path, launches, expected):
    trace = Synthetic()
    for number in range(3):
        start = 10 * number
        trace.step(number, start, start + 10)
        for graph in range(2):
            launched = start + 1 + 4 * graph
            trace.graph([(launched + 0.1, launched + 0.4), (launched + 0.4, launched + 0.7)], launched=launched)
        for kernel in range(launches):
            launched = start + 9 + 0.2 * kernel
            trace.kernel(launched + 0.01, launched + 0.1, launched=launched)
    trace.write(tmp_path)
    analysis = analyze(tmp_path).analysis
    assert analysis.verdict == "launch-bound"
    assert expected in analysis.verdict_text
    for words in (*(found.advice for found in analysis.findings), *(hint.text for hint in analysis.hints)):
        assert "reduce-overhead" not in words
        assert "or CUDA graphs" not in words


def test_a_healthy_pair_of_ranks_has_only_small_findings():
    analysis = analysis_of(TRACES / "ddp")
    assert codes(analysis) <= {"communication-bound", "sync-bound", "straggler", "launch-bound"}
    assert all(finding.share_pct < 20 for finding in analysis.findings)


@pytest.mark.parametrize("case", ["slow_rank_gpu", "slow_rank_host"])
def test_the_straggler_is_named_with_what_makes_it_slow(case):
    first = analysis_of(TRACES / case).findings[0]
    reason = {"slow_rank_gpu": "its GPU computes longer", "slow_rank_host": "its host is late"}[case]
    assert (first.code, first.rank) == ("straggler", 1)
    assert reason in first.title


def test_a_late_rank_s_own_wait_for_its_host_is_no_second_thing_to_fix():
    straggler, own = analysis_of(TRACES / "slow_rank_host").findings
    assert (straggler.evidence["late"], own.code, own.rank) == ("host", "gpu-idle", 1)
    assert "makes rank 1 late: see straggler" in own.advice
    assert own.saves is None
    straggler, own = analysis_of(TRACES / "slow_rank_gpu").findings
    assert (straggler.evidence["late"], own.code) == ("gpu", "compute-bound")
    assert own.saves is not None


def test_a_single_step_does_not_tell_whether_allocations_go_on():
    step = analysis_of(TRACES / "allocator_churn").ranks[0].per_step[-1].number
    [found] = [
        found
        for found in analyze(TRACES / "allocator_churn", steps=(step, step + 1)).analysis.findings
        if found.code == "allocator-churn"
    ]
    assert found.advice.startswith("The allocator grows in the first steps of a run")
    assert "If they show it too: remove torch.cuda.empty_cache()" in found.advice


def test_what_rounds_to_nothing_is_not_listed():
    [case] = [rule.gpu for rule in RULES if rule.code == "memory-bandwidth-bound"]
    explained = case.explain(RuleContext(analysis_of(TRACES / "conv_net").ranks[0]))
    assert explained.title.endswith("(normalization 35 %, elementwise 17 %)")


def test_a_wait_for_data_that_is_hidden_is_not_found():
    """The first step is another matter: recording begins with an empty queue, behind which nothing hides."""
    assert "input-bound" not in codes(analysis_of(TRACES / "input_hidden"))
    rank = analyze(TRACES / "input_hidden", steps=(13, 15)).analysis.ranks[0]
    assert rank.host.data_wait_ms_per_step > 0.3 * rank.step_ms.mean
    assert rank.idle["data"].ms_per_step < 0.01 * rank.step_ms.mean


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_STEPS)
def test_the_last_two_steps_give_the_same_verdict(case):
    whole = analysis_of(TRACES / case)
    last = whole.ranks[0].per_step[-1].number
    assert analyze(TRACES / case, steps=(last - 1, last + 1)).analysis.verdict == whole.verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_STEPS)
def test_the_first_two_steps_give_the_same_verdict(case):
    whole = analysis_of(TRACES / case)
    first = whole.ranks[0].per_step[0].number
    assert analyze(TRACES / case, steps=(first, first + 2)).analysis.verdict == whole.verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_STEPS)
def test_a_machine_of_half_the_speed_gives_the_same_verdict(case, tmp_path):
    def twice_as_long(event):
        for time in event.keys() & {"ts", "dur"}:
            event[time] = round(event[time] * 1000) * 2 / 1000

    slow = analyze(rewritten(case, tmp_path, twice_as_long)).analysis
    usual = analysis_of(TRACES / case)
    assert slow.verdict == usual.verdict
    assert slow.ranks[0].step_ms.mean == pytest.approx(2 * usual.ranks[0].step_ms.mean)
    assert [(one.code, pytest.approx(one.share_pct, abs=0.01)) for one in slow.findings] == [
        (one.code, one.share_pct) for one in usual.findings
    ]


HOSTILE = (
    "", " ", "\x00\x1b[31mred", "<script>alert(1)</script>", "a" * 100_000, "((((((<<<<", "ncclncclnccl", "Ω≈ç√∫",
    "ProfilerStep#99999999999999999999", "forge.", "aten::", "void at::native::", "100 %", "__proto__", "|`*_\n",
)  # fmt: skip


@pytest.mark.parametrize("category", ["kernel", "cpu_op", "user_annotation", "cuda_runtime", "python_function"])
def test_unknown_names_change_no_time(category, tmp_path):
    names = iter(HOSTILE * 10_000)

    def rename(event):
        if event.get("cat") == category and not event["name"].startswith("ProfilerStep#"):
            event["name"] = next(names)

    found = analyze(rewritten("sync_stack", tmp_path, rename)).analysis.ranks[0]
    usual = analysis_of(TRACES / "sync_stack").ranks[0]
    assert found.gpu == usual.gpu
    assert sum(kind.ms_per_step for kind in found.kinds.values()) == pytest.approx(usual.gpu.busy_ms_per_step)


@pytest.mark.parametrize(
    ("wait_ms", "busy", "expected", "absent"),
    [
        (9.0, True, "measure num_workers=2, persistent_workers=True and pin_memory=True (", "larger or cheaper"),
        (9.0, False, "measure num_workers=2 and persistent_workers=True (", "pin_memory"),
        (0.6, True, "make batches larger or cheaper", "num_workers"),
        (0.6, False, "make batches larger or cheaper", "num_workers"),
    ],
)
def test_workers_and_pinned_memory_are_advised_where_they_help(wait_ms, busy, expected, absent):
    [rank] = sample_analysis().ranks
    idle = {**rank.idle, "data": replace(rank.idle["data"], ms_per_step=wait_ms)}
    rank = replace(
        rank,
        step_ms=replace(rank.step_ms, mean=2.9 * wait_ms),
        idle=idle,
        host=replace(rank.host, data_wait_ms_per_step=wait_ms),
        gpu=replace(rank.gpu, busy_ms_per_step=rank.gpu.busy_ms_per_step if busy else 0.0),
    )
    [advice] = [found.advice for found in find_causes([rank]) if found.code == "input-bound"]
    assert expected in advice
    assert absent not in advice
