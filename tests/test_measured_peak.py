"""`measure_peak`: a rate that the device really reaches, with nothing changed by it."""

from collections import defaultdict
from time import perf_counter

import pytest
import torch

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.flops.peaks import find_peak
from lightning_forge_profiling.flops.precision import MeasuredPeak, measure_peak


class Products:
    """Real products, and a clock that stands still in between: what else the machine does is in no time."""

    def __init__(self):
        self.now = 0.0
        self.taken = defaultdict(list)
        self.real = torch.mm

    def mm(self, left, right, *, out):
        began = perf_counter()
        self.real(left, right, out=out)
        self.taken[tuple(left.shape)].append(perf_counter() - began)
        self.now += self.taken[tuple(left.shape)][-1]

    def clock(self):
        return self.now


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_the_rate_is_that_of_a_product_of_its_shape(monkeypatch, dtype):
    products = Products()
    monkeypatch.setattr(torch, "mm", products.mm)
    monkeypatch.setattr("lightning_forge_profiling.flops.precision.perf_counter", products.clock)
    peak = measure_peak(dtype, device="cpu", seconds=0.1)
    assert (peak.device, peak.dtype, peak.clock_mhz) == ("cpu", dtype, None)
    size = peak.shape[0]
    assert peak.shape == (size, size, size)
    taken = products.taken[size, size]
    slowest, fastest = (2 * size**3 / seconds for seconds in (max(taken), min(taken)))
    assert slowest * (1 - 1e-9) <= peak.flops <= fastest * (1 + 1e-9)


def test_random_numbers_and_settings_stay_as_they_were():
    numbers, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    new = torch.backends.cuda.matmul.fp32_precision
    measure_peak("fp32", device="cpu", seconds=0.01)
    assert torch.equal(numbers, torch.get_rng_state())
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cuda.matmul.fp32_precision == new


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "bf16, fp16, fp32, tf32, fp64"),
        ({"dtype": "tf32", "device": "cpu"}, "cpu has no TF32; measure fp32"),
        ({"device": "meta"}, "not meta"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "cuda:99"}, "There is no cuda:99 here"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": "x"}, "seconds"),
        ({"seconds": None}, "seconds"),
        ({"seconds": True}, "seconds"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        measure_peak(**options)


@pytest.mark.parametrize(
    ("name", "capability", "hip"), [("Tesla T4", (7, 5), None), ("AMD Instinct MI300X", (9, 4), "6.4.0")]
)
def test_tf32_is_refused_where_fp32_would_be_measured_in_its_place(monkeypatch, name, capability, hip):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=f"{name} has no TF32"):
        measure_peak("tf32", device="cuda")


@pytest.mark.usefixtures("_fp32_settings")
def test_a_setting_for_all_of_pytorch_goes_on_to_hold_for_products():
    generic = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        measure_peak("fp32", device="cpu", seconds=0.01)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = generic


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "torch.float32"])
def test_pytorchs_own_names_are_taken_too(dtype):
    assert measure_peak(dtype, device="cpu", seconds=0.01).dtype == "fp32"


def test_where_the_next_shape_would_take_longer_than_there_is_time_it_is_left_out():
    """Many a CPU has no fp16 of its own: a product of 1024 takes it ten seconds."""
    assert measure_peak("fp16", device="cpu", seconds=1e-6).shape == (512, 512, 512)


def test_it_reads_well():
    peak = MeasuredPeak("NVIDIA H200", "bf16", 731.27, (8192, 8192, 8192), 1410)
    assert str(peak) == "731.3 TFLOP/s bf16 on NVIDIA H200 at 1410 MHz (8192x8192x8192)"
    assert peak.flops == pytest.approx(731.27e12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
def test_a_gpu_reaches_most_of_its_data_sheet_and_no_more(dtype):
    properties = torch.cuda.get_device_properties(0)
    table = find_peak(
        torch.cuda.get_device_name(0), memory_bytes=properties.total_memory, sms=properties.multi_processor_count
    )
    if table is None or dtype not in table.flops:
        pytest.skip(f"{properties.name} has no {dtype} peak in the table")
    peak = measure_peak(dtype, seconds=0.5)
    above = 1.2 if "GeForce" in table.device else 1.02  # those run above the stated clock
    assert 0.5 < peak.flops / table.flops[dtype] < above, str(peak)
