"""The process that finishes a trace: from where it takes its code, and when it ends."""

import gzip
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import lightning_forge_profiling
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.finish import OTHERS_WAIT_S, analyze, publish
from lightning_forge_profiling.profiler.child import FinishingChild
from tests.outcomes import HANGS_S, REPORTS, SCRIPTS, wait_for_processes_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX processes")

TRACES = Path(__file__).parent / "data" / "traces" / "ddp"
PACKAGE = Path(lightning_forge_profiling.__file__).parent
PLANTED = "open({marker!r}, 'a').write(__name__ + '\\n')\nraise ImportError('planted: ' + __name__)\n"


def plant(folder, marker, *names):
    """Modules that leave a trace of their own and fail."""
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED.format(marker=str(marker)))


def record(package, tmp_path, *options, cwd=None, flags=()):
    """Record a window with the package from a folder or an archive, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *flags, str(SCRIPTS / "window.py"), str(package), str(tmp_path / "traces"), *options]
    done = subprocess.run(
        command, cwd=cwd or tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "status='written'" in done.stdout, done.stdout
    names = {path.name for path in (tmp_path / "traces").rglob("*") if path.is_file()}
    assert names == {"rank0.trace.json.gz", "rank0.pt.trace.json.gz", *REPORTS}, done.stdout


STANDARD = ("argparse", "gzip", "shutil", "select", "pathlib", "sitecustomize", "usercustomize")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "flags"), [((), ("-P",)), (("here",), ())], ids=["-P", "PYTHONPATH"])
def test_modules_in_the_working_directory_are_not_run(tmp_path, options, flags):
    here, marker = tmp_path / "here", tmp_path / "marker"
    here.mkdir()
    plant(here, marker, *STANDARD, "numpy", "msgspec", "typing_extensions", "lightning_forge_profiling")
    record(PACKAGE.parent, tmp_path, *options, cwd=here, flags=flags)
    assert not marker.exists(), marker.read_text()


@pytest.mark.slow
def test_what_is_installed_beside_the_package_does_not_take_the_place_of_the_standard_library(tmp_path):
    installed, marker = tmp_path / "installed", tmp_path / "marker"
    shutil.copytree(PACKAGE, installed / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    plant(installed, marker, *STANDARD[:-2])  # `pathlib` is on PyPI
    record(installed, tmp_path, "append")
    assert not marker.exists(), marker.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "option"), [("link", ("hook",)), ("archive", ())], ids=["link-hook", "archive"])
def test_it_finds_the_package_where_the_training_did(tmp_path, kind, option):
    if kind == "link":
        place = tmp_path / "packages"
        place.mkdir()
        (tmp_path / "other name").symlink_to(PACKAGE)
        (place / PACKAGE.name).symlink_to(tmp_path / "other name")
    else:
        copy = tmp_path / "copy" / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        place = Path(shutil.make_archive(str(tmp_path / "packages"), "zip", copy.parent))
    record(place, tmp_path, *option)


def start(folder):
    raw = folder / ".rank0.raw" / "raw.json"
    raw.parent.mkdir()
    raw.write_text("")
    return FinishingChild(raw, 0, ranks=[0], tensorboard=False, analyze=False), raw


def test_it_goes_on_alone_if_training_is_killed_whoever_has_its_pipe_open(tmp_path):
    script = f"""
import os, signal
from tests.test_finishing_child import Path, start
start(Path({str(tmp_path)!r}))
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print(os.getpid(), flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=PACKAGE.parent, stdout=subprocess.PIPE) as process:
        survivor = int(process.stdout.readline())  # as a DataLoader's workers do, it keeps open what the training had
        try:
            assert process.wait(HANGS_S) == -signal.SIGKILL
            deadline = time.monotonic() + HANGS_S
            while (tmp_path / ".rank0.raw").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.kill(survivor, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.trace.json.gz"]


@pytest.mark.linux
def test_ctrl_c_ends_the_wait_for_it_also_where_lightning_ignores_it(tmp_path):
    child, raw = start(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    before, over = signal.signal(signal.SIGINT, signal.SIG_IGN), threading.Event()

    def press():
        while not over.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    keys = threading.Thread(target=press)
    keys.start()
    try:
        began = time.monotonic()
        assert child.wait_or_detach(HANGS_S) is None
        assert time.monotonic() - began < HANGS_S / 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        over.set()
        keys.join()
        signal.signal(signal.SIGINT, before)
        os.kill(child.pid, signal.SIGCONT)
    wait_for_processes_of(tmp_path)
    assert not raw.exists(), "it went on alone"


@pytest.mark.linux
def test_one_that_takes_too_long_is_killed(tmp_path):
    child, _ = start(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    assert child.wait(0.01) == "finishing the trace took longer than 0 s"


@pytest.mark.slow
def test_the_windows_of_a_run_share_the_time_in_which_another_rank_may_come(tmp_path):
    raws = [tmp_path / name / ".rank0.raw" / "raw.json" for name in ("first", "second")]
    for raw in raws:
        raw.parent.mkdir(parents=True)
        raw.write_bytes(gzip.decompress((TRACES / "rank0.trace.json.gz").read_bytes()))
    children = [FinishingChild(raw, 0, ranks=[0, 1], tensorboard=True, analyze=True) for raw in raws]
    assert [child.wait(HANGS_S, alone=child is not children[0]) for child in children] == ["", ""]
    for raw in raws:
        copy = raw.parents[1] / "tensorboard" / "rank0.pt.trace.json.gz"
        took_s = raw.parents[1].joinpath("summary.json").stat().st_mtime - copy.stat().st_mtime
        assert took_s < 2 * OTHERS_WAIT_S, "where publishing and analysing wait once each, at least two waits"


def test_a_folder_that_was_removed_is_not_waited_for(tmp_path):
    gone, began = tmp_path / "gone", time.monotonic()
    publish(gone / "rank0.pt.trace.json.gz", [0, 1], wait_s=HANGS_S)
    with pytest.raises(TraceError, match="no such file or folder"):
        analyze(gone / "rank0.trace.json.gz", [0, 1], wait_s=HANGS_S)
    assert time.monotonic() - began < HANGS_S / 2
