"""What this package does beside the training is the profiler's: its rows, its collections, its child process."""

import copy
import gc
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch.profiler.profiler import _KinetoProfile

import lightning_forge_profiling
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.names import GC_FULL, PROFILER, STEPS
from lightning_forge_profiling.schema import RunTiming
from lightning_forge_profiling.timing.ledger import LedgerClock, goodput
from tests.models import Classifier, loader, quiet_trainer
from tests.outcomes import HANGS_S, logged

ROOT = Path(lightning_forge_profiling.__file__).parents[1]

posix = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux' scheduler")


def fit(tmp_path, *callbacks, steps=400, **options):
    """A fit that logs each step, with our callbacks as users have them; returns how long it took."""
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, log_every_n_steps=1, default_root_dir=tmp_path, **options)
    trainer.callbacks[:0] = callbacks
    trainer.logger = CSVLogger(tmp_path, name="csv")
    began = time.monotonic()
    trainer.fit(Classifier(), loader(4 * steps))
    return time.monotonic() - began


@pytest.mark.slow
def test_where_each_step_is_logged_our_rows_come_once_a_second(tmp_path):
    took_s = fit(tmp_path, ThroughputCallback())
    rows = logged(tmp_path)
    assert 1 <= len(rows) <= took_s + 1
    assert int(rows[-1]["step"]) == 399, "what came since the last row"
    with_shares = ["run/goodput" in row for row in rows]
    assert with_shares[0]
    assert with_shares[-1]
    assert sum(with_shares) <= 2 + took_s / 10


def test_a_fit_shorter_than_a_second_has_one_row(tmp_path):
    fit(tmp_path, ours := ThroughputCallback(warmup_steps=0), steps=4)
    rows = logged(tmp_path)
    assert [int(row["step"]) for row in rows][-1] == 3
    if len(rows) == 1:  # more only where four steps took a second
        assert rows[0]["time/step_ms"] == pytest.approx(ours.summary()["time/step_ms"])


def test_an_interval_given_to_the_callback_is_kept(tmp_path):
    fit(tmp_path, ThroughputCallback(warmup_steps=0, log_every_n_steps=2), steps=40)
    assert [int(row["step"]) for row in logged(tmp_path)] == [*range(1, 40, 2)]


class Looks(Callback):
    """Lets the collector rest, and looks at the end of a step for what a window has left."""

    def __init__(self, step):
        self.step, self.left = step, None

    def on_train_start(self, *_):
        gc.disable()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.step:
            self.left = [type(one) for one in gc.get_objects() if issubclass(type(one), _KinetoProfile)]

    def on_train_end(self, *_):
        gc.enable()


def test_what_a_window_recorded_is_gone_without_a_collection(tmp_path):
    looks = Looks(step=9)
    try:
        fit(tmp_path, looks, ForgeProfilerCallback(5, 8, trace_dir=tmp_path, analyze=False), steps=12)
    finally:
        gc.enable()
    assert looks.left == []


class Collections(Callback):
    """Counts the garbage collections from the 200th step on, by generation: by then a window has been looked through.

    In 1,800 steps there are 7 of the youngest without us, and 10 to 15 with us, by what the process happens to hold.
    """

    def __init__(self):
        self.counts, self.step = [0, 0, 0], 0

    def on_train_start(self, *_):
        gc.collect()
        gc.callbacks.append(self.note)

    def on_train_batch_end(self, *_):
        self.step += 1

    def on_train_end(self, *_):
        gc.callbacks.remove(self.note)

    def note(self, phase, info):
        self.counts[info["generation"]] += phase == "stop" and self.step >= 200


@pytest.mark.slow
def test_a_fit_has_hardly_more_collections_than_without_us(tmp_path):
    fit(tmp_path / "without", without := Collections(), steps=2000)
    ours = ForgeProfilerCallback(5, 8, trace_dir=tmp_path), ThroughputCallback()
    fit(tmp_path / "with", with_us := Collections(), *ours, steps=2000)
    assert with_us.counts[2] == without.counts[2]
    assert with_us.counts[1] <= without.counts[1] + 2
    assert with_us.counts[0] <= without.counts[0] + 15, "700 objects each: six a step"


class Kept(Callback):
    """Lets the collector rest, and counts the objects that it tracks.

    Its own count of allocations less deallocations will not do: by 1400 steps of plain training it grows by 2,800 in
    some processes and not at all in others.
    """

    def __init__(self):
        self.step, self.counts = 0, {}

    def on_train_start(self, *_):
        gc.disable()

    def on_train_batch_end(self, *_):
        self.step += 1
        if self.step in (500, 1200, 1900):
            self.counts[self.step] = len(gc.get_objects(generation=0))

    def on_train_end(self, *_):
        gc.enable()


@pytest.mark.slow
def test_a_step_leaves_nothing_for_the_collector(tmp_path):
    kept = Kept()
    try:
        fit(tmp_path, kept, ThroughputCallback(record=False), steps=2000)
    finally:
        gc.enable()
    halves = [kept.counts[1200] - kept.counts[500], kept.counts[1900] - kept.counts[1200]]
    assert min(halves) < 700 / 2, "an object in less than every other step; something else may have come once"


class Garbage:
    """Collections that have ended, as `GarbageTimer` gives them."""

    def __init__(self, *collections):
        self.pending = list(collections)

    def take(self):
        taken, self.pending[:] = list(self.pending), []
        return taken


def test_a_collection_in_our_own_work_is_ours():
    times = iter([10, 20, 30, 40, 50, 60, 70, 80, 90, 100])
    clock = LedgerClock(0, STEPS, clock_ns=times.__next__)
    clock.note_garbage(Garbage())
    clock.enter(PROFILER)
    clock.note_garbage(Garbage((2, 11, 19)))
    clock.exit(PROFILER)
    parts = clock.read().parts
    assert GC_FULL not in parts
    assert parts[PROFILER] > 0


def test_time_that_timing_took_is_the_profilers_and_goodput_is_of_the_rest():
    times = iter([100, 100])
    clock = LedgerClock(0, STEPS, clock_ns=times.__next__)
    clock.charge(20, PROFILER)
    ledger = clock.read()
    assert {part: round(1e9 * s) for part, s in ledger.parts.items()} == {STEPS: 80, PROFILER: 20}
    assert ledger.unexplained_s == 0
    assert goodput(ledger, RunTiming()) == 1


def run_python(code, *arguments, **options):
    """Run code in a fresh process and return what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


BUSY = """
import os, sys, time
from pathlib import Path
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import torch
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler
with build_profiler(ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=sys.argv[1])) as profiler:
    for step in range(3):
        torch.ones(2, 2) @ torch.ones(2, 2)
        profiler.step()
    path, ends = profiler.report.path, time.monotonic() + 3
    while time.monotonic() < ends:
        pass
    print(path.exists())
print(path.exists(), path.with_name("report.html").exists())
"""


@pytest.mark.slow
@posix
def test_where_no_core_is_free_the_trace_is_analysed_once_training_is_over(tmp_path):
    assert run_python(BUSY, tmp_path) == ["False", "True", "True"]


FREE = """
import os, sys
from lightning_forge_profiling import finish
finish.free_cores = lambda *_: 2.0  # whatever else runs on this machine
def work():
    os.write(1, f"{os.sched_getscheduler(0) == os.SCHED_IDLE} {os.getpriority(os.PRIO_PROCESS, 0)} ".encode())
    return 0
print(finish.beside_training(work, os.getppid()))
"""

STARVED = """
import os, sys, time
from pathlib import Path
from lightning_forge_profiling import finish
from lightning_forge_profiling.safe_files import whole_file
finish.free_cores = lambda *_: 2.0
def work():
    with whole_file(Path(sys.argv[1]) / "trace"):
        os.write(1, b"begun ")
        time.sleep(1000)
code = finish.beside_training(work, os.getppid())
print(code, os.listdir(sys.argv[1]))
"""


@posix
def test_beside_the_training_it_has_the_lowest_priority():
    with subprocess.Popen(
        [sys.executable, "-c", FREE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read().split() == ["True", "19", "0"]


@posix
def test_work_that_gets_no_core_once_training_is_over_is_left_to_be_begun_again(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", STARVED, tmp_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.read(6) == "begun "
        with suppress(BrokenPipeError):
            process.stdin.write("over\n")
            process.stdin.flush()
        assert process.stdout.read().split() == ["None", "[]"]


def test_hooks_of_each_step_are_called_where_a_subclass_has_them_and_none_is_lost(tmp_path):
    class Counts(ThroughputCallback):
        began, zeroed = 0, 0

        def on_train_batch_start(self, *args):
            self.began += 1

    ours, plain = Counts(), ForgeProfilerCallback(trace_dir=tmp_path)
    plain.on_before_zero_grad = lambda *args: setattr(ours, "zeroed", ours.zeroed + 1)  # the user's own
    copies = []
    keeps = LambdaCallback(on_train_batch_end=lambda *args: copies.append(copy.deepcopy(ours)))
    quiet_trainer(ours, plain, keeps, default_root_dir=tmp_path).fit(Classifier(), loader(32, batch_size=8))
    assert (ours.began, ours.zeroed) == (4, 4)
    for callback in (ours, plain, copies[0]):
        for hook in ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_after_backward"):
            assert callable(getattr(callback, hook))
