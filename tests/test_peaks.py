"""The table of device peaks: names as drivers give them, and figures as vendors print them."""

import pytest

from lightning_forge_profiling.flops.peaks import DEVICES, find_peak

GIB = 2**30
BY_NAME = {part.device: part for part in DEVICES}


DRIVER_NAMES = [
    ("Tesla P100-SXM2-16GB", "P100 SXM2", "fp32", 10.6),
    ("Tesla P100-PCIE-16GB", "P100 PCIe", "fp32", 9.3),
    ("Tesla V100-SXM2-16GB", "V100 SXM2", "fp16", 125),
    ("Tesla V100-SXM2-32GB", "V100 SXM2", "fp16", 125),
    ("Tesla V100-PCIE-32GB", "V100 PCIe", "fp16", 112),
    ("Tesla V100S-PCIE-32GB", "V100S PCIe", "fp16", 130),
    ("Tesla T4", "T4", "fp16", 65),
    ("NVIDIA A2", "A2", "bf16", 18),
    ("NVIDIA A10", "A10", "bf16", 125),
    ("NVIDIA A10G", "A10G", "bf16", 70),
    ("NVIDIA A16", "A16", "bf16", 17.9),
    ("NVIDIA A30", "A30", "bf16", 165),
    ("NVIDIA A40", "A40", "bf16", 149.7),
    ("A100-SXM4-40GB", "A100", "bf16", 312),
    ("A100-PCIE-40GB", "A100", "bf16", 312),
    ("NVIDIA A100-SXM4-80GB", "A100", "tf32", 156),
    ("NVIDIA A100 80GB PCIe", "A100", "bf16", 312),
    ("NVIDIA A800-SXM4-80GB", "A800", "bf16", 312),
    ("NVIDIA A800 80GB PCIe", "A800", "bf16", 312),
    ("NVIDIA A800 40GB Active", "A800", "bf16", 312),
    ("NVIDIA L4", "L4", "bf16", 121),
    ("NVIDIA L20", "L20", "bf16", 119.5),
    ("NVIDIA L40", "L40", "bf16", 181.05),
    ("NVIDIA L40S", "L40S", "bf16", 362.05),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", "bf16", 989.4),
    ("NVIDIA H100 PCIe", "H100 PCIe", "bf16", 756),
    ("NVIDIA H100 NVL", "H100 NVL", "bf16", 835.5),
    ("NVIDIA H800", "H800 SXM", "bf16", 989.4),
    ("NVIDIA H800 PCIe", "H800 PCIe", "bf16", 756),
    ("NVIDIA H200", "H200 SXM", "bf16", 989.5),
    ("NVIDIA H200 NVL", "H200 NVL", "bf16", 835.5),
    ("NVIDIA H20", "H20", "bf16", 148),
    ("NVIDIA H20-3e", "H20", "bf16", 148),
    ("NVIDIA GH200 480GB", "GH200", "bf16", 989.5),
    ("NVIDIA GH200 144G HBM3e", "GH200", "bf16", 989.5),
    ("NVIDIA B200", "B200", "bf16", 2250),
    ("NVIDIA GB200", "GB200", "bf16", 2500),
    ("NVIDIA B300 SXM6 AC", "B300", "bf16", 2250),
    ("NVIDIA GB300", "GB300", "bf16", 2500),
    ("AMD Instinct MI100", "MI100", "bf16", 92.3),
    ("AMD Instinct MI210", "MI210", "bf16", 181),
    ("AMD Instinct MI250X", "MI250X (one die)", "bf16", 191.5),
    ("AMD Instinct MI300A", "MI300A", "bf16", 980.6),
    ("AMD Instinct MI300X", "MI300X", "bf16", 1307.4),
    ("AMD Instinct MI300X OAM", "MI300X", "fp8", 2614.9),
    ("AMD Instinct MI300X VF", "MI300X", "fp16", 1307.4),
    ("AMD Instinct MI325X", "MI325X", "bf16", 1307.4),
    ("AMD Instinct MI350X", "MI350X", "bf16", 2306.9),
    ("AMD Instinct MI355X", "MI355X", "bf16", 2516.6),
]


def test_a_device_is_found_by_its_drivers_name():
    for name, device, dtype, tflops in DRIVER_NAMES:
        peak = find_peak(name)
        assert peak is not None, name
        assert (peak.device, peak.flops[dtype]) == (device, pytest.approx(tflops * 1e12)), name


# As printed in the architecture whitepapers and, for cards that are not in them, on the data sheets: dense, with FP32
# accumulate.
PRINTED_RATES = [
    ("GeForce RTX 2080 Ti", {"fp32": 13.4, "fp16": 53.8, "int8": 215.2}),
    ("NVIDIA GeForce RTX 3070", {"fp32": 20.3, "bf16": 40.6, "int8": 162.6}),
    ("NVIDIA GeForce RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71, "int8": 284}),
    ("NVIDIA GeForce RTX 3090 Ti", {"fp32": 40, "bf16": 80, "int8": 320}),
    ("NVIDIA GeForce RTX 4070 Ti", {"fp32": 40.1}),
    ("NVIDIA GeForce RTX 4080", {"fp32": 48.7, "bf16": 97.5, "int8": 389.9}),
    ("NVIDIA GeForce RTX 4080 SUPER", {"fp32": 52.2, "int8": 417.6}),
    ("NVIDIA GeForce RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3, "int8": 660.6}),
    ("NVIDIA GeForce RTX 4090 D", {"fp32": 73.5}),
    ("NVIDIA GeForce RTX 5080", {"fp32": 56.3, "bf16": 112.6}),
    ("NVIDIA GeForce RTX 5090", {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "int8": 838}),
    ("Quadro RTX 5000", {"fp32": 11.2, "fp16": 89.2}),
    ("Quadro RTX 6000", {"fp32": 16.3, "fp16": 130.5, "int8": 261}),
    ("Quadro RTX 8000", {"fp32": 16.3, "fp16": 130.5}),
    ("NVIDIA TITAN RTX", {"fp32": 16.3, "fp16": 130.5}),
    ("NVIDIA RTX A2000 12GB", {"fp32": 8, "fp16": 63.9 / 2}),
    ("NVIDIA RTX A4000", {"fp32": 19.2, "fp16": 153.4 / 2}),
    ("NVIDIA RTX A4500", {"fp32": 23.7, "fp16": 189.2 / 2}),
    ("NVIDIA RTX A5000", {"fp32": 27.8, "fp16": 222.2 / 2}),
    ("NVIDIA RTX A5500", {"fp32": 34.1, "fp16": 272.8 / 2}),
    ("NVIDIA RTX A6000", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8, "int8": 309.7}),
    ("NVIDIA RTX 6000 Ada Generation", {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp8": 728.5, "int8": 728.5}),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", {"fp32": 126, "bf16": 503.8}),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", {"fp32": 110}),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", {"tf32": 234}),
]


def test_rates_of_cards_are_those_that_nvidia_prints():
    for name, rates in PRINTED_RATES:
        for dtype, tflops in rates.items():
            assert find_peak(name).flops[dtype] == pytest.approx(tflops * 1e12, rel=0.005), name


# What one SM or compute unit does in a clock cycle, by NVIDIA's whitepapers and AMD's documentation of ROCm; a
# multiply-add is two. 16 stands for bf16 and fp16, 8 for fp8 and int8.
CHIPS = {
    "GP100": "fp64:64 fp32:128",
    "GV100": "fp64:64 fp32:128 16:1024",
    "TU104": "fp32:128 16:1024 8:2048",
    "GA100": "fp64:128 fp32:128 tf32:1024 16:2048 8:4096",
    "GA10x": "fp32:256 tf32:512 16:1024 8:2048",
    "GA10x, half": "fp32:256 tf32:256 16:512 8:1024",
    "AD10x": "fp32:256 tf32:512 16:1024 8:2048",
    "AD10x, half": "fp32:256 tf32:256 16:512 8:1024",
    "GH100": "fp64:256 fp32:256 tf32:2048 16:4096 8:8192",
    "GH100, quarter": "tf32:512 16:1024 8:2048",
    "GB100": "fp64:128 fp32:256 tf32:4096 16:8192 8:16384",
    "CDNA1": "fp64:64 fp32:256 bf16:512 fp16:1024 8:1024",
    "CDNA2": "fp64:256 fp32:256 16:1024 8:1024",
    "CDNA3": "fp64:256 fp32:256 tf32:1024 16:2048 8:4096",
    "CDNA4": "fp64:128 fp32:256 16:4096 8:8192",
}
ALIKE = {"bf16": "16", "fp16": "16", "fp8": "8", "int8": "8"}


# Boost clock in MHz; that of the tensor cores where the vendor states one; how much of that the printed rates assume
# at least. Newer parts do not hold the highest clock that the driver shows with all tensor cores at work.
CLOCKS = (
    ("P100 SXM2", "GP100", 1480, None, 0.97),
    ("P100 PCIe", "GP100", 1303, None, 0.97),
    ("V100 SXM2", "GV100", 1530, None, 0.97),
    ("V100 PCIe", "GV100", 1380, None, 0.97),
    ("V100S PCIe", "GV100", 1597, None, 0.97),
    ("T4", "TU104", 1590, None, 0.97),
    ("A2", "GA10x", 1770, None, 0.97),
    ("A10", "GA10x", 1695, None, 0.97),
    ("A10G", "GA10x, half", 1710, None, 0.97),
    ("A16", "GA10x", 1755, None, 0.97),
    ("A30", "GA100", 1440, None, 0.97),
    ("A40", "GA10x", 1740, None, 0.97),
    ("A100", "GA100", 1410, None, 0.97),
    ("A800", "GA100", 1410, None, 0.97),
    ("L4", "AD10x", 2040, None, 0.97),
    ("L20", "AD10x, half", 2520, None, 0.97),
    ("L40", "AD10x, half", 2490, None, 0.97),
    ("L40S", "AD10x", 2520, None, 0.97),
    ("H100 SXM", "GH100", 1980, 1830, 0.99),
    ("H100 PCIe", "GH100", 1755, 1620, 0.99),
    ("H100 NVL", "GH100", 1785, None, 0.85),
    ("H800 SXM", "GH100", 1980, 1830, 0.99),
    ("H800 PCIe", "GH100", 1755, 1620, 0.99),
    ("H200 SXM", "GH100", 1980, 1830, 0.99),
    ("H200 NVL", "GH100", 1785, None, 0.85),
    ("H20", "GH100, quarter", 1980, None, 0.9),
    ("GH200", "GH100", 1980, 1830, 0.99),
    ("B200", "GB100", 1965, None, 0.9),
    ("GB200", "GB100", 2062, None, 0.9),
    ("B300", "GB100", 2032, None, 0.9),
    ("GB300", "GB100", 2070, None, 0.9),
    ("MI100", "CDNA1", 1502, None, 0.99),
    ("MI210", "CDNA2", 1700, None, 0.99),
    ("MI250X (one die)", "CDNA2", 1700, None, 0.99),
    ("MI250 (one die)", "CDNA2", 1700, None, 0.99),
    ("MI300A", "CDNA3", 2100, None, 0.99),
    ("MI300X", "CDNA3", 2100, None, 0.99),
    ("MI325X", "CDNA3", 2100, None, 0.99),
    ("MI350X", "CDNA4", 2200, None, 0.99),
    ("MI355X", "CDNA4", 2400, None, 0.99),
)


def test_printed_rates_are_what_the_units_of_the_chip_can_do():
    for device, chip, mhz, tensor_mhz, least in CLOCKS:
        operations = {dtype: int(number) for dtype, _, number in (cell.partition(":") for cell in CHIPS[chip].split())}
        part = BY_NAME[device]
        for dtype, printed in part.flops.items():
            per_cycle = operations[dtype if dtype in operations else ALIKE[dtype]]
            clock = mhz if dtype in {"fp64", "fp32"} else tensor_mhz or mhz
            assert least < printed / (part.sms * per_cycle * clock * 1e6) < 1.02, (device, dtype)


def test_every_printed_row_is_compared_with_its_chip():
    computed = {part.device for part in DEVICES if "boost clock" in part.source}
    assert {device for device, *_ in CLOCKS} | computed == set(BY_NAME)


# The fastest square product that PyTorch users measured, https://github.com/zzc0721/torch-performance-test-data. A rate
# with FP16 accumulate, or with sparsity, or half the right one, would be off by a factor of two. GeForce cards run
# above their stated clock; an L4 stays far below it, at 72 W.
MEASURED = [
    ("NVIDIA A40", "bf16", 122.3),
    ("NVIDIA L4", "bf16", 70.9),
    ("NVIDIA L20", "bf16", 114.1),
    ("NVIDIA L40S", "bf16", 269.2),
    ("NVIDIA H20", "bf16", 142.3),
    ("NVIDIA H20", "tf32", 71.8),
    ("NVIDIA H800 PCIe", "bf16", 503.8),
    ("NVIDIA H100 80GB HBM3", "bf16", 797.5),
    ("NVIDIA H200", "bf16", 790.3),
    ("NVIDIA RTX A2000 12GB", "bf16", 37.3),
    ("NVIDIA RTX A4000", "fp16", 65.4),
    ("NVIDIA RTX A6000", "bf16", 123.3),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", 417.3),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "tf32", 205.2),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "fp16", 390.9),
    ("NVIDIA GeForce RTX 2080 Ti", "fp16", 56.8),
    ("NVIDIA GeForce RTX 3060", "bf16", 25.5),
    ("NVIDIA GeForce RTX 3060 Ti", "bf16", 36.5),
    ("NVIDIA GeForce RTX 3070 Ti", "bf16", 45.8),
    ("NVIDIA GeForce RTX 3080 Ti", "bf16", 77.7),
    ("NVIDIA GeForce RTX 3090", "bf16", 76.6),
    ("NVIDIA GeForce RTX 5050", "bf16", 28.4),
    ("NVIDIA GeForce RTX 5060", "bf16", 41.9),
    ("NVIDIA GeForce RTX 5060 Ti", "bf16", 50.2),
    ("NVIDIA GeForce RTX 5070", "bf16", 67.5),
    ("NVIDIA GeForce RTX 5080", "bf16", 102.9),
    ("NVIDIA GeForce RTX 5090", "bf16", 236),
]


def test_what_others_measured_is_near_the_rate():
    for name, dtype, tflops in MEASURED:
        assert 0.55 < tflops * 1e12 / find_peak(name).flops[dtype] < 1.2, name


NOT_ONE_KNOWN_DEVICE = [
    "",
    "cpu",
    "Graphics Device",
    "NVIDIA",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb",
    "NVIDIA A100-SXM-64GB",  # Leonardo's, with more units than the product
    "GRID A100X-40C",  # virtual GPUs
    "GRID A100-10C",
    "NVIDIA A100-40C",
    "NVIDIA L40S-48Q",
    "GRID T4-16Q",
    "NVIDIA A100X",
    "NVIDIA A100-PG509-200",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 3080 Laptop GPU",
    "NVIDIA GeForce RTX 2080 with Max-Q Design",
    "NVIDIA GeForce GTX 1080 Ti",
    "NVIDIA GeForce GTX 1660 Ti",
    "Quadro RTX 6000 with Max-Q Design",
    "NVIDIA RTX 6000",
    "NVIDIA RTX A5000 Laptop GPU",
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA RTX PRO 5000 Blackwell",
    "Tesla V100-SXM2-32GB-LS",
    "Tesla V100-SXM3-32GB",
    "Tesla V100-FHHL-16GB",
    "NVIDIA GB10",
    "NVIDIA Thor",
    "Orin",
    "AMD Instinct MI308X",
    "AMD Instinct MI250X/MI250",  # two products
    "AMD Radeon Graphics",
    "NVIDIA H100",  # three products
    "Tesla V100",
    "NVIDIA GeForce RTX 2060",
    "NVIDIA GeForce RTX 3050",
    "NVIDIA GeForce RTX 3080",
]


def test_what_is_not_in_the_table_or_not_one_device_has_no_peak():
    assert [name for name in NOT_ONE_KNOWN_DEVICE if find_peak(name)] == []


@pytest.mark.parametrize(
    ("name", "figures", "device"),
    [
        ("NVIDIA H100", {"sms": 114}, "H100 PCIe"),
        ("NVIDIA H100", {"sms": 132, "memory_bytes": 85_029_158_912}, "H100 SXM"),
        ("NVIDIA H100", {"memory_bytes": 99_987_488_768}, "H100 NVL"),
        ("NVIDIA H100", {"power_w": lambda: 700.0}, "H100 SXM"),
        ("NVIDIA H100", {"memory_bytes": 85_029_158_912}, None),
        ("NVIDIA H100", {"power_w": lambda: 350.0}, None),  # any of them can be limited to this
        ("Tesla V100", {"power_w": lambda: 300.0}, "V100 SXM2"),
        ("AMD Instinct MI250X/MI250", {"sms": 110}, "MI250X (one die)"),
        ("AMD Instinct MI250X/MI250", {"sms": 104}, "MI250 (one die)"),
        ("NVIDIA A100-SXM4-40GB", {"sms": 108, "memory_bytes": 42_405_855_232}, "A100"),
        ("NVIDIA A100 80GB PCIe", {"sms": 108, "memory_bytes": 84_974_239_744, "power_w": lambda: 300.0}, "A100"),
        ("NVIDIA GeForce RTX 2060", {"sms": 30}, "GeForce RTX 2060 6 GB"),
        ("NVIDIA GeForce RTX 3050", {"memory_bytes": int(7.65 * GIB)}, "GeForce RTX 3050 8 GB"),
        ("NVIDIA GeForce RTX 3080", {"sms": 68}, "GeForce RTX 3080 10 GB"),
        ("NVIDIA GeForce RTX 3080", {"memory_bytes": int(11.76 * GIB)}, "GeForce RTX 3080 12 GB"),
        ("NVIDIA GeForce RTX 4090", {"sms": 128, "memory_bytes": 25_393_692_672}, "GeForce RTX 4090"),
        ("NVIDIA H200", {"sms": 132, "memory_bytes": 150_109_880_320, "power_w": lambda: 700.0}, "H200 SXM"),
        ("AMD Instinct MI300X", {"sms": 304, "memory_bytes": 206_141_652_992}, "MI300X"),
        ("AMD Instinct MI300X", {"sms": 38}, None),  # one of eight compute partitions
        ("NVIDIA H100 80GB HBM3", {"sms": 16}, None),  # a slice whose name does not say so
        ("NVIDIA GeForce RTX 3080", {"memory_bytes": 20 * GIB}, None),  # one that was rebuilt
    ],
)
def test_other_figures_decide_where_the_name_does_not(name, figures, device):
    peak = find_peak(name, **figures)
    assert (peak.device if peak else None) == device


def test_a_type_that_the_device_does_not_have_has_no_rate():
    assert "bf16" not in find_peak("Tesla V100-SXM2-16GB").flops
    assert "fp8" not in find_peak("NVIDIA A100-SXM4-80GB").flops
    assert "complex64" not in find_peak("NVIDIA H200").flops


def test_a_peak_says_where_it_is_from_and_cannot_be_changed():
    peak = find_peak("NVIDIA H100 PCIe")
    assert "H100" in peak.source
    with pytest.raises(TypeError):
        peak.flops["bf16"] = 1.0


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 NVL", "NVIDIA H200", "NVIDIA B200", "NVIDIA GB200", "NVIDIA GH200 480GB"]
)
def test_only_rates_that_are_printed_with_sparsity_are_halved(name):
    peak = find_peak(name)
    for dtype in peak.flops:
        source = peak.source_of(dtype)
        assert ("halved" in source) == (dtype not in {"fp64", "fp32"}), dtype
        assert source.startswith("NVIDIA "), "nothing else is lost"
        assert " ," not in source


@pytest.mark.parametrize(
    ("name", "figures", "asked"),
    [
        ("Tesla V100", {}, True),
        ("NVIDIA H100", {"memory_bytes": 85_029_158_912}, True),
        ("NVIDIA GeForce RTX 3080", {}, False),  # no row has one
        ("NVIDIA RTX 5000 Ada Generation", {}, False),
        ("NVIDIA H200", {}, False),
    ],
)
def test_the_power_limit_is_asked_for_only_where_several_devices_go_by_a_name(name, figures, asked):
    calls = []
    find_peak(name, **figures, power_w=lambda: calls.append(name))
    assert bool(calls) == asked


def test_every_row_of_the_table_is_whole():
    for part in DEVICES:
        assert part.source
        assert part.flops, part.device
        assert set(part.flops) <= {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"}, part.device
        words = "".join(part.name | part.also)
        assert set(words) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"), "as names are compared"


def test_no_two_parts_share_a_name():
    assert len(BY_NAME) == len(DEVICES)
