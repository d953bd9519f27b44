"""What the machine does to a run comes first: cores, quotas and the interpreter lock that training has to wait for."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.host import cpu_times, waited_pct
from lightning_forge_profiling.run.worker_stacks import WorkerStacks
from lightning_forge_profiling.schema import (
    NO_VERDICT,
    NOTHING_STANDS_OUT,
    CpuUse,
    Distribution,
    RunLedger,
    RunRegion,
    ShareInterval,
)
from lightning_forge_profiling.timing.bootstrap import share_interval
from tests.evidence import made_evidence
from tests.loaded_modules import LoadedModules
from tests.models import Samples, quiet_trainer
from tests.outcomes import HANGS_S
from tests.test_leaves import Manual, Plain, WaitsInUpdate, batches, computes
from tests.test_leaves import fitted as fitted_leaves

CHECKOUT = Path(__file__).parents[1]
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


@contextmanager
def burners(count, core):
    """Processes that only compute, on one core."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def trained(steps=300, *, before=None):
    """What a run of the script in a process of its own says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts.busy", str(steps)],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=HANGS_S, check=True, preexec_fn=before,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.real_time
def test_processes_on_the_same_core_are_the_verdict():
    core = min(os.sched_getaffinity(0))
    with burners(2, core):
        run = trained(before=lambda: os.sched_setaffinity(0, {core}))
    assert run["verdict"] == "cpu-starved"
    assert run["waits_pct"] > 40  # two of three processes have the core
    assert "for a core; other processes use " in run["text"]
    assert "taskset" in run["text"]
    assert next(iter(run["findings"])) == "cpu-starved"
    assert "unreliable" in run["note"]
    assert run["evidence"]["involuntary_switches_per_s"] > 1


@pytest.mark.slow
@pytest.mark.real_time
def test_an_update_that_waits_and_then_waits_for_a_core_is_no_slow_one(tmp_path):
    with ExitStack() as stack:
        for core in os.sched_getaffinity(0):
            stack.enter_context(burners(2, core))
        analysis = fitted_leaves(WaitsInUpdate(), ForgeProfilerCallback(10, 13, trace_dir=tmp_path), data=batches())
    codes = {finding.code for finding in analysis.findings}
    assert "blocked-optimizer" in codes
    assert "slow-optimizer" not in codes


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.skipif(not os.access(CPU_GROUPS, os.W_OK), reason="no control group (v1) for CPU quotas can be made here")
def test_a_quota_that_stops_training_is_the_verdict():
    group = CPU_GROUPS / f"forge-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("50000")
        (group / "cpu.cfs_quota_us").write_text("15000")
        run = trained(before=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    finally:
        group.rmdir()
    assert run["verdict"] == "cpu-throttled"
    assert "quota" in run["text"]
    assert run["evidence"]["throttled_pct"] > 5


@pytest.mark.slow
@pytest.mark.real_time
def test_a_run_that_is_stopped_for_seconds_blames_no_code():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts.busy", "1500"], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)  # what is planted
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
    run = json.loads(output.splitlines()[-1])
    assert run["verdict"] in {NOTHING_STANDS_OUT, NO_VERDICT, *MACHINE}


class Ours:
    """The lines that a test looks for."""

    @staticmethod
    def call_reward_server():
        time.sleep(0.02)


def fitted(model, steps=60, **options):
    callback = ThroughputCallback(warmup_steps=2, record=False)
    quiet_trainer(callback, **options).fit(model, DataLoader(Samples(4 * steps), 4))
    return callback.analysis()


@pytest.mark.slow
@pytest.mark.real_time
def test_a_thread_that_keeps_the_interpreter_lock_is_named():
    over = threading.Event()

    def count():
        number = 0
        while not over.is_set():
            number += 1

    class Small(Plain):
        def training_step(self, batch):
            for _ in range(20):
                self.layer(batch[0])
            return super().training_step(batch)

        forward_s = 0.0

    thread = threading.Thread(target=count, name="counter")
    thread.start()
    try:
        # steps take up to 0.6 s if the thread gets the lock each time it is free
        analysis = fitted(Small(), 400, max_time={"seconds": 40})
    finally:
        over.set()
        thread.join()
    [found] = [found for found in analysis.findings if found.code == "gil-held"]
    assert "the Python thread counter holds" in found.title
    assert found.share_pct > 10
    assert analysis.verdict in MACHINE


@pytest.mark.slow
@pytest.mark.real_time
def test_a_thread_that_computes_without_the_lock_is_not_blamed():
    over = threading.Event()

    def digest():
        data = bytes(8_000_000)
        while not over.is_set():
            hashlib.sha256(data).digest()

    class Sleeps(Plain):
        def training_step(self, batch):
            Ours.call_reward_server()
            return super().training_step(batch)

        forward_s = 0.0

    thread = threading.Thread(target=digest, name="digest")
    thread.start()
    try:
        analysis = fitted(Sleeps(), 80)
    finally:
        over.set()
        thread.join()
    assert "gil-held" not in {found.code for found in analysis.findings}


@pytest.mark.linux
def test_the_line_that_waits_is_named():
    class Asks(Plain):
        def training_step(self, batch):
            Ours.call_reward_server()
            return super().training_step(batch)

        forward_s = 0.001

    analysis = fitted(Asks(), 80)
    assert analysis.verdict == "blocked-forward"
    called = r" of it in time\.sleep\(\S+\) at \S*test_busy_machine\.py:\d+ \(waiting, not computing\)\."
    assert re.search(called, analysis.verdict_text), analysis.verdict_text
    [line, *_] = analysis.run.lines["forward"]
    assert line.function.endswith("Ours.call_reward_server")
    assert line.waiting_pct > 60
    assert line.pct > 60


def test_the_line_that_calls_backward_does_not_wait_where_another_thread_runs_it(monkeypatch):
    """As on a GPU: the thread that trains waits in the function of PyTorch's that starts the engine."""

    class ByHand(Manual):
        forward_s = 0.001

    graph = torch.autograd.graph
    known = {"run": graph._engine_run_backward, "sleep": time.sleep}
    code = "def _engine_run_backward(*args, **kwargs):\n    sleep(0.02)\n    return run(*args, **kwargs)"
    exec(compile(code, graph.__file__, "exec"), known)  # noqa: S102
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", known["_engine_run_backward"])
    [line, *_] = fitted(ByHand(), 80).run.lines["backward"]
    assert line.function.endswith("Manual.training_step")
    assert line.waiting_pct < 10


def test_the_line_of_a_loader_that_computes_is_named():
    class Decodes(Samples):
        def __getitem__(self, index):
            computes(0.008)  # longer than the interpreter's switch interval
            return super().__getitem__(index)

    callback = ThroughputCallback(warmup_steps=2, record=False)

    class Light(Plain):
        forward_s = 0.0

    quiet_trainer(callback).fit(Light(), DataLoader(Decodes(4 * 40), 4))
    analysis = callback.analysis()
    assert analysis.verdict == "input-bound"
    assert "test_leaves.py" in analysis.verdict_text  # where `computes` is
    assert "waiting" not in analysis.verdict_text.partition(". ")[0].rpartition(" in ")[2]


class Slow(Samples):
    def __getitem__(self, index):
        Ours.call_reward_server()
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_the_line_that_a_worker_makes_batches_in_is_named(start):
    loop = worker._worker_loop
    callback = ThroughputCallback(warmup_steps=2, record=False)

    class Light(Plain):
        forward_s = 0.0

    quiet_trainer(callback).fit(Light(), DataLoader(Slow(4 * 40), 4, num_workers=1, multiprocessing_context=start))
    analysis = callback.analysis()
    assert analysis.verdict == "input-bound"
    called = r"a worker spends \d+ % of its time on batches in time\.sleep\(\S+\) at \S*test_busy_machine.py:\d+"
    assert re.search(called, analysis.verdict_text)
    assert "num_workers=0" not in analysis.verdict_text, "more of them save most of it"
    assert worker._worker_loop is loop


class Notes(Plain):
    def training_step(self, batch):
        self.loaded = {*getattr(self, "loaded", ()), tuple(batch[0].int().tolist())}
        return self.layer(torch.ones(8)).sum()


@pytest.mark.slow
@pytest.mark.real_time
def test_of_spawned_workers_only_the_first_imports_this_package():
    module, loader = Notes(), DataLoader(LoadedModules(), 4, num_workers=2, multiprocessing_context="spawn")
    quiet_trainer(ThroughputCallback(record=False)).fit(module, loader)
    assert module.loaded == {(0, 1), (1, 0)}


@pytest.mark.slow
@pytest.mark.real_time
def test_a_worker_that_can_be_given_no_file_works_unsampled():
    stacks = WorkerStacks()
    stacks.watch()
    os.close(stacks.file)  # as a script does that closes all files
    try:
        loader = DataLoader(LoadedModules(), 4, num_workers=1, multiprocessing_context="spawn")
        assert {tuple(batch[0].tolist()) for batch in loader} == {(0.0, 0.0)}
    finally:
        stacks.file = -1
        stacks.close()


def test_the_sampler_ends_with_the_fit():
    fitted(Plain(), 80)
    assert "forge-stacks" not in {thread.name for thread in threading.enumerate()}


# -- by what was measured ----------------------------------------------------------------------------------------------


def ran(step_ms=20.0, *, on_device=False, gpu_starved_pct=None, data_ms=0.0, interval=None, **cpu):
    regions = {name: RunRegion(device_ms=0.0, host_ms=0.0) for name in ("transfer", "optimizer", "other")}
    regions["data"] = RunRegion(device_ms=data_ms, host_ms=data_ms)
    regions |= dict.fromkeys(("forward", "backward"), RunRegion(device_ms=(step_ms - data_ms) / 2, host_ms=1.0))
    return made_evidence(
        steps=38,
        on_device=on_device,
        step_ms=Distribution(mean=step_ms, p50=step_ms, min=step_ms, max=step_ms),
        regions=regions,
        gpu_starved_pct=gpu_starved_pct,
        cpu=CpuUse(**{"cores": 2, "used": 1.0, "idle": 1.0, **cpu}),
        intervals={} if interval is None else {"data": interval},
    )


def test_waits_that_a_gpu_does_not_wait_for_cost_nothing():
    def codes(gpu_starved_pct):
        return {
            found.code
            for found in combine(None, ran(on_device=True, gpu_starved_pct=gpu_starved_pct, waits_pct=30)).findings
        }

    assert "cpu-starved" not in codes(5.0)
    assert "cpu-starved" in codes(95.0)


@pytest.mark.parametrize(
    ("cpu", "advice"),
    [
        ({"used": 0.5, "idle": 0.0}, "Stop the other processes (top shows them), or give training cores of its own"),
        ({"used": 1.9, "idle": 0.1, "threads": 8}, "An operator uses 8 threads: set OMP_NUM_THREADS=2."),
        ({"used": 1.9, "idle": 0.1, "threads": 2}, "This process has 2 cores for itself"),
        ({"used": 1.9, "idle": 0.1, "stolen_pct": 30.0}, "Move to a machine whose cores are not shared."),
    ],
)
def test_the_advice_is_about_who_uses_the_cores(cpu, advice):
    assert advice in combine(None, ran(waits_pct=20.0, **cpu)).verdict_text


def test_nothing_else_is_the_verdict_of_a_starved_run():
    analysis = combine(None, ran(data_ms=15.0, waits_pct=20.0, missing=("/proc/pressure/cpu",)))
    assert [found.code for found in analysis.findings] == ["cpu-starved", "input-bound", "compute-bound"]
    assert analysis.verdict == "cpu-starved"
    assert analysis.findings[0].evidence["unknown"] == "/proc/pressure/cpu"
    assert combine(None, ran(data_ms=15.0, waits_pct=2.0)).verdict == "input-bound"


@pytest.mark.parametrize(("low_pct", "verdict"), [(60.0, "input-bound"), (10.0, "cpu-starved")])
def test_a_cause_that_is_far_larger_than_few_waits_stays_the_verdict(low_pct, verdict):
    sure = ShareInterval(pct=75.0, low_pct=low_pct, high_pct=80.0)
    analysis = combine(None, ran(data_ms=15.0, waits_pct=6.0, interval=sure))
    assert analysis.verdict == verdict
    assert {"input-bound", "cpu-starved"} == {found.code for found in analysis.findings[:2]}
    # without all of the waits it would still cost more than they do
    assert combine(None, ran(data_ms=15.0, waits_pct=25.0, interval=sure)).verdict == verdict
    assert combine(None, ran(data_ms=15.0, waits_pct=31.0, interval=sure)).verdict == "cpu-starved"


@pytest.mark.parametrize(
    ("hook_s", "waits_pct", "verdict"),
    [
        (1.5, 8.0, "slow-callback"),
        (0.2, 8.0, "slow-callback"),
        (0.2, 12.0, "cpu-starved"),
        (1.5, 40.0, "slow-callback"),
    ],
)
def test_what_takes_more_of_the_fit_than_the_waits_is_the_verdict(hook_s, waits_pct, verdict):
    parts = {"steps": 2.0 - hook_s, "callback/Slow.on_train_batch_end": hook_s}
    ledger = RunLedger(wall_s=2.0, parts=parts, unexplained_s=0.0, counts=dict.fromkeys(parts, 100), counted_s=parts)
    analysis = combine(None, replace(ran(waits_pct=waits_pct), ledger=ledger))
    assert analysis.verdict == verdict
    assert {"slow-callback", "cpu-starved"} <= {finding.code for finding in analysis.findings}


class WaitsAfterValidation(Plain):
    """Computes in its steps, but for those after a validation, which wait for half a second before they begin."""

    def __init__(self):
        super().__init__()
        self.waits = False

    def on_validation_end(self):
        self.waits = True

    def on_train_batch_start(self, batch, batch_idx):
        if self.waits:
            time.sleep(0.5)
        self.waits = False

    def training_step(self, batch):
        computes(0.01)
        return super().training_step(batch)

    def validation_step(self, batch):
        pass


def test_what_waits_after_a_validation_is_accounted_like_any_step():
    ours = ThroughputCallback(2)
    loader = DataLoader(Samples(400), 4)
    trainer = quiet_trainer(ours, val_check_interval=20, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(WaitsAfterValidation(), loader, DataLoader(Samples(4), 4))
    # 1 s of computing and 2 s of waiting; without the latter a core would have been in use nearly all the time
    assert ours.analysis().run.machine.cpu.used < 0.6


def test_cores_are_of_each_rank():
    analysis = combine(None, ran(waits_pct=20.0, threads=1, cores=0.5, used=0.5, idle=0.0))
    assert "0.5 cores for itself (nproc, divided by the ranks on the machine)" in analysis.verdict_text
    assert "set OMP_NUM_THREADS=1" not in analysis.verdict_text


def test_a_share_that_may_be_small_is_no_verdict():
    wide = ShareInterval(pct=10.0, low_pct=1.0, high_pct=24.0)
    analysis = combine(None, ran(data_ms=2.0, interval=wide))
    assert analysis.verdict == NO_VERDICT
    assert analysis.verdict_text == (
        "Not enough steps to tell: input-bound takes 10 % of the step (1 to 24 %). 38 steps counted, about 120 needed."
    )
    sure = combine(None, ran(data_ms=10.0, interval=ShareInterval(pct=50.0, low_pct=44.0, high_pct=56.0)))
    assert sure.verdict == "input-bound"
    assert (sure.findings[0].low_pct, sure.findings[0].high_pct) == pytest.approx((44.0, 56.0))


def test_one_long_step_is_outside_of_the_interval_and_a_regular_one_inside():
    steps = [1] * 64
    once = share_interval([0.0] * 63 + [500.0], [10.0] * 63 + [510.0], steps)
    assert (round(once.pct), once.low_pct) == (44, 0.0)
    regular = share_interval([60.0 if step % 6 == 0 else 0.0 for step in range(64)], [15.0] * 64, steps)
    assert regular.low_pct > 40


# -- what the system says ----------------------------------------------------------------------------------------------


def system(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("group", "stat", "seconds"),
    [
        ("0::/job/step", {"cgroup/job/cpu.stat": "nr_throttled 7\nthrottled_usec 2500000\n"}, 2.5),
        ("3:cpu,cpuacct:/job", {"cgroup/cpu,cpuacct/job/cpu.stat": "nr_throttled 7\nthrottled_time 2500000000\n"}, 2.5),
        ("0::/", {"cgroup/cpu.stat": "usage_usec 5\n"}, None),  # no quota
    ],
)
def test_throttling_is_read_of_both_versions_of_control_groups(tmp_path, group, stat, seconds):
    proc = system(tmp_path, **{"proc/self/cgroup": group + "\n", **stat})
    read = cpu_times(proc=proc / "proc", cgroup=tmp_path / "cgroup").throttled
    assert (None if read is None else read.seconds) == seconds
    assert seconds is None or read.periods == 7


def test_a_system_that_says_nothing_names_what_is_missing(tmp_path):
    read = cpu_times(proc=tmp_path, cgroup=tmp_path)
    assert read.missing == ("/proc/thread-self/schedstat", "the cgroup's cpu.stat", "/proc/pressure/cpu")
    assert waited_pct(read, read._replace(at_s=read.at_s + 1)) == 0.0


@pytest.mark.linux
def test_time_that_the_hypervisor_took_is_read_of_the_usable_cores(tmp_path):
    cores = os.sched_getaffinity(0)
    lines = [
        f"cpu{core} 100 0 100 500 0 0 0 {300 if core in cores else 9999} 0 0" for core in range(os.cpu_count() + 2)
    ]
    system(tmp_path, stat="\n".join(lines))
    assert cpu_times(proc=tmp_path).stolen_s == pytest.approx(len(cores) * 300 / os.sysconf("SC_CLK_TCK"))


def test_waits_are_those_of_the_thread_that_waited_longest():
    before = cpu_times()._replace(at_s=0.0, thread_s=(1.0, 1.0), threads_s={2**30: (0.0, 5.0)})
    after = before._replace(at_s=10.0, thread_s=(2.0, 3.0), threads_s={2**30: (0.0, 9.0)})
    assert waited_pct(before, after) == pytest.approx(40.0)
    assert waited_pct(before, replace_python_thread(after)) == pytest.approx(20.0)


def replace_python_thread(times):
    """The same where the thread that waited longest is one of Python's, which carries no step."""
    return times._replace(threads_s={threading.get_native_id(): (0.0, 99.0)})
