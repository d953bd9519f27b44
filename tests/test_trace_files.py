"""Which files of a folder are read, where others have put what cannot be read, or very much of it."""

import ctypes
import itertools
import json
import os
import subprocess
import sys

import pytest

from lightning_forge_profiling.kineto.files import find_traces
from tests import trace_builder as made
from tests.test_cli import fails, forge

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def trace_in(folder, name="rank0.trace.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(made.kineto(made.today()))
    return folder


def bound_by_permissions():
    """Called in a process before it becomes a command: takes from root what permissions do not stop."""
    if os.geteuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.fixture
def closed(tmp_path):
    """A folder of windows; of two of them, which are newer, one cannot be listed and one cannot be entered."""
    runs = tmp_path / "runs"
    for age, name in enumerate(("fine", "unlistable", "unenterable")):
        path = trace_in(runs / name) / "rank0.trace.json"
        os.utime(path, (1e9 + age, 1e9 + age))
    (runs / "unlistable").chmod(0o000)
    (runs / "unenterable").chmod(0o444)
    listing = subprocess.run(
        [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", str(runs / "unlistable")],
        capture_output=True, text=True, preexec_fn=bound_by_permissions, check=False,
    )  # fmt: skip
    yield runs if "PermissionError" in listing.stderr else None
    for name in ("unlistable", "unenterable"):
        (runs / name).chmod(0o755)


@pytest.mark.slow
def test_a_subfolder_that_cannot_be_read_is_skipped_and_named_in_one_line(closed, tmp_path):
    if closed is None:
        pytest.skip("root, and nothing takes from it that permissions do not stop it")
    (tmp_path / "link").symlink_to(closed / "unlistable" / "rank0.trace.json")  # beside them
    (closed / "fine" / "deeper").symlink_to(closed / "unlistable" / "deeper")
    done = forge("show", closed, "--json", preexec_fn=bound_by_permissions)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ranks"][0]["steps"] == 2
    (line,) = [warning for warning in summary["warnings"] if "cannot be read" in warning]
    assert line == (
        f"{closed}: skipped, cannot be read: fine/deeper (Permission denied), "
        "unenterable/rank0.trace.json (Permission denied), unlistable (Permission denied)"
    )
    shown = forge("show", closed, preexec_fn=bound_by_permissions)
    assert sum("skipped, cannot be read" in text for text in shown.stdout.splitlines()) == 1
    copied = forge("export", closed, "--for", "tensorboard", "--out", tmp_path / "out", preexec_fn=bound_by_permissions)
    assert copied.returncode == 0
    assert "unlistable (Permission denied)" in copied.stderr


def test_where_nothing_else_is_there_the_error_says_what_was_skipped(closed):
    if closed is None:
        pytest.skip("root, and nothing takes from it that permissions do not stop it")
    (closed / "fine" / "rank0.trace.json").unlink()
    done = forge("show", closed, preexec_fn=bound_by_permissions)
    assert fails(done, "no trace in this folder")
    assert "unlistable (Permission denied)" in done.stderr


def test_only_some_of_many_are_named(tmp_path):
    for number in range(9):
        trace_in(tmp_path / f"run{number}").chmod(0o000)
    trace_in(tmp_path / "run9")
    done = forge("show", tmp_path, "--json", preexec_fn=bound_by_permissions)
    for number in range(9):
        (tmp_path / f"run{number}").chmod(0o755)
    warnings = json.loads(done.stdout)["warnings"]
    if not any("Permission denied" in warning for warning in warnings):
        pytest.skip("root, and nothing takes from it that permissions do not stop it")
    (line,) = [warning for warning in warnings if "cannot be read" in warning]
    assert line.count("Permission denied") == 5
    assert line.endswith(" and 4 more")


def test_a_window_is_as_old_as_the_trace_that_was_written_last(tmp_path):
    for window, ages in (("long", (1, 4)), ("short", (2, 3))):
        for rank, age in enumerate(ages):
            name = f"rank{rank}.trace.json"
            os.utime(trace_in(tmp_path / window, name) / name, (1e9 + age, 1e9 + age))
    files, _ = find_traces(tmp_path)
    assert {file.parent.name for file in files} == {"long"}


def test_a_name_that_is_no_text_is_one_in_the_reports(tmp_path):
    folder = trace_in(tmp_path / os.fsdecode(b"run\xff"))
    trace_in(tmp_path / "older", "rank0.trace.json")
    os.utime(tmp_path / "older" / "rank0.trace.json", (1e9, 1e9))
    (folder / os.fsdecode(b"rank1\xff.trace.json")).write_text("{")
    done = forge("show", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)["warnings"]
    assert any("this is the newest, run\ufffd" in warning for warning in warnings)
    assert any("rank1\ufffd.trace.json: cut before its first event" in warning for warning in warnings)


def test_a_link_that_leads_back_up_ends(tmp_path):
    trace_in(tmp_path / "runs" / "first")
    (tmp_path / "runs" / "back").symlink_to(tmp_path)
    files, _ = find_traces(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["runs/first/rank0.trace.json"]


def test_a_window_behind_a_link_is_found(tmp_path):
    trace_in(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "elsewhere")
    assert find_traces(tmp_path / "runs")[0] == (tmp_path / "runs" / "latest" / "rank0.trace.json",)


@pytest.mark.parametrize("folder", ["", "below"])
def test_the_work_grows_as_the_number_of_files_does(folder, tmp_path):
    """Four times the files take four times the calls, where every one compared with every other would take sixteen."""
    calls = []
    for count in (500, 2_000):
        (tmp_path / str(count) / folder).mkdir(parents=True)
        for number in range(count):
            (tmp_path / str(count) / folder / f"rank{number}.trace.json").touch()
        counted = itertools.count()
        sys.setprofile(lambda *_, counted=counted: next(counted))
        try:
            files, _ = find_traces(tmp_path / str(count))
        finally:
            sys.setprofile(None)
        calls.append(next(counted))
        assert len(files) == count
    assert calls[1] < 6 * calls[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank0\n.trace.json", "a\r\nb.json", "host\n1.1700000000000.pt.trace.json"])
def test_a_trace_whose_name_holds_a_line_break_is_found(name, tmp_path):
    trace_in(tmp_path, name)
    assert find_traces(tmp_path)[0] == (tmp_path / name,)
    done = forge("show", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["rank0.trace.json", "rank0.trace.json.gz"])
def test_a_copy_for_tensorboards_plugin_beside_its_trace_is_no_second_trace(name, tmp_path):
    copy = tmp_path / "rank0.pt.trace.json.gz"
    copy.touch()
    assert find_traces(tmp_path)[0] == (copy,)
    (tmp_path / name).touch()
    assert find_traces(tmp_path)[0] == (tmp_path / name,)
