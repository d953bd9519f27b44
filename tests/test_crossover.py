"""From which size on the GPU is faster: finding it, and measuring for it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_forge_profiling.bench.result import BenchmarkResult
from lightning_forge_profiling.crossover.curves import (
    Curve,
    Point,
    describe,
    find_crossover,
)
from lightning_forge_profiling.crossover.sweep import OPERATIONS, OperationTimer, measure, setting
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.host import free_memory_bytes, processor_name
from tests.simulated_gpu import SimulatedGpu
from tests.test_bench_methods import options, timed


def curve(way, times, noise=0.0):
    points = [
        Point(size=size, us=us, low_us=us * (1 - noise), high_us=us * (1 + noise), samples=20)
        for size, us in times.items()
    ]
    return Curve(way=way, points=tuple(points))


CPU = curve("cpu", {64: 1.0, 128: 4.0, 256: 16.0, 512: 64.0})


# --- finding it ------------------------------------------------------------------------------------------------------


def test_curves_that_are_powers_of_the_size_cross_where_they_truly_do():
    cpu = curve("cpu", {size: 1e-5 * size**3 for size in (64, 256, 1024)})
    gpu = curve("stream", {size: 2.0 * size for size in (64, 256, 1024)})
    crossover = find_crossover(cpu, gpu)
    assert crossover.size == pytest.approx((2.0 / 1e-5) ** 0.5)


@pytest.mark.parametrize(
    ("gpu", "size", "said"),
    [
        ({64: 8.0, 128: 8.0, 256: 8.0, 512: 8.0}, 181.0, "faster from about 180 on"),
        ({64: 0.5, 128: 0.5, 256: 0.5, 512: 0.5}, 64, "faster at every size, 64 to 512"),
        ({64: 90.0, 128: 90.0, 256: 90.0, 512: 90.0}, None, "not faster at any size, 64 to 512"),
        ({64: 0.5, 128: 8.0, 256: 8.0, 512: 8.0}, 181.0, "faster from about 180 on, and at 64"),
        ({64: 0.5, 128: 2.0, 256: 32.0, 512: 99.0}, None, "slower at 512, though faster at 64 and 128"),
        ({64: 0.5, 128: 2.0, 256: 8.0, 512: 99.0}, None, "slower at 512, though faster at 64, 128 and 256"),
        ({256: 8.0, 512: 8.0}, 256, "faster at every size, 256 to 512"),
        ({512: 99.0}, None, "not faster at any size, 512"),
        ({64: 1.0, 128: 2.0, 256: 8.0, 512: 9.0}, 64, "faster from about 64 on"),
        ({64: 1.0 + 1e-15, 128: 2.0, 256: 8.0, 512: 9.0}, 64, "faster from about 64 on"),
        ({1024: 1.0}, None, "not compared at any size"),
    ],
)
def test_the_crossover_is_the_size_from_which_it_stays_faster(gpu, size, said):
    crossover = find_crossover(CPU, curve("alone", gpu))
    assert crossover.size == pytest.approx(size, abs=0.1)
    assert describe(crossover) == said


@pytest.mark.parametrize(
    ("gpu", "noise", "said"),
    [
        (8.0, 0.01, "faster from about 180 on"),
        (8.0, 0.2, "faster from about 180 on (between 150 and 220)"),
        (63.0, 0.1, "faster from about 510 on (within the noise, at no size)"),
        (65.0, 0.1, "not faster at any size, 64 to 512 (within the noise, faster from about 470 on)"),
        (0.9, 0.3, "faster at every size, 64 to 512 (between 64 and 83)"),
    ],
)
def test_the_noise_of_the_times_gives_a_range(gpu, noise, said):
    cpu = curve("cpu", {point.size: point.us for point in CPU.points}, noise)
    assert describe(find_crossover(cpu, curve("alone", dict.fromkeys((64, 128, 256, 512), gpu), noise))) == said


def test_a_crossover_is_never_past_the_size_at_which_the_gpu_was_faster():
    cpu = curve("cpu", {11: 1.0, 100: 8.0})
    assert find_crossover(cpu, curve("alone", {11: 1e9, 100: 8.0 * (1 - 1e-16)})).size <= 100


def test_sizes_that_do_not_ascend_are_refused():
    with pytest.raises(ConfigurationError, match="ascend"):
        curve("cpu", {128: 1.0, 64: 1.0})


# --- measuring -------------------------------------------------------------------------------------------------------


def operation(meaning="", exponent=3):
    return replace(OPERATIONS["add"], meaning=meaning, exponent=exponent)


class Machine:
    """Times by formula, and remembers what it was asked."""

    def __init__(self, **us):
        self.us = us
        self.asked = []

    def __call__(self, name, size, way, expected_us):
        self.asked.append((name, size, way, expected_us))
        us = self.us[way](size)
        return us if isinstance(us, str) else Point(size=size, us=us, low_us=us, high_us=us, samples=9)


def test_every_operation_is_timed_at_every_size_in_every_way():
    machine, announced = Machine(cpu=lambda n: n * 1.0, alone=lambda _: 20.0), []
    measured = measure(
        {"one": operation("first"), "two": operation("second")}, (8, 16), ("cpu", "alone"), machine,
        longest_us=1e6, progress=lambda name, size: announced.append((name, size)),
    )  # fmt: skip
    assert announced == [("one", 8), ("one", 16), ("two", 8), ("two", 16)]
    assert [explored.name for explored in measured] == ["one", "two"]
    assert [explored.meaning for explored in measured] == ["first", "second"]
    for explored in measured:
        assert explored.sizes == (8, 16)
        assert [point.us for point in explored.curve("cpu").points] == [8.0, 16.0]
        assert explored.crossovers[0].way == "alone"


def test_a_curve_ends_before_a_call_that_would_take_too_long_and_the_others_go_on():
    machine = Machine(cpu=lambda n: n**3.0, alone=lambda _: 20.0)
    [measured] = measure({"one": operation()}, (10, 20, 40, 80, 160), ("cpu", "alone"), machine, longest_us=100_000)
    assert [point.size for point in measured.curve("cpu").points] == [10, 20, 40]
    assert measured.curve("cpu").ended == "a call at 80 would take about 512 ms"
    assert [point.size for point in measured.curve("alone").points] == [10, 20, 40, 80, 160]
    assert measured.curve("alone").ended == ""
    assert [us for _, _, way, us in machine.asked if way == "cpu"] == [None, None, pytest.approx(64_000)]


def test_the_end_of_a_cache_ends_no_curve():
    """An addition as measured: from 2048 to 4096 it takes 55 times as long, for four times the work."""
    times = {1024: 200.0, 2048: 850.0, 4096: 46_600.0, 8192: 160_000.0, 16384: 640_000.0}
    machine = Machine(cpu=times.__getitem__)
    [measured] = measure({"add": operation(exponent=2)}, (*times, 32768), ("cpu",), machine, longest_us=1e6)
    assert [point.size for point in measured.curve("cpu").points] == [*times]
    assert [us for *_, us in machine.asked][3] == pytest.approx(4 * 46_600)
    assert measured.curve("cpu").ended == "a call at 32768 would take about 2.56 s"


def test_a_call_that_turns_out_longer_than_the_limit_is_kept_and_the_curve_ends_there():
    """Nothing is known about the first two calls of a curve."""
    machine = Machine(cpu={2048: 0.2e6, 4096: 1.5e6}.__getitem__)
    [measured] = measure({"matmul": operation()}, (2048, 4096), ("cpu",), machine, longest_us=0.05e6)
    assert [point.size for point in measured.curve("cpu").points] == [2048]
    assert measured.curve("cpu").ended == "a call at 2048 took 200 ms"
    [measured] = measure({"matmul": operation()}, (2048, 4096), ("cpu",), machine, longest_us=0.3e6)
    assert [point.size for point in measured.curve("cpu").points] == [2048, 4096]
    assert measured.curve("cpu").ended == ""


def test_a_curve_of_the_gpu_goes_on_as_long_as_it_may_win():
    """A convolution as measured: at 8192 the CPU took 6.9 s, where 2.5 s were expected of the copies."""
    cpu = {2048: 53e3, 4096: 210e3, 8192: 6.9e6}
    copies = {2048: 159e3, 4096: 634e3, 8192: 2.5e6}
    machine = Machine(cpu=cpu.__getitem__, copies=copies.__getitem__)
    [measured] = measure({"conv2d": operation(exponent=2)}, (*cpu, 16384), ("cpu", "copies"), machine, longest_us=1e6)
    assert [point.size for point in measured.curve("copies").points] == [*cpu]
    assert describe(measured.crossovers[0]) == "faster from about 5900 on"
    assert [measured.curve(way).ended for way in ("cpu", "copies")] == [
        "a call at 8192 took 6.90 s",
        "a call at 8192 took 2.50 s",
    ]


def test_a_curve_of_the_gpu_ends_where_it_is_expected_to_lose_and_takes_too_long():
    machine = Machine(cpu={8: 1e3, 16: 4e3, 32: 2e6}.__getitem__, alone={8: 0.2e6, 16: 0.8e6}.__getitem__)
    [measured] = measure({"one": operation(exponent=2)}, (8, 16, 32), ("cpu", "alone"), machine, longest_us=1e6)
    assert measured.curve("alone").ended == "a call at 32 would take about 3.20 s"


def test_a_call_of_a_larger_size_is_not_expected_to_take_less():
    machine = Machine(alone={8: 30.0, 16: 20.0, 32: 20.0}.__getitem__)
    measure({"one": operation()}, (8, 16, 32), ("alone",), machine, longest_us=1e6)
    assert machine.asked[-1][-1] == 20.0


def test_a_curve_ends_where_it_cannot_go_on_and_says_why():
    machine = Machine(cpu=float, alone=lambda n: 20.0 if n < 40 else "no memory")
    [measured] = measure({"one": operation()}, (10, 20, 40, 80), ("cpu", "alone"), machine, longest_us=1e6)
    assert [point.size for point in measured.curve("cpu").points] == [10, 20, 40, 80]
    assert [point.size for point in measured.curve("alone").points] == [10, 20]
    assert measured.curve("alone").ended == "40: no memory"
    assert sum(way == "alone" for _, _, way, _ in machine.asked) == 3
    assert describe(measured.crossovers[0]) == "not faster at any size, 10 to 20"


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operation_makes_a_result_of_the_shape_and_type_that_it_says(name, dtype):
    known = OPERATIONS[name]
    arguments = known.arguments(16, dtype)
    result = known.call(*arguments)
    assert (result.shape, result.dtype) == (known.shapes(16)[-1], dtype)
    assert known.parameters < len(arguments)
    assert known.bytes(16, dtype) == sum(tensor.nbytes for tensor in (*arguments, result))
    assert all(torch.equal(*pair) for pair in zip(arguments, known.arguments(16, dtype), strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_work_of_an_operation_grows_as_it_says(name):
    """Its FLOPs as PyTorch counts them, where it counts any, and its tensors."""
    known = OPERATIONS[name]

    def work(size):
        with FlopCounterMode(display=False) as counter:
            known.call(*known.arguments(size, torch.float32))
        return counter.get_total_flops() or known.bytes(size, torch.float32)

    assert math.log2(work(256) / work(128)) == pytest.approx(known.exponent, abs=0.03)


def test_arguments_leave_the_random_numbers_of_others_alone():
    before = torch.get_rng_state()
    OPERATIONS["matmul"].arguments(8, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_point_on_the_cpu_is_what_a_call_takes():
    timer = OperationTimer("float32", None, 0.1)
    small, large = (timer("add", size, "cpu", None) for size in (64, 2048))
    assert small.size == 64
    assert 0.1 < small.us < 1000
    assert large.us > 10 * small.us
    assert small.low_us <= small.us <= small.high_us


@pytest.mark.linux
def test_what_does_not_fit_is_not_tried():
    said = OperationTimer("float64", None, 0.1)("matmul", 2**24, "cpu", None)
    assert re.fullmatch(r"it needs about 1\.26e\+07 GiB, and [\d.e+]+ GiB of memory are free", said)


def test_an_operation_that_the_cpu_cannot_compute_ends_with_its_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("\"add\" not implemented for 'Half'\nwith a second line")

    refusing = {"add": replace(OPERATIONS["add"], call=refuse)}
    monkeypatch.setattr("lightning_forge_profiling.crossover.sweep.OPERATIONS", refusing)
    timer = OperationTimer("float16", None, 0.1)
    assert timer("add", 8, "cpu", None) == "\"add\" not implemented for 'Half'"


@pytest.mark.parametrize(
    ("samples", "low", "high"),
    [
        ([10.0] * 12 + [10.5] * 8, 10.0, 10.5),
        ([10.0, 12.0, 11.0, 19.0, 10.0], 10.0, 19.0),
        ([7.0], 7.0, 7.0),
        ([float(number) for number in range(1, 101)], 40.0, 61.0),
    ],
)
def test_a_point_has_the_true_ends_of_its_medians_interval(samples, low, high):
    result = BenchmarkResult(name="", method="wall", device="cpu", samples_us=tuple(samples))
    point = Point.of(64, result, calls=4)
    assert (point.low_us, point.high_us) == (low / 4, high / 4)
    assert point.us == result.median_us / 4


def test_a_point_has_the_warnings_of_its_time_without_the_wait_that_belongs_to_it():
    gpu = SimulatedGpu()

    def waits():
        gpu.kernel(2000)
        gpu.synchronize()

    result = timed(gpu, waits, options("wall"))
    point = Point.of(64, replace(result, warnings=(*result.warnings, "it is late")))
    assert result.waits_for_gpu
    assert point.warnings == ("it is late",)


def test_the_processors_name_is_read(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert processor_name(cpuinfo) != ""
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9454\nprocessor\t: 1\nmodel name\t: other\n")
    assert processor_name(cpuinfo) == "AMD EPYC 9454"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8192),
        ({"memory.max": "max"}, 8192),
        ({"memory.max": "4096"}, 4096),
        ({"memory.max": "4096", "memory.current": "3000"}, 1096),
        ({"memory.max": "4096", "memory.current": "3000", "memory.stat": "file 9\ninactive_file 1000\nx 1"}, 2096),
        ({"memory.max": "4096", "memory.current": "500", "memory.stat": "inactive_file 1000"}, 4096),
        ({"memory.max": "4096", "memory.current": "5000", "memory.stat": "inactive_file 0"}, 0),
        ({"memory.max": "99999", "memory.current": "9000", "memory.stat": "inactive_file 0"}, 8192),
        (
            {
                "memory/memory.limit_in_bytes": "4096",
                "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000",
            },
            2096,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "3000"}, 8192),
    ],
)
def test_free_is_what_the_machine_has_and_the_container_may_still_take(files, free, tmp_path):
    meminfo = tmp_path / "meminfo"
    assert free_memory_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  16 kB\nMemAvailable:    8 kB\n")
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{content}\n")
    assert free_memory_bytes(meminfo, tmp_path) == free


@pytest.mark.usefixtures("_fp32_settings")
@pytest.mark.parametrize(("precision", "word"), [("tf32", "on"), ("ieee", "off")])
def test_tf32_is_read_also_where_pytorchs_newer_interface_has_set_it(monkeypatch, precision, word):
    """After that the older one raises."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    torch.backends.cuda.matmul.fp32_precision = precision
    assert setting("float32", torch.device("cuda")).tf32 == f"{word} for products, on for convolutions"
