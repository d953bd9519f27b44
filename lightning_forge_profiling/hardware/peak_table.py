"""What data-center and workstation GPUs can do at most, and by what names they go.

Rates are dense: data sheets often print the rate with 2:4 sparsity alone, which is halved here. They are those of the
fastest unit that has the type, so of tensor or matrix cores where these have it. What a source does not give is left
out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One device.

    Attributes:
        device: what it is called here.
        name: the words that a driver's name for it must have.
        also: further words that it may have; with any other it is a different device.
        tflops: dense TFLOP/s (TOP/s for int8) by type: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `int8`.
        source: where the rates are from.
        sms: streaming multiprocessors (compute units on AMD) of the whole device. With fewer it is a slice.
        memory_gib: its memory, where that tells it from another of the same name.
        power_w: the highest power limit it can be set to, likewise.
    """

    device: str
    name: str
    also: str = ""
    tflops: Mapping[str, float]
    source: str
    sms: int | None = None
    memory_gib: float | None = None
    power_w: float | None = None


_AMPERE: Final = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_ADA: Final = "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"

_DATA_CENTER: Final = (
    Part(
        device="V100 SXM2",
        name="V100",
        also="SXM2 16GB 32GB",
        tflops={"fp64": 7.8, "fp32": 15.7, "fp16": 125},
        source="NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/",
        sms=80,
        power_w=300,
    ),
    Part(
        device="V100 PCIe",
        name="V100",
        also="PCIE 16GB 32GB",
        tflops={"fp64": 7, "fp32": 14, "fp16": 112},
        source="NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/",
        sms=80,
        power_w=250,
    ),
    Part(
        device="V100S PCIe",
        name="V100S",
        also="PCIE 32GB",
        tflops={"fp64": 8.2, "fp32": 16.4, "fp16": 130},
        source="NVIDIA V100 data sheet, https://www.nvidia.com/en-us/data-center/v100/",
        sms=80,
    ),
    Part(
        device="T4",
        name="T4",
        tflops={"fp32": 8.1, "fp16": 65, "int8": 130},
        source="NVIDIA T4 data sheet, https://www.nvidia.com/en-us/data-center/tesla-t4/",
        sms=40,
    ),
    Part(
        device="A10",
        name="A10",
        tflops={"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125, "int8": 250},
        source="NVIDIA A10 data sheet, https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
        sms=72,
    ),
    Part(
        device="A10G",
        name="A10G",
        tflops={"tf32": 35, "bf16": 70, "fp16": 70, "int8": 140},
        source="NVIDIA A10G data sheet for AWS (EC2 G5): the tensor cores' FP32-accumulate rate is half that of an A10",
        sms=80,
    ),
    Part(
        device="A30",
        name="A30",
        tflops={"fp64": 10.3, "fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165, "int8": 330},
        source="NVIDIA A30 data sheet, https://www.nvidia.com/en-us/data-center/products/a30-gpu/",
        sms=56,
    ),
    Part(
        device="A40",
        name="A40",
        tflops={"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7, "int8": 299.3},
        source="NVIDIA A40 data sheet, https://www.nvidia.com/en-us/data-center/a40/",
        sms=84,
    ),
    Part(
        device="A100",
        name="A100",
        also="SXM SXM4 PCIE 40GB 80GB",
        tflops={"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624},
        source="NVIDIA A100 data sheet (the same for SXM and PCIe), https://www.nvidia.com/en-us/data-center/a100/",
        sms=108,
    ),
    Part(
        device="L4",
        name="L4",
        tflops={"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5, "int8": 242.5},
        source="NVIDIA L4 data sheet, https://www.nvidia.com/en-us/data-center/l4/",
        sms=58,
    ),
    Part(
        device="L40",
        name="L40",
        tflops={"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362, "int8": 362},
        source="NVIDIA L40 data sheet, https://www.nvidia.com/en-us/data-center/l40/",
        sms=142,
    ),
    Part(
        device="L40S",
        name="L40S",
        tflops={"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733, "int8": 733},
        source="NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/",
        sms=142,
    ),
    Part(
        device="H100 SXM",
        name="H100",
        also="SXM SXM5 80GB HBM3",
        tflops={
            "fp64": 66.9,
            "fp32": 66.9,
            "tf32": 494.7,
            "bf16": 989.4,
            "fp16": 989.4,
            "fp8": 1978.9,
            "int8": 1978.9,
        },
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2",
        sms=132,
        memory_gib=80,
        power_w=700,
    ),
    Part(
        device="H100 PCIe",
        name="H100",
        also="PCIE 80GB HBM2E",
        tflops={"fp64": 51.2, "fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513, "int8": 1513},
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2",
        sms=114,
        memory_gib=80,
        power_w=350,
    ),
    Part(
        device="H100 NVL",
        name="H100",
        also="NVL",
        tflops={
            "fp64": 60,
            "fp32": 60,
            "tf32": 417.5,
            "bf16": 835.5,
            "fp16": 835.5,
            "fp8": 1670.5,
            "int8": 1670.5,
        },
        source="NVIDIA H100 data sheet, per GPU and halved, https://www.nvidia.com/en-us/data-center/h100/",
        sms=132,
        memory_gib=94,
        power_w=400,
    ),
    Part(
        device="H200 SXM",
        name="H200",
        tflops={"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979},
        source="NVIDIA H200 data sheet, halved, https://www.nvidia.com/en-us/data-center/h200/",
        sms=132,
    ),
    Part(
        device="H200 NVL",
        name="H200 NVL",
        tflops={
            "fp64": 60,
            "fp32": 60,
            "tf32": 417.5,
            "bf16": 835.5,
            "fp16": 835.5,
            "fp8": 1670.5,
            "int8": 1670.5,
        },
        source="NVIDIA H200 data sheet, halved, https://www.nvidia.com/en-us/data-center/h200/",
        sms=132,
    ),
    Part(
        device="H20",
        name="H20",
        tflops={"fp64": 1, "fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296, "int8": 296},
        source="as resellers state it; NVIDIA publishes no data sheet",
        sms=78,
    ),
    Part(
        device="GH200",
        name="GH200",
        also="480GB 120GB 144G HBM3E",
        tflops={"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979},
        source="NVIDIA GH200 Grace Hopper Superchip data sheet, halved",
        sms=132,
    ),
    Part(
        device="B200",
        name="B200",
        tflops={"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": 4500},
        source="NVIDIA HGX B200 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/",
    ),
    Part(
        device="GB200",
        name="GB200",
        tflops={"fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "int8": 5000},
        source="NVIDIA GB200 NVL72 data sheet, per GPU, halved, https://www.nvidia.com/en-us/data-center/gb200-nvl72/",
    ),
    Part(
        device="B300",
        name="B300",
        also="SXM6 AC",
        tflops={"fp64": 1.25, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500},
        source="NVIDIA HGX B300 data sheet, an eighth, halved, https://www.nvidia.com/en-us/data-center/hgx/",
    ),
)

_WORKSTATION: Final = (
    Part(
        device="Quadro RTX 6000",
        name="QUADRO RTX 6000",
        tflops={"fp32": 16.3, "fp16": 130.5, "int8": 261},
        source="NVIDIA Turing GPU Architecture whitepaper, appendix A",
        sms=72,
    ),
    Part(
        device="RTX A6000",
        name="RTX A6000",
        tflops={"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8, "int8": 309.7},
        source=_AMPERE,
        sms=84,
    ),
    Part(
        device="RTX 6000 Ada",
        name="RTX 6000 ADA",
        also="GENERATION",
        tflops={"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5, "int8": 728.5},
        source=_ADA,
        sms=142,
    ),
)

_INSTINCT: Final = (
    Part(
        device="MI210",
        name="MI210",
        tflops={"fp64": 45.3, "fp32": 45.3, "bf16": 181, "fp16": 181, "int8": 181},
        source="AMD Instinct MI210 data sheet, matrix cores",
        sms=104,
    ),
    Part(
        device="MI250X (one die)",
        name="MI250X",
        also="MI250",
        tflops={"fp64": 47.85, "fp32": 47.85, "bf16": 191.5, "fp16": 191.5, "int8": 191.5},
        source="AMD Instinct MI250X data sheet, matrix cores, half: each of its two dies is a device of its own",
        sms=110,
    ),
    Part(
        device="MI250 (one die)",
        name="MI250",
        also="MI250X",
        tflops={"fp64": 45.25, "fp32": 45.25, "bf16": 181.05, "fp16": 181.05, "int8": 181.05},
        source="AMD Instinct MI250 data sheet, matrix cores, half: each of its two dies is a device of its own",
        sms=104,
    ),
    Part(
        device="MI300X",
        name="MI300X",
        also="OAM VF",
        tflops={
            "fp64": 163.4,
            "fp32": 163.4,
            "tf32": 653.7,
            "bf16": 1307.4,
            "fp16": 1307.4,
            "fp8": 2614.9,
            "int8": 2614.9,
        },
        source="AMD Instinct MI300X data sheet, matrix cores",
        sms=304,
    ),
    Part(
        device="MI325X",
        name="MI325X",
        also="OAM VF",
        tflops={
            "fp64": 163.4,
            "fp32": 163.4,
            "tf32": 653.7,
            "bf16": 1307.4,
            "fp16": 1307.4,
            "fp8": 2614.9,
            "int8": 2614.9,
        },
        source="AMD Instinct MI325X data sheet, matrix cores",
        sms=304,
    ),
    Part(
        device="MI355X",
        name="MI355X",
        also="OAM VF",
        tflops={"fp64": 78.6, "fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2, "int8": 5033.2},
        source="AMD Instinct MI355X data sheet, matrix cores (no TF32)",
        sms=256,
    ),
)

PARTS: Final = _DATA_CENTER + _WORKSTATION + _INSTINCT
