"""Which line and call of the user's code each part of a fit is in, and that looking changes nothing."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.host import thread_counts
from lightning_forge_profiling.run.stack_sampler import StackSampler
from lightning_forge_profiling.run.stack_timer import SIGNAL, LookingThread, SignalTimer, stack_timer
from tests.models import quiet_trainer
from tests.outcomes import HANGS_S

CHECKOUT = Path(__file__).parent.parent
FREE = signal.SIG_DFL


class Places(L.LightningModule):
    """Spends its time in places of its own, each in another kind of code."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.numbers = torch.rand(1_000_000).tolist()
        self.text = json.dumps([[number] * 10 for number in range(5000)])

    def setup(self, stage):
        self.counts_up(40_000_000)  # half a second at least

    def counts_up(self, times):
        for _ in range(times):
            pass

    def training_step(self, batch):
        self.counts_up(20_000)
        json.loads(self.text)
        return self.layer(batch).mean()

    def validation_step(self, batch):
        torch.linalg.svd(torch.rand(300, 300))

    def on_train_epoch_end(self):
        sorted(self.numbers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def lines():
    callback = ThroughputCallback(warmup_steps=2, record=False)
    data = DataLoader(torch.rand(120, 8), 1)
    quiet_trainer(callback, num_sanity_val_steps=0, max_epochs=2).fit(Places(), data, DataLoader(torch.rand(30, 8), 1))
    return callback.analysis().run.lines


@pytest.mark.linux
@pytest.mark.parametrize(
    ("part", "function", "call", "callee"),
    [
        ("forward", "Places.training_step", "json.loads(self.text)", "json.loads"),
        ("validation/step", "Places.validation_step", "torch.linalg.svd(torch.rand(300, 300))", "svd"),
        ("startup/module.setup", "Places.counts_up", "", ""),
        ("module/on_train_epoch_end", "Places.on_train_epoch_end", "sorted(self.numbers)", "sorted"),
    ],
)
def test_each_part_has_its_line_and_what_is_called_there(lines, part, function, call, callee):
    found = next(line for line in lines[part] if line.function == function)
    assert found.file.endswith("test_stack_sampler.py")
    assert found.call.startswith(call)
    assert found.callee == callee
    assert found.pct > 20


def test_pure_python_is_seen_as_much_as_it_takes(lines):
    counts = sum(line.pct for line in lines["forward"] if line.function == "Places.counts_up")
    loads = sum(line.pct for line in lines["forward"] if line.callee == "json.loads")
    model, began_s = Places(), time.perf_counter()
    for _ in range(100):
        model.counts_up(20_000)
    counted_s = time.perf_counter() - began_s
    for _ in range(100):
        json.loads(model.text)
    loaded_s = time.perf_counter() - began_s - counted_s
    assert counts / (counts + loads) == pytest.approx(counted_s / (counted_s + loaded_s), abs=0.15)


def counts_after_the_call(seconds):
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def counts_before_the_call(seconds):
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


@pytest.mark.linux
def test_what_follows_a_long_call_in_c_is_seen_as_much_as_it_takes():
    """Such a call, as backward is on a GPU, delays a look; equal times from there on would miss the same part again."""
    numbers, spent = torch.randn(150_000), Counter()

    def timed(name, function, *arguments):
        began = time.perf_counter()
        function(*arguments)
        spent[name] += time.perf_counter() - began

    sampler = StackSampler(lambda: "all")
    sampler.start()
    try:
        for _ in range(120):
            timed("before", counts_before_the_call, 0.02)
            timed("call", numbers.sort)
            timed("after", counts_after_the_call, 0.008)
    finally:
        sampler.stop()
    seen = sum(line.pct for line in sampler.times.lines()["all"] if line.function == "counts_after_the_call")
    assert seen == pytest.approx(100 * spent["after"] / spent.total(), rel=0.5)


# -- the signal --------------------------------------------------------------------------------------------------------


def fit(*callbacks, model=None):
    quiet_trainer(*callbacks).fit(model or Places(), DataLoader(torch.rand(30, 8), 1))


def test_the_signal_is_free_again_after_a_fit():
    fit(ThroughputCallback(record=False))
    handler = signal.getsignal(SIGNAL)
    assert handler is FREE or not handler.is_in_use()  # Lightning restores what it saw when the fit began
    signal.raise_signal(SIGNAL)


def test_a_handler_of_the_users_stays_and_a_thread_looks():
    received = []
    before = signal.signal(SIGNAL, lambda number, _: received.append(number))
    try:
        assert isinstance(stack_timer(lambda _: None), LookingThread)
        fit(ThroughputCallback(record=False))
        assert received == []
        signal.raise_signal(SIGNAL)
        assert received == [SIGNAL]
    finally:
        signal.signal(SIGNAL, before)


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("FORGE_PROFILING_STACKS", "off")
    callback = ThroughputCallback(record=False)
    fit(callback)
    assert callback.analysis().run.lines == {}
    assert signal.getsignal(SIGNAL) is FREE or not signal.getsignal(SIGNAL).is_in_use()


class CallsC(Places):
    """Calls a library in C that waits in `poll`, which ends early after any signal, and does not call it again."""

    def __init__(self):
        super().__init__()
        self.returned = []

    def training_step(self, batch):
        self.returned.append(ctypes.CDLL(None, use_errno=True).poll(None, 0, 50))
        return self.layer(batch).mean()


@pytest.mark.linux
@pytest.mark.parametrize(("switch", "interrupted"), [("on", True), ("off", False)])
def test_the_switch_leaves_a_library_in_c_alone_that_does_not_go_on_after_a_signal(monkeypatch, switch, interrupted):
    monkeypatch.setenv("FORGE_PROFILING_STACKS", switch)
    model = CallsC()
    quiet_trainer(ThroughputCallback(record=False), num_sanity_val_steps=0, max_steps=20).fit(
        model, DataLoader(torch.rand(20, 8), 1)
    )
    assert (-1 in model.returned) == interrupted, "each call of 50 ms has a signal in it"


@pytest.mark.linux
def test_an_event_loop_is_not_woken():
    async def chosen():
        return type(stack_timer(lambda _: None))

    assert asyncio.run(chosen()) is SignalTimer, "an event loop without handlers of signals is not woken"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        assert isinstance(stack_timer(lambda _: None), LookingThread)
    finally:
        assert signal.set_wakeup_fd(before) == writing
        os.close(reading)
        os.close(writing)


def test_training_in_a_thread_is_looked_at_from_another():
    kinds = []
    thread = threading.Thread(target=lambda: kinds.append(type(stack_timer(lambda _: None))))
    thread.start()
    thread.join(HANGS_S)
    assert kinds == [LookingThread]


class Computes(Places):
    def training_step(self, batch):
        torch.linalg.svd(torch.rand(200, 200))
        return self.layer(batch).mean()


class Waits(Places):
    def training_step(self, batch):
        time.sleep(0.02)
        return self.layer(batch).mean()


@pytest.mark.linux
@pytest.mark.parametrize(("model", "waits"), [(Computes, False), (Waits, True)])
def test_a_line_seen_from_another_thread_waits_or_computes_as_it_does(model, waits):
    callback, before = ThroughputCallback(warmup_steps=2, record=False), signal.signal(SIGNAL, lambda *_: None)
    try:
        quiet_trainer(callback).fit(model(), DataLoader(torch.rand(80, 8), 1))
    finally:
        signal.signal(SIGNAL, before)
    line = callback.analysis().run.lines["forward"][0]
    assert line.function == f"{model.__name__}.training_step"
    assert (line.waiting_pct > 50) is waits


def wakes(seconds, wait):
    """How often a second the kernel gives this thread a core while it waits."""
    before = thread_counts(os.getpid(), threading.get_native_id()).times
    wait(seconds)
    return (thread_counts(os.getpid(), threading.get_native_id()).times - before) / seconds


@pytest.mark.linux
def test_a_thread_that_stands_is_woken_so_seldom_that_a_hang_is_still_known():
    reading, writing = os.pipe()
    threading.Timer(2.0, os.write, (writing, b"x")).start()
    timer = SignalTimer(lambda _: None)
    timer.start()
    try:
        in_c = wakes(2.0, lambda _: os.read(reading, 1))
        standing = wakes(6.0, threading.Event().wait)
    finally:
        timer.stop()
        os.close(reading)
        os.close(writing)
    assert in_c < 10
    assert standing < 25  # a hang is what wakes it less than 50 times


@pytest.mark.linux
def test_a_function_that_fails_ends_the_looking_and_nothing_else(caplog):
    def fails(_):
        raise RuntimeError("planted")

    timer = SignalTimer(fails)
    timer.start()
    try:
        until_s = time.monotonic() + HANGS_S
        while not caplog.records and time.monotonic() < until_s:
            pass
    finally:
        timer.stop()
    [record] = caplog.records
    assert "not sampled any more: RuntimeError: planted" in record.message


@pytest.mark.linux
def test_a_system_call_goes_on_and_a_forked_process_is_left_alone():
    looks = []
    timer = SignalTimer(looks.append)
    timer.start()
    try:
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            before = len(looks)
            time.sleep(0.1)
            os.write(writing, b"x" * (1 + len(looks) - before))
            os._exit(0)
        os.close(writing)
        assert os.read(reading, 100) == b"x"
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        timer.stop()
        os.close(reading)
    assert looks, "the call is not broken off, and the time in it is seen when it returns"
    looks.clear()
    signal.raise_signal(SIGNAL)
    assert looks == []


class Compiled(Places):
    """A module whose forward is compiled, and long enough to be looked at."""

    def __init__(self):
        super().__init__()
        self.run = torch.compile(self._run, backend="eager")

    def _run(self, batch):
        batch = self.layer(batch)
        torch._dynamo.graph_break()
        json.loads(self.text)  # plain Python between two graphs
        return batch.mean()

    def training_step(self, batch):
        return self.run(batch)


@pytest.mark.slow
def test_dynamo_compiles_nothing_of_ours():
    compiled = []
    for callbacks in ([], [ThroughputCallback(record=False)]):
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        fit(*callbacks, model=Compiled())
        compiled.append([(each.co_filename, each.co_name) for each in torch._dynamo.utils.get_compilation_metrics()])
    assert compiled[0]
    assert compiled[0] == compiled[1]


@pytest.mark.slow
def test_a_window_with_stacks_has_none_of_ours(tmp_path):
    callback = ForgeProfilerCallback(start_step=5, end_step=20, trace_dir=tmp_path, with_stack=True)
    fit(callback, ThroughputCallback(record=False))
    [trace] = tmp_path.rglob("*.pt.trace.json*")
    assert "stack_timer.py" not in (
        subprocess.run(["zcat", "-f", trace], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.slow
def test_a_script_under_run_is_sampled_from_its_first_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "total = 0\n"
        "for number in range(8_000_000):\n"
        "    total += number\n"
        "from tests.test_stack_sampler import Places, quiet_trainer\n"
        "import torch\n"
        "data = torch.utils.data.DataLoader(torch.rand(60, 8), 1)\n"
        "quiet_trainer(logger=True, default_root_dir='.').fit(Places(), data)\n"
    )
    command = [sys.executable, "-m", "lightning_forge_profiling", "run", "--no-window", script]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=HANGS_S, capture_output=True)
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_forge_profiling", "show", "--json", "lightning_logs/version_0"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=HANGS_S,
        capture_output=True,
        text=True,
    )
    lines = json.loads(shown.stdout)["analysis"]["run"]["lines"]["startup/process"]
    assert [line for line in lines if line["file"] == "train.py" and line["line"] in {2, 3}]


IMPORTS_OF_THE_HANDLER = """
import builtins, sys, threading, time
import lightning_forge_profiling.run.stack_sampler as sampler
original, imported = builtins.__import__, []
def notes(name, *arguments, **options):
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_code.co_filename.endswith("stack_timer.py"):
            imported.append(name)
        frame = frame.f_back
    return original(name, *arguments, **options)
builtins.__import__ = notes
sampler.sample_from_start()
fit = sampler.begin_sampling(lambda: "startup/fit")
ends = time.thread_time() + 0.5
while time.thread_time() < ends:
    pass
assert fit.times.by_part["startup/fit"], "it has looked"
print(imported)
"""


@pytest.mark.linux
def test_the_handler_imports_nothing(tmp_path):
    """A signal may come within an import, which another one in the same thread would end by a KeyError."""
    command = [sys.executable, "-c", IMPORTS_OF_THE_HANDLER]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, timeout=HANGS_S, capture_output=True, text=True)
    assert done.stdout == "[]\n"
