"""The table of device peaks: names as drivers give them, and figures as vendors print them."""

import pytest

from lightning_forge_profiling.hardware.peak_geforce import GEFORCE_PARTS
from lightning_forge_profiling.hardware.peak_table import PARTS
from lightning_forge_profiling.hardware.peaks import find_peak, peak_flops

GIB = 2**30
ALL_PARTS = PARTS + GEFORCE_PARTS
BY_NAME = {part.device: part for part in ALL_PARTS}


@pytest.mark.parametrize(
    ("name", "device", "dtype", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "V100 SXM2", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "V100 SXM2", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "V100 PCIe", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "V100S PCIe", "fp16", 130),
        ("Tesla T4", "T4", "fp16", 65),
        ("NVIDIA A10", "A10", "bf16", 125),
        ("NVIDIA A10G", "A10G", "bf16", 70),
        ("NVIDIA A30", "A30", "bf16", 165),
        ("NVIDIA A40", "A40", "bf16", 149.7),
        ("A100-SXM4-40GB", "A100", "bf16", 312),
        ("A100-PCIE-40GB", "A100", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "A100", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "A100", "bf16", 312),
        ("NVIDIA L4", "L4", "bf16", 121),
        ("NVIDIA L40", "L40", "bf16", 181.05),
        ("NVIDIA L40S", "L40S", "bf16", 362.05),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "H200 SXM", "bf16", 989.5),
        ("NVIDIA H200 NVL", "H200 NVL", "bf16", 835.5),
        ("NVIDIA H20", "H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "GH200", "bf16", 989.5),
        ("NVIDIA GH200 144G HBM3e", "GH200", "bf16", 989.5),
        ("NVIDIA B200", "B200", "bf16", 2250),
        ("NVIDIA GB200", "GB200", "bf16", 2500),
        ("NVIDIA B300 SXM6 AC", "B300", "bf16", 2250),
        ("AMD Instinct MI210", "MI210", "bf16", 181),
        ("AMD Instinct MI250X", "MI250X (one die)", "bf16", 191.5),
        ("AMD Instinct MI300X", "MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X OAM", "MI300X", "fp8", 2614.9),
        ("AMD Instinct MI300X VF", "MI300X", "fp16", 1307.4),
        ("AMD Instinct MI325X", "MI325X", "bf16", 1307.4),
        ("AMD Instinct MI355X", "MI355X", "bf16", 2516.6),
        ("Quadro RTX 6000", "Quadro RTX 6000", "fp16", 130.5),
        ("NVIDIA RTX A6000", "RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "bf16", 364.2),
    ],
)
def test_a_device_is_found_by_its_drivers_name(name, device, dtype, tflops):
    assert find_peak(name).device == device
    assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


# As printed in the architecture whitepapers: dense, with FP32 accumulate.
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("NVIDIA GeForce RTX 3070", {"fp32": 20.3, "bf16": 40.6, "int8": 162.6}),
        ("NVIDIA GeForce RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71, "int8": 284}),
        ("NVIDIA GeForce RTX 3090 Ti", {"fp32": 40, "bf16": 80, "int8": 320}),
        ("NVIDIA GeForce RTX 4070 Ti", {"fp32": 40.1}),
        ("NVIDIA GeForce RTX 4080", {"fp32": 48.7, "bf16": 97.5, "int8": 389.9}),
        ("NVIDIA GeForce RTX 4080 SUPER", {"fp32": 52.2, "int8": 417.6}),
        ("NVIDIA GeForce RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3, "int8": 660.6}),
        ("NVIDIA GeForce RTX 5080", {"fp32": 56.3, "bf16": 112.6}),
        ("NVIDIA GeForce RTX 5090", {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp8": 419, "int8": 838}),
    ],
)
def test_geforce_rates_are_the_whitepapers_with_fp32_accumulate(name, rates):
    for dtype, tflops in rates.items():
        assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12, rel=0.003)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "Graphics Device",
        "NVIDIA",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM-64GB",  # Leonardo's, with more units than the product
        "GRID A100X-40C",  # virtual GPUs
        "NVIDIA A100-40C",
        "NVIDIA L40S-48Q",
        "GRID T4-16Q",
        "NVIDIA A100X",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H800",
        "NVIDIA L20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce GTX 1080 Ti",
        "Quadro RTX 6000 with Max-Q Design",
        "Quadro RTX 8000",
        "NVIDIA RTX 6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "Tesla V100-SXM2-32GB-LS",
        "Tesla V100-FHHL-16GB",
        "AMD Instinct MI300A",
        "AMD Instinct MI250X/MI250",  # two products
        "AMD Radeon Graphics",
        "NVIDIA H100",  # three products
        "Tesla V100",
        "NVIDIA GeForce RTX 3080",
    ],
)
def test_what_is_not_in_the_table_or_not_one_device_has_no_peak(name):
    assert find_peak(name) is None
    assert peak_flops(name, "fp32") is None


@pytest.mark.parametrize(
    ("name", "figures", "device"),
    [
        ("NVIDIA H100", {"sms": 114}, "H100 PCIe"),
        ("NVIDIA H100", {"sms": 132, "memory_bytes": 85_029_158_912}, "H100 SXM"),
        ("NVIDIA H100", {"memory_bytes": 99_987_488_768}, "H100 NVL"),
        ("NVIDIA H100", {"power_w": 700.0}, "H100 SXM"),
        ("NVIDIA H100", {"memory_bytes": 85_029_158_912}, None),
        ("NVIDIA H100", {"power_w": 350.0}, None),  # any of them can be limited to this
        ("Tesla V100", {"power_w": 300.0}, "V100 SXM2"),
        ("AMD Instinct MI250X/MI250", {"sms": 110}, "MI250X (one die)"),
        ("AMD Instinct MI250X/MI250", {"sms": 104}, "MI250 (one die)"),
        ("NVIDIA GeForce RTX 3080", {"sms": 68}, "GeForce RTX 3080 10 GB"),
        ("NVIDIA GeForce RTX 3080", {"memory_bytes": int(11.76 * GIB)}, "GeForce RTX 3080 12 GB"),
        ("NVIDIA GeForce RTX 4090", {"sms": 128, "memory_bytes": 25_393_692_672}, "GeForce RTX 4090"),
        ("NVIDIA H200", {"sms": 132, "memory_bytes": 150_109_880_320, "power_w": 700.0}, "H200 SXM"),
        ("AMD Instinct MI300X", {"sms": 304, "memory_bytes": 206_141_652_992}, "MI300X"),
        ("AMD Instinct MI300X", {"sms": 38}, None),  # one of eight compute partitions
        ("NVIDIA H100 80GB HBM3", {"sms": 16}, None),  # a slice whose name does not say so
    ],
)
def test_other_figures_decide_where_the_name_does_not(name, figures, device):
    peak = find_peak(name, **figures)
    assert (peak.device if peak else None) == device


def test_a_type_that_the_device_does_not_have_has_no_rate():
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("NVIDIA H200", "complex64") is None


def test_a_peak_says_where_it_is_from_and_cannot_be_changed():
    peak = find_peak("NVIDIA H100 PCIe")
    assert "H100" in peak.source
    with pytest.raises(TypeError):
        peak.flops["bf16"] = 1.0


# Every tensor core here does TF32 at half and fp8 at twice the 16-bit rate. A figure with sparsity among dense ones
# breaks that.
@pytest.mark.parametrize("part", ALL_PARTS, ids=lambda part: part.device)
def test_the_rates_of_a_part_fit_each_other(part):
    rates = part.tflops
    assert part.source
    assert set(rates) <= {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"}
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    assert 2 * rates.get("tf32", rates["fp16"] / 2) == pytest.approx(rates["fp16"], rel=0.02)
    assert rates.get("fp8", 2 * rates["fp16"]) == pytest.approx(2 * rates["fp16"], rel=0.02)
    ascending = [rates[dtype] for dtype in ("fp64", "fp32", "tf32", "fp16", "int8") if dtype in rates]
    assert ascending == sorted(ascending)


def test_no_two_parts_share_a_name():
    assert len(BY_NAME) == len(ALL_PARTS)
