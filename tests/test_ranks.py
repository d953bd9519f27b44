"""Which rank the others wait for, and where in its step: by the records of all ranks, without a trace."""

import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from time import monotonic, time

import msgspec
import pytest
from msgspec.structs import replace

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.ranks import rank_work, straggler, with_waits
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.record.files import write_heard
from lightning_forge_profiling.record.reader import read_run, read_works
from lightning_forge_profiling.report.run_table import run_table
from lightning_forge_profiling.report.run_wording import rank_notes
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_end
from lightning_forge_profiling.schema import (
    CpuUse,
    Distribution,
    LastPulse,
    Pulse,
    RankWork,
    RunLedger,
    RunRegion,
    RunReport,
)
from tests.evidence import made_evidence, with_figures
from tests.outcomes import HANGS_S, script, summary_of, unwrapped
from tests.ports import free_port
from tests.record_builder import MadeRun, made_pulse, write_ranks
from tests.synthetic import Synthetic

CASE = Path(__file__).parent / "data/traces/slow_rank_host"  # two H200s, rank 1 is busy in Python for 15 ms a step
LIVE = json.loads((CASE / "live.json").read_text())
REGIONS = ("data", "transfer", "forward", "backward", "optimizer", "other")

# -- real ranks ------------------------------------------------------------------------------------------------------


MACHINE = ("cpu-starved", "cpu-throttled", "gil-held")  # of a busy machine these come first
SECOND_CAUSES = ("between-regions", "input-bound", "slow-callback", "blocked-backward")  # what the 20 ms are not


def trained(folder, place, *options):
    """What rank 0 printed, and what its record says in the end."""
    done = script(
        "slow_rank.py", folder, place, *options, cwd=folder, env={**os.environ, "MASTER_PORT": str(free_port())}
    )
    assert done.returncode == 0, done.stderr
    [record] = folder.rglob("rank0.jsonl")
    [*_, last] = [line for line in map(json.loads, record.read_text().splitlines()) if line["line"] == "state"]
    return unwrapped(done.stdout), last["report"]["analysis"] | {"run": last["report"]["run"]}


def shown(command, record, capsys):
    assert main([*command, str(record)]) == 0
    return unwrapped(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "leaf"),
    [
        ("data", "data"),
        ("forward", "forward"),
        ("backward", "backward"),
        ("optimizer", "optimizer"),
        ("callback", "callback/SlowCallback.on_train_batch_end"),
    ],
)
def test_the_rank_and_the_leaf_that_the_others_wait_for_are_named(tmp_path, capsys, place, leaf):
    for attempt in range(3):  # the test beside this one may take a core meanwhile, though too little to be named
        folder = tmp_path / str(attempt)
        folder.mkdir()
        said, analysis = trained(folder, place)
        findings = {found["code"]: found for found in analysis["findings"]}
        seconds = [findings[code] for code in SECOND_CAUSES if code in findings]
        if not seconds or analysis["verdict"] in MACHINE:
            break
    title = findings["straggler"]["title"]
    found = re.fullmatch(
        r"the other ranks wait ([\d.]+) ms of each ([\d.]+) ms step for rank 1: "
        rf"its {leaf}(?:, in which it waits for a core,)? takes ([\d.]+) ms a step, the others' ([\d.]+) ms"
        r"(?:; \d+ % of that in \S+\.py:\d+ \S+)?",  # a short run may have too few samples
        title,
    )
    assert found, title
    waits_ms, step_ms, leaf_ms, others_ms = map(float, found.groups())
    assert 0.7 * 20 <= waits_ms < step_ms
    assert leaf_ms - others_ms >= 0.8 * 20
    for second in seconds:
        assert second["share_pct"] + findings["straggler"]["share_pct"] <= 100, "the 20 ms count once"
    assert not seconds or analysis["verdict"] in MACHINE, "waits for a core lengthen any part of a step"
    assert analysis["verdict"] in {"straggler", *MACHINE}
    assert re.search(r"rank 1 works .* rank 0 works .* waits [\d.]+ ms for others", unwrapped(summary_of(folder)))
    for output in (said, shown(["show"], folder, capsys)):
        assert f"verdict {analysis['verdict']}: " in output
        assert analysis["verdict"] != "straggler" or title in output
    assert title in shown(["watch", "--once"], folder, capsys)


@pytest.mark.slow
def test_a_window_on_a_waiting_rank_does_not_blame_python(tmp_path):
    _, analysis = trained(tmp_path, "callback", "window")
    assert analysis["verdict"] in {"straggler", *MACHINE}
    shares = {found["code"]: found["share_pct"] for found in analysis["findings"]}
    others = max(shares.get(code, 0.0) for code in ("python-bound", "between-regions"))
    assert shares["straggler"] > 50 > others, "the 20 ms count once"


@pytest.mark.slow
def test_ranks_that_are_slow_alike_have_the_finding_of_a_single_one(tmp_path):
    said, analysis = trained(tmp_path, "data", "both")
    assert analysis["verdict"] in {"input-bound", *MACHINE}
    assert "training waits" in said
    [found] = [found for found in analysis["findings"] if found["code"] == "input-bound"]
    assert found["rank"] is None, "it is of all ranks"


@pytest.mark.slow
@pytest.mark.parametrize(("place", "leaf"), [("forward", "forward"), ("callback", "callback/SlowCallback.")])
def test_ranks_that_are_late_in_turns_are_named_with_the_leaf(tmp_path, place, leaf):
    _, analysis = trained(tmp_path, place, "turns")
    [found] = [found for found in analysis["findings"] if found["code"] == "straggler"]
    said = re.fullmatch(
        r"the ranks are late in turns, and wait ([\d.]+) ms of each ([\d.]+) ms step for each other: "
        rf"rank 0 in \d+ % of the steps, rank 1 in \d+ % of the steps, by ([\d.]+) ms in {leaf}.*",
        found["title"],
    )
    assert said, found["title"]
    waits_ms, step_ms, late_by_ms = map(float, said.groups())
    assert late_by_ms == pytest.approx(20, rel=0.3)
    assert 3 < waits_ms < 14, "10 ms, of a dozen steps"
    assert waits_ms < step_ms
    assert found["rank"] is None


@pytest.mark.slow
def test_equal_ranks_have_no_straggler(tmp_path):
    _, analysis = trained(tmp_path, "none")
    assert analysis["verdict"] != "straggler"
    assert [work["rank"] for work in analysis["run"]["ranks"]["works"]] == [0, 1]


# -- summaries -------------------------------------------------------------------------------------------------------


def rank(number, *, waits=None, host="node0", **leaves):
    """A rank's step, in milliseconds: 10 of work, and what it works and waits on top of that."""
    usual = {"data": 1.0, "transfer": 0.5, "forward": 4.0, "backward": 2.0, "optimizer": 1.5, "other": 1.0}
    more, waits = (Counter(each or {}) for each in (leaves, waits))
    all_leaves = {name: usual.get(name, 0.0) + more[name] + waits[name] for name in {**usual, **leaves}}
    return RankWork(
        rank=number,
        host=host,
        steps=100,
        step_ms=sum(all_leaves.values()),
        leaves_ms=all_leaves,
        exposed_ms=waits,
    )


def evidence_of(works, *, number=0, on_device=False):
    work = works[number]
    regions = {name: RunRegion(device_ms=work.leaves_ms[name], host_ms=work.leaves_ms[name]) for name in REGIONS}
    step = Distribution(mean=work.step_ms, p50=work.step_ms, min=work.step_ms, max=work.step_ms)
    return made_evidence(
        steps=100,
        on_device=on_device,
        step_ms=step,
        regions=regions,
        world_size=len(works),
        rank=number,
        works=tuple(works),
    )


def found_in(*works, on_device=False):
    return straggler(with_figures(evidence_of(works, on_device=on_device), works=with_waits(works)))


def test_a_gpu_that_takes_longer_in_forward_is_named():
    found = found_in(rank(0, waits={"backward": 5.7}), rank(1, forward=5.7), on_device=True)
    assert found.title == (
        "the other ranks wait 5.70 ms of each 15.7 ms step for rank 1: its forward takes 9.70 ms a step, the others' "
        "4.00 ms"
    )
    assert (found.rank, found.share_pct) == (1, pytest.approx(100 * 5.7 / 15.7))


def test_waiting_in_a_collective_of_forward_is_no_work():
    found = found_in(*(rank(number, waits={"forward": 20}) for number in (0, 2)), rank(1, data=20))
    assert (found.rank, found.evidence["leaf"]) == (1, "data")


def test_events_tell_waiting_in_backward_from_work_there():
    assert found_in(rank(0, backward=20), rank(1, backward=20)) is None
    found = found_in(rank(0, waits={"backward": 20}), rank(1, backward=20))
    assert (found.rank, found.evidence["leaf"]) == (1, "backward")


def test_a_late_rank_is_not_measured_where_no_events_are_around_waits(recorded):
    """As in strategies other than DDP and FSDP2; the trace, whose collectives are matched, still says who is late."""
    because = "the waits of FSDPStrategy have no events around them"
    works = [
        replace(work, exposed_ms=None, unmeasured_because=because) for work in (rank(0, backward=20), rank(1, data=20))
    ]
    assert found_in(*works) is None
    alone = combine(None, evidence_of(works))
    assert "straggler" not in {found.code for found in alone.findings}
    [note] = rank_notes(alone.run)
    assert note == f"the ranks differ, and which of them is late is not measured: {because}"
    both = combine(recorded, with_figures(live(), works=tuple(works)))
    assert [(found.rank, found.source) for found in both.findings if found.code == "straggler"] == [(1, "trace")]


def test_watch_says_that_a_late_rank_is_not_measured(tmp_path, capsys):
    at, record = time() - 1, MadeRun(ranks=2).write(tmp_path)
    pulses = [made_pulse(number, 2, at, own_ms=own_ms) for number, own_ms in enumerate((7.0, 12.0))]
    more = {"exposed_ms": None, "unmeasured_because": "no events"}
    write_ranks(record, [msgspec.structs.replace(pulse, work=replace(pulse.work, **more)) for pulse in pulses])
    assert "straggler not measured: no events" in shown(["watch", "--once"], record, capsys)
    status = json.loads(shown(["show", "--json"], record, capsys))["ranks"]
    assert (status["straggler"], status["unmeasured"]) == (None, "no events")
    assert {one["own_ms"] for one in status["ranks"]} == {None}


def test_ranks_that_do_not_wait_for_each_other_have_no_straggler():
    assert found_in(rank(0), rank(1, data=20)) is None


def test_ranks_that_are_late_in_different_places_do_not_wait():
    assert found_in(rank(0, data=20), rank(1, optimizer=20)) is None


def test_the_advice_for_a_late_rank_that_waits_for_a_core_says_so():
    late = replace(rank(1, forward=5), cpu=CpuUse(cores=1.0, used=0.5, waits_pct=30.0))
    advice = found_in(rank(0, waits={"backward": 5}), late).advice
    assert advice.startswith("Compare rank 1 with the others: ")
    assert advice.endswith(" Rank 1 waited for a core in 30 % of its time, which lengthens any part of a step.")


def test_waiting_for_what_a_rank_does_between_steps_is_of_the_fit():
    validates = replace(rank(1, validation=30.0), outside=("validation",), step_ms=10.0)
    works = with_waits([rank(0, waits={"other": 30}), validates])
    parts = {"steps": 4.0, "validation": 0.1}
    ledger = RunLedger(wall_s=4.1, parts=parts, unexplained_s=0.0, counts={"validation": 10})
    found = straggler(replace(evidence_of(works), ledger=ledger))
    assert (found.rank, found.of, found.evidence["leaf"]) == (1, "run", "validation")
    assert found.title == (
        "the other ranks wait 3.0 s of the fit's 4.1 s for rank 1: its validation takes 3.0 s, the others' 0.00 ms"
    )


def test_several_late_ranks_are_all_named_and_a_fix_of_one_promises_nothing():
    late = [rank(number, data=20) for number in (2, 3)]
    found = found_in(*[rank(number, waits={"backward": 20}) for number in (0, 1, 4, 5)], *late)
    assert "for ranks 2, 3: its data takes 21.0 ms a step" in found.title
    assert found.saves.at_most


def test_few_timed_steps_are_not_enough_to_name_a_rank():
    sure, scattered = (replace(rank(1, forward=2), error_ms=error) for error in (0.2, 1.8))
    assert combine(None, evidence_of([rank(0, waits={"backward": 2}), sure])).verdict == "straggler"
    found = combine(None, evidence_of([rank(0, waits={"backward": 2}), scattered]))
    [late] = [each for each in found.findings if each.code == "straggler"]
    assert found.verdict != "straggler"
    assert (late.low_pct, late.high_pct) == (pytest.approx(100 * 0.2 / 12, abs=2), pytest.approx(100 * 3.8 / 12, abs=2))


def test_a_waiting_rank_has_no_finding_for_its_wait_and_a_late_one_only_the_straggler():
    works = [rank(0, waits={"other": 20}), rank(1, **{"callback/A.on_train_batch_end": 20.0})]
    of_waiting = combine(None, evidence_of(works))
    assert [found.code for found in of_waiting.findings if found.code != "compute-bound"] == ["straggler"]
    works = [rank(0, data=20), rank(1, waits={"backward": 20})]
    assert {found.code for found in combine(None, evidence_of(works)).findings} == {"straggler", "compute-bound"}


def test_a_summary_has_hooks_apart_from_the_regions_that_contain_them():
    made = evidence_of([rank(0, other=20)])
    ledger = {"callback/A.on_train_batch_end": 2.0, "validation": 3.0, "steps": 1.0, "startup/fit": 5.0}
    counted = {"callback/A.on_train_batch_end": 2.0}
    counts = {"callback/A.on_train_batch_end": 100, "validation": 10}
    run = RunLedger(wall_s=700.0, parts=ledger, unexplained_s=0.0, counts=counts, counted_s=counted)
    work = rank_work(replace(made, ledger=run), host="node0")
    assert work.leaves_ms["callback/A.on_train_batch_end"] == pytest.approx(20)
    assert work.leaves_ms["other"] == pytest.approx(1)
    assert (work.leaves_ms["validation"], work.outside) == (pytest.approx(30), ("validation",))
    assert sum(work.step_leaves_ms.values()) == pytest.approx(30)


def test_long_steps_of_which_nothing_is_known_are_no_own_work():
    """As where a rank waits for one that was stopped, in a step whose regions were not timed."""
    made = evidence_of([rank(0, other=20)])
    own, with_unknown = (rank_work(one, host="node0").leaves_ms for one in (made, with_figures(made, unknown_ms=15.0)))
    assert with_unknown == own, "it is in no region"


# -- beside a trace --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return analyze(CASE).analysis


def live(late=None):
    """Rank 0's live evidence of that case, and both ranks' work: `late` computes 15 ms longer, the other waits."""
    of_rank = {name: LIVE[f"time/{name}_ms"] for name in REGIONS}
    least = of_rank["backward"] - 15.0
    works = []
    for number in range(2):
        more = {"backward": least, "forward": of_rank["forward"] + 15.0} if number == late else {}
        more = {"backward": least} if late is None else more
        leaves = of_rank | more
        step_ms, waits = sum(leaves.values()), {} if late in {None, number} else {"backward": 15.0}
        work = RankWork(rank=number, host="node0", steps=60, step_ms=step_ms, leaves_ms=leaves, exposed_ms=waits)
        works.append(work)
    return with_figures(evidence_of(works, on_device=True), gpu_starved_pct=0.0)


def test_live_steps_overrule_what_a_trace_says_of_hosts(recorded):
    """The recorded steps have rank 1 late; in these live ones it is rank 0, or none."""
    assert [found.rank for found in recorded.findings if found.code == "straggler"] == [1]
    both = combine(recorded, live(late=0))
    assert [(found.rank, found.source) for found in both.findings if found.code == "straggler"] == [(0, "run")]
    none = combine(recorded, live())
    assert "straggler" not in {found.code for found in none.findings}
    for found in (*both.findings, *none.findings):
        assert "makes rank 1 late" not in found.advice, "of which there is no word any more"


def test_a_late_hosts_own_idle_gpu_is_no_second_cause(recorded):
    assert {found.code for found in recorded.findings} == {"straggler", "gpu-idle"}
    both = combine(recorded, live(late=1))
    [found] = [found for found in both.findings if found.code == "straggler"]
    assert (found.rank, found.evidence["leaf"]) == (1, "forward")
    assert found.evidence["others_wait_ms_per_step"] == pytest.approx(15)
    assert both.verdict == "straggler"
    assert any(text.startswith("gpu-idle took 31 % of the recorded steps") for text in both.differences)


def test_a_gpu_that_computes_longer_where_the_others_wait_shows_only_in_a_trace():
    slow_gpu = analyze(CASE.with_name("slow_rank_gpu")).analysis
    [found] = [found for found in slow_gpu.findings if found.code == "straggler"]
    [title] = [each.title for each in combine(slow_gpu, live()).findings if each.code == "straggler"]
    assert title.startswith(found.title)


@pytest.mark.parametrize("late_ms", [0.0, 4.0])
def test_what_recording_added_to_a_wait_for_the_host_is_taken_off(recorded, late_ms):
    """The host's work in steps that recording made half as long again is not what the live step waits for."""
    [waiting] = [found for found in recorded.findings if found.code == "gpu-idle"]
    live_ms = 27.26 / 1.5
    rest = {"backward": live_ms - 10.0 - late_ms}
    works = [rank(0, waits={"backward": late_ms}, **rest), rank(1, forward=late_ms, **rest)]
    evidence = with_figures(evidence_of(works, on_device=True), gpu_starved_pct=100.0)
    both = combine(replace(recorded, findings=(waiting,)), evidence)
    busy, comm = recorded.spread["busy"], recorded.spread["comm"]
    idle_ms = live_ms - (busy.mean - comm.mean + comm.min)
    costs = {found.code: found.share_pct * live_ms / 100 for found in both.findings}
    assert costs.get("straggler", 0.0) == pytest.approx(late_ms)
    assert costs.get("gpu-idle", 0.0) <= idle_ms - late_ms + 0.01


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_running_run_is_summarized_by_all_its_ranks(tmp_path, capsys):
    record = MadeRun(ranks=3, late=2).write(tmp_path)
    said = shown(["show"], record, capsys)
    assert "verdict input-bound: the GPU waits 9.5" in said, "on all ranks, and on the late one more"
    assert "also straggler 14 % of the step" in said
    frame = shown(["watch", "--once"], record, capsys)
    assert re.search(r"also straggler, 14 % of the step: .* 5\.\d+ ms of each .* for rank 2: its data takes 15", frame)
    content = json.loads(shown(["show", "--json"], record, capsys))
    found = {each["code"]: each["rank"] for each in content["analysis"]["findings"]}
    assert (found["straggler"], found["input-bound"]) == (2, None)


def test_machines_are_named_with_the_offset_of_their_clocks(tmp_path, capsys):
    record = MadeRun(ranks=2, late=1).write(tmp_path)
    text = (record / "rank1.jsonl").read_text().replace('"node0"', '"node7"')
    shifted = re.sub(r'"at":(\d+)', lambda found: f'"at":{int(found[1]) + 5}', text)
    (record / "rank1.jsonl").write_text(shifted)
    assert "for rank 1 on node7: its data takes" in shown(["watch", "--once"], record, capsys)
    said = shown(["show"], record, capsys)
    found = re.search(r"node7 is ([\d.]+) ms ahead of rank 0's, give or take ([\d.]+)", said)
    ahead_ms, error_ms = map(float, found.groups())
    assert (ahead_ms, error_ms > 40) == (pytest.approx(5000, abs=300), True), (
        "these ranks drift; real ones may by a step"
    )


def test_a_rank_whose_record_has_not_its_end_is_waited_for_briefly(tmp_path):
    record = MadeRun(ranks=3, late=2, outcome="finished").write(tmp_path)
    begin = (record / "rank1.jsonl").read_text().partition("\n")[0]
    (record / "rank1.jsonl").write_text(f"{begin}\n")
    began = monotonic()
    [work] = read_works(record, rank(0), 3, "made-up", 24 * 50, timeout_s=0.3)
    assert 0.3 <= monotonic() - began < 3
    assert work.rank == 2


@pytest.mark.parametrize("outcome", [None, "finished"])
def test_of_a_rank_on_another_hosts_disk_counts_what_rank_0_heard_last(tmp_path, capsys, outcome):
    record = MadeRun(ranks=3, late=2, outcome=outcome).write(tmp_path)
    [late] = [work for work in read_run(record).works if work.rank == 2]
    (record / "rank2.jsonl").unlink()
    pulse = Pulse(run="made-up", rank=2, world_size=3, host="node7", pid=1, number=9, at=1.0, work=late)
    write_heard(record, [LastPulse(pulse=pulse, at=1.0)])
    if outcome is None:  # it goes on
        assert "also straggler 14 % of the step" in shown(["show"], record, capsys)
        return
    began = monotonic()
    works = read_works(record, rank(0), 3, "made-up", 24 * 50, timeout_s=HANGS_S)
    assert monotonic() - began < HANGS_S / 2, "its record cannot come"
    assert [work.rank for work in works] == [1, 2]


def test_a_rank_that_is_neither_read_nor_heard_is_said_to_be_missing_first(tmp_path):
    record = MadeRun(ranks=3, late=2, outcome="finished").write(tmp_path)
    (record / "rank1.jsonl").unlink()
    mine = rank(0)
    steps = 24 * 50
    [work] = read_works(record, mine, 3, "made-up", steps, timeout_s=HANGS_S)
    assert read_works(record, mine, 3, "another run", steps, timeout_s=0.0) == ()
    analysis = combine(None, with_figures(evidence_of([mine, work]), world_size=3))
    report = RunReport(analysis.run, None, device="cpu", replicas=3, log_folder=None, analysis=analysis)
    first = "Without rank 1 of 3, which is missing and may be the cause: "
    assert report.analysis.verdict_text.startswith(first)
    print_end(report, None, Screen(text := io.StringIO(), width=80))
    assert f"verdict {first}" in unwrapped(text.getvalue())
    said = [line.text.text for line in run_table(report).lines]
    assert "the records of 1 of 3 ranks are not known: rank 0 may wait for them" in said


def test_traces_of_runs_of_one_process_are_said_to_be_no_ranks(tmp_path):
    for number in (0, 1):
        trace = Synthetic(rank=0, about={"rank": 0, "world_size": 1})
        trace.step(0, 0, 100)
        trace.kernel(1, 60 + number, launched=0.5)
        trace.write(tmp_path, f"run{number}.trace.json")
    analysis = analyze(tmp_path).analysis
    assert analysis.all_ranks == 2
    assert any("2 of 2 traces are of runs of one process" in warning for warning in analysis.warnings)
    assert not any("one process" in warning for warning in analyze(tmp_path / "run0.trace.json").analysis.warnings)
