"""Floating-point operations of one PyTorch operator call, from its arguments in a profiler trace.

The multiply-adds of matrix products, convolutions and attention are counted, two operations each, as by
`torch.utils.flop_counter.FlopCounterMode`. Biases, activations and softmax are not.
"""

# The formulas are not the counter's own. Importing torch takes 2.8 s of processor time and 170 MB more where a trace is
# analysed in 1.1 s and 53 MB (Python 3.11, torch 2.13), and a trace has no shape of an output, which the counter's
# formulas of convolutions need.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

_T = TypeVar("_T")


class UncountableError(Exception):
    """Arguments do not fit the operator."""


# Element types by their C++ name without namespace.
_DTYPES: Final = {
    "BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64", "signed char": "int8",
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e4m3fnuz", "Float8_e5m2", "Float8_e5m2fnuz"), "fp8"),
}  # fmt: skip
_Shape = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...]
_Steps = list[Annotated[int, msgspec.Meta(ge=0, lt=10**9)]]
_MISSING: Final = (UncountableError, IndexError, KeyError, AttributeError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class Call:
    """The recorded arguments by position, checked when they are read: a trace can contain anything.

    Every method raises one of `_MISSING` if the argument is missing or does not fit.
    """

    dims: Sequence[object]
    types: Sequence[str]
    concrete: Sequence[str]

    def shape(self, index: int) -> tuple[int, ...]:
        """The dimensions of a tensor."""
        return msgspec.convert(self.dims[index], _Shape)

    def dtype(self, index: int) -> str:
        """The element type of a tensor, by its short name."""
        return _DTYPES[self.types[index].rpartition("::")[2]]

    def value(self, index: int, of_type: type[_T]) -> _T:
        """The value of an argument that is no tensor. Booleans are recorded as Python writes them."""
        return msgspec.json.decode(self.concrete[index].lower(), type=of_type)

    def per_dimension(self, index: int, dimensions: int) -> list[int]:
        """A stride, padding or dilation; one number stands for all dimensions."""
        values = self.value(index, _Steps)
        if len(values) not in {1, dimensions}:
            raise UncountableError
        return values * dimensions if len(values) == 1 else values


# In the formulas below, integers are positions of arguments; `operand` is the first one that is multiplied.


def _product(call: Call, operand: int) -> int:
    """A product of two matrices, or of two batches of them."""
    left, right = call.shape(operand), call.shape(operand + 1)
    if len(left) not in {2, 3} or (*left[:-2], left[-1]) != right[:-1]:
        raise UncountableError
    return 2 * prod(left) * right[-1]


def convolution_flops(image: tuple[int, ...], weight: tuple[int, ...], positions: Sequence[int]) -> int:
    """Operations of one pass of a convolution: all of `weight` at each position of each sample.

    Forward, gradient of the input and gradient of the weight are the same multiply-adds, summed differently. The
    channels of `weight` are already divided by the groups. The positions are those of the output, or of the input where
    the convolution is transposed.
    """
    # a sample, channels and one to three dimensions
    if len(image) != len(weight) or len(image) not in {3, 4, 5} or len(positions) != len(image) - 2:
        raise UncountableError
    return 2 * image[0] * prod(positions) * prod(weight)


def _convolution(call: Call, operand: int) -> int:
    image, weight = call.shape(operand), call.shape(operand + 1)
    if call.value(6, bool):  # transposed
        return convolution_flops(image, weight, image[2:])
    stride, padding, dilation = (call.per_dimension(index, len(image) - 2) for index in (3, 4, 5))
    if len(weight) != len(image) or 0 in stride:
        raise UncountableError
    # https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv2d.html, "Shape"
    output = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    if any(size < 1 for size in output):
        raise UncountableError
    return convolution_flops(image, weight, output)


def _convolution_backward(call: Call, operand: int) -> int:
    gradient, image, weight = call.shape(0), call.shape(operand), call.shape(operand + 1)
    positions = image[2:] if call.value(7, bool) else gradient[2:]  # where it is transposed
    of_input, of_weight, _of_bias = call.value(10, tuple[bool, bool, bool])  # those that are asked for
    return (of_input + of_weight) * convolution_flops(image, weight, positions)


def _attention(call: Call, operand: int) -> int:
    """Fused scaled dot-product attention of (batch, heads, sequence, depth), or its backward behind a gradient."""
    query, key, value = (call.shape(operand + offset) for offset in range(3))
    if {len(query), len(key), len(value)} != {4}:
        raise UncountableError
    # Grouped-query attention: several heads of the query share one of key and value.
    if not key[1] or query[1] % key[1] or key[:3] != value[:3] or (query[0], query[3]) != (key[0], key[3]):
        raise UncountableError
    scores = prod(query[:3]) * key[2]
    # Products with the depth of query and key, and with that of the value. Forward: scores from query and key, output
    # from scores and value. Backward: the scores again, the gradients of query and key, and those of scores and value.
    of_key, of_value = (3, 2) if operand else (1, 1)
    return 2 * scores * (of_key * query[3] + of_value * value[3])


_ATTENTION: Final = [
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
# Formula, operand and names. Positions as in PyTorch 2.13's aten/src/ATen/native/native_functions.yaml. Variants with
# `out=` append it and those in place keep the order, so they share a layout. What these call needs no formula, as the
# outermost call counts: `aten::_convolution` calls `aten::cudnn_convolution`.
#
# Differences from `FlopCounterMode`, besides what a trace cannot tell (the lengths of packed sequences): it does not
# count products in place and of int8, nor attention on a CPU and with grouped queries; and it counts the weight
# gradient of a grouped convolution as if it were not grouped, `groups` times too much. As there, causal attention
# counts in full, and so does a sliding window or an additive mask. The backward of fused attention counts five
# products, its forward two, because it recomputes the scores. Attention as separate products has four.
_FORMULAS: Final[Mapping[str, tuple[Callable[[Call, int], int], int]]] = MappingProxyType(
    {
        f"aten::{name}": (formula, operand)
        for formula, operand, names in (
            (_product, 0, ["mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"]),
            (_product, 1, ["addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_"]),
            (_convolution, 0, ["convolution", "_convolution", "convolution_overrideable"]),
            (_convolution_backward, 1, ["convolution_backward"]),
            (_attention, 0, _ATTENTION),
            (_attention, 1, [f"{name}_backward" for name in _ATTENTION]),
        )
        for name in names
    }
)

COUNTED: Final = frozenset(_FORMULAS)
"""Names of operators with a formula."""

PRODUCTS: Final = frozenset(name for name, (formula, _) in _FORMULAS.items() if formula is _product)
"""Names of those that are matrix products."""


class OperatorFlops(NamedTuple):
    """Operations of one operator call, and the element type of its operands by its short name."""

    flops: int
    dtype: str


def operator_flops(
    name: str,
    input_dims: Sequence[object],
    input_types: Sequence[str],
    concrete_inputs: Sequence[str],
) -> OperatorFlops | None:
    """Count one recorded operator call; None if it has no formula or its arguments do not fit.

    Operators nest (`aten::convolution` calls `aten::_convolution`, which calls `aten::cudnn_convolution`), and each
    counts in full: in a call stack, count only the outermost operator of `COUNTED`. Composites that call others of that
    list (`aten::linear`, `aten::matmul`, `aten::scaled_dot_product_attention`) are not in it. Under autocast a product
    nests in itself: the outer call has the original types, the inner one those that it runs in.
    """
    if name not in _FORMULAS:
        return None
    formula, operand = _FORMULAS[name]
    call = Call(input_dims, input_types, concrete_inputs)
    try:
        return OperatorFlops(formula(call, operand), call.dtype(operand))
    except _MISSING:
        return None
