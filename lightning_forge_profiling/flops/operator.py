"""Floating-point operations of one PyTorch operator call, from its arguments in a profiler trace.

The multiply-adds of matrix products, convolutions and attention are counted, two operations each, as by
`torch.utils.flop_counter.FlopCounterMode`. Biases, activations and softmax are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, NamedTuple, TypeVar

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

    def has_tensor(self, index: int) -> bool:
        """Whether an optional tensor of at least one dimension was given."""
        return index < len(self.dims) and bool(self.dims[index])

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


# Ranks of the two factors.
MATRICES: Final = (2, 2)
BATCHES: Final = (3, 3)
MATRIX_VECTOR: Final = (2, 1)
VECTORS: Final = (1, 1)


# In the formulas below, integers are positions of arguments.


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices, or of a matrix or vector and a vector."""

    operand: int  # the left factor; the right one follows it
    ranks: tuple[int, int]

    def flops(self, call: Call) -> int:
        """Count one call."""
        left, right = call.shape(self.operand), call.shape(self.operand + 1)
        if (len(left), len(right)) != self.ranks:
            raise UncountableError
        batch = 1 if self.ranks == BATCHES else 0
        if right[: batch + 1] != (*left[:batch], left[-1]):
            raise UncountableError
        return 2 * prod(left) * prod(right[batch + 1 :])


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


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of argument 0 with the weight in argument 1."""

    stride: int = 0
    padding: int = 0
    dilation: int | None = None  # None if the operator has none
    transposed: int | bool = False  # an argument says so, or the operator
    operand: ClassVar = 0

    def flops(self, call: Call) -> int:
        """Count one call."""
        image, weight = call.shape(0), call.shape(1)
        if self.transposed is True or (self.transposed and call.value(self.transposed, bool)):
            return convolution_flops(image, weight, image[2:])
        dimensions = len(image) - 2
        stride = call.per_dimension(self.stride, dimensions)
        padding = call.per_dimension(self.padding, dimensions)
        dilation = [1] * dimensions if self.dilation is None else call.per_dimension(self.dilation, dimensions)
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


@dataclass(frozen=True, slots=True)
class ConvolutionBackward:
    """Gradients of a convolution: of its output in argument 0, with its input and weight in 1 and 2."""

    transposed: int
    output_mask: int  # of requested gradients: of the input, the weight and the bias
    operand: ClassVar = 1

    def flops(self, call: Call) -> int:
        """Count one call."""
        gradient, image, weight = call.shape(0), call.shape(1), call.shape(2)
        positions = image[2:] if call.value(self.transposed, bool) else gradient[2:]
        of_input, of_weight, _of_bias = call.value(self.output_mask, tuple[bool, bool, bool])
        return (of_input + of_weight) * convolution_flops(image, weight, positions)


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused scaled dot-product attention, or its backward."""

    axes: tuple[int, int]  # of the heads and of the sequence
    lengths: tuple[int, ...] = ()  # given where sequences are shorter than the shapes say
    backward: bool = False

    @property
    def operand(self) -> int:
        """The query; key and value follow it."""
        return int(self.backward)

    def flops(self, call: Call) -> int:
        """Count one call."""
        query, key, value = (call.shape(self.operand + offset) for offset in range(3))
        if {len(query), len(key), len(value)} != {4} or any(map(call.has_tensor, self.lengths)):
            raise UncountableError
        heads, sequence = self.axes
        # Grouped-query attention: several heads of the query share one of key and value.
        if not key[heads] or query[heads] % key[heads]:
            raise UncountableError
        if key[:3] != value[:3] or (query[0], query[3]) != (key[0], key[3]):
            raise UncountableError
        scores = query[0] * query[heads] * query[sequence] * key[sequence]
        # Products with the depth of query and key, and with that of the value. Forward: scores from query and key,
        # output from scores and value. Backward: the scores again, the gradients of query and key, and those of scores
        # and value.
        of_key, of_value = (3, 2) if self.backward else (1, 1)
        return 2 * scores * (of_key * query[3] + of_value * value[3])


class OperatorFlops(NamedTuple):
    """Operations of one operator call, and the element type of its operands by its short name."""

    flops: int
    dtype: str


# Differences from `FlopCounterMode`, besides what a trace cannot tell (the lengths of packed sequences):
# - It does not count in-place products (`aten::addmm_`), products with a vector (`aten::mv`) or of int8.
# - It counts the weight gradient of a grouped convolution as if it were not grouped, `groups` times too much.
# - It reads `aten::_flash_attention_forward` and `aten::_efficient_attention_forward` as (batch, heads, sequence,
#   depth); their layout is (batch, sequence, heads, depth).
# As there, causal attention counts in full, and so does a sliding window or an additive mask.
# The backward of fused attention counts five products, its forward two, because it recomputes the scores. Attention as
# separate products has four.
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
    operator = _OPERATORS.get(name)
    if operator is None:
        return None
    call = Call(input_dims, input_types, concrete_inputs)
    try:
        return OperatorFlops(operator.flops(call), call.dtype(operator.operand))
    except _MISSING:
        return None


_BHSD: Final = (1, 2)  # (batch, heads, sequence, depth)
_BSHD: Final = (2, 1)  # (batch, sequence, heads, depth)

_Formula = Product | Convolution | ConvolutionBackward | Attention

# Positions as in PyTorch 2.13's aten/src/ATen/native/native_functions.yaml. Variants with `out=` append it and those in
# place keep the order, so they share a layout.
_LAYOUTS: Final[tuple[tuple[_Formula, str], ...]] = (
    (Product(0, MATRICES), "mm _int_mm _scaled_mm _scaled_mm_v2"),
    (Product(1, MATRICES), "addmm addmm_ _addmm_activation"),
    (Product(0, BATCHES), "bmm"),
    (Product(1, BATCHES), "baddbmm baddbmm_ addbmm addbmm_"),
    (Product(0, MATRIX_VECTOR), "mv"),
    (Product(1, MATRIX_VECTOR), "addmv addmv_"),
    (Product(0, VECTORS), "dot vdot"),
    (Convolution(stride=3, padding=4, dilation=5, transposed=6), "convolution _convolution convolution_overrideable"),
    (Convolution(stride=3, padding=2, dilation=4), "cudnn_convolution"),
    (Convolution(stride=4, padding=3, dilation=5), "mkldnn_convolution miopen_convolution"),
    (Convolution(stride=4, padding=3, dilation=5), "miopen_depthwise_convolution"),
    (Convolution(stride=3, padding=4, dilation=5), "cudnn_convolution_relu miopen_convolution_relu"),
    (Convolution(stride=5, padding=6, dilation=7), "cudnn_convolution_add_relu miopen_convolution_add_relu"),
    (Convolution(stride=4, padding=5), "thnn_conv2d _slow_conv2d_forward slow_conv3d slow_conv3d_forward"),
    (Convolution(stride=4, padding=5, dilation=6), "_conv_depthwise2d conv_depthwise3d"),
    (Convolution(stride=4, padding=5, dilation=6), "slow_conv_dilated2d slow_conv_dilated3d"),
    (Convolution(transposed=True), "cudnn_convolution_transpose miopen_convolution_transpose"),
    (Convolution(transposed=True), "slow_conv_transpose2d slow_conv_transpose3d"),
    (ConvolutionBackward(transposed=7, output_mask=10), "convolution_backward"),
    (ConvolutionBackward(transposed=6, output_mask=9), "convolution_backward_overrideable"),
    (Attention(_BHSD), "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    (Attention(_BHSD), "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (Attention(_BHSD), "_scaled_dot_product_fused_attention_overrideable"),
    (Attention(_BSHD, lengths=(3, 4, 13, 15)), "_flash_attention_forward"),
    (Attention(_BSHD, lengths=(4, 5, 12)), "_efficient_attention_forward"),
    (Attention(_BHSD, lengths=(4, 5)), "_cudnn_attention_forward"),
    (Attention(_BHSD, backward=True), "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (Attention(_BHSD, backward=True), "_scaled_dot_product_efficient_attention_backward"),
    (Attention(_BHSD, lengths=(6, 7), backward=True), "_scaled_dot_product_flash_attention_backward"),
    (Attention(_BHSD, lengths=(8, 9), backward=True), "_scaled_dot_product_fused_attention_overrideable_backward"),
    (Attention(_BHSD, lengths=(9, 10), backward=True), "_scaled_dot_product_cudnn_attention_backward"),
    (Attention(_BHSD, lengths=(9, 10), backward=True), "_cudnn_attention_backward"),
    (Attention(_BSHD, lengths=(6, 7), backward=True), "_flash_attention_backward _efficient_attention_backward"),
)

_OPERATORS: Final[Mapping[str, _Formula]] = MappingProxyType(
    {f"aten::{name}": formula for formula, names in _LAYOUTS for name in names.split()}
)

COUNTED: Final = frozenset(_OPERATORS)
"""Names of operators with a formula."""

PRODUCTS: Final = frozenset(name for name, formula in _OPERATORS.items() if isinstance(formula, Product))
"""Names of those that are matrix products."""
