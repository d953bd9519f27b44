"""A fit's telemetry: what counts, what is logged of it, and the summary at the end."""

import signal
import sys
import threading
import time

import pytest

from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.gpu.nvml import GpuReader, find_device
from lightning_forge_profiling.run.telemetry import RunTelemetry
from tests.fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeBoard, FakeNvml
from tests.outcomes import HANGS_S

GIB = 2**30


class Fit:
    """A fit on a simulated GPU whose time passes by hand."""

    def __init__(self, *, gpu=True):
        self.board, self.ns = FakeBoard(), 0
        self.nvml = FakeNvml(self.board)
        self.allocator = {"allocated_bytes": 2 * GIB, "reserved_bytes": 4 * GIB, "peak_bytes": 3 * GIB}
        self.allocator |= {"retries": 0, "device_allocs": 10}
        self.telemetry = RunTelemetry(
            self.reader, lambda: AllocatorReading(**self.allocator), period_s=3600, clock_ns=lambda: self.ns
        )
        self.telemetry.sampler.start = lambda: None  # sampled by hand instead
        self.telemetry.start()
        if gpu:
            assert self.telemetry.sampler.open()

    def reader(self):
        return GpuReader(
            self.nvml,
            find_device(self.nvml, self.nvml.boards[0].uuid),
            pid=1,
            allocated_bytes=lambda: self.allocator["allocated_bytes"],
        )

    def passes(self, seconds, *, watts=100.0, **readings):
        for name, value in readings.items():
            assert hasattr(self.board, name)
            setattr(self.board, name, value)
        for _ in range(round(seconds * 5)):
            self.ns += 200_000_000
            self.board.milliwatts = watts * 1e3
            self.board.millijoules += watts * 200
            assert self.telemetry.sampler.sample()

    def waits(self, seconds):
        """Without a sample."""
        self.ns += round(seconds * 1e9)

    def log_entry(self, samples=100.0, took_ms=1e3):
        return self.telemetry.metrics(samples, took_ms)

    def allocates(self, *, mallocs=0, peak_gib=0.0, retries=0):
        self.allocator["device_allocs"] += mallocs
        self.allocator["retries"] += retries
        self.allocator["peak_bytes"] = max(self.allocator["peak_bytes"], int(peak_gib * GIB))


def test_a_log_entry_has_the_means_since_the_one_before():
    fit = Fit()
    fit.passes(1, utilization=40, watts=350)
    fit.log_entry()
    fit.passes(1, utilization=90, memory_utilization=50, watts=700, memory_used=70 * GIB, reasons=0x4, celsius=66)
    fit.allocates(mallocs=3, peak_gib=60, retries=1)
    assert fit.log_entry() == pytest.approx(
        {
            "gpu/utilization_pct": 90,
            "gpu/memory_utilization_pct": 50,
            "gpu/encoder_pct": 0,
            "gpu/decoder_pct": 0,
            "gpu/memory_used_gib": 70,
            "gpu/power_w": 700,
            "gpu/power_pct_of_limit": 100,
            "gpu/temperature_c": 66,
            "gpu/sm_mhz": 1980,
            "gpu/memory_mhz": 3201,
            "gpu/throttled_pct": 100,
            "gpu/throttled_by_power_cap_pct": 100,
            "gpu/joules_per_sample": 7,
            "gpu/allocated_gib": 2,
            "gpu/allocated_peak_gib": 60,
            "gpu/reserved_gib": 4,
            "gpu/alloc_retries": 1,
            "gpu/device_allocs": 3,
        }
    )


def test_a_log_entry_that_no_sample_fell_into_has_pytorchs_figures_alone():
    fit = Fit()
    fit.passes(1)
    fit.log_entry()
    fit.waits(1)
    assert set(fit.log_entry()) == {
        "gpu/allocated_gib",
        "gpu/allocated_peak_gib",
        "gpu/reserved_gib",
        "gpu/alloc_retries",
        "gpu/device_allocs",
    }


def test_log_entries_within_a_second_share_their_telemetry():
    fit = Fit()
    fit.passes(1, utilization=40, watts=350)
    fit.allocates(mallocs=3)
    assert fit.log_entry()["gpu/utilization_pct"] == 40
    fit.passes(0.4, utilization=90, watts=700)
    fit.allocates(mallocs=2)
    assert fit.log_entry(samples=30.0, took_ms=200.0) == {}
    fit.passes(0.6, utilization=90, watts=700)
    third = fit.log_entry(samples=50.0, took_ms=600.0)
    assert (third["gpu/device_allocs"], third["gpu/joules_per_sample"]) == (2, pytest.approx(700 / (80 / 0.8)))


def test_what_the_driver_does_not_tell_is_not_logged():
    fit = Fit()
    fit.nvml.fails |= dict.fromkeys(
        ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption"), NOT_SUPPORTED
    )
    fit.passes(1)
    metrics = fit.log_entry()
    assert not {"gpu/utilization_pct", "gpu/joules_per_sample", "gpu/memory_own_gib"} & metrics.keys()
    assert metrics["gpu/power_w"] == 100


def test_the_run_is_without_its_warm_up_and_its_validation():
    fit = Fit()
    fit.passes(2, utilization=5, watts=100)
    fit.allocates(mallocs=500, peak_gib=90)  # the warm-up
    fit.telemetry.restart()
    fit.passes(2, utilization=80, watts=600)
    fit.log_entry(50.0)
    fit.telemetry.pause()
    fit.passes(4, utilization=20, watts=200)
    fit.allocates(mallocs=70, peak_gib=95)  # validation
    fit.telemetry.resume()
    fit.passes(2, utilization=100, watts=600)
    fit.allocates(mallocs=4)
    fit.log_entry(50.0)
    summary = fit.telemetry.summary(samples_per_second=50.0, steps=40)
    assert summary.utilization_pct == 90
    assert (summary.power_w, summary.joules_per_sample) == (pytest.approx(600), pytest.approx(12))
    assert summary.device_allocs_per_step == 0.1
    assert summary.allocated_peak_gib == 95, "the peak is of everything: it is what has to fit"
    series = summary.series
    assert (series.seconds[0], series.seconds[-1]) == (0.2, 10.0), "the picture is of everything, too"
    counted = dict(zip(series.seconds, series.counted_pct, strict=True))
    assert [counted[second] for second in (0.2, 2.0, 2.2, 4.0, 4.2, 8.0, 8.2, 10.0)] == [0, 0, 100, 100, 0, 0, 100, 100]


def test_a_long_run_is_drawn_by_means_of_all_its_samples():
    fit = Fit()
    for _ in range(200):
        fit.passes(1, utilization=100, reasons=0x4, watts=700)
        fit.passes(1, utilization=20, reasons=0, watts=100)
    series = fit.telemetry.summary(samples_per_second=50.0, steps=40).series
    assert (series.samples_per_point, len(series.seconds)) == (4, 500)
    assert series.seconds[:2] == (0.5, 1.3), "the middle of samples at 0.2 to 0.8 and at 1.0 to 1.6"
    points = {name: columns["utilization_pct"][:2] for name, columns in (
        ("mean", series.values), ("lowest", series.lowest), ("highest", series.highest)
    )}  # fmt: skip
    assert points == {"mean": (100, 40), "lowest": (100, 20), "highest": (100, 100)}
    assert series.throttled_by_pct["power cap"][:2] == (100, 25)
    assert sum(series.values["utilization_pct"]) / 500 == pytest.approx(60), "nothing is dropped"
    assert "memory_used_gib" not in series.lowest, "it did not vary"


def test_a_reading_that_fails_is_a_gap():
    fit = Fit()
    fit.passes(0.2)
    fit.nvml.fails["nvmlDeviceGetPowerUsage"] = GPU_IS_LOST
    fit.passes(0.2)
    fit.nvml.fails.clear()
    fit.passes(0.2)
    series = fit.telemetry.summary(None, steps=1).series
    assert series.values["power_w"] == (100, None, 100)


def test_the_allocators_validation_is_in_no_log_entry():
    fit = Fit()
    fit.log_entry(None)
    fit.allocates(mallocs=2)
    fit.telemetry.pause()
    fit.allocates(mallocs=70, peak_gib=95)
    fit.telemetry.resume()
    fit.allocates(mallocs=1)
    fit.waits(1)
    metrics = fit.log_entry(None)
    assert metrics["gpu/device_allocs"] == 3
    assert metrics["gpu/allocated_peak_gib"] == 2, "it did not rise in these steps"


def test_without_a_sample_there_is_no_summary():
    assert Fit(gpu=False).telemetry.summary(100.0, steps=5) is None
    assert Fit().telemetry.summary(100.0, steps=5) is None


def test_the_peak_of_an_earlier_fit_is_not_this_ones():
    fit = Fit()
    fit.allocator |= {"peak_bytes": 40 * GIB}
    fit.telemetry.start()
    fit.allocator["allocated_bytes"] = 5 * GIB
    fit.passes(1)
    fit.telemetry.restart()
    fit.allocator["allocated_bytes"] = 2 * GIB
    fit.passes(1)
    fit.log_entry(None)
    assert fit.telemetry.summary(None, steps=5).allocated_peak_gib == 5, "the most that was seen, in the warm-up too"
    fit.allocates(peak_gib=41)
    fit.waits(1)
    fit.log_entry(None)
    assert fit.telemetry.summary(None, steps=5).allocated_peak_gib == 41


@pytest.fixture
def ctrl_c_ignored():
    """As Lightning leaves it after the first Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.untraced
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.usefixtures("ctrl_c_ignored")
def test_ctrl_c_ends_the_wait_for_a_driver_that_hangs(monkeypatch):
    monkeypatch.setattr("lightning_forge_profiling.gpu.telemetry._JOIN_S", HANGS_S)
    stopped, released = threading.Event(), threading.Event()

    def hangs():
        telemetry.sampler._ended.wait()  # stop() waits from here on
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if not stopped.wait(0.3):  # the first was lost between stop() releasing the interpreter and waiting
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        released.wait()
        raise LookupError

    telemetry = RunTelemetry(hangs, AllocatorReading, period_s=3600)
    telemetry.start()
    thread = telemetry.sampler._thread
    began = time.monotonic()
    telemetry.stop()
    stopped.set()
    assert time.monotonic() - began < HANGS_S / 2, "it waits twice as long for the driver"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    released.set()
    while thread in threading.enumerate():  # a join that was interrupted takes it for ended
        time.sleep(0.001)
