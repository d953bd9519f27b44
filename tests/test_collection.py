"""Every process collects the same test ids in the same order: pytest-xdist stops where two workers differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.through_lightning import refuse_trainers

TESTS = Path(__file__).parent
SHOWN = 10
UNSTEADY = """
import os, time
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_steady(number): pass

@pytest.mark.parametrize("now", [time.time_ns()])
def test_clock(now): pass

@pytest.mark.parametrize("process", [os.getpid()])
def test_process(process): pass

@pytest.mark.parametrize("digest", [hash("text")])
def test_hash(digest): pass

@pytest.mark.parametrize("address", [object()], ids=repr)
def test_address(address): pass
"""
UNORDERED = """
import pytest

@pytest.mark.parametrize("letter", set("abcdefghijklmnopqrstuvwxyz"))
def test_letter(letter): pass
"""


def collected(folder, hash_seed, *options):
    """The test ids that a new process collects in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            str(folder),
            *map(str, options),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
        env={**environment, "PYTHONHASHSEED": str(hash_seed)},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line for line in answer.stdout.splitlines() if "::" in line]


def difference(first, second):
    """How two collections differ, for a reader; empty where they do not."""
    lines = []
    for side, ids, others in (("first", first, set(second)), ("second", second, set(first))):
        alone = [name for name in ids if name not in others]
        lines += [f"only in the {side} collection: {name}" for name in alone[:SHOWN]]
        lines += [f"... and {len(alone) - SHOWN} more"] if len(alone) > SHOWN else []
    if not lines and first != second:
        at, names = next((at, names) for at, names in enumerate(zip(first, second, strict=True)) if len({*names}) > 1)
        lines.append(f"the same ids in another order: number {at} is {names[0]} first, then {names[1]}")
    return "\n".join(lines)


def test_two_processes_collect_the_same_ids():
    # One after the other: importing all test files takes many seconds, so that a second in an id shows too.
    first, second = collected(TESTS, hash_seed=1), collected(TESTS, hash_seed=2)
    found = difference(first, second)

    assert not found, f"test ids differ between two processes:\n{found}"
    assert f"{Path(__file__).parent.name}/{Path(__file__).name}::test_two_processes_collect_the_same_ids" in first


def test_ids_made_of_clock_process_hash_and_address_are_named(tmp_path):
    (tmp_path / "test_unsteady.py").write_text(UNSTEADY)

    found = difference(collected(tmp_path, hash_seed=1), collected(tmp_path, hash_seed=2))

    for name in ("clock", "process", "hash", "address"):
        assert found.count(f"::test_{name}[") == 2, found
    assert "test_steady" not in found


def test_another_order_is_named(tmp_path):
    (tmp_path / "test_unordered.py").write_text(UNORDERED)

    found = difference(collected(tmp_path, hash_seed=1), collected(tmp_path, hash_seed=2))

    assert found.startswith("the same ids in another order: number ")
    assert found.count("::test_letter[") == 2


@pytest.mark.parametrize(("more", "shown"), [(0, 10), (3, 11)])
def test_a_long_difference_is_cut(more, shown):
    lines = difference([f"t::{n}" for n in range(SHOWN + more)], []).splitlines()

    assert len(lines) == shown
    assert (lines[-1] == "... and 3 more") == bool(more)


def test_tests_that_go_through_lightning_are_known_without_a_list():
    names = ("situations_lightning", "interrupts", "examples", "reports", "steps", "table", "crossover_command")
    chosen = collected(TESTS / "test_kept.py", 0, *(TESTS / f"test_{name}.py" for name in names), "--through-lightning")
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
