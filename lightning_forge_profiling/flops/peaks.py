"""Looks up the dense peak rate of a GPU by its driver's name for it."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """One device of the table."""

    device: str
    flops: Mapping[str, float]  # dense, per second, by type; without types that it lacks or whose rate no source gives
    source: str
    name: frozenset[str]  # words that the driver's name must have
    also: frozenset[str]  # further words that it may have
    sms: int  # streaming multiprocessors (compute units on AMD) of the whole device: with fewer it is a slice
    memory_gib: float | None
    power_w: float | None

    def source_of(self, dtype: str) -> str:
        """The source of one type's rate: data sheets give fp64 and fp32 without sparsity, so they are not halved."""
        return self.source.replace(", halved", "") if dtype in {"fp64", "fp32"} else self.source

    def fits(self, memory_bytes: int | None, sms: int | None) -> bool:
        """Whether nothing that the driver reports contradicts it."""
        # up to a tenth less than the nominal memory, without ECC and the driver's own reserve
        memory_gib = memory_bytes / 2**30 if memory_bytes and self.memory_gib else None
        fits_memory = memory_gib is None or math.isclose(memory_gib, self.memory_gib or 0.0, rel_tol=0.1)
        return fits_memory and (not sms or sms == self.sms)


_CLOCK: Final = "SMs and boost clock from NVIDIA's data sheets; rates an SM as in the "
_GEFORCE_CLOCK: Final = "SMs and boost clock from https://www.nvidia.com/en-us/geforce/; rates an SM as in the "

# A line with # is the source of the rows below it. In brackets: words that the driver's name may also have; any other
# word means a different device. GiB and watts (the highest power limit) stand where the name alone does not tell one
# part from another. Rates are as vendors print them, dense TFLOP/s (TOP/s for int8); a line with @ gives operations an
# SM and clock cycle instead, for cards whose data sheets do not print dense rates for each type.
#
# Workstation cards accumulate in FP32 as fast as in FP16, other than a GeForce. That is stated for the cards in the
# whitepapers and follows from measured products for the A2000 and A4000. For smaller Ada and Blackwell cards (RTX 5000
# Ada, RTX PRO 5000) neither is there, so they are left out. A GeForce of Blackwell has two rates for fp8 (products with
# block scales run at twice the whitepaper's), so it has none here.
_TABLE: Final = f"""
device            name                               SMs  GiB  W    fp64   fp32   tf32   bf16    fp16    fp8     int8

# NVIDIA Tesla P100 data sheet (its FP16 rate is for accumulating in FP16)
P100 SXM2         P100 SXM2 [16GB]                   56   -    -    5.3    10.6   -      -       -       -       -
P100 PCIe         P100 PCIE [12GB 16GB]              56   -    -    4.7    9.3    -      -       -       -       -
# NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/
V100 SXM2         V100 [SXM2 16GB 32GB]              80   -    300  7.8    15.7   -      -       125     -       -
V100 PCIe         V100 [PCIE 16GB 32GB]              80   -    250  7      14     -      -       112     -       -
V100S PCIe        V100S [PCIE 32GB]                  80   -    -    8.2    16.4   -      -       130     -       -
# NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/
T4                T4                                 40   -    -    -      8.1    -      -       65      -       130
# NVIDIA A2 data sheet, https://www.nvidia.com/en-us/data-center/products/a2/
A2                A2                                 10   -    -    -      4.5    9      18      18      -       36
# NVIDIA A10 data sheet, https://www.nvidia.com/en-us/data-center/products/a10-gpu/
A10               A10                                72   -    -    -      31.2   62.5   125     125     -       250
# NVIDIA A10G data sheet for AWS (EC2 G5): per SM its tensor cores do half of what an A10's do
A10G              A10G                               80   -    -    -      35     35     70      70      -       140
# NVIDIA A16 data sheet, one of the four GPUs of a board, https://www.nvidia.com/en-us/data-center/products/a16-gpu/
A16               A16                                10   -    -    -      4.5    9      17.9    17.9    -       35.9
# NVIDIA A30 data sheet, https://www.nvidia.com/en-us/data-center/products/a30-gpu/
A30               A30                                56   -    -    10.3   10.3   82     165     165     -       330
# NVIDIA A40 data sheet, https://www.nvidia.com/en-us/data-center/a40/
A40               A40                                84   -    -    -      37.4   74.8   149.7   149.7   -       299.3
# NVIDIA A100 data sheet (the same for SXM and PCIe), https://www.nvidia.com/en-us/data-center/a100/
A100              A100 [SXM SXM4 PCIE 40GB 80GB]     108  -    -    19.5   19.5   156    312     312     -       624
# an A100 with slower NVLink: NVIDIA A100 data sheet
A800              A800 [SXM4 PCIE 40GB 80GB ACTIVE]  108  -    -    19.5   19.5   156    312     312     -       624
# NVIDIA L4 data sheet, https://www.nvidia.com/en-us/data-center/l4/
L4                L4                                 58   -    -    -      30.3   60     121     121     242.5   242.5
# as resellers state it, NVIDIA publishes no data sheet (92 SMs at an L40's rate and 2520 MHz)
L20               L20                                92   -    -    -      59.8   59.8   119.5   119.5   239     239
# NVIDIA L40 data sheet, https://www.nvidia.com/en-us/data-center/l40/
L40               L40                                142  -    -    -      90.5   90.5   181.05  181.05  362     362
# NVIDIA L40S data sheet (half of its 733 with sparsity is 366.5), https://www.nvidia.com/en-us/data-center/l40s/
L40S              L40S                               142  -    -    -      91.6   183    362.05  362.05  733     733
# NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2
H100 SXM          H100 [SXM SXM5 80GB HBM3]          132  80   700  66.9   66.9   494.7  989.4   989.4   1978.9  1978.9
H100 PCIe         H100 [PCIE 80GB HBM2E]             114  80   350  51.2   51.2   378    756     756     1513    1513
# NVIDIA H100 data sheet, per GPU, halved, https://www.nvidia.com/en-us/data-center/h100/
H100 NVL          H100 [NVL]                         132  94   400  60     60     417.5  835.5   835.5   1670.5  1670.5
# an H100 with slower NVLink and next to no FP64: NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2
H800 SXM          H800                               132  -    -    -      66.9   494.7  989.4   989.4   1978.9  1978.9
H800 PCIe         H800 PCIE                          114  -    -    -      51.2   378    756     756     1513    1513
# as resellers state it, NVIDIA publishes no data sheet (their FP32 rate is more than its SMs could do)
H20               H20 [3E]                           78   -    -    -      -      74     148     148     296     296
# NVIDIA H200 data sheet, halved, https://www.nvidia.com/en-us/data-center/h200/
H200 SXM          H200                               132  -    -    67     67     494.5  989.5   989.5   1979    1979
H200 NVL          H200 NVL                           132  -    -    60     60     417.5  835.5   835.5   1670.5  1670.5
# NVIDIA GH200 Grace Hopper Superchip data sheet, halved
GH200             GH200 [480GB 120GB 144G HBM3E]     132  -    -    67     67     494.5  989.5   989.5   1979    1979
# NVIDIA HGX B200 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/
B200              B200                               148  -    -    37     75     1125   2250    2250    4500    4500
# NVIDIA GB200 NVL72 data sheet, per GPU, halved, https://www.nvidia.com/en-us/data-center/gb200-nvl72/
GB200             GB200                              152  -    -    40     80     1250   2500    2500    5000    5000
# NVIDIA HGX B300 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/
B300              B300 [SXM6 AC]                     148  -    -    -      75     1125   2250    2250    4500    -
# NVIDIA GB300 NVL72 data sheet, per GPU, halved (FP32 as GB200), https://www.nvidia.com/en-us/data-center/gb300-nvl72/
GB300             GB300                              152  -    -    -      80     1250   2500    2500    5000    -

# AMD Instinct MI100 data sheet, matrix cores
MI100             MI100                              120  -    -    11.5   46.1   -      92.3    184.6   -       184.6
# AMD Instinct MI210 data sheet, matrix cores
MI210             MI210                              104  -    -    45.3   45.3   -      181     181     -       181
# AMD Instinct MI250 and MI250X data sheets, matrix cores, half: each of the two dies is a device of its own
MI250X (one die)  MI250X [MI250]                     110  -    -    47.85  47.85  -      191.5   191.5   -       191.5
MI250 (one die)   MI250 [MI250X]                     104  -    -    45.25  45.25  -      181.05  181.05  -       181.05
# AMD Instinct MI300A data sheet, matrix cores
MI300A            MI300A                             228  -    -    122.6  122.6  490.3  980.6   980.6   1961.2  1961.2
# AMD Instinct MI300X and MI325X data sheets, matrix cores
MI300X            MI300X [OAM VF]                    304  -    -    163.4  163.4  653.7  1307.4  1307.4  2614.9  2614.9
MI325X            MI325X [OAM VF]                    304  -    -    163.4  163.4  653.7  1307.4  1307.4  2614.9  2614.9
# AMD Instinct MI350X and MI355X data sheets, matrix cores (no TF32)
MI350X            MI350X [OAM VF]                    256  -    -    72.1   144.2  -      2306.9  2306.9  4613.7  4613.7
MI355X            MI355X [OAM VF]                    256  -    -    78.6   157.3  -      2516.6  2516.6  5033.2  5033.2

device                              name                                                SMs  GiB  MHz
# {_CLOCK}NVIDIA Turing GPU Architecture whitepaper, table 1
@ fp32:128 fp16:1024 int8:2048
Quadro RTX 4000                     QUADRO RTX 4000                                     36   -    1545
Quadro RTX 5000                     QUADRO RTX 5000                                     48   -    1815
Quadro RTX 6000                     QUADRO RTX 6000                                     72   -    1770
Quadro RTX 8000                     QUADRO RTX 8000                                     72   -    1770
TITAN RTX                           TITAN RTX                                           72   -    1770
# {_CLOCK}NVIDIA Ampere GA102 architecture whitepaper, appendix A
@ fp32:256 tf32:512 bf16:1024 fp16:1024 int8:2048
RTX A2000                           RTX A2000 [12GB]                                    26   -    1200
RTX A4000                           RTX A4000                                           48   -    1560
RTX A4500                           RTX A4500                                           56   -    1650
RTX A5000                           RTX A5000                                           64   -    1695
RTX A5500                           RTX A5500                                           80   -    1665
RTX A6000                           RTX A6000                                           84   -    1800
# {_CLOCK}NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A
@ fp32:256 tf32:512 bf16:1024 fp16:1024 int8:2048 fp8:2048
RTX 6000 Ada                        RTX 6000 ADA [GENERATION]                           142  -    2505
# {_CLOCK}NVIDIA RTX Blackwell PRO GPU Architecture whitepaper v1.1, table 4
@ fp32:256 tf32:512 bf16:1024 fp16:1024 int8:2048 fp8:2048
RTX PRO 6000 Blackwell Workstation  RTX PRO 6000 BLACKWELL WORKSTATION [EDITION]        188  -    2617
RTX PRO 6000 Blackwell Max-Q        RTX PRO 6000 BLACKWELL MAX Q [WORKSTATION EDITION]  188  -    2288
RTX PRO 6000 Blackwell Server       RTX PRO 6000 BLACKWELL SERVER [EDITION]             188  -    2430
# {_GEFORCE_CLOCK}NVIDIA Turing GPU Architecture whitepaper, table 1
@ fp32:128 fp16:512 int8:2048
GeForce RTX 2060 6 GB               RTX 2060                                            30   6    1680
GeForce RTX 2060 12 GB              RTX 2060                                            34   12   1650
GeForce RTX 2060 SUPER              RTX 2060 SUPER                                      34   -    1650
GeForce RTX 2070                    RTX 2070                                            36   -    1620
GeForce RTX 2070 SUPER              RTX 2070 SUPER                                      40   -    1770
GeForce RTX 2080                    RTX 2080                                            46   -    1710
GeForce RTX 2080 SUPER              RTX 2080 SUPER                                      48   -    1815
GeForce RTX 2080 Ti                 RTX 2080 TI                                         68   -    1545
# {_GEFORCE_CLOCK}NVIDIA Ampere GA102 architecture whitepaper, appendix A
@ fp32:256 tf32:256 bf16:512 fp16:512 int8:2048
GeForce RTX 3050 6 GB               RTX 3050                                            18   6    1470
GeForce RTX 3050 8 GB               RTX 3050                                            20   8    1777
GeForce RTX 3060                    RTX 3060                                            28   -    1777
GeForce RTX 3060 Ti                 RTX 3060 TI                                         38   -    1665
GeForce RTX 3070                    RTX 3070                                            46   -    1725
GeForce RTX 3070 Ti                 RTX 3070 TI                                         48   -    1770
GeForce RTX 3080 10 GB              RTX 3080                                            68   10   1710
GeForce RTX 3080 12 GB              RTX 3080                                            70   12   1710
GeForce RTX 3080 Ti                 RTX 3080 TI                                         80   -    1665
GeForce RTX 3090                    RTX 3090                                            82   -    1695
GeForce RTX 3090 Ti                 RTX 3090 TI                                         84   -    1860
# {_GEFORCE_CLOCK}NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A
@ fp32:256 tf32:256 bf16:512 fp16:512 int8:2048 fp8:1024
GeForce RTX 4060                    RTX 4060                                            24   -    2460
GeForce RTX 4060 Ti                 RTX 4060 TI                                         34   -    2535
GeForce RTX 4070                    RTX 4070                                            46   -    2475
GeForce RTX 4070 SUPER              RTX 4070 SUPER                                      56   -    2475
GeForce RTX 4070 Ti                 RTX 4070 TI                                         60   -    2610
GeForce RTX 4070 Ti SUPER           RTX 4070 TI SUPER                                   66   -    2610
GeForce RTX 4080                    RTX 4080                                            76   -    2505
GeForce RTX 4080 SUPER              RTX 4080 SUPER                                      80   -    2550
GeForce RTX 4090 D                  RTX 4090 D                                          114  -    2520
GeForce RTX 4090                    RTX 4090                                            128  -    2520
# {_GEFORCE_CLOCK}NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A
@ fp32:256 tf32:256 bf16:512 fp16:512 int8:2048
GeForce RTX 5050                    RTX 5050                                            20   -    2572
GeForce RTX 5060                    RTX 5060                                            30   -    2497
GeForce RTX 5060 Ti                 RTX 5060 TI                                         36   -    2572
GeForce RTX 5070                    RTX 5070                                            48   -    2512
GeForce RTX 5070 Ti                 RTX 5070 TI                                         70   -    2452
GeForce RTX 5080                    RTX 5080                                            84   -    2617
GeForce RTX 5090                    RTX 5090                                            170  -    2407
"""


def _devices() -> Iterator[DevicePeak]:
    dtypes: list[str] = []
    operations: dict[str, int] = {}
    source = ""
    for line in filter(None, _TABLE.splitlines()):
        cells = re.split(r" {2,}", line)
        if line.startswith("#"):
            source = line.removeprefix("# ")
        elif line.startswith("@"):
            operations = {dtype: int(number) for dtype, number in (each.split(":") for each in line.split()[1:])}
        elif cells[0] == "device":
            dtypes = cells[5:]
        else:
            device, names, sms, memory_gib, *figures = cells
            power_w = "-"
            if operations:
                tflops = {dtype: int(sms) * number * int(figures[0]) / 1e6 for dtype, number in operations.items()}
            else:
                power_w, *rates = figures
                tflops = {dtype: float(rate) for dtype, rate in zip(dtypes, rates, strict=True) if rate != "-"}
            name, _, also = names.rstrip("]").partition(" [")
            yield DevicePeak(
                device=device,
                flops=MappingProxyType({dtype: rate * 1e12 for dtype, rate in tflops.items()}),
                source=source,
                name=frozenset(name.split()),
                also=frozenset(also.split()),
                sms=int(sms),
                memory_gib=None if memory_gib == "-" else float(memory_gib),
                power_w=None if power_w == "-" else float(power_w),
            )


DEVICES: Final = tuple(_devices())

# Words that some driver versions include and others omit.
_NO_DISTINCTION: Final = frozenset({"", "NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT"})


def find_peak(
    name: str,
    *,
    memory_bytes: int | None = None,
    sms: int | None = None,
    power_w: Callable[[], float | None] = lambda: None,
) -> DevicePeak | None:
    """Look a device up by its driver's name; None unless exactly one device matches.

    Every word must match, so that similar names (a laptop's GPU, a MIG slice, a virtual GPU, an export version) are not
    taken for a device in the table. The other arguments decide between devices of one name, or contradict it (a compute
    partition with fewer units). The power limit is asked for only where several devices of different limits match.

    Examples:
        >>> find_peak("NVIDIA H100 PCIe").flops["bf16"] / 1e12
        756.0
        >>> find_peak("NVIDIA H100") is None
        True
        >>> find_peak("NVIDIA H100", sms=114).device
        'H100 PCIe'
    """
    words = frozenset(re.split(r"[^A-Z0-9.]+", name.upper())) - _NO_DISTINCTION
    named = (device for device in DEVICES if device.name <= words <= device.name | device.also)
    matches = [device for device in named if device.fits(memory_bytes, sms)]
    if len(matches) > 1 and any(device.power_w for device in matches):
        limit_w = power_w() or 0.0
        matches = [device for device in matches if limit_w <= (device.power_w or limit_w)]
    return matches[0] if len(matches) == 1 else None


# copies of 39 to 134 MB from pinned memory ran at 53 to 55 GB/s on H100s and H200s, on PCIe 5; PCIe 4 has half
_ON_PCIE_5: Final = re.compile(r"\b(H100|H200|H800|H20|B200|B300|RTX PRO|RTX 50\d\d)\b")


def bus_gb_per_s(device: str) -> float:
    """How fast copies from pinned memory are to a GPU of this name."""
    return 53.0 if _ON_PCIE_5.search(device) else 26.0
