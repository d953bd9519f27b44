"""The operations of `forge-profiling crossover`, and what size n means for each."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

import torch
from torch.nn import functional as F

DTYPES: Final = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
)
"""The types of `--dtype`."""

_CHANNELS: Final = 16
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation whose work depends on one size.

    Attributes:
        meaning: what it computes at size n.
        call: takes tensors and returns a new one, in eager mode, forward only.
        shapes: of its tensors at a size; the result is the last one.
        exponent: the power of the size with which its arithmetic or its tensors grow, whichever is higher.
        parameters: this many of its last arguments are parameters of a model, which stay on the GPU when the others
            are copied.
    """

    meaning: str
    call: Callable[..., torch.Tensor]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    exponent: int
    parameters: int = 0

    def arguments(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Its arguments, on the CPU: normal random numbers, the same each time.

        Constants would not do: a GPU's power draw, and with it its clock, depends on how many bits flip.
        """
        generator = torch.Generator().manual_seed(_SEED)
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in self.shapes(size)[:-1])

    def bytes(self, size: int, dtype: torch.dtype) -> int:
        """The size of its tensors in bytes, the result included.

        Example:
            >>> OPERATIONS["add"].bytes(1024, torch.float32) / 2**20
            12.0
        """
        return sum(prod(shape) for shape in self.shapes(size)) * dtype.itemsize


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    return torch.softmax(rows, -1)


def _layer_norm(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(rows, weight.shape, weight, bias)


def _conv2d(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(images, weight, padding=1)


OPERATIONS: Final = MappingProxyType(
    {
        "matmul": Operation(
            meaning="product of two n by n matrices",
            call=torch.matmul,
            shapes=lambda n: ((n, n), (n, n), (n, n)),
            exponent=3,
        ),
        "add": Operation(
            meaning="sum of two n by n matrices",
            call=torch.add,
            shapes=lambda n: ((n, n), (n, n), (n, n)),
            exponent=2,
        ),
        "softmax": Operation(
            meaning="softmax of each row of an n by n matrix",
            call=_softmax,
            shapes=lambda n: ((n, n), (n, n)),
            exponent=2,
        ),
        "layernorm": Operation(
            meaning="layer norm of each row of an n by n matrix",
            call=_layer_norm,
            shapes=lambda n: ((n, n), (n,), (n,), (n, n)),
            exponent=2,
            parameters=2,
        ),
        "conv2d": Operation(
            meaning=f"3 by 3 convolution of one n by n image, {_CHANNELS} channels to {_CHANNELS}",
            call=_conv2d,
            shapes=lambda n: ((1, _CHANNELS, n, n), (_CHANNELS, _CHANNELS, 3, 3), (1, _CHANNELS, n, n)),
            exponent=2,
            parameters=1,
        ),
    }
)
"""The operations of `--ops`."""
