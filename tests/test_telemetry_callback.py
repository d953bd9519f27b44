"""Telemetry in a fit: its thread ends with it, its figures are logged and in the table, and it changes nothing."""

import pickle
import threading

import pytest
import torch

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.gpu.nvml import GpuReader, find_device
from lightning_forge_profiling.run import fit_log
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.telemetry import RunTelemetry
from tests.fake_nvml import FakeBoard, FakeNvml
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S, logged, summary_of

PERIOD_S = 0.01


class Gpu(FakeNvml):
    """A simulated GPU that is busy at 37 %; each sample finds 2 J more on its meter."""

    def __init__(self):
        super().__init__(FakeBoard())
        self.boards[0].utilization, self.boards[0].memory_used = 37, 100 * 2**30
        self.boards[0].milliwatts, self.boards[0].reasons = 200_000, 0x4
        self.sampled = threading.Semaphore(0)

    def wait_for_samples(self):
        """Until two have been taken from here on, of which the first may have begun before."""
        while self.sampled.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.sampled.acquire(timeout=HANGS_S)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802  (NVML's name)
        handle.millijoules += 2000
        self.sampled.release()
        return super().nvmlDeviceGetTotalEnergyConsumption(handle)


class Waiting(Classifier):
    """Each of its steps takes as long as two samples."""

    def __init__(self, gpu, fails_at=None):
        super().__init__()
        self.gpu, self.fails_at = gpu, fails_at

    def training_step(self, batch):
        self.gpu.wait_for_samples()
        if self.seen == self.fails_at:
            raise ZeroDivisionError("planted")
        return super().training_step(batch)


@pytest.fixture
def gpu(monkeypatch):
    """Have the callback take the CPU for this GPU."""
    gpu = Gpu()

    def reader():
        gpu.nvmlInit()
        return GpuReader(gpu, find_device(gpu, gpu.boards[0].uuid), pid=1)

    def start(rows, device, period_s):
        rows._telemetry = RunTelemetry(reader, AllocatorReading, period_s=period_s)
        rows._telemetry.start()

    monkeypatch.setattr(FitLog, "_start_telemetry", start)
    return gpu


def sampling():
    return [thread for thread in threading.enumerate() if thread.name == "gpu-telemetry"]


def test_it_is_logged_and_in_the_table_and_ends_with_the_fit(make_trainer, gpu, tmp_path):
    callback = ThroughputCallback(warmup_steps=2, telemetry_period_s=PERIOD_S)
    make_trainer(callback).fit(Waiting(gpu), loader(40))
    assert (sampling(), gpu.opened) == ([], 0)
    rows = logged(tmp_path, "gpu/utilization_pct")
    assert {row["gpu/utilization_pct"] for row in rows} == {37.0}
    assert {row["gpu/throttled_by_power_cap_pct"] for row in rows} == {100.0}
    assert all(row["gpu/joules_per_sample"] > 0 for row in rows if "gpu/joules_per_sample" in row)
    printed = " ".join(summary_of(tmp_path).split())
    assert "gpu 37 % utilized, 100.0 of 141.0 GiB at peak" in printed
    assert callback.summary()["gpu/joules_per_sample"] > 0, "which the reports show"
    assert "throttled 100 % of the time (power cap 100 %)" in printed


def test_the_summary_and_the_analysis_have_it(make_trainer, gpu):
    callback = ThroughputCallback(warmup_steps=2, telemetry_period_s=PERIOD_S)
    make_trainer(callback).fit(Waiting(gpu), loader(64))
    assert callback.summary()["gpu/utilization_pct"] == 37
    analysis = callback.analysis()
    assert analysis.run.machine.telemetry.device == "NVIDIA H200"
    assert analysis.run.machine.telemetry.samples >= 20
    assert {"gpu-underused", "gpu-throttled"} <= {hint.code for hint in analysis.hints}


def test_it_ends_with_an_exception_which_goes_on(make_trainer, gpu, tmp_path):
    callback = ThroughputCallback(warmup_steps=2, telemetry_period_s=PERIOD_S)
    with pytest.raises(ZeroDivisionError, match="planted"):
        make_trainer(callback).fit(Waiting(gpu, fails_at=6), loader(40))
    assert (sampling(), gpu.opened) == ([], 0)
    assert "37 % utilized" in summary_of(tmp_path)


def test_on_a_cpu_there_is_none_and_nothing_is_said(make_trainer, capsys):
    callback = ThroughputCallback(warmup_steps=0)
    make_trainer(callback).fit(Classifier(), loader(24))
    assert "telemetry" not in capsys.readouterr().out
    assert not any(name.startswith("gpu/") for name in callback.summary())


def test_a_driver_that_is_missing_is_one_line(make_trainer, monkeypatch, tmp_path):
    def no_driver():
        raise LookupError("NVML failed to start (Driver Not Loaded): no NVIDIA driver")

    def start(rows, device, period_s):
        rows._telemetry = RunTelemetry(no_driver, AllocatorReading, period_s=period_s)
        rows._telemetry.start()

    monkeypatch.setattr(FitLog, "_start_telemetry", start)
    make_trainer(ThroughputCallback(warmup_steps=0)).fit(Classifier(), loader(24))
    assert "no telemetry: NVML failed to start (Driver Not Loaded): no NVIDIA driver" in summary_of(tmp_path)


def test_what_fails_before_the_thread_is_up_leaves_the_rates(make_trainer, monkeypatch, tmp_path):
    def broken(device, period_s):
        raise RuntimeError("planted")

    start = FitLog._start_telemetry
    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(FitLog, "_start_telemetry", lambda rows, _, period_s: start(rows, on_gpu, period_s))
    monkeypatch.setattr(fit_log, "run_telemetry", broken)
    callback = ThroughputCallback(warmup_steps=0)
    make_trainer(callback).fit(Classifier(), loader(24))
    assert "no telemetry: RuntimeError: planted" in summary_of(tmp_path)
    assert callback.summary()["throughput/steps_per_sec"] > 0


def test_none_is_none(make_trainer, capsys):
    callback = ThroughputCallback(warmup_steps=0, telemetry_period_s=None)
    make_trainer(callback).fit(Classifier(), loader(24))
    assert "telemetry" not in capsys.readouterr().out


def test_validation_does_not_count(make_trainer, gpu):
    class Validating(Waiting):
        def validation_step(self, batch):
            self.gpu.boards[0].utilization = 1
            self.gpu.wait_for_samples()
            super().validation_step(batch)
            self.gpu.boards[0].utilization = 37

    callback = ThroughputCallback(warmup_steps=2, telemetry_period_s=PERIOD_S)
    make_trainer(callback, val_check_interval=4, num_sanity_val_steps=0).fit(Validating(gpu), loader(48), loader(16))
    run = callback.analysis().run.machine.telemetry
    assert 1 in run.series.values["utilization_pct"], "it is in the picture"
    assert run.utilization_pct > 30, "at most the sample that was under way when validation ended"


class Recorded(Waiting):
    """Keeps its GPU busy at 99 % in the steps that are recorded."""

    def __init__(self, gpu, profiler):
        super().__init__(gpu)
        self.profiler = profiler

    def training_step(self, batch):
        for utilization in (99 if self.profiler.run.recording else 37, 37):
            self.gpu.boards[0].utilization = utilization
            self.gpu.wait_for_samples()
        return Classifier.training_step(self, batch)


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("profiler_first", [False, True])
def test_steps_under_the_profiler_do_not_count(make_trainer, gpu, profiler_first, validates):
    throughput = ThroughputCallback(warmup_steps=1, telemetry_period_s=PERIOD_S)
    profiler = ForgeProfilerCallback(start_step=4, end_step=7, analyze=False)
    callbacks = (profiler, throughput) if profiler_first else (throughput, profiler)
    options = {"val_check_interval": 1, "num_sanity_val_steps": 0} if validates else {}
    loaders = (loader(80), loader(8)) if validates else (loader(80),)
    make_trainer(*callbacks, **options).fit(Recorded(gpu, profiler), *loaders)
    run = throughput.analysis().run.machine.telemetry
    assert 99 in run.series.values["utilization_pct"], "they are in the picture"
    assert run.utilization_pct == 37


@pytest.mark.parametrize("period", [0, 0.001, -1, True, "0.2", float("nan"), float("inf")])
def test_a_period_that_cannot_be_is_refused(period):
    with pytest.raises(ConfigurationError, match="telemetry_period_s must be"):
        ThroughputCallback(telemetry_period_s=period)


def test_the_callback_pickles_after_a_fit_and_its_figures_come_with_it(make_trainer, gpu):
    callback = ThroughputCallback(warmup_steps=2, telemetry_period_s=PERIOD_S)
    make_trainer(callback).fit(Waiting(gpu), loader(40))
    again = pickle.loads(pickle.dumps(callback))  # noqa: S301  (our own)
    assert again.summary() == callback.summary()
    assert again.analysis().run.machine.telemetry.device == "NVIDIA H200"
