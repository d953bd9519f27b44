"""`forge-profiling compare` on the records of runs: outcome, exit code, table, what is refused."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
import pytest
from msgspec import structs

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.comparison.compare import SCATTER_APART_PCT, SCATTER_IN_TURNS_PCT, compare, percent
from lightning_forge_profiling.comparison.ratio import ratio_of, runs_needed, steps_needed
from lightning_forge_profiling.comparison.source import record_source, slow_steps
from lightning_forge_profiling.names import record_name
from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.schema import IntervalLine, Ratio, StepGroup
from lightning_forge_profiling.timing.bootstrap import BlockBootstrap, Estimate, block_length, resampled
from lightning_forge_profiling.timing.counters import BUCKET_RATIO, bucket
from tests.compared_runs import PER_ROW, SHARES, step_times, write_record
from tests.record_builder import times_of, with_times
from tests.test_cli import INPUT_BOUND, fails
from tests.test_cli import forge as process

DATA = {"data": 0.31, "forward": 0.69}


@pytest.fixture
def forge(capsys, monkeypatch):
    """The command in this process: exit code, standard output, standard error without progress."""
    monkeypatch.setenv("COLUMNS", "150")

    def command(*arguments):
        code = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, "".join(line for line in err.splitlines(keepends=True) if line.startswith("forge-profiling:"))

    return command


@pytest.fixture
def records(tmp_path):
    """Writes a record in a folder of its own, and returns that folder."""

    def write(name, mean_ms=10.0, *, noise=0.02, steps=1000, seed=0, **options):
        write_record(tmp_path / name, step_times(mean_ms, noise=noise, steps=steps, seed=seed), **options)
        return tmp_path / name

    return write


def flat(out):
    return " ".join(out.split())


def outcome_of(out):
    """The outcome of the first gate."""
    return re.search(r"(?m)^(slower|faster|same|too noisy|too short): ", out)[1]


def repeats(records, name, mean_ms, paces, **options):
    return [
        records(f"{name}{number}", mean_ms * pace, seed=10 * ord(name) + number, **options)
        for number, pace in enumerate(paces)
    ]


# --- outcome and exit code -------------------------------------------------------------------------------------------


def test_the_command_says_slower_and_exits_with_1(records):
    a, b = records("a"), records("b", 15.0, seed=1)
    done = process("compare", a, b, "--fail-over", "5")
    assert done.returncode == 1, done.stderr
    step = r"step (49|50|51) % slower \([\d to]+ %\): [\d.]+ to [\d.]+ ms"
    assert re.match(rf"{step} slower: {step}, limit 5 %", flat(done.stdout))


def test_one_run_a_side_that_differs_little_is_too_noisy_and_it_is_said_what_would_tell(records, forge):
    a, b = records("a"), records("b", 10.2, seed=1)
    code, out, err = forge("compare", a, b, "--fail-over", "5")
    assert (code, err) == (3, "")
    assert re.match(
        r"no difference above 1\d % "
        r"too noisy: step \+[\d.]+ % \([-+\d. to]+ %\): 9.97 to 10.2 ms, limit 5 %; "
        r"about \d+ runs a side would decide before",
        " ".join(out.split()),
    )
    said = " ".join(forge("compare", a, b, "--verbose")[1].split())
    assert "too few runs to show how much equal runs differ. Assumed: 3 % (one standard deviation; one run" in said


@pytest.mark.parametrize("blocks", [0, 55], ids=["intervals alone", "blocks"])
@pytest.mark.parametrize(
    ("mean_ms", "said"),
    [
        (12.5, r"step 2[45] % slower \(\d\d to \d\d %\)"),
        (100.0, r"step (900|89\d|90\d) % slower \(\d{3} to \d{3,4} %\)"),
    ],
)
def test_two_single_runs_of_220_steps_are_decided(records, forge, blocks, mean_ms, said):
    a, b = (
        records(name, ms, steps=220, seed=seed, blocks=blocks)
        for seed, (name, ms) in enumerate([("a", 10.0), ("b", mean_ms)])
    )
    code, out, _ = forge("compare", a, b, "--fail-over", "5")
    assert code == 1
    assert re.match(rf"{said}: .* ms slower: {said}: .* ms, limit 5 % before", flat(out)), out
    code, out, _ = forge("compare", b, a, "--fail-over", "5")
    assert (code, outcome_of(out)) == (0, "faster")


def test_ten_times_slower_is_slower_in_runs_of_any_length(records, forge):
    a, b = records("a", steps=4), records("b", 100.0, seed=1, steps=4)
    code, out, _ = forge("compare", a, b, "--fail-over", "5")
    assert code == 1
    assert re.search(r"(?m)^slower: step \d{3} % slower, more than equal runs differ: .*, limit 5 %$", out)
    assert forge("compare", a, records("c", 12.5, steps=4, seed=2), "--fail-over", "5")[0] == 3


def test_of_runs_that_did_not_follow_each_other_more_scatter_is_assumed(records):
    a, soon, late = (
        source(records(name, began=began)) for name, began in (("a", 0.0), ("soon", 900.0), ("late", 950.0))
    )
    assert a.ended_s == pytest.approx(10, abs=1)
    assert compare([a], [soon]).assumed_scatter_pct == SCATTER_IN_TURNS_PCT
    assert compare([a], [late]).assumed_scatter_pct == SCATTER_APART_PCT
    assert compare([late], [soon]).assumed_scatter_pct == SCATTER_IN_TURNS_PCT
    elsewhere = source(records("elsewhere", host="node-2"))
    assert compare([a], [elsewhere]).assumed_scatter_pct == SCATTER_APART_PCT
    assert compare([a], [soon], scatter_pct=1.0).assumed_scatter_pct == 1.0


def test_runs_made_in_turns_are_paired_by_their_start(records, forge):
    paces = (1.0, 1.1, 0.85, 1.2)  # of the machine, which changes meanwhile
    a = [records(f"a{turn}", 10.0 * pace, seed=turn, began=100.0 * turn) for turn, pace in enumerate(paces)]
    b = [records(f"b{turn}", 11.5 * pace, seed=9 + turn, began=100.0 * turn + 50) for turn, pace in enumerate(paces)]
    code, out, _ = forge("compare", *a, "--against", *reversed(b), "--fail-over", "5", "--verbose")
    assert (code, outcome_of(out)) == (1, "slower")
    assert "from the differences between neighbours of runs made in turns" in " ".join(out.split())
    later = [records(f"c{turn}", 11.5 * pace, seed=20 + turn, began=1000.0 + turn) for turn, pace in enumerate(paces)]
    code, out, _ = forge("compare", *a, "--against", *later, "--fail-over", "5", "--verbose")
    assert (code, outcome_of(out)) == (3, "too noisy")
    assert "from the differences between the runs of a side: they scatter by 14.8 %" in " ".join(out.split())


def test_runs_cannot_agree_better_than_their_own_steps_tell():
    same = [Estimate(value=10.0, log_error=0.02, blocks=8)] * 3
    ratio = ratio_of(same, same, 0.0, in_turns=True)
    assert ratio.log_error == pytest.approx(0.02 * np.sqrt(2 / 3))
    assert not ratio.paired


def test_the_interval_of_pairs_is_student_t_of_their_differences():
    a, b = (
        [Estimate(value=value, log_error=0.0, blocks=8) for value in side]
        for side in ((10.0, 20.0, 40.0), (11.0, 22.0, 48.0))
    )
    ratio = ratio_of(a, b, 0.0, in_turns=True)
    logs = np.log([1.1, 1.1, 1.2])
    error = logs.std(ddof=1) / np.sqrt(3)
    assert ratio.paired
    assert ratio.log_error == pytest.approx(error)
    assert ratio.scatter == pytest.approx(logs.std(ddof=1) / np.sqrt(2))
    assert np.log([ratio.ratio, ratio.low]) == pytest.approx([logs.mean(), logs.mean() - 4.303 * error])


def test_slow_steps_differ_between_runs_unless_they_come_regularly():
    step = Estimate(value=10.0, log_error=0.03)
    assert slow_steps(step, Estimate(value=7.0), independent=0.05) == pytest.approx(0.3 * 0.3)
    assert slow_steps(step, Estimate(value=7.0), independent=0.1) == 0, "as every eighth step that waits for a loader"
    assert slow_steps(step, Estimate(value=11.0), independent=0.05) == 0


def test_periodic_waits_for_a_loader_are_no_noise(records, forge):
    """Every eighth step takes seven times as long, and with another phase in the second run."""
    sides = [records("a", steps=600), records("b", steps=600)]
    for phase, folder in enumerate(sides):
        times = step_times(10.0, steps=600, seed=phase)
        times[phase * 3 :: 8] += 60.0
        write_record(folder, times, blocks=55)
    assert re.match(r"no difference above (9|10|11) %\n", forge("compare", *sides)[1])
    write_record(sides[1], 1.25 * times, blocks=55)
    assert re.match(r"step 2\d % slower ", forge("compare", *sides)[1])


@pytest.mark.parametrize(("waits_pct", "outcome"), [(0, "slower"), (40, "too noisy")])
def test_a_run_that_waited_for_a_core_decides_less(records, forge, waits_pct, outcome):
    findings = [("cpu-starved", waits_pct)] if waits_pct else []
    a, b = records("a"), records("b", 13.0, seed=1, ledger={"steps": 13.0}, findings=findings)
    code, out, _ = forge("compare", a, b, "--fail-over", "5")
    assert outcome_of(out) == outcome
    assert code == {"slower": 1, "too noisy": 3}[outcome]
    said = "now: cpu-starved, 40 % of the step: repeat the run on a free machine"
    assert (said in " ".join(out.split())) == bool(waits_pct)


def test_a_median_that_got_slower_is_the_headline_where_nothing_else_is_decided(records, forge):
    """A hundredth of the steps takes half of the time and varies, so that the mean is undecided."""
    sides = []
    for number, ms in enumerate((10.0, 20.0)):
        random = np.random.default_rng(number)
        spikes = 2000 * (random.random(1000) < 0.01) * random.random(1000)
        sides.append(records(f"side{number}"))
        write_record(sides[-1], step_times(ms, seed=number) + spikes, shares={"step": 1.0})
    _, out, _ = forge("compare", *sides, "--scatter", "0", "--fail-over", "5")
    assert re.match(r"median step \d+ % slower \(.*\): \S+ to \S+ ms too noisy: step \+", flat(out))
    assert re.search(r"(?m)^step, median ms .* slower$", out)


def test_regions_sum_to_the_step_where_not_all_pieces_have_a_split_step(tmp_path):
    """The last quarter of the run has no split step, and its steps take three times as long."""
    times = step_times(20.0)
    times[750:] *= 3
    folder = write_record(tmp_path, times)
    rank = read_run(folder).ranks[0]
    lines = [
        with_times(line, {"step": sum(times_of(line).values())})
        if isinstance(line, IntervalLine) and line.step > 750
        else line
        for line in rank.lines
    ]
    metrics = record_source(replace(read_run(folder), ranks=(replace(rank, lines=tuple(lines)),))).metrics
    assert metrics["step"].value == pytest.approx(30, rel=0.02)
    assert sum(metrics[region].value for region in SHARES) == pytest.approx(metrics["step"].value)
    assert metrics["backward"].value == pytest.approx(SHARES["backward"] * metrics["step"].value)


def test_what_is_unknown_of_long_steps_is_a_row_of_its_own(tmp_path, forge):
    """The last quarter of the run has no split step, and its steps take six times as long."""
    folder = write_record(tmp_path / "a", step_times(20.0))
    rank = read_run(folder).ranks[0]
    long = {"changing/2": StepGroup(unsplit=PER_ROW, unsplit_ms=120.0 * PER_ROW)}
    lines = [
        structs.replace(line, counters=structs.replace(line.counters, groups=long))
        if isinstance(line, IntervalLine) and line.step > 750
        else line
        for line in rank.lines
    ]
    metrics = record_source(replace(read_run(folder), ranks=(replace(rank, lines=tuple(lines)),))).metrics
    assert metrics["unknown"].value == pytest.approx(25, rel=0.02)
    assert sum(metrics[region].value for region in (*SHARES, "unknown")) == pytest.approx(metrics["step"].value)
    (folder / record_name(0)).write_bytes(b"".join(map(encode_line, (rank.begin, *lines))))
    _, out, _ = forge("compare", folder, write_record(tmp_path / "b", step_times(20.0)), "--verbose")
    assert re.search(r"unknown ms +25\.\d +gone", out), out


def test_drift_is_what_blocks_differ_by_beyond_independent_steps():
    wave = list(10.0 + np.repeat([1.0, -1.0], 32))
    bootstrap = BlockBootstrap([1] * 64, wave)
    step = bootstrap.ratio(wave, [1.0] * 64)
    independent = np.std(wave) / np.mean(wave) / np.sqrt(64)
    assert step.log_drift == pytest.approx(np.sqrt((step.log_error**2 - independent**2) * bootstrap.blocks))
    assert 0.05 < step.log_drift < 0.15, "halves are 10 % off"
    assert BlockBootstrap([1] * 64, [9.0, 11.0] * 32).ratio([9.0, 11.0] * 32, [1.0] * 64).log_drift == 0


def test_what_is_known_of_the_machine_decides_with_one_run_a_side(records, forge):
    a, b = records("a", noise=0.005), records("b", 10.05, noise=0.005, seed=1)
    assert forge("compare", a, b, "--fail-over", "5", "--scatter", "0.5")[0] == 0
    slower = records("c", 11.2, noise=0.005, seed=2)
    assert forge("compare", a, slower, "--fail-over", "5", "--scatter", "0.5")[0] == 1
    assert forge("compare", a, slower, "--fail-over", "5")[0] == 3, "processes that scatter by 3 % may differ as much"


def test_a_machine_on_which_steps_are_unsteady_makes_runs_too_noisy(records, forge):
    a, b = records("a", noise=0.6, blocks=50), records("b", 12.5, noise=0.6, seed=1, blocks=50)
    code, out, _ = forge("compare", a, b, "--fail-over", "5", "--verbose")
    assert (code, outcome_of(out)) == (3, "too noisy")
    assert "with what changes within a run" in " ".join(out.split())


def test_repeats_measure_how_much_runs_differ(records, forge):
    paces = (1.0, 1.01, 0.99)
    a, b = repeats(records, "a", 10.0, paces), repeats(records, "b", 11.0, paces)
    code, out, _ = forge("compare", *a, "--against", *b, "--fail-over", "5", "--verbose")
    assert code == 1
    assert re.search(r"(?m)^slower: step (9\.\d|10) % slower \([78]\.\d to 1[1-3] %\): .*, limit 5 %$", out)
    assert "3 runs, 1,000 + 1,000 + 1,000 steps on NVIDIA H200" in out
    assert "from the differences between the runs of a side" in " ".join(out.split())
    code, out, _ = forge("compare", *a, "--against", *repeats(records, "c", 10.0, paces), "--fail-over", "5")
    assert (code, outcome_of(out)) == (0, "same")
    code, out, _ = forge("compare", *a, "--against", *repeats(records, "d", 8.0, paces), "--fail-over", "5")
    assert (code, outcome_of(out)) == (0, "faster")


def test_repeats_that_scatter_say_how_many_it_takes(records, forge):
    paces = (0.9, 1.0, 1.1)
    a, b = repeats(records, "a", 10.0, paces), repeats(records, "b", 10.0, paces)
    code, out, _ = forge("compare", *a, "--against", *b, "--fail-over", "5")
    assert code == 3
    said = " ".join(out.split())
    needed = int(re.search(r"limit 5 %; about (\d+) runs a side would decide", said)[1])
    assert 60 < needed < 90


def test_several_baselines_and_one_new_run_are_enough_for_an_interval(records, forge):
    a = repeats(records, "a", 10.0, (1.0, 1.005, 0.995, 1.002, 0.998))
    code, out, _ = forge("compare", *a, "--against", records("b", 11.5, seed=7), "--fail-over", "5")
    assert code == 1
    assert "1 run" not in out.splitlines()[0]


def test_without_a_limit_it_only_shows(records, forge):
    code, out, _ = forge("compare", records("a"), records("b", 20.0, seed=1))
    assert code == 0
    assert re.match(r"step \d+ % slower \(\d+ to \d+ %\): \S+ to \S+ ms\n\n", out)


def test_the_gate_can_be_on_a_rate_or_a_region_and_the_worst_decides(records, forge):
    lazy = {**SHARES, "data": 0.6}  # of a step that is 1.5 times as long
    total = sum(lazy.values())
    a = records("a", noise=0.005)
    b = records("b", 10.0 * total, noise=0.005, seed=1, shares={name: share / total for name, share in lazy.items()})
    gate = ("--fail-over", "20", "--scatter", "2")
    code, out, _ = forge("compare", a, b, *gate, "--metric", "backward", "--metric", "samples")
    assert code == 1
    headline, first, second, *_ = out.splitlines()
    assert headline.startswith("data ")
    assert first.startswith("slower: samples/s 33 % lower (")
    assert second.startswith("same: backward ")
    assert forge("compare", a, b, *gate, "--metric", "forward")[0] == 0


def test_more_noise_in_the_steps_makes_a_wider_interval(records):
    def reach(noise):
        a, b = (source(records(f"{side}{noise}", noise=noise, seed=side)) for side in (0, 1))
        ratio = compare([a], [b], scatter_pct=0).metrics["step"].ratio
        return ratio.high - ratio.low

    assert 3 < reach(0.1) / reach(0.02) < 8


def test_a_run_of_few_steps_is_too_short_alone_and_enough_beside_repeats(records, forge):
    a, b = repeats(records, "a", 10.0, (1.0, 1.01), steps=40), repeats(records, "b", 13.0, (1.0, 1.01), steps=40)
    code, out, _ = forge("compare", a[0], b[0], "--fail-over", "5")
    assert code == 3
    assert outcome_of(out) == "too short"
    assert out.startswith("undecided: step +")
    assert "too few steps for an interval" in " ".join(out.split())
    assert forge("compare", *a, "--against", *b, "--fail-over", "5")[0] == 1


def test_a_region_that_got_slower_is_the_headline_where_the_step_is_undecided(records, forge):
    paces = (0.985, 1.0, 1.015)
    a = repeats(records, "a", 10.0, paces)
    b = [
        records(f"b{number}", 10.0 * pace * 1.04, seed=40 + number, shares={"forward": share, "other": 1 - share})
        for number, (pace, share) in enumerate(zip(paces, (0.38, 0.37, 0.36), strict=True))
    ]
    code, out, _ = forge("compare", *a, "--against", *b, "--fail-over", "5")
    assert code == 3
    assert re.match(
        r"forward \d\d % slower \(\d\d to \d\d %\): 3.00 to 3.\d\d ms too noisy: step .*, limit 5 %; ", flat(out)
    )
    assert re.search(r"(?m)^forward ms .* slower$", out)


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_everything_is_in_the_json(records, forge):
    a, b = records("a", commit="a" * 40), records("b", 20.0, seed=1, commit="b" * 40)
    asked = ("--fail-over", "5", "--metric", "step", "--metric", "median")
    code, out, _ = forge("compare", a, b, *asked, "--format", "json")
    assert code == 1
    found = json.loads(out)
    assert found["outcome"] == "slower"
    assert [gate["metric"] for gate in found["gates"]] == ["step", "median"]
    step = found["comparison"]["metrics"]["step"]
    assert step["ratio"]["ratio"] == pytest.approx(2, rel=0.02)
    assert step["ratio"]["low"] < step["ratio"]["ratio"] < step["ratio"]["high"]
    assert step["b"] == pytest.approx(20, rel=0.02)
    assert {"samples", "median", "forward"} < found["comparison"]["metrics"].keys()
    assert found["comparison"]["headline"].startswith("step ")
    assert found["comparison"]["rows"] == ["step", "data", "forward", "backward", "optimizer", "samples"]
    assert found["comparison"]["a"]["commits"] == ["a" * 40]
    assert found["comparison"]["assumed_scatter_pct"] == SCATTER_IN_TURNS_PCT


def test_ledger_verdict_and_findings_are_compared(records, forge):
    parts = {"startup/process": 4.0, "steps": 10.0, "checkpoint": 1.0}
    a = records("a", ledger=parts, findings=[("input-bound", 31.0)], shares=DATA, metrics={"gpu/power_w": 400.0})
    b = records(
        "b",
        7.2,
        seed=1,
        ledger=parts | {"checkpoint": 5.1},
        findings=[("compute-bound", 40.0), ("input-bound", 4.0)],
        shares={"data": 0.04, "forward": 0.96},
        metrics={"gpu/power_w": 440.0},
    )
    _, out, _ = forge("compare", a, b, "--verbose")
    assert "(whole run: 15.0 s before, 19.1 s now)" in out
    assert re.search(r"(?m)^checkpoint +1\.00 +5\.10 +\+4\.10 +run$", out)
    assert "verdict input-bound -> compute-bound" in out
    assert "finding input-bound (of the step) 31 % -> 4 %" in out
    assert "finding compute-bound" not in out, "it has no more milliseconds than before by what became slower"
    assert re.search(r"(?m)^gpu/power_w +400 +440 +\+10\.0 %$", out)


def test_of_equal_code_no_verdict_is_said_to_have_changed(records, forge):
    a = records("a", ledger={"steps": 10.0}, findings=[("python-bound", 61.0, 6.1)])
    b = records("b", seed=1, ledger={"steps": 10.0}, findings=[("blocked-forward", 62.0, 6.2)])
    _, out, _ = forge("compare", a, b, "--verbose")
    assert "verdict python-bound before, blocked-forward now; no time changed by as much as either costs" in flat(out)
    assert "finding " not in out
    assert "fixed " not in out


def test_the_whole_fit_decides_where_the_step_is_the_same(records, forge):
    """Validation takes 10 s of 20, and is fixed; in reverse the limit fails."""
    slow, fast = (
        records(name, seed=seed, ledger={"steps": 10.0, "validation": 5 * each}, events=[("validation", each)] * 5)
        for seed, (name, each) in enumerate([("slow", 2.0), ("fast", 0.05)])
    )
    code, out, _ = forge("compare", slow, fast, "--fail-over", "5")
    assert (code, outcome_of(out)) == (0, "faster")
    assert re.match(r"a validation 9[78] % faster .*: 2.00 to 0.0500 s\nfaster: whole fit 49 % faster ", out)
    assert re.search(r"(?m)^whole fit s +20.0 +10.2 +-49 % .* faster$", out)
    code, out, _ = forge("compare", fast, slow, "--fail-over", "5")
    assert (code, outcome_of(out)) == (1, "slower")
    code, out, _ = forge("compare", fast, records("longer", steps=2000, ledger={"steps": 20.0}))
    assert re.search(r"(?m)^whole fit s +10.2 +20.0 +of different lengths$", out)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            {"findings": [("input-bound", 31.0, 3.1)], "shares": DATA},
            {"shares": {"data": 0.1, "forward": 0.9}},
            "input-bound: data 3.?? ms -> 0.* ms; 3.10 ms less a step were predicted, the whole step takes *",
        ),
        (
            {"findings": [("sync-bound", 31.0, 4.0)]},
            {"findings": [("compute-bound", 40.0), ("sync-bound", 9.0, 1.0)]},
            "sync-bound: sync-bound 3.* ms -> 0.6* ms; at most 4.00 ms less a step were predicted, *",
        ),
        ({"findings": [("launch-bound", 31.0, 4.0)]}, {}, "launch-bound: launch-bound 3.* ms -> gone; 4.00 ms less *"),
        ({"findings": [("launch-bound", 31.0, 4.0)]}, {"findings": [("launch-bound", 30.0, 2.0)]}, ""),
        ({"findings": [("slow-optimizer", 31.0)]}, {}, ""),
        ({"findings": [("cpu-starved", 31.0, 3.1)]}, {}, ""),
    ],
    ids=["gone", "a bound", "no region", "still there", "no prediction", "the machine"],
)
def test_what_was_predicted_of_a_fix_is_beside_what_it_saved(records, forge, before, now, said):
    _, out, _ = forge("compare", records("a", 10.0, **before), records("b", 7.0, seed=1, **now), "--verbose")
    fixed = " ".join(out.split()).split(" basis ")[0].split(" fixed ")[1:]
    assert len(fixed) == bool(said)
    assert not fixed or fnmatch(fixed[0], said)


def test_a_cause_is_not_fixed_where_the_rest_of_the_step_has_grown(records, forge):
    before = records("a", 10.0, findings=[("input-bound", 31.0, 3.1)], shares=DATA)
    now = records("b", 31.0, seed=1, shares={"data": 0.1, "forward": 0.9})
    _, out, _ = forge("compare", before, now, "--verbose")
    assert "input-bound: data" not in out


def test_a_fix_is_seen_where_the_rest_of_the_step_has_grown(records, forge):
    before = records("a", 10.0, findings=[("input-bound", 31.0, 3.1)], shares=DATA)
    now = records("b", 12.0, seed=1, shares={"data": 0.01, "forward": 0.99})
    _, out, _ = forge("compare", before, now, "--verbose")
    assert re.search(
        r"fixed input-bound: data 3\.\d+ ms -> 0\.1\d+ ms; .* the whole step takes [12]\.\d+ ms more", flat(out)
    )


def test_a_prediction_of_repeats_is_their_mean_if_all_of_them_have_it(records, forge):
    a = [records(f"a{saved}", 10.0, seed=saved, findings=[("sync-bound", 31.0, float(saved))]) for saved in (3, 5)]
    b = [records(f"b{seed}", 7.0, seed=seed) for seed in (6, 7)]
    _, out, _ = forge("compare", *a, "--against", *b, "--verbose")
    assert "at most 4.00 ms less a step were predicted" in " ".join(out.split())
    _, out, _ = forge("compare", *a, records("a0", 10.0, seed=9), "--against", *b, "--verbose")
    assert "fixed" not in out


def test_ledgers_of_runs_that_differ_in_length_are_per_1000_steps_but_for_what_happens_once(records, forge):
    a = records("a", steps=1000, ledger={"startup/process": 4.0, "steps": 10.0, "checkpoint": 1.0})
    b = records("b", steps=4000, seed=1, ledger={"startup/process": 4.0, "steps": 40.0, "checkpoint": 8.0})
    _, out, _ = forge("compare", a, b, "--verbose")
    assert re.search(r"(?m)^checkpoint +1\.00 +2\.00 +\+1\.00 +1,000 steps$", out)
    assert re.search(r"(?m)^startup/process +4\.00 +4\.00 +\+0\.00 +run$", out)


@pytest.mark.parametrize("limit", [[], ["--fail-over", "5"]])
def test_the_table_fits_80_columns(records, forge, limit, monkeypatch):
    options = {"ledger": {"callback/ExponentialMovingAverage.on_train_batch_end": 9.0, "steps": 10.0}}
    a, b = records("a", 12345.6, **options), records("b", 0.00123, seed=1, **options)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = forge("compare", a, b, "--verbose", *limit)
    lines = [line for line in out.splitlines() if "/forge_record" not in line]  # paths are never broken
    assert max(map(len, lines)) <= 80


def test_a_region_on_one_side_only_has_no_ratio(records, forge):
    a, b = records("a"), records("b", seed=1, shares={"forward": 0.5, "backward": 0.3, "transfer": 0.2})
    _, out, _ = forge("compare", a, b, "--verbose")
    assert re.search(r"(?m)^transfer ms +\d\.\d+ +new$", out)
    assert re.search(r"(?m)^data ms +\d\.\d+ +gone$", out)
    code, _, err = forge("compare", a, b, "--fail-over", "5", "--metric", "transfer")
    assert code == 2
    assert "no values of 'transfer' on both sides" in err


def test_a_sensor_is_averaged_over_the_runs_that_have_it(records):
    a = [
        source(records(f"a{number}", seed=number, metrics=metrics))
        for number, metrics in enumerate(({"gpu/power_w": 400.0}, {}))
    ]
    b = [source(records("b", seed=5, metrics={"gpu/power_w": 440.0, "gpu/temperature_c": 60.0}))]
    [power] = compare(a, b).gpu
    assert (power.name, power.a, power.b, power.pct) == ("gpu/power_w", 400.0, 440.0, pytest.approx(10))


def test_each_rank_is_compared_by_its_steps(records, forge):
    a, b = (records(name, seed=seed, world_size=2) for seed, name in enumerate("ab"))
    for folder, mean_ms, seed in ((a, 10.0, 2), (b, 20.0, 3)):
        write_record(folder, step_times(mean_ms, seed=seed), world_size=2, rank=1)
    code, out, _ = forge("compare", a, b, "--fail-over", "5", "--metric", "rank1", "--verbose")
    assert code == 1
    assert re.search(r"(?m)^slower: step of rank 1 (99|100|101) % slower ", out)
    assert re.search(r"(?m)^step of rank 1 ms +[\d.]+ +[\d.]+ +\+(99|100|101) % .* slower$", out)


def test_what_is_outside_of_the_steps_is_compared(records, forge):
    parts = {"startup/imports": 3.0, "startup/trainer": 1.0, "steps": 10.0, "validation": 6.0, "checkpoint": 6.0}
    events = [("checkpoint", 1.0 + 0.01 * number) for number in range(6)]
    validations = [("validation", 1.0 + 0.01 * number) for number in range(6)]
    a = records("a", ledger=parts, events=[*events, *validations])
    b = records("b", seed=1, ledger={**parts, "startup/imports": 11.0}, events=[*events, *[("validation", 1.6)] * 6])
    code, out, _ = forge("compare", a, b, "--fail-over", "5", "--metric", "validation", "--verbose")
    assert code == 1
    assert re.search(r"(?m)^slower: a validation 56 % slower \(4\d to 7\d %\): 1.03 to 1.60 s, limit 5 %$", out)
    assert re.search(r"(?m)^a checkpoint s +1\.0\d +1\.0\d +\+0\.0 % .*\d$", out)
    assert re.search(r"(?m)^start-up s +4\.00 +12\.0 +\+200 % +unknown$", out), "cold caches do as much"
    b = records("slow", seed=1, ledger={**parts, "startup/imports": 47.0})
    _, out, _ = forge("compare", a, b, "--verbose")
    assert re.search(r"(?m)^start-up s +4\.00 +48\.0 .* unknown +slower$", out)
    code, out, _ = forge("compare", a, a, "--fail-over", "5", "--metric", "startup")
    assert code == 3
    assert "one value a run: repeat each side 3 times" in out


def test_a_run_that_gets_slower_is_compared_by_its_last_fifth(records, forge, tmp_path):
    a = records("a", blocks=50)
    write_record(tmp_path / "b", step_times(10.0, seed=1) * np.linspace(1.0, 1.6, 1000), blocks=50)
    asked = ("--fail-over", "5", "--metric", "last_fifth", "--scatter", "1")
    _code, out, _ = forge("compare", a, tmp_path / "b", *asked, "--verbose")
    assert re.search(r"(?m)^(slower|too noisy): last over first fifth \+?4\d %", out), out
    assert re.search(r"(?m)^last / first fifth +[01]\.\d+ +1\.4\d +\+4\d %", out)


@pytest.mark.parametrize("noisy", ["first", "last", "both"])
def test_the_error_of_the_last_fifth_is_that_of_both_fifths(tmp_path, noisy):
    times = step_times(10.0, noise=0.001)
    alone = {"first": slice(200), "last": slice(800, None)}
    for fifth in alone if noisy == "both" else (noisy,):
        times[alone[fifth]] = step_times(10.0, noise=0.1, steps=200, seed=3)
    error = record_source(read_run(write_record(tmp_path, times, blocks=50))).metrics["last_fifth"].log_error
    assert error == pytest.approx(0.0173 * (2**0.5 if noisy == "both" else 1), rel=0.02)


def test_a_tail_of_slow_steps_is_found_by_p95(records, forge, tmp_path):
    paces = (1.0, 1.01, 0.99)
    a = repeats(records, "a", 10.0, paces)
    b = []
    for number, pace in enumerate(paces):
        times = step_times(10.0 * pace, seed=50 + number)
        times[::12] *= 1.5
        write_record(tmp_path / f"b{number}", times)
        b.append(tmp_path / f"b{number}")
    code, out, _ = forge("compare", *a, "--against", *b, "--fail-over", "20", "--metric", "p95", "--metric", "median")
    assert code == 1
    assert re.search(r"(?m)^slower: p95 of the step 4\d % slower .*\nsame: median step ", out)


def test_github_gets_the_times_of_the_second_side(records, forge):
    a, b = records("a"), records("b", 20.0, seed=1)
    code, out, _ = forge("compare", a, b, "--format", "github")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert entries["step"] == {
        "name": "step",
        "unit": "ms",
        "value": pytest.approx(20, rel=0.02),
        "range": entries["step"]["range"],
        "extra": entries["step"]["extra"],
    }
    assert re.fullmatch(r"± \d\.\d+", entries["step"]["range"])
    assert entries["step"]["extra"].startswith("slower: step 100 % slower ")
    assert {"median", "p95", "forward", "backward"} <= entries.keys()
    assert not {"samples", "tokens", "goodput"} & entries.keys(), "of which more is better"


def test_names_cannot_steer_the_terminal(records, forge):
    a, b = records("a", device="x\x1b[2J"), records("b", device="x\x1b[2J", seed=1, host="node\u202e")
    _, out, _ = forge("compare", a, b)
    assert "\x1b" not in out
    assert "\u202e" not in out


# --- which runs ------------------------------------------------------------------------------------------------------


def test_of_a_folder_the_newest_record_is_taken_and_it_is_said(records, forge, tmp_path):
    a = records("logs/version_0")
    newest = records("logs/version_1", 20.0, seed=1)
    for age, folder in enumerate((newest, a)):
        stamp_record(folder, 1e9 - age)
    code, out, _ = forge("compare", a, tmp_path / "logs", "--fail-over", "5", "--verbose")
    assert code == 1
    assert f"{newest / 'forge_record'}" in out
    assert "now: the newest of 2 records in the folder" in out
    same = forge("compare", a / "forge_record" / "rank0.jsonl", newest / "forge_record", "--fail-over", "5")
    assert same[0] == 1


def stamp_record(folder, at):
    os.utime(folder / "forge_record" / "rank0.jsonl", (at, at))


def test_a_run_that_was_killed_is_compared_as_far_as_it_went(records, forge):
    a, b = records("a"), records("b", seed=1, end="")
    path = b / "forge_record" / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    code, out, _ = forge("compare", a, b, "--verbose")
    said = " ".join(out.split())
    assert code == 0
    assert "950 steps on NVIDIA H200" in out
    assert "now: 950 steps so far; the run is still going on, or was killed" in said
    assert "now: rank0.jsonl: the last line is incomplete" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "NVIDIA L4"}, "different device: NVIDIA H200 before, NVIDIA L4 now"),
        ({"world_size": 8}, "different world size: 1 before, 8 now"),
        ({"precision": "32-true"}, "different precision: bf16-mixed before, 32-true now"),
        ({"batch_size": 32}, "different batch size: 16 before, 32 now"),
    ],
)
def test_other_hardware_batch_size_precision_or_world_size_is_refused_unless_asked_for(records, forge, change, named):
    a, b = records("a"), records("b", seed=1, **change)
    code, out, err = forge("compare", a, b, "--fail-over", "5")
    assert (code, out) == (2, "")
    assert named in err
    assert "--anyway" in err
    code, out, err = forge("compare", a, b, "--anyway")
    assert (code, err) == (0, "")
    assert named in " ".join(out.split())
    twice = forge("compare", a, b, "--against", records("c", seed=2), "--fail-over", "5")
    assert twice[0] == 2, "repeats of one side must be alike, too"


def test_other_settings_and_versions_are_noted(records, forge):
    a, b = (records(f"{seed}", seed=seed, settings={"gradient_clip_val": seed}) for seed in (1, 2))
    assert "gradient_clip_val 1 before, 2 now" in forge("compare", a, b, "--verbose")[1]


def test_a_run_is_no_repeat_of_itself(records, forge):
    a, b = records("a"), records("b", seed=1)
    code, _, err = forge("compare", a, a, "--against", b)
    assert code == 2
    assert "are the same run" in err
    code, out, _ = forge("compare", a, a)
    assert code == 0
    assert out.startswith("no difference above ")
    assert "the same run is on both sides" in out


@pytest.mark.slow
def test_a_record_and_a_trace_are_not_compared(records):
    a = records("a")
    assert fails(process("compare", a, INPUT_BOUND), "has the record of a run, and")
    assert fails(process("compare", INPUT_BOUND, a), "compare two records, or two traces")


def test_a_folder_with_a_record_and_a_trace_is_compared_by_what_the_other_side_has(records, forge):
    a, b = records("a"), records("b", seed=1)
    (b / "profiler_traces").mkdir()
    shutil.copy(INPUT_BOUND, b / "profiler_traces")
    assert "Kinds of kernels" in forge("compare", INPUT_BOUND, b, "--verbose")[1]
    assert "step, mean ms" in forge("compare", a, b)[1]


def test_what_cannot_be_compared_is_bad_input(records, forge, tmp_path):
    a = records("a")
    code, _, err = forge("compare", a, tmp_path / "missing")
    assert (code, "missing: no such file or folder" in err) == (2, True)
    only_warmup = tmp_path / "short"
    write_record(only_warmup, step_times(10.0, steps=0))
    code, _, err = forge("compare", a, only_warmup)
    assert (code, "no counted step to compare" in err) == (2, True)
    broken = tmp_path / "broken" / "forge_record" / "rank0.jsonl"
    broken.parent.mkdir(parents=True)
    broken.write_text("nonsense\n")
    assert forge("compare", a, broken)[0] == 2
    code, _, err = forge("compare", a, records("b"), "--fail-over", "5", "--metric", "busy")
    assert code == 2
    assert "no values of 'busy' on both sides; available: step, median" in err
    code, _, err = forge("compare", INPUT_BOUND, INPUT_BOUND, "--fail-over", "5", "--metric", "samples")
    assert code == 2
    assert "no values of 'samples' on both sides; available: step, busy" in err
    code, _, err = forge("compare", a, records("single", steps=1))
    assert (code, "a single counted step cannot be compared" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    assert forge("compare", a, tmp_path / "empty")[0] == 2


@pytest.mark.parametrize("paths", [["x"], ["x", "y", "z"]])
def test_more_than_two_runs_without_the_other_side_is_a_usage_error(paths):
    done = process("compare", *paths)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: forge-profiling compare")
    assert "against" in done.stderr


# --- statistics ------------------------------------------------------------------------------------------------------


def source(folder):
    return record_source(read_run(folder / "forge_record"))


def test_noise_that_lasts_takes_longer_blocks():
    random = np.random.default_rng(0)
    white = random.normal(size=400)
    wandering = np.convolve(random.normal(size=440), np.ones(40))[39:439]
    assert block_length(list(white)) == 20, "the root of their number, at least"
    assert block_length(list(wandering)) > 30


def test_the_error_of_a_mean_is_that_of_simulated_runs():
    """Of 200 runs with noise that lasts: the deviation of their means is what each run says of itself."""
    runs = [step_times(10.0, noise=0.1, seed=seed).reshape(-1, 10).sum(axis=1) for seed in range(200)]
    found = [BlockBootstrap([10] * 100, list(run)).ratio(list(run), [10.0] * 100) for run in runs]
    true = np.std([np.log(value.value) for value in found])
    assert np.median([value.log_error for value in found]) == pytest.approx(true, rel=0.25)
    each_step_for_itself = 0.1 / np.sqrt(1000)
    assert true > 2 * each_step_for_itself


@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_a_quantile_of_a_histogram_is_that_of_the_steps(quantile):
    times = step_times(10.0, noise=0.2)
    times[::3] *= 4
    parts = [Counter(map(bucket, times[first : first + 50])) for first in range(0, 1000, 50)]
    bootstrap = BlockBootstrap([50] * 20, [float(times[i : i + 50].sum()) for i in range(0, 1000, 50)])
    estimate = bootstrap.quantile(parts, BUCKET_RATIO, quantile)
    assert estimate.value == pytest.approx(np.quantile(times, quantile), rel=0.01)


def test_the_error_of_a_quantile_is_that_of_the_resamples_and_of_a_bucket():
    """Half of the pieces have their steps in bucket 400, half in 500: a resample's median is in one of the two."""
    width = np.log(BUCKET_RATIO)
    alone = BlockBootstrap([10] * 20, [10.0] * 20).quantile([{400: 10}] * 20, BUCKET_RATIO, 0.5)
    assert alone.value == pytest.approx(np.exp(399.5 * width) / 1e3)
    assert alone.log_error == pytest.approx(width / np.sqrt(12)), "no resample differs: the bucket's width alone"

    slow = np.random.default_rng(0).permutation([False, True] * 10)
    bootstrap = BlockBootstrap([10] * 20, list(10.0 * (1.0 + slow)))
    draws = resampled(20, round(20 / bootstrap.blocks), 1000, np.random.default_rng(0))
    high = 10 * slow[draws].sum(axis=1)
    low = 200 - high
    medians = width * np.where(low >= 100, 400 - (low - 100) / np.maximum(low, 1), 500 - 100 / np.maximum(high, 1))
    variance = medians.var() * 20 / (20 - round(20 / bootstrap.blocks))
    estimate = bootstrap.quantile([{500: 10} if is_slow else {400: 10} for is_slow in slow], BUCKET_RATIO, 0.5)
    assert estimate.log_error == pytest.approx(np.sqrt(variance + width**2 / 12))
    assert estimate.log_error > 10 * width


def test_equal_runs_are_seldom_called_slower_however_much_processes_differ(records):
    """A nominal 2.5 % of 300 comparisons, and three standard deviations of chance; far fewer lie over the limit."""
    random = np.random.default_rng(0)
    paces = np.exp(0.03 * random.normal(size=60))
    runs = [source(records(f"run{number}", 10.0 * pace, seed=number)) for number, pace in enumerate(paces)]
    runs = [replace(run, metrics={"step": run.metrics["step"]}) for run in runs]
    slower = faster = 0
    for _ in range(300):
        drawn = [runs[index] for index in random.permutation(60)[:6]]
        outcome = compare(drawn[:3], drawn[3:]).metrics["step"].outcome
        slower, faster = slower + (outcome == "slower"), faster + (outcome == "faster")
    assert slower <= 300 * 0.025 + 8
    assert faster <= 300 * 0.025 + 8


def test_what_would_tell_is_what_tells():
    assert runs_needed(0.02, 5) > 2
    assert runs_needed(0.5, 1) is None


def test_more_steps_help_against_noise_and_not_against_differences_between_processes():
    for scatter, needed in ((0.01, 1674), (0.03, None)):
        ratio = Ratio(ratio=1.0, low=0.9, high=1.1, log_error=np.hypot(0.024, scatter * np.sqrt(2)), scatter=scatter)
        assert steps_needed(ratio, 300, 5) == (None if needed is None else pytest.approx(needed, rel=0.01))


def test_a_change_has_two_to_four_digits():
    assert [percent(ratio) for ratio in (0.5, 0.98, 1.0, 1.0312, 1.25, 10.0, 10.99, 11.0, 1e6)] == [
        *("-50", "-2.0", "+0.0", "+3.1", "+25", "+900", "+999", "+1000", "+>9999")
    ]
