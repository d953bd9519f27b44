"""Which tests `make lowest` repeats: those that go through Lightning, without a list of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.through_lightning import refuse_trainers

TESTS = Path(__file__).parent


def collected(*arguments):
    """The test ids that a new process collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line for line in answer.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_tests_that_go_through_lightning_are_known_without_a_list():
    names = ("situations_lightning", "interrupts", "examples", "reports", "steps", "table", "crossover_command")
    chosen = collected(TESTS / "test_kept.py", *(TESTS / f"test_{name}.py" for name in names), "--through-lightning")
    files = {test.partition("::")[0].removeprefix("tests/test_").removesuffix(".py") for test in chosen}
    assert files == {"kept", "situations_lightning", "interrupts", "examples", "reports"}
    in_reports = {test.partition("::")[2] for test in chosen if "test_reports" in test}  # of some hundred
    assert in_reports == {
        "test_a_trace_without_gpu_work_is_not_told_as_an_idle_gpu",
        "test_of_ranks_with_and_without_gpu_work_only_the_former_are_busy_or_idle",
    }


def test_a_test_that_is_not_known_to_go_through_lightning_gets_no_trainer():
    from tests import models  # noqa: PLC0415  (which loads Lightning, as the tests do that this one stands for)

    refused = pytest.MonkeyPatch()
    refuse_trainers(refused)
    try:
        with pytest.raises(AssertionError, match="This test goes through Lightning"):
            models.L.Trainer()
    finally:
        refused.undo()
