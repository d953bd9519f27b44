"""Many fits in one process under `run`: the first of each module in full, a line on each further one, an overview."""

import os
import re
import subprocess
import sys

import pytest

from lightning_forge_profiling.record.reader import records_at
from lightning_forge_profiling.run.fit_results import ProcessFits
from lightning_forge_profiling.schema import RunEvidence, RunReport
from lightning_forge_profiling.timing.run_totals import RunTotals
from lightning_forge_profiling.timing.steps import StepTimes, StepWork
from tests.outcomes import HANGS_S, SCRIPTS, tables, traces
from tests.samples import sample_analysis

RUN = [sys.executable, "-m", "lightning_forge_profiling", "run"]


def lines_of(tmp_path, *fits):
    """Our lines on standard error but the first, and all of it."""
    done = subprocess.run(
        [*RUN, SCRIPTS / "many_fits.py", *fits],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, timeout=HANGS_S, check=True,
    )  # fmt: skip
    return [line for line in done.stderr.splitlines() if line.startswith("forge-profiling: ")][1:], done.stderr


@pytest.mark.slow
def test_the_first_fit_of_a_module_is_recorded_and_each_further_one_is_a_line(tmp_path):
    lines, err = lines_of(tmp_path, "Small:4", "Small:4", "Small:4")
    assert (tables(err), len(traces(tmp_path)), len(records_at(tmp_path))) == (1, 1, 1)
    *further, overview = lines
    assert [line.partition(",")[0].partition(": ")[2].partition(": ")[0] for line in further] == [
        "fit 2 of Small",
        "fit 3 of Small",
    ]
    assert all(
        re.search(r": [\d.]+ m?s, 24 steps of [\d.]+ ms, too short to differ from the first$", line) for line in further
    )
    assert re.match(r"forge-profiling: 3 fits of Small, [\d.]+ m?s, ", overview)


@pytest.mark.slow
def test_another_class_or_shape_is_another_module(tmp_path):
    lines, err = lines_of(tmp_path, "Small:4", "Small:6", "Other:4", "Small:6")
    assert tables(err) == 3
    assert [len(re.findall(rf"^Where a step of {kind} goes", err, re.MULTILINE)) for kind in ("Small", "Other")] == [
        2,
        1,
    ]
    assert len(traces(tmp_path)) == len(records_at(tmp_path)) == 3
    line, overview = lines
    assert line.startswith("forge-profiling: fit 3 of Small: ")
    assert overview.startswith("forge-profiling: 3 fits of Small in 2 sizes, ")


def report_of(analysis, steps):
    totals = RunTotals()
    for step in range(steps):
        totals.add(StepTimes(step, {"data": 1.0}, {"data": 1.0}), StepWork(8.0, None, 1), None)
    run = totals.timing(steps=steps, before_first_s=0.1, wall_s=0.2)
    measured = RunEvidence(timing=run)
    return RunReport(measured, None, device="cpu", replicas=1, log_folder=None, analysis=analysis, model="M")


def overview_of(*fits):
    """The overview of fits given as their analysis and number of steps."""
    done = ProcessFits()
    for number, (analysis, steps) in enumerate(fits):
        done.add((), 0.0, report_of(analysis, steps), timing_only=number > 0)
    return [line.partition(" s, ")[2] for line in done.overview()]


def test_verdicts_are_the_same_where_the_first_cause_is_found_again():
    first = sample_analysis()
    other = first.findings[1]
    reordered = type(first)(
        source="the run", verdict=other.code, verdict_text="", findings=(other, first.findings[0]), hints=()
    )
    assert overview_of((first, 100), (reordered, 100)) == [f"the same verdict in all: {first.verdict}"]
    alone = type(first)(source="the run", verdict=other.code, verdict_text="", findings=(other,), hints=())
    assert overview_of((first, 100), (first, 100), (alone, 100)) == [f"{first.verdict} in 2, {other.code} in 1"]


def test_a_few_steps_do_not_contradict_the_first_fit():
    assert overview_of((sample_analysis(), 100), (None, 9)) == ["input-bound in 1, no verdict in 1"]
    short = type(sample_analysis())(source="the run", verdict="gc-bound", verdict_text="", findings=(), hints=())
    assert overview_of((sample_analysis(), 100), (short, 49)) == [
        "input-bound in 1, too short to differ from the first in 1"
    ]
    assert overview_of((sample_analysis(), 100)) == [], "one fit has its table"
