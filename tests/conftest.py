"""Fixtures for all tests; after each of them nothing of it may be left in the process or on the machine."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.elsewhere import SYSTEMS, become
from tests.through_lightning import goes_through_lightning, refuse_trainers

PROC = Path("/proc/self")
# multiprocessing, torch and MPI keep these for the life of the process
PERMANENT = ("resource_tracker", "forkserver", "compile_worker", "orted", "addr2line")
PERMANENT_THREADS = ("TMonitor", "InductorSubproc", "subproc_worker_timer", "_read_thread", "Dummy")
# few tests that take minutes, most of it in processes of their own: begun last, one core would wait for the other
SLOWEST = ("test_distributed", "test_interrupts", "test_situations_lightning",
           "test_crossover_command", "test_through_lightning", "test_situations_guards", "test_wheel",
           "test_benchmarks", "test_examples", "test_published_results")  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--through-lightning", action="store_true", help="only tests that go through Lightning")
    parser.addoption("--elsewhere", choices=[*SYSTEMS], help="as on a system that lacks what it lacks")


def pytest_configure(config):
    """No process that a test forks keeps open what a worker of pytest-xdist is read by: it would seem to live on.

    Nor is coverage, which traces this process, the verdict of each run.
    """
    if system := config.getoption("elsewhere"):
        become(system)
    if type(sys.gettrace()).__module__.startswith("coverage"):
        from lightning_forge_profiling.run import run_settings  # noqa: PLC0415  (slow, and measured from here on)

        run_settings._tracer = lambda: ""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            pipes = plugin.channel.gateway._io
            for pipe in (pipes.infile, pipes.outfile):
                os.register_at_fork(after_in_child=partial(os.dup2, 0, pipe.fileno(), inheritable=False))


def pytest_collection_modifyitems(config, items):
    """The slowest files first: pytest-xdist hands them out in this order (`--no-loadscope-reorder`)."""
    if config.getoption("through_lightning"):
        config.hook.pytest_deselected(items=[item for item in items if not goes_through_lightning(item)])
        items[:] = filter(goes_through_lightning, items)
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("linux") and (sys.platform != "linux" or item.config.getoption("elsewhere")):
        pytest.skip("of what Linux alone has")
    wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
    if wanted:
        import torch  # noqa: PLC0415  (slow, and not every test needs it)

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device{'s' if wanted > 1 else ''}, this machine has {found}")


def threads():
    """All threads but tqdm's monitor and the compiler's, which stay for the life of the process."""
    return {
        thread
        for thread in threading.enumerate()
        if not any(name in f"{type(thread).__name__} {thread.name}" for name in PERMANENT_THREADS)
    }


def children():
    """Our child processes, but for those that are meant to stay and those of the GPU's driver."""
    found, listed = set(), []
    for listing in PROC.glob("task/*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended by now
            listed += listing.read_text().split()
    for pid in listed:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if command and not any(name in command for name in PERMANENT):
            found.add(f"{pid} ({command[:80]!r})")
    return found


def open_files(folder):
    found = []
    for descriptor in PROC.glob("fd/*"):
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def leftovers(before, folder):
    """What a test left behind, in words."""
    found = [f"thread {thread.name}" for thread in threads() - before["threads"]]
    found += [f"child process {child}" for child in children() - before["children"]]
    found += [f"open file {name}" for name in (open_files(folder) if folder is not None else [])]
    if "torch" in sys.modules and sys.modules["torch"]._C._autograd._profiler_enabled():
        found.append("a running torch profiler")
    region = sys.modules.get("lightning_forge_profiling.timing.region")
    if region is not None and region._sinks:
        found.append(f"sinks for regions: {region._sinks}")
    handler = signal.getsignal(signal.SIGURG)
    if getattr(handler, "is_in_use", bool)():
        found.append("a timer that samples the stack")
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request):
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = {"threads": threads(), "children": children()}
    yield
    found = leftovers(before, folder)
    deadline = time.monotonic() + 30
    while found and time.monotonic() < deadline:  # what has been told to end may need a moment
        gc.collect()
        time.sleep(0.05)
        found = leftovers(before, folder)
    assert not found, f"left behind: {', '.join(found)}"


def share_of_the_run(findings, in_steps_pct):
    """The shares of a run's own findings, in percent of the run; a trace's may overlap them.

    Of the step, the regions: of a hook that is under 5 % of the run and more of the step, the run's share is not known.
    """
    timed = [found for found in findings if found.source == "run" and found.of != "memory"]
    own = [found for found in timed if found.of == "run" or "part" not in found.evidence]
    return sum(found.share_pct * (in_steps_pct / 100 if found.of == "step" else 1) for found in own)


@pytest.fixture(autouse=True)
def _no_time_counts_twice(request, monkeypatch):
    """Whatever a test runs, the findings of a run take at most all of it."""
    from lightning_forge_profiling.diagnosis.ledger_costs import in_steps_pct  # noqa: PLC0415  (needs no torch)
    from lightning_forge_profiling.diagnosis.verdict import in_order  # noqa: PLC0415

    more = []

    def checked(findings, run=None, *, gpu=True):
        findings = list(findings)
        if share_of_the_run(findings, 100.0 if run is None else in_steps_pct(run)) > 100.5:
            more.append(findings)
        return in_order(findings, run, gpu=gpu)

    monkeypatch.setattr("lightning_forge_profiling.diagnosis.combine.in_order", checked)
    yield
    if request.node.get_closest_marker("two_clocks"):
        return
    assert not more, f"shares of over 100 %: {more}"


@pytest.fixture(autouse=True)
def _cores_are_free(request, monkeypatch):
    """A test does not depend on what else runs on this machine, but for those that plant it."""
    if not request.node.get_closest_marker("own_cores") and "torch" in sys.modules:
        from lightning_forge_profiling.run import cpu_account  # noqa: PLC0415  (needs torch)

        monkeypatch.setattr(cpu_account, "waited_s", lambda *_: 0.0)
        monkeypatch.setattr(cpu_account, "_grown", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def _lightning_is_declared(request, monkeypatch):
    """So that `--through-lightning` leaves out no test that does."""
    if not goes_through_lightning(request.node):
        refuse_trainers(monkeypatch)


@pytest.fixture(autouse=True)
def _environment_stays():
    """Variables that a test, or Lightning in it, has set are not there for the next one."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture
def _signals_act():
    """Signals do what they do in a process that was started in a terminal, here and in child processes.

    `nohup`, and a shell that starts a job in the background, leave some of them ignored.
    """
    ignored: dict[signal.Signals, Any] = {}
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            ignored[number] = signal.signal(number, handler)
    yield
    for number, handler in ignored.items():
        signal.signal(number, handler)


@pytest.fixture
def make_trainer(tmp_path):
    """A quiet Trainer for the CPU that logs every step to a CSV file below `tmp_path`."""
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415  (slow, and not every test needs it)

    from tests.models import quiet_trainer  # noqa: PLC0415

    made: list[tuple[Any, Any]] = []

    def make(*callbacks, **options):
        logs = {"logger": CSVLogger(tmp_path, name="csv"), "log_every_n_steps": 1, "default_root_dir": tmp_path}
        trainer: Any = quiet_trainer(*callbacks, **{**logs, **options})  # mypy does not see its `profiler`
        made.append((trainer, trainer.profiler))
        return trainer

    yield make
    for trainer, profiler in made:
        assert trainer.profiler is profiler, "the Trainer's own profiler is not back in place"


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for the tests of a file."""
    from tests.browser import chromium  # noqa: PLC0415  (not for tests without Selenium)

    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page, of HTML or of an analysis with timelines; whatever else it does, it never complains."""

    from tests.report_page import Page  # noqa: PLC0415  (not for tests without Selenium)

    def open_page(content, *timelines, **options):
        if not isinstance(content, str):
            return Page(browser, tmp_path, content, timelines, **options)
        (tmp_path / "page.html").write_text(content, encoding="utf-8")
        return Page.of_file(browser, tmp_path / "page.html", **options)

    yield open_page
    assert browser.get_log("browser") == []


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system with room for so many bytes, and returns its folder."""
    folder = tmp_path / "disk"

    def mount(size):
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def _fp32_settings():
    """PyTorch's settings of TF32 are put back."""
    import torch  # noqa: PLC0415  (not for tests without it)

    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("torch before 2.9 has one interface alone")
    settings: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [each.fp32_precision for each in settings]
    yield
    for each, precision in zip(settings, before, strict=True):
        each.fp32_precision = precision
