"""`measure_peak`: a rate that the device really reaches, with nothing changed by it."""

from time import perf_counter

import pytest
import torch

from lightning_forge_profiling import ConfigurationError
from lightning_forge_profiling.hardware.measured_peak import MeasuredPeak, measure_peak
from lightning_forge_profiling.hardware.peaks import find_peak


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_the_rate_is_that_of_a_product_of_its_shape(dtype):
    peak = measure_peak(dtype, device="cpu", seconds=0.1)
    assert (peak.device, peak.dtype, peak.clock_mhz) == ("cpu", dtype, None)
    size = peak.shape[0]
    assert peak.shape == (size, size, size)
    left = torch.randn(size, size).to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[dtype])
    taken = []
    for _ in range(5):
        began = perf_counter()
        left @ left
        taken.append(perf_counter() - began)
    # the machine is shared: within a factor, not a percentage
    assert peak.flops == pytest.approx(2 * size**3 / min(taken), rel=0.9)


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
        ({"dtype": "tf32", "device": "cpu"}, "CPU has no TF32"),
        ({"device": "meta"}, "not meta"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        measure_peak(**options)


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
    assert 0.5 < peak.flops / table.flops[dtype] < 1.02, str(peak)
