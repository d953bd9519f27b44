"""What desktop GeForce RTX cards can do at most, and by what names they go.

GeForce tensor cores multiply 16-bit and fp8 numbers at half their rate where they accumulate in FP32, which is what
PyTorch asks of them: it is that rate which stands here, half of what is often quoted.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_forge_profiling.hardware.peak_table import Part

__all__ = ["GEFORCE_PARTS"]

# CUDA cores, boost clock in MHz, and memory in GiB where the name alone is ambiguous.
_AMPERE: Final = (
    ("RTX 3060", 3584, 1777, None),
    ("RTX 3060 Ti", 4864, 1665, None),
    ("RTX 3070", 5888, 1725, None),
    ("RTX 3070 Ti", 6144, 1770, None),
    ("RTX 3080", 8704, 1710, 10),
    ("RTX 3080", 8960, 1710, 12),
    ("RTX 3080 Ti", 10240, 1665, None),
    ("RTX 3090", 10496, 1695, None),
    ("RTX 3090 Ti", 10752, 1860, None),
)
_ADA: Final = (
    ("RTX 4060", 3072, 2460, None),
    ("RTX 4060 Ti", 4352, 2535, None),
    ("RTX 4070", 5888, 2475, None),
    ("RTX 4070 SUPER", 7168, 2475, None),
    ("RTX 4070 Ti", 7680, 2610, None),
    ("RTX 4070 Ti SUPER", 8448, 2610, None),
    ("RTX 4080", 9728, 2505, None),
    ("RTX 4080 SUPER", 10240, 2550, None),
    ("RTX 4090", 16384, 2520, None),
)
_BLACKWELL: Final = (
    ("RTX 5060", 3840, 2497, None),
    ("RTX 5060 Ti", 4608, 2572, None),
    ("RTX 5070", 6144, 2512, None),
    ("RTX 5070 Ti", 8960, 2452, None),
    ("RTX 5080", 10752, 2617, None),
    ("RTX 5090", 21760, 2407, None),
)

# Multiples of the FP32 rate, the same for all cards of a generation.
_AMPERE_RATES: Final = {"fp32": 1, "tf32": 1, "bf16": 2, "fp16": 2, "int8": 8}
_ADA_RATES: Final = {"fp32": 1, "tf32": 1, "bf16": 2, "fp16": 2, "fp8": 4, "int8": 8}

_SPECIFICATIONS: Final = (
    "CUDA cores and boost clock from https://www.nvidia.com/en-us/geforce/; rates a core as in the "
)


def _parts(
    cards: tuple[tuple[str, int, int, int | None], ...], rates: Mapping[str, int], whitepaper: str
) -> Iterator[Part]:
    for name, cores, boost_mhz, memory_gib in cards:
        fp32 = 2 * cores * boost_mhz / 1e6  # one multiply-add a core and cycle
        yield Part(
            device=f"GeForce {name}" + (f" {memory_gib} GB" if memory_gib else ""),
            name=name.upper(),
            tflops={dtype: rate * fp32 for dtype, rate in rates.items()},
            source=_SPECIFICATIONS + whitepaper,
            sms=cores // 128,
            memory_gib=memory_gib,
        )


GEFORCE_PARTS: Final = (
    *_parts(_AMPERE, _AMPERE_RATES, "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"),
    *_parts(_ADA, _ADA_RATES, "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"),
    *_parts(_BLACKWELL, _ADA_RATES, "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"),
)
