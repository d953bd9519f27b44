"""Advice on threads, fused optimizers and workers is given where the use of the cores shows that it gains; else it is
to measure, with the command."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset

from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.diagnosis.loader import LoaderWait, loader_advice, workers_to_try
from lightning_forge_profiling.host import CpuTimes, cpu_times, usable_cores
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.run import cpu_account, host_readings
from lightning_forge_profiling.run.cpu_account import CpuAccount
from lightning_forge_profiling.schema import (
    Analysis,
    CpuUse,
    Distribution,
    LoaderSettings,
    OptimizerSettings,
    RunRegion,
    WorkerRestarts,
)
from tests.evidence import made_evidence, with_figures
from tests.models import Classifier, busy, every_step, loader
from tests.test_cpu_time import ALONE, found, training

COMMAND = "forge-profiling compare A B"


def ran(*, optimizer_ms=30.0, **evidence):
    """A run of as many milliseconds as the trace of `training`."""
    spread = Distribution(mean=100.0, p50=100.0, min=100.0, max=100.0)
    regions = {name: RunRegion(device_ms=ms, host_ms=ms) for name, ms in (("data", 10.0), ("optimizer", optimizer_ms))}
    return made_evidence(steps=40, on_device=False, step_ms=spread, regions=regions, **evidence)


def use(cores=8, *, used, idle, threads=2, **more):
    return CpuUse(cores=cores, used=used, idle=idle, threads=threads, **more)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        (use(used=2, idle=5.9), "An operator uses up to 2 threads, and 5.9 of the 8 usable cores were free: try OMP_"),
        (use(used=2, idle=2.9), "workers included, used 3.1 of the 8 usable cores"),
        (use(used=2, idle=0.0), "workers included, used 6.0 of the 8 usable cores"),
        (use(used=2, idle=None), "whether the others are free is unknown: measure OMP_NUM_THREADS=8"),
        (None, "whether the others are free is unknown: measure OMP_NUM_THREADS=8"),
        (use(cores=1, used=1, idle=0.0), "up to 2 threads where there are 1 usable cores: set OMP_NUM_THREADS=1"),
    ],
)
def test_more_threads_are_advised_only_where_cores_were_idle(tmp_path, cpu, expected):
    traced = analyze(training(about=ALONE).write(tmp_path)).analysis
    advice = found(combine(traced, ran(cpu=cpu)))["compute-bound"].advice
    assert expected in advice
    assert ("try OMP_NUM_THREADS=7" in advice or "try OMP_NUM_THREADS=8" in advice) == (expected.endswith("try OMP_"))
    assert ("(forge-profiling try --only threads train.py)" in advice) == ("set OMP_" not in advice)


# -- fused optimizers -------------------------------------------------------------------------------------------------

ADAMW = OptimizerSettings(kind="AdamW", fused=False, tensors=28, elements=28_000, median_elements=1000)
LARGE = replace(ADAMW, tensors=12, elements=12 << 18, median_elements=1 << 18)
FREE, BUSY = use(used=2, idle=6), use(used=2, idle=0)


@pytest.mark.parametrize(
    ("optimizer", "cpu", "gains"),
    [
        (ADAMW, use(used=1, idle=0, threads=1), True),
        (replace(ADAMW, kind="SGD"), use(used=1, idle=7, threads=1), False),
        (ADAMW, use(used=2, idle=6, threads=2), True),
        (ADAMW, use(used=2, idle=6, threads=8), False),
        (LARGE, use(used=2, idle=6, threads=8), True),
        (LARGE, BUSY, False),
        (ADAMW, BUSY, False),
        (ADAMW, None, False),
        (None, BUSY, False),
    ],
)
@pytest.mark.parametrize("with_trace", [True, False])
def test_a_fused_update_is_advised_on_a_cpu_only_where_it_was_measured_to_gain(
    tmp_path, optimizer, cpu, gains, with_trace
):
    threads = 2 if cpu is None else cpu.threads
    trace = training(about={**ALONE, "intra_op_threads": threads})
    traced = analyze(trace.write(tmp_path)).analysis if with_trace else None
    if with_trace and optimizer is not None and optimizer.kind != "AdamW":
        pytest.skip("the trace's optimizer is AdamW")
    advice = found(combine(traced, ran(optimizer=optimizer, cpu=cpu)))["slow-optimizer"].advice
    assert ("Use AdamW(fused=True)" in advice) == gains
    assert (COMMAND in advice) != gains
    assert "pdate less often" in advice


def test_what_is_fused_already_is_not_advised_to_be():
    fused = replace(ADAMW, fused=True)
    for on_device in (True, False):
        run = with_figures(ran(optimizer=fused, cpu=FREE), on_device=on_device)
        advice = found(combine(None, run))["slow-optimizer"].advice
        assert advice.startswith("Update less often")
        assert advice.endswith("it is fused already.")


def test_on_a_gpu_the_advice_stays():
    run = with_figures(ran(optimizer=ADAMW, cpu=BUSY), on_device=True)
    assert found(combine(None, run))["slow-optimizer"].advice.startswith("Give the optimizer fused=True")


@pytest.mark.slow
def test_a_fit_knows_its_optimizer_and_its_use_of_the_cores(make_trainer):
    callback = every_step(2)
    make_trainer(callback, logger=False).fit(Classifier(), loader(200, slow="data"))
    run = callback.analysis().run
    assert run.settings.optimizer == OptimizerSettings(
        kind="AdamW", fused=False, tensors=4, elements=90, median_elements=12
    )
    assert run.machine.cpu.cores == usable_cores()
    assert run.machine.cpu.threads == torch.get_num_threads()
    assert run.machine.cpu.used >= 0
    assert 0 <= run.machine.cpu.idle <= run.machine.cpu.cores


# -- workers ----------------------------------------------------------------------------------------------------------


class Waits(Dataset):
    """Samples that are waited for, as from a disk."""

    def __len__(self):
        return 4 * 30

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8), index % 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_that_waits_may_have_more_workers_than_cores(make_trainer, monkeypatch, workers):
    def read(processes):  # a core is free, and nobody waits for one
        found = cpu_times(processes)
        others = {pid: (used, 0.0) for pid, (used, _) in found.processes_s.items()}
        return found._replace(idle_s=found.at_s, thread_s=(found.thread_s[0], 0.0), processes_s=others)

    monkeypatch.setattr(host_readings, "CpuAccount", partial(CpuAccount, read=read))
    callback = every_step(2)
    make_trainer(callback, logger=False).fit(Classifier(), DataLoader(Waits(), 4, num_workers=workers))
    finding = found(callback.analysis())["input-bound"]
    assert "and waits for the rest, as for a disk or a network" in finding.advice
    assert int(re.search(r"try num_workers=(\d+)", finding.advice)[1]) == finding.evidence["try_num_workers"] == 4
    assert COMMAND not in finding.advice


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_computes_has_no_more_workers_than_cores(make_trainer, workers):
    callback = every_step(2)
    data = loader(200, slow="data", num_workers=workers)
    make_trainer(callback, logger=False).fit(Classifier(), data)
    run = callback.analysis().run
    assert run.machine.cpu.loader_busy_pct > 50
    advice = found(callback.analysis())["input-bound"].advice
    assert "and waits for the rest" not in advice
    assert all(int(number) <= usable_cores() for number in re.findall(r"num_workers=(\d+)", advice))


@pytest.mark.parametrize(
    ("workers", "busy_pct", "idle", "advised"),
    [
        (2, 3, 0.5, 4),  # waits: more of them than cores
        (8, 3, 0.5, 16),
        (4, 45, 0.5, 5),
        (2, 3, 0.0, "measure"),  # on two threads beside a busy process they lost
        (2, 95, 0.0, None),
        (2, 95, 5.9, 6),
        (2, 95, 1.0, 3),
        (0, 95, 0.0, None),
        (0, 95, 7.0, 4),
        (0, 95, None, "measure"),
        (2, None, 6.0, "measure"),
    ],
)
def test_workers_are_advised_by_what_they_need_of_the_idle_cores(workers, busy_pct, idle, advised):
    cpu = use(used=1, idle=idle, loader_busy_pct=busy_pct)
    settings = LoaderSettings(kind="DataLoader", num_workers=workers, pin_memory=True, prefetch_factor=2, cores=8)
    wait = LoaderWait(host_ms=16, exposed_ms=16, step_ms=24, on_gpu=True, cpu=cpu, settings=settings)
    advice, _ = loader_advice(wait)
    tried = [int(number) for number in re.findall(r"try num_workers=(\d+)", advice)]
    assert tried == ([advised] if isinstance(advised, int) else [])
    if advised != "measure":
        assert workers_to_try(wait) == advised
    assert (COMMAND in advice) == (advised == "measure")
    assert ("Make a sample cheaper" in advice) == (advised is None)


@pytest.mark.parametrize(
    ("workers", "idle", "tried", "saves_ms"),
    [(0, 1.0, None, 16.0), (0, 2.0, 2, 16.0), (2, 1.0, 3, 8.0), (2, 0.0, None, 16.0)],
)
def test_no_more_is_predicted_than_the_workers_that_are_advised_can_save(workers, idle, tried, saves_ms):
    """Of 24 ms 16 are a wait: one worker makes a batch in 16 ms, of two that are always busy each makes one in 48."""
    settings = LoaderSettings(kind="DataLoader", num_workers=workers, pin_memory=True, prefetch_factor=2, cores=8)
    run = with_figures(ran(optimizer_ms=0.0, cpu=use(used=1, idle=idle, loader_busy_pct=95)), loader=settings)
    regions = {"data": RunRegion(device_ms=16.0, host_ms=16.0), "forward": RunRegion(device_ms=8.0, host_ms=8.0)}
    run = with_figures(run, regions=regions, step_ms=Distribution(mean=24.0, p50=24.0, min=24.0, max=24.0))
    finding = found(combine(None, run))["input-bound"]
    assert finding.evidence.get("try_num_workers") == tried
    assert ("Make a sample cheaper" in finding.advice) == (tried is None), "one worker on one core was slower"
    assert finding.saves.ms_per_step == pytest.approx(saves_ms)
    assert finding.saves.at_most


def test_without_a_free_core_workers_that_wait_are_advised_beside_a_single_training_thread():
    cpu = use(used=1, idle=0.0, threads=1, loader_busy_pct=3)
    settings = LoaderSettings(kind="DataLoader", num_workers=2, cores=2)
    wait = LoaderWait(host_ms=16, exposed_ms=16, step_ms=24, on_gpu=False, cpu=cpu, settings=settings)
    advice, _ = loader_advice(wait)
    assert "so there may be more workers than cores: try num_workers=4." in advice


RESTARTS = WorkerRestarts(count=6, workers=2, device_ms=40.0, host_ms=40.0)


def with_workers(*, made_ms, waits_ms, others=0.0, restarts=RESTARTS):
    """A run of 100 ms steps that wait for restarts and for other batches, and 30 ms of each for a core."""
    cpu = use(2, used=0.6, idle=0.2, threads=1, workers=1.2 - others, batch_ms=made_ms, waits_pct=30.0)
    settings = LoaderSettings(kind="DataLoader", num_workers=2, cores=2)
    run = with_figures(ran(optimizer_ms=0.0, cpu=cpu), loader=settings, worker_restarts=restarts)
    data_ms = waits_ms + (40.0 if restarts else 0.0)
    return with_figures(run, regions={"data": RunRegion(device_ms=data_ms, host_ms=data_ms)})


@pytest.mark.parametrize(
    ("made_ms", "waits_ms", "fix", "saves_ms"),
    [(3.0, 5.0, "num_workers=0", 42.0), (20.0, 5.0, "persistent_workers=True", 40.0), (None, 5.0, "persistent", 40.0)],
)
def test_workers_that_restart_are_the_cost_and_go_where_a_batch_needs_none(made_ms, waits_ms, fix, saves_ms):
    analysis = combine(None, with_workers(made_ms=made_ms, waits_ms=waits_ms))
    assert analysis.verdict == "worker-restarts"
    assert "cpu-starved" not in found(analysis), "the workers take the cores"
    finding = found(analysis)["worker-restarts"]
    assert fix in finding.fix
    assert finding.saves.ms_per_step == pytest.approx(saves_ms)
    assert ("input-bound" in found(analysis)) == ("num_workers=0" not in fix), "one cause is one finding"


def test_restarts_that_cost_little_do_not_take_the_wait_for_all_other_batches():
    rare = WorkerRestarts(count=1, workers=2, device_ms=1.0, host_ms=1.0)
    finding = found(combine(None, with_workers(made_ms=3.0, waits_ms=25.0, restarts=rare)))
    assert "worker-restarts" not in finding
    assert "num_workers=0" in finding["input-bound"].fix


def test_workers_that_yield_all_samples_each_are_first_told_to_split_them():
    run = with_workers(made_ms=3.0, waits_ms=25.0, restarts=None)
    run = with_figures(run, loader=replace(run.settings.loader, unsplit=True))
    finding = found(combine(None, run))["input-bound"]
    assert "get_worker_info" in finding.advice
    assert "num_workers=0" not in finding.advice
    assert finding.saves is None


def test_workers_that_stay_go_too_where_a_batch_needs_none():
    analysis = combine(None, with_workers(made_ms=3.0, waits_ms=15.0, restarts=None))
    finding = found(analysis)["input-bound"]
    assert analysis.verdict == "input-bound"
    assert (finding.fix, finding.saves.ms_per_step) == ("DataLoader(..., num_workers=0)", 12.0)


def test_beside_other_processes_waits_for_a_core_stay_a_finding():
    analysis = combine(None, with_workers(made_ms=3.0, waits_ms=15.0, others=1.0, restarts=None))
    assert analysis.verdict == "cpu-starved"
    assert "other processes use 1.0 of the 2 usable cores" in analysis.verdict_text


class Short(Dataset):
    """Samples that take nothing, or are waited for."""

    def __init__(self, wait_s):
        self.wait_s = wait_s

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.ones(8), index % 2


@pytest.mark.slow
@pytest.mark.parametrize(("wait_s", "fix"), [(0.0, "num_workers=0"), (0.05, "persistent_workers=True")])
def test_what_a_worker_takes_for_a_batch_decides(make_trainer, wait_s, fix):
    callback = every_step(2)
    data = DataLoader(Short(wait_s), 1, num_workers=2)
    make_trainer(callback, logger=False, max_epochs=12).fit(Classifier(), data)
    finding = found(callback.analysis())["worker-restarts"]
    assert fix in finding.fix
    # without waits for a core, those in a sleep that a sample interrupts included
    assert 0.9 * 1e3 * wait_s <= callback.analysis().run.machine.cpu.batch_ms < 1e3 * wait_s + 20
    assert callback.analysis().run.machine.cpu.workers > 0.01, "each lives shorter than readings are apart"


@pytest.mark.linux
def test_time_of_processes_that_this_one_starts_is_its_own():
    before = cpu_times().children_s
    compute = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", compute], check=True)
    ended = cpu_times().children_s
    assert ended - before >= 0.25
    ranks = [
        subprocess.Popen([sys.executable, "-c", f"{compute}\ninput()"], env=env, stdin=subprocess.PIPE)
        for env in (None, {**os.environ, "LOCAL_RANK": "1"})
    ]
    try:
        time.sleep(1.5)
        running = cpu_times([process.pid for process in ranks]).children_s
    finally:
        for process in ranks:
            process.communicate(b"\n")
    assert 0.25 <= running - ended < 0.5, "the second is another rank, with its own account"


# -- the accounting ---------------------------------------------------------------------------------------------------


def times(at, process, idle, *, thread=(0.0, 0.0), **workers):
    return CpuTimes(at, process, idle, thread, {int(pid[1:]): used for pid, used in workers.items()})


def test_only_what_counts_is_in_the_account():
    readings = iter(
        [
            times(0.0, 10.0, 5.0, p7=(1.0, 0.0)),
            times(2.0, 12.0, 6.0, p7=(1.5, 0.1)),  # validation begins
            times(50.0, 40.0, 6.0, p7=(9.0, 0.0)),  # it has ended
            times(52.0, 42.0, 7.0, p7=(9.5, 0.0), p8=(3.0, 0.0)),  # a worker that was not there before
        ]
    )
    account = CpuAccount(lambda: [7, 8], lambda _: next(readings))
    account.read(counts=True)
    account.read(counts=False)
    assert not account.due(0.0, counts=False)
    account.read(counts=True)
    account.read(counts=False)
    found_use = account.use(ranks=1)
    assert (found_use.used, found_use.loader_busy_pct) == (1.0, pytest.approx(100 * 1.1 / 4))
    assert found_use.idle == pytest.approx(min(0.5, usable_cores() - 1.0 - 1.1 / 4))


@pytest.mark.parametrize(("cpu", "waited", "busy_pct"), [(0.1, 0.4, 6.25), (1.0, 1.0, 100), (1.6, 0.0, 80)])
def test_what_a_loader_waits_for_a_core_says_nothing_of_how_it_spends_its_time(monkeypatch, cpu, waited, busy_pct):
    now = {"wall": 0.0, "cpu": 0.0, "waited": 0.0}

    def ns(name):
        return int(1e9 * now[name])

    monkeypatch.setattr(cpu_account, "perf_counter_ns", lambda: ns("wall"))
    monkeypatch.setattr(cpu_account, "thread_time_ns", lambda: ns("cpu"))
    account = CpuAccount(list, lambda _: times(now["wall"], 0.0, 0.0))
    account.clock = SimpleNamespace(ns=lambda: (ns("cpu"), ns("waited")))
    account.read(counts=True)
    account.turn("other")
    now.update(wall=2.0, cpu=cpu, waited=waited)
    account.turn("data")
    account.read(counts=False)
    assert account.use(ranks=1).loader_busy_pct == pytest.approx(busy_pct)


def test_a_time_in_which_training_stood_still_is_in_no_region_and_in_no_mean(monkeypatch):
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(cpu_account, "perf_counter_ns", lambda: int(1e9 * now["wall"]))
    monkeypatch.setattr(cpu_account, "thread_time_ns", lambda: int(1e9 * now["cpu"]))
    account = CpuAccount(list, lambda _: times(now["wall"], now["cpu"], 0.0))
    account.clock = SimpleNamespace(ns=lambda: (0, 0))
    account.read(counts=True)
    for seconds, cpu in ((1.0, 1.0), (20.0, 0.0), (1.0, 1.0)):
        account.turn("other")
        now.update(wall=now["wall"] + seconds, cpu=now["cpu"] + cpu)
        account.turn("forward")
        if not cpu:
            account.skip()
        account.read(counts=True)
    found_use = account.use(1)
    assert found_use.used == 1.0
    assert found_use.regions["forward"].blocked_pct == 0.0


@pytest.mark.parametrize(
    ("slept_ms", "each_step_ms"),
    [([5] * 10, 5.0), ([0] * 8 + [200, 100], 0.0), ([5] * 8 + [200, 100], 5.0), ([0, 50] * 5, 25.0)],
)
def test_what_blocks_two_steps_alone_is_no_wait_of_each_step(monkeypatch, slept_ms, each_step_ms):
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(cpu_account, "perf_counter_ns", lambda: int(1e6 * now["wall"]))
    monkeypatch.setattr(cpu_account, "thread_time_ns", lambda: int(1e6 * now["cpu"]))
    account = CpuAccount(list, lambda _: times(now["wall"] / 1e3, now["cpu"] / 1e3, 0.0))
    account.clock = SimpleNamespace(ns=lambda: (0, 0))
    account.read(counts=True)
    for ms in slept_ms:
        account.turn("other")
        now.update(wall=now["wall"] + 100 + ms, cpu=now["cpu"] + 100)
        account.turn("forward")
    account.read(counts=True)
    forward = account.use(1).regions["forward"]
    wall_ms = 1000 + sum(slept_ms)
    assert (forward.blocked_pct - forward.longer_pct) * wall_ms / 1000 == pytest.approx(each_step_ms)


def test_readings_that_take_long_come_seldom():
    def slowly(_):
        busy(5)
        return times(0.0, 0.0, 0.0)

    quick, slow = CpuAccount(list, lambda _: times(0.0, 0.0, 0.0)), CpuAccount(list, slowly)
    for account in (quick, slow):
        account.read(counts=True)
    assert [account.due(1.0, counts=True) for account in (quick, slow)] == [True, False]
    assert slow.due(600.0, counts=True)


def test_too_little_to_count_and_a_platform_without_accounting_are_no_evidence():
    account = CpuAccount(list, lambda _: next(few))
    few = iter([times(0.0, 0.0, 0.0), times(0.4, 0.4, 0.4)])
    account.read(counts=True)
    account.read(counts=False)
    assert account.use(1) is None
    few = iter([times(0.0, 0.0, None, thread=None), times(2.0, 1.0, None, thread=None)])
    account.read(counts=True)
    account.read(counts=False)
    assert (account.use(1).idle, account.use(1).loader_busy_pct) == (None, None)


def test_a_system_without_proc_or_with_zeros_in_it_has_no_idle_times(tmp_path):
    assert cpu_times([1], proc=tmp_path).idle_s is None
    (tmp_path / "stat").write_text("cpu 0 0 0 0\n" + "".join(f"cpu{n} 0 0 0 0 0 0\n" for n in range(os.cpu_count())))
    nothing = cpu_times([os.getpid()], proc=tmp_path)
    assert (nothing.idle_s, nothing.thread_s, nothing.processes_s) == (None, None, {})
    assert cpu_times().process_s > 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_the_quota_of_a_container_limits_the_usable_cores(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_a_summary_of_before_has_no_evidence_and_advice_to_measure():
    old = msgspec.json.encode(combine(None, ran()))
    fields = msgspec.json.decode(old)
    del fields["run"]["machine"], fields["run"]["settings"]
    read = msgspec.json.decode(msgspec.json.encode(fields), type=Analysis)
    assert (read.run.machine.cpu, read.run.settings.optimizer, read.run.settings.validation_loader) == (
        None,
        None,
        None,
    )
    assert COMMAND in found(read)["slow-optimizer"].advice
