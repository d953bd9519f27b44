"""docs/measure_fixes.py runs, has a case for each page of the findings, and holds predictions to what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.measure_fixes import CASES, Measured, row, summary
from tests.outcomes import HANGS_S

CHECKOUT = Path(__file__).parents[1]
WITHOUT_CASE = {
    "memory-near-limit",
    "growth",
    "gpu-idle",
    "slow-launches",
    "python-bound",
    "between-regions",
    "blocked",
    "busy-machine",
    "distorted-times",
}


def run(*arguments):
    command = [sys.executable, "-m", "docs.measure_fixes", *map(str, arguments)]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=HANGS_S, check=False)


def measured(saves_ms, bound_ms, *, at_most=False):
    return Measured(
        before={"step": 20.5},
        after={"step": 10.0},
        verdicts_before=(),
        verdicts_after=(),
        recorded_verdict="sync-bound",
        live={"step": 20.0},
        saves_ms=saves_ms,
        at_most=at_most,
        bound_ms=bound_ms,
        title="",
    )


def test_each_page_of_a_finding_that_has_a_fix_has_its_pair():
    pages = {page.stem for page in (CHECKOUT / "docs" / "findings").glob("*.md")}
    assert {"outside-the-step" if name == "gc-bound" else name for name in CASES} == pages - WITHOUT_CASE


@pytest.mark.slow
def test_a_case_ends_in_a_line_and_in_the_file(tmp_path):
    out = tmp_path / "fixes.json"
    done = run("--quick", "--cases", "slow-optimizer", "--limit", HANGS_S - 20, "--out", out)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert "Error of the step after 1 fixes" in done.stdout
    figures = json.loads(out.read_text())["slow-optimizer"]
    assert line.startswith(f"| `slow-optimizer` | {figures['before']['step']:.2f} | {figures['after']['step']:.2f} |")
    assert min(figures["before"]["optimizer"], figures["after"]["optimizer"]) > 0


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_ended_and_the_next_one_tried(tmp_path):
    out = tmp_path / "fixes.json"
    done = run("--quick", "--cases", "slow-optimizer,sync-bound", "--limit", "0.2", "--out", out)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text()) == dict.fromkeys(("slow-optimizer", "sync-bound"), "no result within 0.2 s")


@pytest.mark.slow
def test_a_case_that_is_none_is_refused(tmp_path):
    done = run("--cases", "slow-optimiser", "--out", tmp_path / "fixes.json")
    assert done.returncode == 1
    assert "unknown cases slow-optimiser; there are input-bound," in done.stderr


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (measured(9.0, 15.0), "| 20.50 | 10.00 | 11.00 (+10 %) | 5.00 (\u221250 %) | sync-bound |"),
        (measured(15.0, 15.0, at_most=True), "| at least 5.00 (\u221250 %) | 5.00 (\u221250 %) |"),
        (measured(None, None), "| no finding | no finding |"),
    ],
)
def test_the_step_after_a_fix_stands_beside_what_was_predicted(found, expected):
    assert expected in row("sync-bound", found)


def test_errors_are_summed_up():
    found = [measured(9.0, 15.0), measured(12.0, 15.0), measured(None, None), "no result"]
    assert summary(found) == (
        "Error of the step after 2 fixes, median: played again 15 %, at most 20 %; by bounds 50 %, at most 50 %."
    )


def test_nothing_predicted_is_said():
    assert summary([measured(None, None)]) == "Nothing was predicted."
