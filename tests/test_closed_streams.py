"""Streams that are closed, full or no longer read: the exit code says so, without a traceback, and files are whole."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.outcomes import HANGS_S
from tests.test_cli import COMMAND, ENVIRONMENT, INPUT_BOUND, forge

CROSSOVERS = Path(__file__).parent / "data" / "crossover_h200.json"
# what is not buffered fails at once, and not once more when Python ends
BUFFERED = {**ENVIRONMENT, "PYTHONUNBUFFERED": ""}
COMMANDS = {
    "help": ["--help"],
    "show": ["show", INPUT_BOUND],
    "save": ["view", INPUT_BOUND, "--save", "r.html"],
    "json": ["show", INPUT_BOUND, "--json"],
    "compare": ["compare", INPUT_BOUND, INPUT_BOUND, "--fail-over", "5"],
    "tensorboard": ["export", INPUT_BOUND, "--for", "tensorboard", "--out", "copies"],
    "view": ["view", "--no-browser", "there.html"],
    "crossover": ["crossover", "--from", CROSSOVERS],
    "schema": ["show", "--schema"],
}
WRITTEN = {"save": {"r.html"}, "tensorboard": {"copies"}}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "there.html").touch()

    def run(arguments, **options):
        """A command in a folder of its own: its exit code, what it says on stderr, and the files it wrote."""
        done = forge(*arguments, **{"cwd": tmp_path, "env": BUFFERED, "capture_output": False, **options})
        said = [line for line in (done.stderr or "").splitlines() if not line.startswith(("reading", "copying"))]
        return done.returncode, said, {path.name for path in tmp_path.iterdir()} - {"there.html"}

    return run


@pytest.fixture
def unread():
    """A pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def without(*descriptors):
    """Called in a process before it becomes a command: closes them, as `>&-` of a shell does."""

    def close():
        for descriptor in descriptors:
            os.close(descriptor)

    return close


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_is_exit_code_141_and_the_files_are_there(name, run, unread):
    code, said, files = run(COMMANDS[name], stdout=unread, stderr=subprocess.PIPE)
    assert (code, said, files) == (141, [], WRITTEN.get(name, set()))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_stdout_is_exit_code_2_and_nothing_is_written(name, run):
    code, said, files = run(COMMANDS[name], stderr=subprocess.PIPE, preexec_fn=without(1))
    assert (code, files) == (2, set())
    assert said == ["forge-profiling: standard output is closed: redirect it to a file or to /dev/null"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_behind_stdout_is_exit_code_2_and_the_files_are_there(name, run):
    with Path("/dev/full").open("w") as full:
        code, said, files = run(COMMANDS[name], stdout=full, stderr=subprocess.PIPE)
    assert (code, said) == (2, ["forge-profiling: No space left on device"])
    assert files == WRITTEN.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(2,), (0, 2)], ids=["stderr", "stdin and stderr"])
def test_a_closed_stderr_changes_nothing(closed, run, tmp_path):
    arguments = COMMANDS["save"]
    expected = forge(*arguments, cwd=tmp_path)
    pages = {path.name: path.read_bytes() for path in tmp_path.glob("r.*")}
    with (tmp_path / "there.html").open("w") as stdout:
        code, _, _ = run(arguments, stdout=stdout, preexec_fn=without(*closed))
    assert code == 0
    assert (tmp_path / "there.html").read_text() == expected.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.glob("r.*")} == pages


@pytest.mark.slow
def test_errors_and_progress_that_cannot_be_written_change_no_exit_code(run, unread):
    assert run(["bogus"], stderr=unread)[0] == 2
    assert run(["show", "none"], stderr=unread)[0] == 2
    assert run(["show", "none"], preexec_fn=without(2))[0] == 2
    # measuring says how far it is from the beginning
    point = ["crossover", "--ops", "add", "--sizes", "8", "--max-time", "0.05", "--format", "json"]
    assert run(point, stdout=subprocess.DEVNULL, stderr=unread, env={**BUFFERED, "CUDA_VISIBLE_DEVICES": ""})[0] == 0


def test_a_fault_of_the_program_is_not_taken_for_a_run_that_got_worse(tmp_path):
    """Exit code 1 is `compare`'s, and Python's own where an exception ends it."""
    broken = tmp_path / "numpy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('planted')")
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    done = subprocess.run(
        [*COMMAND, "compare", str(INPUT_BOUND), str(INPUT_BOUND)],
        capture_output=True, text=True, env={**ENVIRONMENT, "PYTHONPATH": path}, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 70
    assert done.stderr.splitlines()[-1] == "RuntimeError: planted"


def test_a_report_whose_place_nobody_reads_is_removed(run, unread, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**BUFFERED, "TMPDIR": str(temporary)}
    code, said, _ = run(["view", "--no-browser", INPUT_BOUND], stdout=unread, stderr=subprocess.PIPE, env=environment)
    assert (code, said) == (141, [])
    assert list(temporary.iterdir()) == []
