"""Looks up the dense peak rate of a GPU by its driver's name for it."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_CLOCK: Final = "SMs and boost clock from NVIDIA's data sheets; rates an SM as in the "
_GEFORCE_CLOCK: Final = "SMs and boost clock from https://www.nvidia.com/en-us/geforce/; rates an SM as in the "

# A line with # is the source of the rows below it. Rates are dense TFLOP/s (TOP/s for int8), as vendors print them; of
# cards whose data sheets do not print them for each type, SMs x operations of an SM and clock cycle x boost clock. SMs
# (compute units on AMD) are those of the whole device: with fewer it is a slice. W is the highest power limit; GiB and
# W stand where the name alone does not tell one part from another. The driver's name is that of the device, unless
# another is given; in brackets are words that it may also have. Any other word means a different device.
#
# Workstation cards accumulate in FP32 as fast as in FP16, other than a GeForce. That is stated for the cards in the
# whitepapers and follows from measured products for the A2000 and A4000. For smaller Ada and Blackwell cards (RTX 5000
# Ada, RTX PRO 5000) neither is there, so they are left out. A GeForce of Blackwell has two rates for fp8 (products with
# block scales run at twice the whitepaper's), so it has none here.
_TABLE: Final = f"""
device                              SMs  GiB  W    fp64   fp32   tf32   bf16    fp16    fp8     int8    name, if another
# NVIDIA Tesla P100 data sheet (its FP16 rate is for accumulating in FP16)
P100 SXM2                           56   -    -    5.3    10.6   -      -       -       -       -       [16GB]
P100 PCIe                           56   -    -    4.7    9.3    -      -       -       -       -       [12GB 16GB]
# NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/
V100 SXM2                           80   -    300  7.8    15.7   -      -       125     -       -       V100 [SXM2 16GB 32GB]
V100 PCIe                           80   -    250  7      14     -      -       112     -       -       V100 [PCIE 16GB 32GB]
V100S PCIe                          80   -    -    8.2    16.4   -      -       130     -       -       V100S [PCIE 32GB]
# NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/
T4                                  40   -    -    -      8.1    -      -       65      -       130
# NVIDIA A2 data sheet, https://www.nvidia.com/en-us/data-center/products/a2/
A2                                  10   -    -    -      4.5    9      18      18      -       36
# NVIDIA A10 data sheet, https://www.nvidia.com/en-us/data-center/products/a10-gpu/
A10                                 72   -    -    -      31.2   62.5   125     125     -       250
# NVIDIA A10G data sheet for AWS (EC2 G5): per SM its tensor cores do half of what an A10's do
A10G                                80   -    -    -      35     35     70      70      -       140
# NVIDIA A16 data sheet, one of the four GPUs of a board, https://www.nvidia.com/en-us/data-center/products/a16-gpu/
A16                                 10   -    -    -      4.5    9      17.9    17.9    -       35.9
# NVIDIA A30 data sheet, https://www.nvidia.com/en-us/data-center/products/a30-gpu/
A30                                 56   -    -    10.3   10.3   82     165     165     -       330
# NVIDIA A40 data sheet, https://www.nvidia.com/en-us/data-center/a40/
A40                                 84   -    -    -      37.4   74.8   149.7   149.7   -       299.3
# NVIDIA A100 data sheet (the same for SXM and PCIe), https://www.nvidia.com/en-us/data-center/a100/
A100                                108  -    -    19.5   19.5   156    312     312     -       624     [SXM SXM4 PCIE 40GB 80GB]
# an A100 with slower NVLink: NVIDIA A100 data sheet
A800                                108  -    -    19.5   19.5   156    312     312     -       624     [SXM4 PCIE 40GB 80GB ACTIVE]
# NVIDIA L4 data sheet, https://www.nvidia.com/en-us/data-center/l4/
L4                                  58   -    -    -      30.3   60     121     121     242.5   242.5
# as resellers state it, NVIDIA publishes no data sheet (92 SMs at an L40's rate and 2520 MHz)
L20                                 92   -    -    -      59.8   59.8   119.5   119.5   239     239
# NVIDIA L40 data sheet, https://www.nvidia.com/en-us/data-center/l40/
L40                                 142  -    -    -      90.5   90.5   181.05  181.05  362     362
# NVIDIA L40S data sheet (half of its 733 with sparsity is 366.5), https://www.nvidia.com/en-us/data-center/l40s/
L40S                                142  -    -    -      91.6   183    362.05  362.05  733     733
# NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2
H100 SXM                            132  80   700  66.9   66.9   494.7  989.4   989.4   1978.9  1978.9  H100 [SXM SXM5 80GB HBM3]
H100 PCIe                           114  80   350  51.2   51.2   378    756     756     1513    1513    H100 [PCIE 80GB HBM2E]
# NVIDIA H100 data sheet, per GPU, halved, https://www.nvidia.com/en-us/data-center/h100/
H100 NVL                            132  94   400  60     60     417.5  835.5   835.5   1670.5  1670.5  H100 [NVL]
# an H100 with slower NVLink and next to no FP64: NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2
H800 SXM                            132  -    -    -      66.9   494.7  989.4   989.4   1978.9  1978.9  H800
H800 PCIe                           114  -    -    -      51.2   378    756     756     1513    1513
# as resellers state it, NVIDIA publishes no data sheet (their FP32 rate is more than its SMs could do)
H20                                 78   -    -    -      -      74     148     148     296     296     [3E]
# NVIDIA H200 data sheet, halved, https://www.nvidia.com/en-us/data-center/h200/
H200 SXM                            132  -    -    67     67     494.5  989.5   989.5   1979    1979    H200
H200 NVL                            132  -    -    60     60     417.5  835.5   835.5   1670.5  1670.5
# NVIDIA GH200 Grace Hopper Superchip data sheet, halved
GH200                               132  -    -    67     67     494.5  989.5   989.5   1979    1979    [480GB 120GB 144G HBM3E]
# NVIDIA HGX B200 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/
B200                                148  -    -    37     75     1125   2250    2250    4500    4500
# NVIDIA GB200 NVL72 data sheet, per GPU, halved, https://www.nvidia.com/en-us/data-center/gb200-nvl72/
GB200                               152  -    -    40     80     1250   2500    2500    5000    5000
# NVIDIA HGX B300 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/
B300                                148  -    -    -      75     1125   2250    2250    4500    -       [SXM6 AC]
# NVIDIA GB300 NVL72 data sheet, per GPU, halved (FP32 as GB200), https://www.nvidia.com/en-us/data-center/gb300-nvl72/
GB300                               152  -    -    -      80     1250   2500    2500    5000    -
# AMD Instinct MI100 data sheet, matrix cores
MI100                               120  -    -    11.5   46.1   -      92.3    184.6   -       184.6
# AMD Instinct MI210 data sheet, matrix cores
MI210                               104  -    -    45.3   45.3   -      181     181     -       181
# AMD Instinct MI250 and MI250X data sheets, matrix cores, half: each of the two dies is a device of its own
MI250X (one die)                    110  -    -    47.85  47.85  -      191.5   191.5   -       191.5   MI250X [MI250]
MI250 (one die)                     104  -    -    45.25  45.25  -      181.05  181.05  -       181.05  MI250 [MI250X]
# AMD Instinct MI300A data sheet, matrix cores
MI300A                              228  -    -    122.6  122.6  490.3  980.6   980.6   1961.2  1961.2
# AMD Instinct MI300X and MI325X data sheets, matrix cores
MI300X                              304  -    -    163.4  163.4  653.7  1307.4  1307.4  2614.9  2614.9  [OAM VF]
MI325X                              304  -    -    163.4  163.4  653.7  1307.4  1307.4  2614.9  2614.9  [OAM VF]
# AMD Instinct MI350X and MI355X data sheets, matrix cores (no TF32)
MI350X                              256  -    -    72.1   144.2  -      2306.9  2306.9  4613.7  4613.7  [OAM VF]
MI355X                              256  -    -    78.6   157.3  -      2516.6  2516.6  5033.2  5033.2  [OAM VF]
# {_CLOCK}NVIDIA Turing GPU Architecture whitepaper, table 1
Quadro RTX 4000                     36   -    -    -      7.119  -      -       56.95   -       113.9
Quadro RTX 5000                     48   -    -    -      11.15  -      -       89.21   -       178.4
Quadro RTX 6000                     72   -    -    -      16.31  -      -       130.5   -       261
Quadro RTX 8000                     72   -    -    -      16.31  -      -       130.5   -       261
TITAN RTX                           72   -    -    -      16.31  -      -       130.5   -       261
# {_CLOCK}NVIDIA Ampere GA102 architecture whitepaper, appendix A
RTX A2000                           26   -    -    -      7.987  15.97  31.95   31.95   -       63.9    [12GB]
RTX A4000                           48   -    -    -      19.17  38.34  76.68   76.68   -       153.4
RTX A4500                           56   -    -    -      23.65  47.31  94.62   94.62   -       189.2
RTX A5000                           64   -    -    -      27.77  55.54  111.1   111.1   -       222.2
RTX A5500                           80   -    -    -      34.1   68.2   136.4   136.4   -       272.8
RTX A6000                           84   -    -    -      38.71  77.41  154.8   154.8   -       309.7
# {_CLOCK}NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A
RTX 6000 Ada                        142  -    -    -      91.06  182.1  364.2   364.2   728.5   728.5   [GENERATION]
# {_CLOCK}NVIDIA RTX Blackwell PRO GPU Architecture whitepaper v1.1, table 4
RTX PRO 6000 Blackwell Workstation  188  -    -    -      126    251.9  503.8   503.8   1008    1008    [EDITION]
RTX PRO 6000 Blackwell Max-Q        188  -    -    -      110.1  220.2  440.5   440.5   880.9   880.9   [WORKSTATION EDITION]
RTX PRO 6000 Blackwell Server       188  -    -    -      117    233.9  467.8   467.8   935.6   935.6   [EDITION]
# {_GEFORCE_CLOCK}NVIDIA Turing GPU Architecture whitepaper, table 1
GeForce RTX 2060 6 GB               30   6    -    -      6.451  -      -       25.8    -       103.2   RTX 2060
GeForce RTX 2060 12 GB              34   12   -    -      7.181  -      -       28.72   -       114.9   RTX 2060
GeForce RTX 2060 SUPER              34   -    -    -      7.181  -      -       28.72   -       114.9
GeForce RTX 2070                    36   -    -    -      7.465  -      -       29.86   -       119.4
GeForce RTX 2070 SUPER              40   -    -    -      9.062  -      -       36.25   -       145
GeForce RTX 2080                    46   -    -    -      10.07  -      -       40.27   -       161.1
GeForce RTX 2080 SUPER              48   -    -    -      11.15  -      -       44.61   -       178.4
GeForce RTX 2080 Ti                 68   -    -    -      13.45  -      -       53.79   -       215.2
# {_GEFORCE_CLOCK}NVIDIA Ampere GA102 architecture whitepaper, appendix A
GeForce RTX 3050 6 GB               18   6    -    -      6.774  6.774  13.55   13.55   -       54.19   RTX 3050
GeForce RTX 3050 8 GB               20   8    -    -      9.098  9.098  18.2    18.2    -       72.79   RTX 3050
GeForce RTX 3060                    28   -    -    -      12.74  12.74  25.48   25.48   -       101.9
GeForce RTX 3060 Ti                 38   -    -    -      16.2   16.2   32.39   32.39   -       129.6
GeForce RTX 3070                    46   -    -    -      20.31  20.31  40.63   40.63   -       162.5
GeForce RTX 3070 Ti                 48   -    -    -      21.75  21.75  43.5    43.5    -       174
GeForce RTX 3080 10 GB              68   10   -    -      29.77  29.77  59.54   59.54   -       238.1   RTX 3080
GeForce RTX 3080 12 GB              70   12   -    -      30.64  30.64  61.29   61.29   -       245.1   RTX 3080
GeForce RTX 3080 Ti                 80   -    -    -      34.1   34.1   68.2    68.2    -       272.8
GeForce RTX 3090                    82   -    -    -      35.58  35.58  71.16   71.16   -       284.7
GeForce RTX 3090 Ti                 84   -    -    -      40     40     79.99   79.99   -       320
# {_GEFORCE_CLOCK}NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A
GeForce RTX 4060                    24   -    -    -      15.11  15.11  30.23   30.23   60.46   120.9
GeForce RTX 4060 Ti                 34   -    -    -      22.06  22.06  44.13   44.13   88.26   176.5
GeForce RTX 4070                    46   -    -    -      29.15  29.15  58.29   58.29   116.6   233.2
GeForce RTX 4070 SUPER              56   -    -    -      35.48  35.48  70.96   70.96   141.9   283.9
GeForce RTX 4070 Ti                 60   -    -    -      40.09  40.09  80.18   80.18   160.4   320.7
GeForce RTX 4070 Ti SUPER           66   -    -    -      44.1   44.1   88.2    88.2    176.4   352.8
GeForce RTX 4080                    76   -    -    -      48.74  48.74  97.47   97.47   194.9   389.9
GeForce RTX 4080 SUPER              80   -    -    -      52.22  52.22  104.4   104.4   208.9   417.8
GeForce RTX 4090 D                  114  -    -    -      73.54  73.54  147.1   147.1   294.2   588.3
GeForce RTX 4090                    128  -    -    -      82.58  82.58  165.2   165.2   330.3   660.6
# {_GEFORCE_CLOCK}NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A
GeForce RTX 5050                    20   -    -    -      13.17  13.17  26.34   26.34   -       105.3
GeForce RTX 5060                    30   -    -    -      19.18  19.18  38.35   38.35   -       153.4
GeForce RTX 5060 Ti                 36   -    -    -      23.7   23.7   47.41   47.41   -       189.6
GeForce RTX 5070                    48   -    -    -      30.87  30.87  61.73   61.73   -       246.9
GeForce RTX 5070 Ti                 70   -    -    -      43.94  43.94  87.88   87.88   -       351.5
GeForce RTX 5080                    84   -    -    -      56.28  56.28  112.6   112.6   -       450.2
GeForce RTX 5090                    170  -    -    -      104.8  104.8  209.5   209.5   -       838
"""  # noqa: E501  (columns)

# Words that some driver versions include and others omit.
_NO_DISTINCTION: Final = frozenset({"", "NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT"})


class DevicePeak(NamedTuple):
    """A row of the table."""

    device: str
    flops: Mapping[str, float]  # dense, per second, by type; without types that it lacks or whose rate no source gives
    source: str
    name: frozenset[str]  # words that the driver's name must have
    also: frozenset[str]  # further words that it may have
    sms: float
    memory_gib: float | None
    power_w: float | None

    def source_of(self, dtype: str) -> str:
        """The source of one type's rate: data sheets give fp64 and fp32 without sparsity, so they are not halved."""
        return self.source.replace(", halved", "") if dtype in {"fp64", "fp32"} else self.source


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^A-Z0-9.]+", name.upper())) - _NO_DISTINCTION


def _rows() -> Iterator[DevicePeak]:
    source, (header, *lines) = "", _TABLE.strip().splitlines()
    dtypes = re.split(r" {2,}", header)[4:-1]
    for line in lines:
        if line.startswith("#"):
            source = line.removeprefix("# ")
            continue
        device, *cells = re.split(r" {2,}", line)
        sms, memory_gib, power_w, *rates = (None if cell == "-" else float(cell) for cell in cells[: 3 + len(dtypes)])
        flops = {dtype: rate * 1e12 for dtype, rate in zip(dtypes, rates, strict=True) if rate is not None}
        name, _, also = "".join(cells[3 + len(dtypes) :]).partition("[")
        words = _words(name or device), _words(also)
        yield DevicePeak(device, MappingProxyType(flops), source, *words, sms or 0.0, memory_gib, power_w)


DEVICES: Final = tuple(_rows())


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
    words = _words(name)
    matches = [one for one in DEVICES if one.name <= words <= one.name | one.also and sms in {None, 0, one.sms}]
    if memory_bytes:  # up to a tenth less than the nominal memory, without ECC and the driver's own reserve
        gib = memory_bytes / 2**30
        matches = [one for one in matches if one.memory_gib is None or math.isclose(gib, one.memory_gib, rel_tol=0.1)]
    if len(matches) > 1 and any(device.power_w for device in matches):
        limit_w = power_w() or 0.0
        matches = [device for device in matches if limit_w <= (device.power_w or limit_w)]
    return matches[0] if len(matches) == 1 else None


# copies of 39 to 134 MB from pinned memory ran at 53 to 55 GB/s on H100s and H200s, on PCIe 5; PCIe 4 has half
_ON_PCIE_5: Final = re.compile(r"\b(H100|H200|H800|H20|B200|B300|RTX PRO|RTX 50\d\d)\b")


def bus_gb_per_s(device: str) -> float:
    """How fast copies from pinned memory are to a GPU of this name."""
    return 53.0 if _ON_PCIE_5.search(device) else 26.0
