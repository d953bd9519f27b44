"""`forge-profiling compare` on the records of runs: outcome, exit code, table, what is refused."""

import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from lightning_forge_profiling.cli import compare
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.diagnosis.block_bootstrap import BlockBootstrap, block_length
from lightning_forge_profiling.diagnosis.log_ratio import runs_needed, steps_needed, tolerable_scatter
from lightning_forge_profiling.diagnosis.run_comparison import compare_runs
from lightning_forge_profiling.diagnosis.run_metrics import RUN_METRICS, run_metrics
from lightning_forge_profiling.record.histogram import histogram
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.record.run_samples import run_samples
from tests.compared_runs import SHARES, step_times, write_record
from tests.test_cli import INPUT_BOUND, fails
from tests.test_cli import forge as process


@pytest.fixture
def forge(capsys, monkeypatch):
    """The command in this process: exit code, standard output, standard error without progress."""
    monkeypatch.setenv("COLUMNS", "80")

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
    assert done.stdout.startswith("slower: step +50.")
    assert done.stdout.splitlines()[0].endswith(" %, limit 5 %")


def test_one_run_a_side_that_differs_little_is_inconclusive_and_it_is_said_what_would_tell(records, forge):
    a, b = records("a"), records("b", 10.2, seed=1)
    code, out, err = forge("compare", a, b, "--fail-over", "5")
    assert (code, err) == (3, "")
    assert out.startswith("inconclusive: step +")
    said = " ".join(out.split())
    assert "Repeat each side 3 times: that decides a limit of 5 % where equal runs differ by 1.6 % or less" in said
    assert re.search(r"with 7.\d %, as assumed here, it needs (3[3-9]|4\d)", said)
    assert "one run a side: its steps do not show how much equal runs differ" in said


def test_what_is_known_of_the_machine_decides_with_one_run_a_side(records, forge):
    a, b = records("a", noise=0.005), records("b", 10.05, noise=0.005, seed=1)
    assert forge("compare", a, b, "--fail-over", "5", "--scatter", "0.5")[0] == 0
    slower = records("c", 11.5, noise=0.005, seed=2)
    assert forge("compare", a, slower, "--fail-over", "5", "--scatter", "0.5")[0] == 1
    assert forge("compare", a, slower, "--fail-over", "5")[0] == 3, "processes that scatter by 7 % may differ as much"


@pytest.mark.parametrize("words", [["--against"], ["against"]])
def test_repeats_measure_how_much_runs_differ(records, forge, words):
    paces = (1.0, 1.01, 0.99)
    a, b = repeats(records, "a", 10.0, paces), repeats(records, "b", 11.0, paces)
    code, out, _ = forge("compare", *a, *words, *b, "--fail-over", "5")
    assert code == 1
    assert re.match(r"slower: step \+(9|10)\.\d %, 95 % interval \+[78]\.\d to \+1[1-3]\.\d %, limit 5 %\n", out)
    assert "3 runs, 1,000 + 1,000 + 1,000 steps on NVIDIA H200" in out
    assert "from the differences between the runs of a side" in " ".join(out.split())
    code, out, _ = forge("compare", *a, *words, *repeats(records, "c", 10.0, paces), "--fail-over", "5")
    assert (code, out.partition(":")[0]) == (0, "same")
    code, out, _ = forge("compare", *a, *words, *repeats(records, "d", 8.0, paces), "--fail-over", "5")
    assert (code, out.partition(":")[0]) == (0, "faster")


def test_repeats_that_scatter_say_how_many_it_takes(records, forge):
    paces = (0.9, 1.0, 1.1)
    a, b = repeats(records, "a", 10.0, paces), repeats(records, "b", 10.0, paces)
    code, out, _ = forge("compare", *a, "--against", *b, "--fail-over", "5")
    assert code == 3
    said = " ".join(out.split())
    needed = int(re.search(r"Runs of a side scatter by 1\d.\d %: a limit of 5 % needs (\d+) a side", said)[1])
    assert 60 < needed < 90


def test_several_baselines_and_one_new_run_are_enough_for_an_interval(records, forge):
    a = repeats(records, "a", 10.0, (1.0, 1.005, 0.995, 1.002, 0.998))
    code, out, _ = forge("compare", *a, "--against", records("b", 11.5, seed=7), "--fail-over", "5")
    assert code == 1
    assert "1 run" not in out.splitlines()[0]


def test_without_a_limit_it_only_shows(records, forge):
    code, out, _ = forge("compare", records("a"), records("b", 20.0, seed=1))
    assert code == 0
    assert re.match(r"slower: step \+\d+\.\d %, 95 % interval [+\d. to]+ %\n", out)


def test_the_gate_can_be_on_a_rate_or_a_region_and_the_worst_decides(records, forge):
    lazy = {**SHARES, "data": 0.6}  # of a step that is 1.5 times as long
    total = sum(lazy.values())
    a = records("a", noise=0.005)
    b = records("b", 10.0 * total, noise=0.005, seed=1, shares={name: share / total for name, share in lazy.items()})
    gate = ("--fail-over", "20", "--scatter", "2")
    code, out, _ = forge("compare", a, b, *gate, "--metric", "backward", "--metric", "samples")
    assert code == 1
    first, second, *_ = out.splitlines()
    assert first.startswith("slower: samples/s -33.")
    assert second.startswith("same: backward ms ")
    assert forge("compare", a, b, *gate, "--metric", "forward")[0] == 0


def test_more_noise_in_the_steps_makes_a_wider_interval(records):
    def reach(noise):
        a, b = (samples(records(f"{side}{noise}", noise=noise, seed=side)) for side in (0, 1))
        ratio = compare_runs([a], [b], scatter_pct=0).metrics["step"].ratio
        return ratio.high - ratio.low

    assert 3 < reach(0.1) / reach(0.02) < 8


def test_a_run_of_four_intervals_is_too_short_alone_and_enough_beside_repeats(records, forge):
    a, b = repeats(records, "a", 10.0, (1.0, 1.01), steps=200), repeats(records, "b", 13.0, (1.0, 1.01), steps=200)
    code, out, _ = forge("compare", a[0], b[0], "--fail-over", "5")
    assert code == 3
    assert "5 intervals a side are needed" in " ".join(out.split())
    assert forge("compare", *a, "--against", *b, "--fail-over", "5")[0] == 1


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_everything_is_in_the_json(records, forge):
    a, b = records("a", commit="a" * 40), records("b", 20.0, seed=1, commit="b" * 40)
    code, out, _ = forge("compare", a, b, "--fail-over", "5", "--metric", "step", "--metric", "median", "--json")
    assert code == 1
    found = json.loads(out)
    assert found["outcome"] == "slower"
    assert [gate["metric"] for gate in found["gates"]] == ["step", "median"]
    step = found["comparison"]["metrics"]["step"]
    assert step["ratio"]["ratio"] == pytest.approx(2, rel=0.02)
    assert step["ratio"]["low"] < step["ratio"]["ratio"] < step["ratio"]["high"]
    assert step["b"] == pytest.approx(20, rel=0.02)
    assert {"samples", "median", "forward"} < found["comparison"]["metrics"].keys()
    assert found["comparison"]["a"]["commits"] == ["a" * 40]
    assert found["comparison"]["assumed_scatter_pct"] == compare.SCATTER_PCT


def test_ledger_verdict_and_findings_are_compared(records, forge):
    parts = {"startup/process": 4.0, "steps": 10.0, "checkpoint": 1.0}
    a = records("a", ledger=parts, findings=[("input-bound", 31.0)], metrics={"gpu/power_w": 400.0})
    b = records(
        "b",
        seed=1,
        ledger=parts | {"checkpoint": 5.1},
        findings=[("compute-bound", 40.0), ("input-bound", 4.0)],
        metrics={"gpu/power_w": 440.0},
    )
    _, out, _ = forge("compare", a, b)
    assert "(whole run: 15.0 s before, 19.1 s now)" in out
    assert re.search(r"(?m)^checkpoint +1\.00 +5\.10 +\+4\.10 +run$", out)
    assert "verdict input-bound -> compute-bound" in out
    assert "finding compute-bound 0 % -> 40 % of the step" in out
    assert "finding input-bound 31 % -> 4 % of the step" in out
    assert re.search(r"(?m)^gpu/power_w +400 +440 +\+10\.0 %$", out)


def test_ledgers_of_runs_that_differ_in_length_are_per_1000_steps_but_for_what_happens_once(records, forge):
    a = records("a", steps=1000, ledger={"startup/process": 4.0, "steps": 10.0, "checkpoint": 1.0})
    b = records("b", steps=4000, seed=1, ledger={"startup/process": 4.0, "steps": 40.0, "checkpoint": 8.0})
    _, out, _ = forge("compare", a, b)
    assert re.search(r"(?m)^checkpoint +1\.00 +2\.00 +\+1\.00 +1,000 steps$", out)
    assert re.search(r"(?m)^startup/process +4\.00 +4\.00 +\+0\.00 +run$", out)


@pytest.mark.parametrize("limit", [[], ["--fail-over", "5"]])
def test_the_table_fits_80_columns(records, forge, limit):
    options = {"ledger": {"callback/ExponentialMovingAverage.on_train_batch_end": 9.0, "steps": 10.0}}
    a, b = records("a", 12345.6, **options), records("b", 0.00123, seed=1, **options)
    _, out, _ = forge("compare", a, b, *limit)
    lines = [line for line in out.splitlines() if "/forge_record" not in line]  # paths are never broken
    assert max(map(len, lines)) <= 80


def test_a_region_on_one_side_only_has_no_ratio(records, forge):
    a, b = records("a"), records("b", seed=1, shares={"forward": 0.5, "backward": 0.3, "transfer": 0.2})
    _, out, _ = forge("compare", a, b)
    assert re.search(r"(?m)^transfer ms +\d\.\d+ +new$", out)
    assert re.search(r"(?m)^data ms +\d\.\d+ +gone$", out)
    code, _, err = forge("compare", a, b, "--fail-over", "5", "--metric", "transfer")
    assert code == 2
    assert "no values of 'transfer' on both sides" in err


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
    code, out, _ = forge("compare", a, tmp_path / "logs", "--fail-over", "5")
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
    code, out, _ = forge("compare", a, b)
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
    assert "gradient_clip_val 1 before, 2 now" in forge("compare", a, b)[1]


def test_a_run_is_no_repeat_of_itself(records, forge):
    a, b = records("a"), records("b", seed=1)
    code, _, err = forge("compare", a, a, "--against", b)
    assert code == 2
    assert "are the same run" in err
    code, out, _ = forge("compare", a, a)
    assert code == 0
    assert out.startswith("inconclusive: step +0.0 %")
    assert "the same run is on both sides" in out


def test_a_record_and_a_trace_are_not_compared(records):
    a = records("a")
    assert fails(process("compare", a, INPUT_BOUND), "has the record of a run, and")
    assert fails(process("compare", INPUT_BOUND, a), "compare two records, or two traces")


def test_a_folder_with_a_record_and_a_trace_is_compared_by_what_the_other_side_has(records, forge):
    a, b = records("a"), records("b", seed=1)
    (b / "profiler_traces").mkdir()
    shutil.copy(INPUT_BOUND, b / "profiler_traces")
    assert "Median step" in forge("compare", INPUT_BOUND, b)[1]
    assert "step, median ms" in forge("compare", a, b)[1]


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
    assert "--metric busy is not one of records of runs, which have step, median" in err
    code, _, err = forge("compare", INPUT_BOUND, INPUT_BOUND, "--fail-over", "5", "--metric", "samples")
    assert code == 2
    assert "--metric samples is not one of traces, which have step, busy" in err
    code, _, err = forge("compare", INPUT_BOUND, INPUT_BOUND, "--against", INPUT_BOUND)
    assert (code, "traces cannot have repeats" in err) == (2, True)


@pytest.mark.parametrize("paths", [["x", "y", "z"], ["against", "y", "z"], ["x", "y", "against"]])
def test_more_than_two_runs_without_the_other_side_is_a_usage_error(paths):
    done = process("compare", *paths)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: forge-profiling compare")
    assert "against" in done.stderr


def test_the_metrics_of_the_command_are_those_of_the_comparison():
    assert compare.RUN_METRICS == RUN_METRICS


# --- statistics ------------------------------------------------------------------------------------------------------


def samples(folder):
    return run_samples(read_run(folder / "forge_record"))


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


def test_the_median_of_a_histogram_is_that_of_the_steps(records):
    times = step_times(10.0, noise=0.2)
    times[::3] *= 4
    run = samples(records("a"))
    parts = [histogram(map(float, times[first : first + 50])) for first in range(0, 1000, 50)]
    found = BlockBootstrap([50] * 20, [float(times[i : i + 50].sum()) for i in range(0, 1000, 50)]).median(
        parts, run.bucket_ratio
    )
    assert found.value == pytest.approx(np.median(times), rel=0.01)


def test_equal_runs_are_seldom_called_slower_however_much_processes_differ(records):
    """A nominal 2.5 % of 300 comparisons, and three standard deviations of chance; far fewer lie over the limit."""
    random = np.random.default_rng(0)
    paces = np.exp(0.03 * random.normal(size=60))
    runs = [samples(records(f"run{number}", 10.0 * pace, seed=number)) for number, pace in enumerate(paces)]
    runs = [replace(run, steps_us=(), region_ms={}, samples=None) for run in runs]
    slower = faster = 0
    for _ in range(300):
        drawn = [runs[place] for place in random.permutation(60)[:6]]
        outcome = run_metrics(drawn[:3], drawn[3:], scatter=0.07)["step"].outcome
        slower, faster = slower + (outcome == "slower"), faster + (outcome == "faster")
    assert slower <= 300 * 0.025 + 8
    assert faster <= 300 * 0.025 + 8


def test_what_would_tell_is_what_tells():
    assert runs_needed(0.02, 5) > 2
    needed = runs_needed(0.02, 5)
    assert tolerable_scatter(needed, 5) >= 0.02 > tolerable_scatter(needed - 1, 5)
    assert runs_needed(0.5, 1) is None


def test_more_steps_help_against_noise_and_not_against_differences_between_processes(records):
    a, b = (samples(records(f"{seed}", noise=0.05, steps=300, seed=seed)) for seed in (0, 1))
    found = compare_runs([a], [b], scatter_pct=1).metrics["step"].ratio
    assert steps_needed(found, 300, 8) > 300
    assert steps_needed(compare_runs([a], [b], scatter_pct=10).metrics["step"].ratio, 300, 8) is None
