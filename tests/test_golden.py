"""What is read from the golden traces is what was kept of them: `tests/golden/README.md`."""

import json
import re
from pathlib import Path

import pytest

from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.names import FINDING_PAGES
from tests.golden import outputs, truths
from tests.golden.truths import TRUTHS

RUNS = Path(__file__).parent / "golden" / "runs"
REGIONS = ("data", "forward", "backward", "optimizer", "step")


@pytest.mark.parametrize("case", outputs.cases())
def test_figures_and_findings_are_those_that_were_kept(case):
    assert outputs.kept(case), "python -m tests.golden.outputs --keep"
    assert outputs.differences(case) == []


def _expected(truth):
    marks = pytest.mark.xfail(reason=truth.wrong, strict=True, raises=AssertionError) if truth.wrong else ()
    return pytest.param(truth, id=f"{truth.case}-{truth.figure}", marks=marks)


@pytest.mark.parametrize("truth", [*map(_expected, TRUTHS)])
def test_what_is_known_to_be_right(truth):
    found = truths.found(truths.figures(truth.case), truth.figure)
    assert truth.check(found), f"{truth.figure} is {found}, and right is {truth.right}"


def test_a_figure_that_changes_is_named(monkeypatch):
    before = outputs.kept("traces/ddp")
    steps = before["figures"]["ranks/0/steps"]
    changed = {**before["figures"], "ranks/0/steps": 2 * steps}
    monkeypatch.setattr(outputs, "kept", lambda _: {**before, "verdict": "gpu-idle", "figures": changed})
    assert outputs.differences("traces/ddp") == [
        f"verdict: gpu-idle before, {before['verdict']} now",
        f"ranks/0/steps: {2 * steps} before, {steps} now",
    ]


def test_steps_that_are_seldom_split_have_the_same_figures_everywhere_and_those_of_a_run_that_splits_each(
    tmp_path, capsys
):
    truth, run, page = RUNS / "every_step_split", RUNS / "few_steps_split", tmp_path / "page.html"

    def printed(*arguments):
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    def of_table(text):  # such as `data  ██▏  53.6 %  9.25  9.26`; a step has no share
        found = re.findall(r"(?m)^(\w+) [^\d\n]*(?:\d+\.\d %)? +(\d+\.\d+) ", text)
        return {name: float(ms) for name, ms in found if name in REGIONS}

    right, shown = of_table(printed("show", truth)), of_table(printed("show", run))
    assert [*shown] == [*REGIONS]
    assert shown == pytest.approx(right, rel=0.1)
    assert of_table(printed("watch", run)) == shown
    changes = dict(re.findall(r"(?m)^(\w+)(?:, mean)? ms +\S+ +(\S+) ", printed("compare", truth, run, "--verbose")))
    assert {name: float(changes[name]) for name in REGIONS} == pytest.approx(shown, abs=0.05)
    printed("view", "--save", page, run)
    record = re.search(r'id="forge-record">(.*?)</script>', page.read_text(), re.DOTALL)
    rows = [row["cells"] for row in json.loads(record[1])["step"]["table"]["rows"]]
    assert {name: float(ms) for name, _, ms, *_ in rows if name in REGIONS} == shown


def test_each_finding_is_of_some_case():
    assert {code for case in outputs.cases() for code in outputs.kept(case).get("findings", ())} == FINDING_PAGES.keys()


@pytest.mark.parametrize(
    ("before", "now", "headline"),
    [
        ("gpu_transfer", "gpu_launch_bound", "transfer 98 % faster (98 to 99 %): 10.3 to 0.155 ms"),
        ("gpu_bound", "gpu_bound_float32", "backward 591 % slower (508 to 687 %): 8.35 to 57.7 ms"),
        ("slow_checkpoints", "healthy", "whole fit 42 % faster (24 to 56 %): 2.73 to 1.58 s"),
        ("healthy", "healthy", "no difference above 10 %"),
    ],
)
def test_compare_begins_with_the_region_that_explains_a_change_of_the_step(before, now, headline, capsys):
    assert main(["compare", str(RUNS / before), str(RUNS / now), "--anyway"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == headline
