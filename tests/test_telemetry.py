"""GPU telemetry: which device, what its sensors come to, a thread that ends, and what it means."""

import functools
import logging
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from lightning_forge_profiling.diagnosis.hints import telemetry_hints
from lightning_forge_profiling.gpu.memory import AllocatorReading
from lightning_forge_profiling.gpu.nvml import (
    GpuReader,
    GpuSample,
    find_device,
    open_nvml,
    open_reader,
    throttle_reasons,
)
from lightning_forge_profiling.gpu.telemetry import MAX_POINTS, TelemetrySampler
from lightning_forge_profiling.run.telemetry import RunTelemetry, telemetry_series
from lightning_forge_profiling.schema import TelemetrySeries, TelemetrySummary
from tests.fake_nvml import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_SUPPORTED, FakeBoard, FakeNvml
from tests.outcomes import HANGS_S

GIB = 2**30
FIRST, SECOND = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1d9f0b0c-5a55-4e0a-9f0e-93cf7c1e2c11"
SLICE, OTHER_SLICE = "MIG-c7b2a1de-6c41-5ce3-b84e-8f0a4f1b7a01", "MIG-0a6b3a52-88f0-5a0d-a0dd-1f3f2f6a0b02"


class Clock:
    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns


class Kept:
    """A reader whose samples can be looked at."""

    def __init__(self, reader, samples):
        self.reader, self.samples = reader, samples

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def read(self, at_ns):
        self.samples.append(self.reader.read(at_ns))
        return self.samples[-1]


class Bench:
    """A sampler on a simulated GPU, sampled by hand."""

    def __init__(self, board=None, allocated=None):
        self.board = board or FakeBoard()
        self.nvml, self.clock = FakeNvml(self.board), Clock()
        self.sampler = TelemetrySampler(self.reader, clock_ns=self.clock)
        self.allocated = allocated
        assert self.sampler.open()

    def reader(self):
        self.nvml.nvmlInit()
        self.samples = []
        reader = GpuReader(
            self.nvml, find_device(self.nvml, self.board.uuid), pid=os.getpid(), allocated_bytes=lambda: self.allocated
        )
        return Kept(reader, self.samples)

    def sample(self, *, after_s=0.2, **readings):
        for name, value in readings.items():
            assert hasattr(self.board, name)
            setattr(self.board, name, value)
        self.clock.ns += int(after_s * 1e9)
        assert self.sampler.sample()


# -- which device ----------------------------------------------------------------------------------------------------


def two_boards():
    return FakeNvml(FakeBoard(FIRST), FakeBoard(SECOND))


@pytest.mark.parametrize("visible", ["", "1", "1,0", SECOND])
def test_the_device_is_the_one_whose_uuid_torch_says(visible):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    for uuid in (FIRST, SECOND):
        assert find_device(two_boards(), uuid.removeprefix("GPU-"), 0, environ=environ).uuid == uuid


def test_a_device_that_is_not_there_is_not_guessed():
    with pytest.raises(LookupError, match="does not know the UUID"):
        find_device(two_boards(), "aaaaaaaa-5a55-4e0a-9f0e-93cf7c1e2c11", 0, environ={})


def sliced(*uuids):
    slices = [None if uuid is None else FakeBoard(uuid, "NVIDIA H200 MIG 1g.18gb") for uuid in uuids]
    return FakeNvml(FakeBoard(FIRST, slices=slices))


@pytest.mark.parametrize("uuid", [FIRST.removeprefix("GPU-"), OTHER_SLICE.removeprefix("MIG-")])
def test_a_slice_is_found_by_its_uuid_in_the_variable(uuid):
    nvml = sliced(SLICE, OTHER_SLICE)
    device = find_device(nvml, uuid, 0, environ={"CUDA_VISIBLE_DEVICES": OTHER_SLICE})
    assert (device.uuid, device.is_mig, device.board.uuid) == (OTHER_SLICE, True, FIRST)


def test_a_slice_is_found_by_the_uuid_that_torch_says():
    device = find_device(sliced(SLICE, OTHER_SLICE), SLICE.removeprefix("MIG-"), 0, environ={})
    assert (device.uuid, device.is_mig) == (SLICE, True)


def test_the_only_slice_of_a_gpu_is_the_one():
    assert find_device(sliced(None, SLICE), FIRST, 0, environ={}).uuid == SLICE


def test_one_of_several_slices_is_not_guessed():
    with pytest.raises(LookupError, match="2 MIG slices"):
        find_device(sliced(SLICE, OTHER_SLICE), FIRST, 0, environ={})


def test_without_a_driver_it_says_so(monkeypatch):
    nvml = FakeNvml()
    nvml.fails["nvmlInit"] = 9
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(LookupError, match="no NVIDIA driver"):
        open_nvml()


def test_without_the_bindings_it_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(LookupError, match="nvidia-ml-py is not installed"):
        open_nvml()


def test_nvml_is_let_go_of_where_the_device_is_not_found(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(LookupError):
        open_reader(7, SECOND, lambda: None)
    assert nvml.opened == 0


# -- readings --------------------------------------------------------------------------------------------------------


def test_all_sensors_are_read_in_their_units():
    bench = Bench(allocated=3 * GIB)
    bench.sample(
        utilization=93, memory_utilization=41, encoder=2, decoder=7, memory_used=20 * GIB,
        processes={1: 5 * GIB, os.getpid(): 12 * GIB}, milliwatts=612_500, celsius=61, sm_mhz=1755, memory_mhz=3201,
        reasons=0x4 | 0x20, millijoules=1_234_500,
    )  # fmt: skip
    assert bench.samples == [
        GpuSample(
            at_ns=200_000_000,
            utilization_pct=93,
            memory_utilization_pct=41,
            encoder_pct=2,
            decoder_pct=7,
            memory_used_bytes=20 * GIB,
            memory_own_bytes=12 * GIB,
            allocated_bytes=3 * GIB,
            power_w=612.5,
            temperature_c=61,
            sm_mhz=1755,
            memory_mhz=3201,
            throttles=("power cap", "temperature"),
            energy_j=1234.5,
        ),
    ]
    device = bench.sampler.device
    assert (device.name, device.memory_bytes, device.power_limit_w) == ("NVIDIA H200", 141 * GIB, 700.0)


def test_what_a_device_does_not_support_is_asked_once():
    bench = Bench()
    bench.nvml.fails |= {"nvmlDeviceGetTotalEnergyConsumption": NOT_SUPPORTED, "nvmlDeviceGetPowerUsage": NOT_SUPPORTED}
    for _ in range(3):
        bench.sample()
    assert bench.nvml.asked["nvmlDeviceGetTotalEnergyConsumption"] == bench.nvml.asked["nvmlDeviceGetPowerUsage"] == 1
    usage = bench.sampler.run()
    assert (usage.joules, usage.watts, "power_w" in usage.mean) == (None, None, False)
    assert usage.mean["temperature_c"] == 40


def test_a_reading_that_fails_once_is_asked_again():
    bench = Bench()
    bench.nvml.fails["nvmlDeviceGetPowerUsage"] = GPU_IS_LOST
    bench.sample()
    bench.nvml.fails.clear()
    bench.sample(milliwatts=300_000)
    assert [sample.power_w for sample in bench.samples] == [None, 300.0]


def test_older_drivers_have_older_names():
    bench = Bench()
    bench.nvml.fails |= dict.fromkeys(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV"), FUNCTION_NOT_FOUND
    )
    bench.sample(reasons=0x4, celsius=70)
    bench.sample()
    assert [(sample.throttles, sample.temperature_c) for sample in bench.samples] == 2 * [(("power cap",), 70)]
    assert bench.nvml.asked["nvmlDeviceGetTemperatureV"] == 1


def test_bindings_without_a_function_leave_its_reading_out():
    class Older(FakeNvml):
        @property
        def nvmlDeviceGetDecoderUtilization(self):  # noqa: N802  (NVML's name)
            raise AttributeError

    older = Older()
    reader = GpuReader(older, find_device(older, older.boards[0].uuid), pid=1)
    assert (reader.read(0).decoder_pct, reader.read(0).encoder_pct) == (None, 0)


def test_a_slice_has_memory_of_its_own_and_its_gpus_clock_but_no_energy():
    nvml = sliced(SLICE)
    nvml.boards[0].slices[0].memory_used, nvml.boards[0].milliwatts = 9 * GIB, 500_000
    reader = GpuReader(nvml, find_device(nvml, nvml.boards[0].uuid), pid=1)
    sample = reader.read(0)
    assert reader.is_mig
    assert (sample.memory_used_bytes, sample.power_w, sample.sm_mhz) == (9 * GIB, 500.0, 1980)
    assert (sample.utilization_pct, sample.energy_j) == (None, None)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2 | 0x10 | 0x100 | 0x400, ()),  # set by somebody, or the ordinary end of boost
        (0x4, ("power cap",)),
        (0x8, ("hardware slowdown",)),
        (0x8 | 0x80, ("power brake",)),
        (0x4 | 0x8 | 0x40, ("power cap", "temperature (hardware)")),
        (1 << 40, ()),  # not known yet
    ],
)
def test_reasons_in_words(mask, expected):
    assert throttle_reasons(mask) == expected


# -- what they come to -----------------------------------------------------------------------------------------------


def test_each_interval_has_its_own_samples_and_the_run_all_of_them():
    bench = Bench()
    bench.sample(utilization=10, memory_used=5 * GIB, millijoules=0)
    bench.sample(utilization=30, memory_used=8 * GIB, millijoules=100_000)
    first = bench.sampler.take()
    bench.sample(utilization=80, memory_used=6 * GIB, millijoules=200_000, reasons=0x4)
    second, nothing = bench.sampler.take(), bench.sampler.take()
    assert (first.samples, first.mean["utilization_pct"], first.peak["memory_used_bytes"]) == (2, 20, 8 * GIB)
    assert (second.samples, second.mean["utilization_pct"], second.peak["memory_used_bytes"]) == (1, 80, 6 * GIB)
    assert nothing.samples == 0
    run = bench.sampler.run()
    assert (run.samples, run.mean["utilization_pct"]) == (3, 40)


def test_the_energy_of_intervals_adds_up_to_that_of_the_run():
    bench = Bench()
    taken = []
    for millijoules in (1000, 41_000, 101_000, 301_000):
        bench.sample(millijoules=millijoules)
        taken.append(bench.sampler.take())
    assert [usage.joules for usage in taken] == [None, 40.0, 60.0, 200.0]
    run = bench.sampler.run()
    assert (run.joules, run.seconds, run.watts) == (300.0, pytest.approx(0.6), pytest.approx(500.0))


def test_what_does_not_count_leaves_a_gap_and_stays_in_the_history():
    bench = Bench()
    bench.sample(millijoules=0, utilization=100)
    bench.sampler.pause()  # as during validation
    bench.sample(millijoules=500_000, utilization=0)
    bench.sampler.resume()
    bench.sample(millijoules=600_000, utilization=100)
    bench.sample(millijoules=640_000, utilization=100)
    run = bench.sampler.run()
    assert (run.samples, run.mean["utilization_pct"]) == (3, 100)
    assert (run.joules, run.seconds) == (40.0, pytest.approx(0.2))
    assert [point.counted for point in bench.sampler.curve()] == [1, 0, 1, 1]
    bench.sampler.restart()
    assert [point.counted for point in bench.sampler.curve()] == [0, 0, 0, 0], "it was the warm-up"


def test_warm_up_is_left_out_of_both():
    bench = Bench()
    bench.sample(utilization=5, millijoules=0)
    bench.sampler.restart()
    bench.sample(utilization=95, millijoules=100_000)
    assert bench.sampler.run().mean["utilization_pct"] == bench.sampler.take().mean["utilization_pct"] == 95
    assert bench.sampler.run().joules == 100.0


def test_a_meter_that_begins_anew_does_not_count_backwards():
    bench = Bench()
    for millijoules in (900_000, 10_000, 50_000):
        bench.sample(millijoules=millijoules)
    assert (bench.sampler.run().joules, bench.sampler.run().seconds) == (40.0, pytest.approx(0.2))


def test_the_energy_of_the_fit_is_of_all_samples_also_those_that_do_not_count():
    bench = Bench()
    bench.sample(millijoules=100_000)
    assert bench.sampler.energy.joules is None, "of one reading"
    bench.sample(millijoules=400_000)
    bench.sampler.restart()  # the warm-up is over
    bench.sampler.pause()
    bench.sample(millijoules=900_000)
    bench.sampler.resume()
    for millijoules in (950_000, 10_000, 30_000):  # the driver was loaded anew
        bench.sample(millijoules=millijoules)
    assert bench.sampler.energy.joules == 300 + 500 + 50 + 20


def test_a_pause_between_two_samples_leaves_a_gap_too():
    bench = Bench()
    bench.sample(millijoules=0)
    bench.sampler.pause()
    bench.sampler.resume()
    bench.sample(millijoules=900_000)
    bench.sample(millijoules=940_000)
    run = bench.sampler.run()
    assert (run.samples, run.joules, run.seconds) == (3, 40.0, pytest.approx(0.2))


def test_shares_of_throttling_by_reason():
    bench = Bench()
    for reasons in (0x4, 0x4 | 0x20, 0x1, 0x0):
        bench.sample(reasons=reasons)
    run = bench.sampler.run()
    assert (run.throttled_pct, run.throttled_by_pct) == (50.0, {"power cap": 50.0, "temperature": 25.0})


def test_the_history_is_bounded_and_covers_the_whole_run():
    bench = Bench()
    count = 5 * MAX_POINTS
    for number in range(count):
        bench.sample(utilization=number % 100)
    history = bench.sampler.curve()
    assert MAX_POINTS // 2 <= len(history) <= MAX_POINTS
    assert (history[0].first_ns, history[-1].last_ns) == (200_000_000, bench.clock.ns)
    assert sum(point.samples for point in history) == count, "no sample is left out"
    steps = {later.first_ns - earlier.first_ns for earlier, later in pairwise(history)}
    assert len(steps) == 1, "the points are evenly spaced"
    assert bench.sampler.run().samples == count, "means are over all of them"


# -- the thread ------------------------------------------------------------------------------------------------------


class Signalling(FakeNvml):
    """Tells when it has been asked a number of times."""

    def __init__(self, samples):
        super().__init__()
        self.wanted, self.reached = samples, threading.Event()
        self.threads = set()

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802  (NVML's name)
        self.threads.add(threading.current_thread())
        answer = super().nvmlDeviceGetPowerUsage(handle)
        if self.asked["nvmlDeviceGetPowerUsage"] >= self.wanted:
            self.reached.set()
        return answer


def sampler_in_thread(nvml, monkeypatch, **options):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return TelemetrySampler(functools.partial(open_reader, 0, FIRST, lambda: None), **options)


def test_it_samples_in_a_thread_of_its_own_until_stopped(monkeypatch):
    nvml = Signalling(samples=3)
    sampler = sampler_in_thread(nvml, monkeypatch, period_s=0.001)
    sampler.start()
    assert nvml.reached.wait(HANGS_S)
    sampler.stop()
    assert sampler.run().samples >= 3
    assert threading.current_thread() not in nvml.threads
    assert not any(thread.is_alive() for thread in nvml.threads)
    assert nvml.opened == 0, "NVML is let go of"


def test_it_stops_at_once_however_long_the_period(monkeypatch):
    nvml = Signalling(samples=1)
    sampler = sampler_in_thread(nvml, monkeypatch, period_s=3600)
    sampler.start()
    assert nvml.reached.wait(HANGS_S)
    [thread] = nvml.threads
    sampler.stop()
    assert not thread.is_alive()
    assert sampler.run().samples == 1


def test_stopping_what_never_started_or_twice_is_fine(monkeypatch):
    sampler = sampler_in_thread(FakeNvml(), monkeypatch)
    sampler.stop()
    sampler.stop()
    assert sampler.run().samples == 0


def test_without_a_gpu_there_is_one_line_and_no_failure(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    sampler = sampler_in_thread(None, monkeypatch)
    sampler.start()
    sampler.stop()
    assert [record.message for record in caplog.records] == [
        "No GPU telemetry: the package nvidia-ml-py is not installed."
    ]
    assert sampler.problem == "the package nvidia-ml-py is not installed"
    assert (sampler.device, sampler.take().samples, sampler.curve()) == (None, 0, ())


def test_a_failure_in_the_thread_is_logged_once_and_ends_it(monkeypatch, caplog):
    nvml = FakeNvml()
    nvml.boards[0].memory_used = "much"
    sampler = sampler_in_thread(nvml, monkeypatch, period_s=0.001)
    sampler.start()
    sampler._thread.join(HANGS_S)
    assert not sampler._thread.is_alive()
    sampler.stop()
    assert [record.message for record in caplog.records] == [
        "GPU telemetry ends: ValueError: could not convert string to float: 'much'."
    ]
    assert nvml.opened == 0


# -- what it means ---------------------------------------------------------------------------------------------------


def hints(**figures):
    figures = {"device": "NVIDIA H200", "samples": 100} | figures
    return {hint.code: hint.text for hint in telemetry_hints(TelemetrySummary(**figures))}


@pytest.mark.parametrize(
    ("utilization", "expected"), [(97.0, {"gpu-well-used"}), (90.0, set()), (50.0, set()), (31.0, {"gpu-underused"})]
)
def test_utilization(utilization, expected):
    found = hints(utilization_pct=utilization)
    assert found.keys() == expected
    assert all(f"{utilization:.0f} %" in text for text in found.values())


def test_a_handful_of_samples_says_nothing_about_utilization():
    assert hints(utilization_pct=3.0, throttled_pct=100.0, samples=4) == {}


def test_throttling_names_its_reasons_the_clock_and_the_power():
    found = hints(
        throttled_pct=62.0,
        throttled_by_pct={"temperature": 8.0, "power cap": 60.0},
        power_w=690.0,
        power_limit_w=700.0,
        sm_mhz=1500.0,
        sm_peak_mhz=1980.0,
    )
    assert found == {
        "gpu-throttled": "The GPU's clock was held down 62 % of the time (power cap 60 %, temperature 8 %), at "
        "1500 MHz on average (1980 MHz at most) and 690 W of the 700 W allowed: it draws what its power limit "
        "allows, as is normal under dense compute."
    }
    assert hints(throttled_pct=4.0, throttled_by_pct={"power cap": 4.0}) == {}


def test_memory_near_full_tells_a_full_cache_from_one_that_ran_out():
    full = hints(memory_peak_gib=138.0, memory_total_gib=141.0, allocated_peak_gib=90.5, alloc_retries=0)
    assert "98 % full" in full["gpu-memory-full"]
    assert "costs no time" in full["gpu-memory-full"]
    ran_out = hints(memory_peak_gib=138.0, memory_total_gib=141.0, alloc_retries=12)
    assert "ran out 12 times" in ran_out["gpu-memory-full"]
    assert hints(memory_peak_gib=100.0, memory_total_gib=141.0) == {}


def test_cuda_malloc_in_the_steady_state():
    assert "3.5 times a step" in hints(device_allocs_per_step=3.5)["cuda-malloc-steady"]
    assert hints(device_allocs_per_step=0.02) == {}


@pytest.mark.parametrize(("mallocs", "steps", "fires"), [(1, 5, False), (5, 5, False), (6, 5, True), (11, 100, True)])
def test_a_few_calls_of_cuda_malloc_are_no_steady_state(mallocs, steps, fires):
    seen = TelemetrySummary(device="NVIDIA H200", samples=1, device_allocs_per_step=mallocs / steps)
    assert [hint.code for hint in telemetry_hints(seen, steps=steps)] == ["cuda-malloc-steady"] * fires


def test_a_run_is_summarized():
    board, clock = FakeBoard(), Clock()
    nvml = FakeNvml(board)
    allocator = AllocatorReading()

    telemetry = RunTelemetry(
        lambda: GpuReader(nvml, find_device(nvml, nvml.boards[0].uuid), pid=1),
        lambda: allocator,
        period_s=1,
        clock_ns=clock,
    )
    clock.ns = 100_000_000
    telemetry.sampler.start = lambda: None  # sampled by hand instead
    telemetry.start()
    assert telemetry.sampler.open()
    board.utilization, board.milliwatts = 60, 480_000
    for number in range(11):
        board.memory_used, board.millijoules = (10 + number) * GIB, number * 100_000
        clock.ns += 200_000_000
        telemetry.sampler.sample()
    allocator = AllocatorReading(peak_bytes=4 * GIB, device_allocs=20)
    telemetry.metrics(None, 1.0)
    summary = telemetry.summary(samples_per_second=250.0, steps=40)
    assert (summary.utilization_pct, summary.memory_peak_gib, summary.memory_total_gib) == (60, 20, 141)
    assert summary.power_w == pytest.approx(500.0), "by the energy meter, which counts what lies between samples"
    assert summary.joules_per_sample == pytest.approx(2.0)
    assert (summary.allocated_peak_gib, summary.device_allocs_per_step) == (4, 0.5)
    assert summary.series.seconds[-1] == pytest.approx(2.2)
    assert summary.series.values["memory_used_gib"][-1] == 20
    assert {len(column) for column in summary.series.values.values()} == {11}


def test_what_was_not_measured_is_none():
    nvml = FakeNvml()
    nvml.fails |= dict.fromkeys(("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption"), NOT_SUPPORTED)
    telemetry = RunTelemetry(
        lambda: GpuReader(nvml, find_device(nvml, nvml.boards[0].uuid), pid=1), AllocatorReading, period_s=1
    )
    assert telemetry.sampler.open()
    telemetry.sampler.sample()
    summary = telemetry.summary(samples_per_second=None, steps=0)
    assert (summary.utilization_pct, summary.joules_per_sample, summary.device_allocs_per_step) == (None, None, None)
    assert "utilization_pct" not in summary.series.values
    assert telemetry_series((), 0) == TelemetrySeries()


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_the_sensors_tell_of_its_load():
    import torch  # noqa: PLC0415  (slow, and the other tests do without)

    from lightning_forge_profiling.gpu.memory import read_allocator  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(0)
    opener = functools.partial(open_reader, 0, str(properties.uuid), lambda: read_allocator(0).allocated_bytes)
    sampler = TelemetrySampler(opener, period_s=0.05)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sampler.start()
    ends = time.monotonic() + 4
    while time.monotonic() < ends:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
    sampler.stop()
    run, device = sampler.run(), sampler.device
    assert sampler.problem == ""
    assert device.uuid.endswith(str(properties.uuid))
    assert device.memory_bytes == pytest.approx(properties.total_memory, rel=0.05)
    assert run.samples >= 20
    assert run.peak["utilization_pct"] >= 90
    assert run.peak["memory_used_bytes"] >= run.peak["allocated_bytes"] >= matrix.nbytes
    assert run.peak["sm_mhz"] > 500
    assert 100 < run.mean["power_w"] < 1.1 * device.power_limit_w
    assert run.watts == pytest.approx(run.mean["power_w"], rel=0.3), "the energy meter agrees with the power"
    assert run.throttled_pct is not None


@pytest.mark.multi_gpu
@pytest.mark.parametrize("by", ["index", "uuid"])
def test_on_two_gpus_the_visible_one_is_found(by):
    nvml = open_nvml()
    second = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(1))
    nvml.nvmlShutdown()
    program = (
        "import torch\n"
        "from lightning_forge_profiling.gpu.nvml import find_device, open_nvml\n"
        "nvml, known = open_nvml(), str(torch.cuda.get_device_properties(0).uuid)\n"
        "print(find_device(nvml, known, 0).uuid)"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "1" if by == "index" else second}
    run = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True)
    assert run.stdout.split() == [second]
