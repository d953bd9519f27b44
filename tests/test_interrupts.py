"""Ctrl-C and its relatives, on real processes: the run ends as it would without the callbacks, with its trace."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.outcomes import HANGS_S, REPORTS, SCRIPTS, recorded_steps, tables, the_trace, traces, wait_for_processes_of

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.usefixtures("_signals_act"),
]


@contextmanager
def announced(which, at, folder, **options):
    """A training process that is in its step `at`."""
    command = [sys.executable, str(SCRIPTS / "interrupted.py"), which, str(at), str(folder)]
    process = subprocess.Popen(
        command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        for line in process.stdout:
            if line.strip() == "here":
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process):
    out, err = process.communicate(timeout=HANGS_S)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "steps"),
    [(0, []), (1, []), (2, [2]), pytest.param(4, [2, 3, 4], marks=pytest.mark.smoke), (9, [2, 3, 4])],
    ids=["before", "warm-up", "first", "last", "after"],
)  # fmt: skip
def test_ctrl_c_ends_the_run_with_the_trace_of_what_there_was(tmp_path, at, steps):
    with announced("with", at, tmp_path / "traces") as process:
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    assert code == 1, err
    assert "Traceback" not in err
    assert "went on" not in out
    assert tables(out) == 1
    if steps:
        wait_for_processes_of(tmp_path)
        assert recorded_steps(the_trace(tmp_path)) == steps
        assert "no trace" not in out
    else:
        assert traces(tmp_path) == []
        assert "no trace    not reached" in out


@pytest.mark.slow
def test_ctrl_c_without_the_callbacks_ends_with_the_same_code(tmp_path):
    with announced("without", 3, tmp_path / "traces") as process:
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert code == 1, err


@pytest.mark.slow
def test_ctrl_c_from_a_terminal_reaches_the_whole_group_and_the_trace_is_written_all_the_same(tmp_path):
    with announced("with", 6, tmp_path / "traces", start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGINT)  # the child that compresses may still be at work
        code, _, err = ended(process)
    assert code == 1, err
    wait_for_processes_of(tmp_path)
    assert recorded_steps(the_trace(tmp_path)) == [2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 3])
def test_sigterm_ends_the_run_as_it_does_without(tmp_path, at):
    codes = {}
    for which in ("without", "with"):
        with announced(which, at, tmp_path / "traces") as process:
            process.send_signal(signal.SIGTERM)
            codes[which], _, err = ended(process)
    assert codes["with"] == codes["without"], err
    if at:
        wait_for_processes_of(tmp_path)
        assert recorded_steps(the_trace(tmp_path)) == [2, 3]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_no_half_written_trace(tmp_path):
    with announced("with", 6, tmp_path / "traces") as process:
        process.kill()
        code, _, _ = ended(process)
    assert code == -signal.SIGKILL
    wait_for_processes_of(tmp_path)
    assert recorded_steps(the_trace(tmp_path)) == [2, 3, 4]
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"rank0.trace.json.gz", "rank0.pt.trace.json.gz", "rank0.jsonl", *REPORTS}
