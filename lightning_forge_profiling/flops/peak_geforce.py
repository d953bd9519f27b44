"""Peak rates and names of desktop GeForce RTX cards.

With FP32 accumulation, which PyTorch uses, GeForce tensor cores run 16-bit and fp8 types at half of the rate that is
often quoted; the table has that half. Clocks are those of NVIDIA's reference cards; most cards run faster, and may
exceed these rates by 10 to 15 %.
"""

from collections.abc import Sequence
from typing import Final

from lightning_forge_profiling.flops.peak_table import Card, cards

# SMs, boost clock in MHz, and memory in GiB where the name alone is ambiguous.
_TURING: Final[Sequence[Card]] = (
    ("RTX 2060", 30, 1680, 6),
    ("RTX 2060", 34, 1650, 12),
    ("RTX 2060 SUPER", 34, 1650, None),
    ("RTX 2070", 36, 1620, None),
    ("RTX 2070 SUPER", 40, 1770, None),
    ("RTX 2080", 46, 1710, None),
    ("RTX 2080 SUPER", 48, 1815, None),
    ("RTX 2080 Ti", 68, 1545, None),
)
_AMPERE: Final[Sequence[Card]] = (
    ("RTX 3050", 18, 1470, 6),
    ("RTX 3050", 20, 1777, 8),
    ("RTX 3060", 28, 1777, None),
    ("RTX 3060 Ti", 38, 1665, None),
    ("RTX 3070", 46, 1725, None),
    ("RTX 3070 Ti", 48, 1770, None),
    ("RTX 3080", 68, 1710, 10),
    ("RTX 3080", 70, 1710, 12),
    ("RTX 3080 Ti", 80, 1665, None),
    ("RTX 3090", 82, 1695, None),
    ("RTX 3090 Ti", 84, 1860, None),
)
_ADA: Final[Sequence[Card]] = (
    ("RTX 4060", 24, 2460, None),
    ("RTX 4060 Ti", 34, 2535, None),
    ("RTX 4070", 46, 2475, None),
    ("RTX 4070 SUPER", 56, 2475, None),
    ("RTX 4070 Ti", 60, 2610, None),
    ("RTX 4070 Ti SUPER", 66, 2610, None),
    ("RTX 4080", 76, 2505, None),
    ("RTX 4080 SUPER", 80, 2550, None),
    ("RTX 4090 D", 114, 2520, None),
    ("RTX 4090", 128, 2520, None),
)
_BLACKWELL: Final[Sequence[Card]] = (
    ("RTX 5050", 20, 2572, None),
    ("RTX 5060", 30, 2497, None),
    ("RTX 5060 Ti", 36, 2572, None),
    ("RTX 5070", 48, 2512, None),
    ("RTX 5070 Ti", 70, 2452, None),
    ("RTX 5080", 84, 2617, None),
    ("RTX 5090", 170, 2407, None),
)

# Operations an SM and clock cycle.
_TURING_RATES: Final = {"fp32": 128, "fp16": 512, "int8": 2048}
_AMPERE_RATES: Final = {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "int8": 2048}
_ADA_RATES: Final = _AMPERE_RATES | {"fp8": 1024}
_BLACKWELL_RATES: Final = _AMPERE_RATES  # fp8 has two: products with block scales run at twice the whitepaper's

_CLOCK: Final = "SMs and boost clock from https://www.nvidia.com/en-us/geforce/; rates an SM as in the "

GEFORCE_PARTS: Final = tuple(
    part
    for rows, rates, whitepaper in (
        (_TURING, _TURING_RATES, "NVIDIA Turing GPU Architecture whitepaper, table 1"),
        (_AMPERE, _AMPERE_RATES, "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"),
        (_ADA, _ADA_RATES, "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"),
        (_BLACKWELL, _BLACKWELL_RATES, "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"),
    )
    for part in cards(rows, rates, _CLOCK + whitepaper, brand="GeForce ")
)
