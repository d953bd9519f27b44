"""A process of the test suite that crashes: the run fails with its stacks, whatever that process has forked."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent

# as a loader's worker would, the forked process outlives the one that crashes
CRASHES = """
import ctypes, os, time
from pathlib import Path

def test_that_crashes():
    if (pid := os.fork()) == 0:
        time.sleep(200)
        os._exit(0)
    Path(__file__).with_name("forked").write_text(str(pid))
    ctypes.string_at(0)
"""


@pytest.fixture
def forked(tmp_path):
    """The file that names the forked process, which is ended afterwards."""
    yield tmp_path / "forked"
    os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_in_which_a_worker_crashes_fails_with_its_stack(tmp_path, forked):
    (tmp_path / "test_crashes.py").write_text(CRASHES)
    (tmp_path / "test_other.py").write_text("def test_that_passes(): pass\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
    make = ["make", "--dry-run", "--assume-old=.venv/.ready", "quick"]
    recipe = subprocess.run(make, cwd=CHECKOUT, env=environ, capture_output=True, text=True, check=True).stdout
    recipe = recipe.replace(".venv/bin/python", shlex.quote(sys.executable)).strip()
    options = f"--numprocesses 2 -p tests.conftest --confcutdir={shlex.quote(str(tmp_path))} -p no:cacheprovider"
    environ["PYTHONPATH"] = os.pathsep.join((str(CHECKOUT), os.environ.get("PYTHONPATH", "")))
    command = f"{recipe} {options} --rootdir={shlex.quote(str(tmp_path))} {shlex.quote(str(tmp_path))}"
    said = tmp_path / "said"  # no pipe, which the forked process would keep open
    with said.open("w") as file:
        ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, stdout=file, stderr=file, check=False)
    assert ran.returncode == 1, said.read_text()
    assert "1 failed" in said.read_text()
    assert 'test_crashes.py", line 10 in test_that_crashes' in said.read_text()
    assert Path(f"/proc/{forked.read_text()}").exists(), "the run did not wait for it"
