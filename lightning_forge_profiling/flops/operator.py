"""Floating-point operations of one PyTorch operator call, from its arguments in a profiler trace.

The multiply-adds of matrix products, convolutions and attention are counted, two operations each, as by
`torch.utils.flop_counter.FlopCounterMode`. Biases, activations and softmax are not.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from lightning_forge_profiling.flops.formulas import (
    BATCHES,
    MATRICES,
    MATRIX_VECTOR,
    VECTORS,
    Attention,
    Call,
    Convolution,
    ConvolutionBackward,
    Product,
    TransposedConvolution,
    UncountableError,
)


class OperatorFlops(NamedTuple):
    """Operations of one operator call.

    Attributes:
        flops: number of operations; a multiply-add is two.
        dtype: the element type of its operands: `bf16`, `fp16`, `fp32`, `fp64`, `fp8` or `int8`.
    """

    flops: int
    dtype: str


def operator_flops(
    name: str,
    input_dims: Sequence[object],
    input_types: Sequence[str],
    concrete_inputs: Sequence[str],
    *,
    causal_halved: bool = False,
) -> OperatorFlops | None:
    """Count the operations of one recorded operator call.

    Operators nest (`aten::convolution` calls `aten::_convolution`, which calls `aten::cudnn_convolution`), and each
    counts in full: in a call stack, count only the outermost operator of `COUNTED`. Composites that call others of that
    list (`aten::linear`, `aten::matmul`, `aten::scaled_dot_product_attention`) are not in it. Under autocast a product
    nests in itself: the outer call has the original types, the inner one those that it runs in.

    Differences from `FlopCounterMode`:

    - It does not count in-place products (`aten::addmm_`), products with a vector (`aten::mv`) or of int8.
    - It counts the weight gradient of a grouped convolution as if it were not grouped, `groups` times too much.
    - It reads `aten::_flash_attention_forward` and `aten::_efficient_attention_forward` as (batch, heads, sequence,
      depth); their layout is (batch, sequence, heads, depth).
    - It sums over packed sequences of different lengths (nested tensors). A trace has no lengths: not counted here.

    As there, causal attention counts in full unless `causal_halved`, and so does a sliding window or an additive mask.
    The backward of fused attention counts five products, its forward two, because it recomputes the scores. Attention
    as separate products has four.

    Example:
        >>> operator_flops("aten::mm", [[128, 256], [256, 512]], ["c10::BFloat16"] * 2, ["", ""])
        OperatorFlops(flops=33554432, dtype='bf16')
    """
    operator = _OPERATORS.get(name)
    if operator is None:
        return None
    call = Call(input_dims, input_types, concrete_inputs, causal_halved)
    try:
        return OperatorFlops(operator.flops(call), call.dtype(operator.operand))
    except UncountableError:
        return None


_BHSD: Final = (1, 2)  # (batch, heads, sequence, depth)
_BSHD: Final = (2, 1)  # (batch, sequence, heads, depth)

# Forward: scores from query and key, output from scores and value. Backward: the scores again, then the gradients of
# scores and value with the value's depth, and those of query and key with theirs.
_FORWARD: Final = (1, 1)
_BACKWARD: Final = (3, 2)

_Formula = Product | Convolution | TransposedConvolution | ConvolutionBackward | Attention

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
    (
        Convolution(stride=3, padding=4, dilation=5, transposed=6),
        "convolution _convolution convolution_overrideable",
    ),
    (Convolution(stride=3, padding=2, dilation=4), "cudnn_convolution"),
    (
        Convolution(stride=4, padding=3, dilation=5),
        "mkldnn_convolution miopen_convolution miopen_depthwise_convolution",
    ),
    (Convolution(stride=3, padding=4, dilation=5), "cudnn_convolution_relu miopen_convolution_relu"),
    (Convolution(stride=5, padding=6, dilation=7), "cudnn_convolution_add_relu miopen_convolution_add_relu"),
    (Convolution(stride=4, padding=5), "thnn_conv2d _slow_conv2d_forward slow_conv3d slow_conv3d_forward"),
    (
        Convolution(stride=4, padding=5, dilation=6),
        "_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d",
    ),
    (
        TransposedConvolution(),
        "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d",
    ),
    (ConvolutionBackward(transposed=7, output_mask=10), "convolution_backward"),
    (ConvolutionBackward(transposed=6, output_mask=9), "convolution_backward_overrideable"),
    (
        Attention(0, causal=4, axes=_BHSD, products=_FORWARD),
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu",
    ),
    (
        Attention(0, causal=6, axes=_BHSD, products=_FORWARD),
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    ),
    (
        Attention(0, causal=5, axes=_BHSD, products=_FORWARD),
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    (
        Attention(0, causal=8, axes=_BSHD, products=_FORWARD, lengths=(3, 4, 13, 15)),
        "_flash_attention_forward",
    ),
    (
        Attention(0, causal=9, axes=_BSHD, products=_FORWARD, lengths=(4, 5, 12)),
        "_efficient_attention_forward",
    ),
    (
        Attention(0, causal=10, axes=_BHSD, products=_FORWARD, lengths=(4, 5)),
        "_cudnn_attention_forward",
    ),
    (
        Attention(1, causal=11, axes=_BHSD, products=_BACKWARD, lengths=(6, 7)),
        "_scaled_dot_product_flash_attention_backward",
    ),
    (
        Attention(1, causal=7, axes=_BHSD, products=_BACKWARD),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    (
        Attention(1, causal=11, axes=_BHSD, products=_BACKWARD),
        "_scaled_dot_product_efficient_attention_backward",
    ),
    (
        Attention(1, causal=14, axes=_BHSD, products=_BACKWARD, lengths=(9, 10)),
        "_scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward",
    ),
    (
        Attention(1, causal=13, axes=_BHSD, products=_BACKWARD, lengths=(8, 9)),
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    (
        Attention(1, causal=11, axes=_BSHD, products=_BACKWARD, lengths=(6, 7)),
        "_flash_attention_backward",
    ),
    (
        Attention(1, causal=14, axes=_BSHD, products=_BACKWARD, lengths=(6, 7)),
        "_efficient_attention_backward",
    ),
)

_OPERATORS: Final[Mapping[str, _Formula]] = MappingProxyType(
    {f"aten::{name}": formula for formula, names in _LAYOUTS for name in names.split()}
)

COUNTED: Final = frozenset(_OPERATORS)
"""Names of operators with a formula."""

PRODUCTS: Final = frozenset(name for name, formula in _OPERATORS.items() if isinstance(formula, Product))
"""Names of those that are matrix products."""
