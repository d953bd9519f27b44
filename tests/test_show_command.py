"""`forge-profiling show`: of runs that are running, have ended or were killed, and of what is no record."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.record.reader import records_at
from lightning_forge_profiling.schema import IntervalLine
from tests.outcomes import unwrapped
from tests.record_builder import MadeRun
from tests.terminals import CODES, terminal
from tests.test_cli import ENVIRONMENT, INPUT_BOUND, fails, forge, loaded
from tests.test_trace_files import bound_by_permissions

LONG_AGO = 1.7e9


def summary(path, *options, **kwargs):
    done = forge("show", path, *options, **kwargs)
    assert done.returncode == 0, done.stderr
    return done


def summary_json(path):
    return json.loads(summary(path, "--json").stdout)


# --- how a run stands ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "says"),
    [
        (MadeRun(), "running: step 1,200, last written "),
        (MadeRun(began=LONG_AGO, outcome="finished"), "finished 1,200 steps in 1 min"),
        (MadeRun(began=LONG_AGO, outcome="failed"), "failed after 1 min, step 1,200: ValueError: the loss is nan"),
        (MadeRun(began=LONG_AGO), "silent for "),
    ],
    ids=["running", "finished", "failed", "killed"],
)
def test_the_first_line_says_which_run_it_is_and_how_it_stands_and_the_table_follows(tmp_path, run, says):
    record = run.write(tmp_path)
    done = summary(record)
    first, second, *others = done.stdout.splitlines()
    assert first == str(record), "which can be copied"
    assert second.startswith(says)
    text = "\n".join(others)
    assert "verdict     input-bound: " in text
    assert "Where a step goes: 36." in text
    assert "whole fit   steps " in text
    assert (done.stderr, "\x1b" in done.stdout) == ("", False)


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_last_totals_has_a_table_of_the_steps_until_then(tmp_path):
    text = summary(MadeRun(began=LONG_AGO, rows=24).write(tmp_path)).stdout
    assert "; killed, stalled, or in a long validation, checkpoint or step the table covers the first" in unwrapped(
        text
    )
    assert "\nthe table covers the first 1,000 steps\n" in text


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_totals_shows_the_pace_that_it_had(tmp_path):
    record = MadeRun(began=LONG_AGO, rows=3, states=False).write(tmp_path)
    text = summary(record).stdout
    assert "step 150" in text
    assert "forward " in text
    assert "samples/s" in text
    content = summary_json(record)
    assert (content["metrics"], content["analysis"]) == ({}, None)


def test_a_run_that_has_not_come_to_its_first_row_says_so(tmp_path):
    text = summary(MadeRun(began=time.time() - 5, rows=0).write(tmp_path)).stdout
    assert "running: step 0, last written " in text
    assert "no counted step on record yet" in text


@pytest.mark.slow
def test_a_rank_that_died_is_named_while_the_others_go_on(tmp_path):
    run = MadeRun(ranks=3, quiet=1, rows=200)
    text = summary(run.write(tmp_path)).stdout
    assert "running: step 10,000" in text
    assert "; rank 1 silent for " in text
    assert ", step 5,000" in text


def test_a_failure_of_any_rank_is_the_run_s(tmp_path):
    record = MadeRun(ranks=2, began=LONG_AGO, outcome="failed", quiet=0).write(tmp_path)
    assert "failed after " in summary(record).stdout
    assert summary_json(record)["outcome"] == "failed"


# --- json ------------------------------------------------------------------------------------------------------------


def test_json_has_the_logged_names_under_metrics_and_the_analysis_as_in_summary_json(tmp_path):
    record = MadeRun(ranks=2, late=1, began=LONG_AGO, outcome="finished").write(tmp_path)
    content = summary_json(record)
    assert (content["outcome"], content["run"], content["step"]) == ("finished", "made-up", 1200)
    assert content["record"] == str(record)
    assert content["at"] > content["began"] == LONG_AGO
    assert content["metrics"]["time/step_ms"] == pytest.approx(42.6, abs=0.5)
    assert content["metrics"]["throughput/samples_per_sec"] == pytest.approx(2 * 16 / 0.0426, rel=0.02)
    assert content["analysis"]["verdict"] == "input-bound"
    assert content["analysis"]["run"]["ledger"]["parts"]["validation"] == pytest.approx(8.0)
    ranks = content["ranks"]
    assert [rank["rank"] for rank in ranks["ranks"]] == [0, 1]
    assert [rank["waits_ms"] for rank in ranks["ranks"]] == [pytest.approx(6.0, abs=0.5), pytest.approx(0.0, abs=0.5)]
    assert ranks["straggler"] == {"rank": 1, "cause": "data", "ms": pytest.approx(6.0, abs=0.5)}
    assert (ranks["hang"], ranks["spread_ms"]) == (None, pytest.approx(6.0, abs=0.5))
    assert ranks["exposed_comm_ms"] == pytest.approx(3.0, abs=0.5), "the mean over the ranks"
    assert content["problems"] == []


def test_ranks_of_the_same_pace_have_none_that_is_late(tmp_path):
    content = summary_json(MadeRun(ranks=3, began=LONG_AGO, outcome="finished").write(tmp_path))
    assert content["ranks"]["straggler"] is None


# --- which record ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_folder_with_several_records_the_newest_is_taken_and_said(tmp_path):
    for age, name in enumerate(("version_0", "version_1")):
        record = MadeRun(began=LONG_AGO + age, outcome="finished", run=name).write(tmp_path / name)
        os.utime(record / "rank0.jsonl", (LONG_AGO + age, LONG_AGO + age))
    assert summary_json(tmp_path)["run"] == "version_1"
    assert summary(tmp_path).stdout.startswith(f"{record} (newest of 2 records)\nfinished ")
    assert summary_json(tmp_path / "version_0")["run"] == "version_0"
    assert summary_json(tmp_path / "version_0" / "forge_record" / "rank0.jsonl")["run"] == "version_0"


def test_a_record_is_as_old_as_the_file_that_was_written_last(tmp_path):
    for run, ages in (("long", (1, 4)), ("short", (2, 3))):
        record = MadeRun(ranks=2, began=LONG_AGO, outcome="finished", run=run).write(tmp_path / run)
        for rank, age in enumerate(ages):
            os.utime(record / f"rank{rank}.jsonl", (LONG_AGO + age, LONG_AGO + age))
    assert [folder.parent.name for folder in records_at(tmp_path)] == ["long", "short"]


def test_the_ranks_of_one_node_are_a_record_without_rank_0(tmp_path):
    record = MadeRun(ranks=3, began=LONG_AGO, outcome="finished").write(tmp_path)
    (record / "rank0.jsonl").unlink()
    assert [rank["rank"] for rank in summary_json(tmp_path)["ranks"]["ranks"]] == [1, 2]


def test_a_record_that_was_moved_elsewhere_is_read_under_its_new_name(tmp_path):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path / "before")
    shutil.move(record, tmp_path / "kept")
    assert summary_json(tmp_path / "kept")["outcome"] == "finished"


# --- damage and wrong input -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_torn_last_line_is_one_line_on_stderr_and_the_rest_is_shown(tmp_path):
    record = MadeRun(began=LONG_AGO).write(tmp_path)
    path = record / "rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (1, len(lines[-1]) // 2, len(lines[-1]) - 2):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
        done = summary(record)
        [line] = done.stderr.splitlines()
        assert line == "forge-profiling: rank0.jsonl: the last line is incomplete, as after a crash"
        assert "step 1,150" in done.stdout
        assert summary(record, "--json").stdout.startswith("{")


@pytest.mark.slow
def test_names_in_a_record_cannot_write_to_the_terminal(tmp_path):
    run = MadeRun(began=LONG_AGO, run="\x1b[2Jevil")
    record = run.write(tmp_path)
    row = run.lines()[-1]
    assert isinstance(row, IntervalLine)
    with (record / "rank0.jsonl").open("ab") as file:
        file.write(encode_line(row).replace(b'"optimizer":', b'"\\u001b[2Jmine":'))
    for options in ((), ("--json",)):
        assert "\x1b" not in summary(record, *options).stdout


@pytest.mark.slow
def test_what_is_no_record_is_refused_with_what_to_do(tmp_path):
    assert fails(forge("show", tmp_path / "nothing"), "nothing: no such file or folder")
    assert fails(forge("show", tmp_path), "no record of a run in ")
    assert fails(
        forge("watch", INPUT_BOUND),
        "is not a record of a run (forge_record/rankN.jsonl); for traces use forge-profiling show",
    )
    empty = tmp_path / "forge_record"
    empty.mkdir()
    assert fails(forge("show", empty), "no record of a run in ")
    (empty / "rank0.jsonl").touch()
    assert fails(forge("show", empty), "rank0.jsonl cannot be read as a record: it is empty")
    (empty / "rank0.jsonl").write_text('{"line": "begin"}\nnonsense\n')
    assert fails(forge("show", empty), "rank0.jsonl cannot be read as a record: line 1: ")


def test_a_folder_without_permission_is_said(tmp_path):
    closed = tmp_path / "closed"
    MadeRun(rows=1).write(closed)
    closed.chmod(0o000)
    try:
        listing = [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", str(closed)]
        if not subprocess.run(listing, preexec_fn=bound_by_permissions, capture_output=True, check=False).returncode:
            pytest.skip("permissions do not bind this user")
        done = forge("show", closed, preexec_fn=bound_by_permissions)
        assert fails(done, f"{closed}: Permission denied")
    finally:
        closed.chmod(0o700)


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("show",), ("show", "--json"), ("watch", "--once"), ("view", "--save")])
def test_commands_on_records_load_neither_torch_nor_numpy(tmp_path, arguments):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path)
    file = [tmp_path / "run.html"] if "--save" in arguments else []
    assert loaded(arguments[0], record, *arguments[1:], *file) == {"msgspec"}
    assert loaded(arguments[0], "--help") == set()


def test_the_table_is_wrapped_in_a_narrow_terminal(tmp_path):
    record = MadeRun(began=LONG_AGO, outcome="finished").write(tmp_path)
    with terminal("show", record, columns=60, environment=ENVIRONMENT) as shown:
        assert shown.ended() == 0
    text = CODES.sub("", shown.output)
    where, *lines = text.splitlines()
    assert where == str(record), "a path is whole"
    assert max(map(len, lines)) <= 60
    assert "input-bound: the GPU waits" in unwrapped(text)
