"""What is read from the golden traces is what was kept of them: `tests/golden/README.md`."""

import pytest

from tests.golden import outputs, truths
from tests.golden.truths import TRUTHS


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
