"""Ranks that are read in processes of their own: how many, and what is said when one is killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.processes import WorkerDiedError, run_in_processes
from tests import trace_builder as made
from tests.outcomes import HANGS_S
from tests.test_cli import COMMAND, ENVIRONMENT, without_progress

several_cores = pytest.mark.skipif(usable_cores() < 2, reason="on one core no process of its own is started")


@pytest.fixture
def ranks(tmp_path):
    """A folder with a rank that is read in no time, and one that takes seconds."""
    (tmp_path / "rank0.trace.json").write_text(made.kineto(made.today()))
    trace = made.kineto(made.today()).encode()
    begin = trace.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    with gzip.open(tmp_path / "rank1.trace.json.gz", "wb", 1) as file:
        file.write(trace[:begin])
        for _ in range(100):
            file.write(b'{"ph": "M", "name": "x"},' * 40_000)
        file.write(trace[begin:])
    return tmp_path


def reader_of(path, started):
    """The child of a process that has a file open, once there is one."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        assert started.poll() is None, started.communicate()
        for child in Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split():
            try:
                if path in {link.readlink() for link in Path(f"/proc/{child}/fd").iterdir()}:
                    return int(child)
            except OSError:
                continue
        time.sleep(0.01)
    pytest.fail(f"nobody reads {path}")


@pytest.mark.linux
@several_cores
@pytest.mark.parametrize("command", [["show"], ["compare", "."]], ids=lambda words: words[0])
def test_a_killed_process_is_exit_code_2_with_the_name_of_its_rank(command, ranks):
    started = subprocess.Popen(
        [*COMMAND, *command, str(ranks)],
        cwd=Path(made.__file__).parent / "data" / "traces" / "input_bound",
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.kill(reader_of(ranks / "rank1.trace.json.gz", started), signal.SIGKILL)
    out, err = started.communicate(timeout=HANGS_S)
    assert (started.returncode, out) == (2, "")
    (line,) = without_progress(err).splitlines()
    assert line.startswith(f"forge-profiling: {ranks / 'rank1.trace.json.gz'}: ")
    assert "the process that read rank 1 was killed by SIGKILL" in line


@pytest.mark.linux
@several_cores
@pytest.mark.usefixtures("_signals_act")
def test_control_c_ends_the_processes_without_a_word_of_theirs(ranks):
    started = subprocess.Popen(
        [*COMMAND, "show", str(ranks)],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    reader = reader_of(ranks / "rank1.trace.json.gz", started)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    out, err = started.communicate(timeout=HANGS_S)
    assert (started.returncode, out, without_progress(err)) == (130, "", "")
    assert not Path(f"/proc/{reader}").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_no_process_outlives_a_parent_that_is_killed(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from lightning_forge_profiling.processes import *\n"
        "import time\n"
        "def work(number):\n"
        "    Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    while len(list(Path(sys.argv[1]).iterdir())) < 3: time.sleep(0.01)\n"
        "    if number == 0: os.kill(os.getppid(), signal.SIGKILL)\n"
        "run_in_processes(work, range(3), 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=HANGS_S)
    assert done.returncode == -signal.SIGKILL
    workers = [Path("/proc", path.name, "comm") for path in tmp_path.iterdir()]
    assert len(workers) == 3
    deadline = time.monotonic() + HANGS_S
    while any(worker.exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a process that can be held to one core")
def test_there_are_as_many_processes_as_cores_that_may_be_used(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank{rank}.trace.json").write_text(made.kineto(made.today()))
    program = (
        "import os, sys; from pathlib import Path; from lightning_forge_profiling.pipeline import analyze\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "analyze(Path(sys.argv[1]), progress=print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=HANGS_S, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"reading {tmp_path}/rank{rank}.trace.json" for rank in range(2)]


def test_results_are_in_the_order_of_the_tasks():
    assert run_in_processes(divmod_by_seven, range(20), 3) == [divmod(number, 7) for number in range(20)]


def divmod_by_seven(number):
    return divmod(number, 7)


def test_what_a_call_raises_is_raised_here_with_its_traceback_as_a_note():
    with pytest.raises(json.JSONDecodeError, match="Expecting value") as raised:
        run_in_processes(json.loads, ["1", "x", "2"], 2)
    assert "in raw_decode" in raised.value.__notes__[0]


def test_a_process_that_ends_on_its_own_is_told_from_one_that_was_killed():
    with pytest.raises(WorkerDiedError, match="task 1: the process ended with exit code 3") as raised:
        run_in_processes(end_with, [0, 3], 2)
    assert raised.value.task == 1


def end_with(code):
    if code:
        os._exit(code)


@pytest.mark.slow
def test_a_rank_that_memory_does_not_suffice_for_is_exit_code_2_with_its_file(tmp_path):
    path = tmp_path / "rank0.trace.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "' + b"k" * (60 << 20) + b'"')
    program = (
        "import resource, sys; from lightning_forge_profiling import pipeline\n"
        "from lightning_forge_profiling.cli.main import main\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, 2 * (pages * resource.getpagesize() + (100 << 20),))\n"
        "sys.exit(main(['show', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True, text=True, timeout=HANGS_S, check=False,
        env={**ENVIRONMENT, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = without_progress(done.stderr).splitlines()
    assert line == f"forge-profiling: {path}: not enough memory to analyse it"
