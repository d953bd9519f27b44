"""Looks up the dense peak rate of a GPU by its driver's name for it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.flops.peak_geforce import GEFORCE_PARTS
from lightning_forge_profiling.flops.peak_table import PARTS, Part


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The peak rates of a device.

    Attributes:
        device: the device, such as `H100 PCIe`.
        flops: dense operations per second by type: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `int8`. Types that
            the device lacks, or whose rate no source gives, are missing.
        source: the source of the rates.
    """

    device: str
    flops: Mapping[str, float]
    source: str

    def source_of(self, dtype: str) -> str:
        """The source of one type's rate. Data sheets give `fp64` and `fp32` without sparsity, so they are not halved.

        Example:
            >>> h200 = find_peak("NVIDIA H200")
            >>> h200.source_of("bf16")
            'NVIDIA H200 data sheet, halved, https://www.nvidia.com/en-us/data-center/h200/'
            >>> h200.source_of("fp32")
            'NVIDIA H200 data sheet, https://www.nvidia.com/en-us/data-center/h200/'
        """
        return self.source.replace(", halved", "") if dtype in _WITHOUT_SPARSITY else self.source


def find_peak(
    name: str, *, memory_bytes: int | None = None, sms: int | None = None, power_w: float | None = None
) -> DevicePeak | None:
    """Look a device up.

    Every word of the name must match, so that similar names (a laptop's GPU, a MIG slice, a virtual GPU, an export
    version) are not taken for a device in the table. If several devices have one name, the other arguments decide; if
    they contradict the name (a compute partition with fewer units), there is no match.

    Example:
        >>> find_peak("NVIDIA H100 PCIe").flops["bf16"] / 1e12
        756.0
        >>> find_peak("NVIDIA H100") is None
        True
        >>> find_peak("NVIDIA H100", sms=114).device
        'H100 PCIe'
    """
    found = _matches(name, memory_bytes, sms, power_w)
    if len(found) != 1:
        return None
    part = found[0]
    flops = MappingProxyType({dtype: tflops * 1e12 for dtype, tflops in part.tflops.items()})
    return DevicePeak(part.device, flops, part.source)


def power_may_tell(name: str, *, memory_bytes: int | None = None, sms: int | None = None) -> bool:
    """Whether several devices in the table match whose power limits differ.

    Example:
        >>> power_may_tell("Tesla V100"), power_may_tell("NVIDIA H200"), power_may_tell("NVIDIA Foo 9000")
        (True, False, False)
    """
    found = _matches(name, memory_bytes, sms, None)
    return len(found) > 1 and any(part.power_w for part in found)


_ALL: Final[tuple[Part, ...]] = PARTS + GEFORCE_PARTS

_WITHOUT_SPARSITY: Final = frozenset({"fp64", "fp32"})

_NO_DISTINCTION: Final = frozenset({"", "NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT"})
"""Words that some driver versions include and others omit."""


def _matches(name: str, memory_bytes: int | None, sms: int | None, power_w: float | None) -> list[Part]:
    words = frozenset(re.split(r"[^A-Z0-9.]+", name.upper())) - _NO_DISTINCTION
    return [part for part in _ALL if _is_named(part, words) and _fits(part, memory_bytes, sms, power_w)]


def _is_named(part: Part, words: frozenset[str]) -> bool:
    required = frozenset(part.name.split())
    return required <= words <= required | frozenset(part.also.split())


def _fits(part: Part, memory_bytes: int | None, sms: int | None, power_w: float | None) -> bool:
    # A driver reports up to a tenth less than the nominal memory, without ECC and its own reserve.
    if memory_bytes and part.memory_gib and not math.isclose(memory_bytes / 2**30, part.memory_gib, rel_tol=0.1):
        return False
    if sms and sms != part.sms:
        return False
    return not (power_w and part.power_w and power_w > part.power_w)
