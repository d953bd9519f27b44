"""Watches the operators that run on fake tensors: those without a formula, and those that are recomputed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lightning_forge_profiling.flops.operator import COUNTED, convolution_flops


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _convolution_backward(*shapes_and_values: Any, **_: Any) -> int:
    gradient, image, weight, _bias, _stride, _padding, _dilation, transposed, _, _groups, asked_for = shapes_and_values
    positions = image[2:] if transposed else gradient[2:]
    return int(sum(asked_for[:2])) * convolution_flops(image, weight, positions)


def _sparse_product(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    return 2 * prod(left) * right[-1]


# What PyTorch's counter lacks or has wrong: it does not count attention on a CPU, where a module usually is before
# training, nor `torch.sparse.mm`, and it counts the weight gradient of a grouped convolution as if it were not grouped.
FORMULAS: Final = {
    getattr(torch.ops.aten, name): formula
    for name, formula in (
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
        ("convolution_backward", _convolution_backward),
        ("_sparse_addmm", _sparse_product),
    )
}


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators of one step; set `in_backward` when the backward pass starts."""

    supports_higher_order_operators = True

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        """Start without operators."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.recomputed = 0
        self.uncounted: set[str] = set()
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = func if isinstance(func, HigherOrderOperator) else func.overloadpacket
        if operator not in self._formulas:
            if _may_multiply(operator):
                self.uncounted.add(str(operator))
        elif self.in_backward and _computes_again():
            self.recomputed += self._formulas[operator](*args, **kwargs, out_val=out)
        return out


def _computes_again() -> bool:
    """Whether an operator in the backward pass belongs to a recomputed forward pass."""
    # Gradients are computed with grad mode off. A recomputed forward has it on, or is a custom operator that PyTorch's
    # checkpoint calls.
    if torch.is_grad_enabled():
        return True
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == autograd_graph.__file__ and code.co_name == "_engine_run_backward":
            return False
        if code.co_filename == torch_checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_PYTORCHS_OWN: Final = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor")
# Prefixes of PyTorch's operators that multiply and are not in `COUNTED`.
_ALSO_MULTIPLY: Final = (
    "linalg_", "_linalg_", "cholesky", "triangular_solve", "geqrf", "ormqr", "_fft_",
    "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer",
    "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_triton_multi_head_attention",
    "_scaled_dot_product_",
    "_grouped_mm", "_scaled_grouped_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_dyn_quant_matmul",
    "_mixed_dtypes_linear",
    "_sparse_mm", "_sparse_sparse_matmul", "_sparse_semi_structured_", "_cslt_sparse_mm", "sparse_sampled_addmm",
    "sspaddmm", "hspmm",
    "_cdist", "_pdist", "_trilinear",
)  # fmt: skip
_NO_PRODUCTS: Final = ("linalg_vector_norm", "linalg_cross")  # of those: a few operations per element


def _may_multiply(operator: Any) -> bool:
    """Whether an operator without a formula multiplies, judged by its name."""
    namespace, _, name = str(operator).rpartition(".")
    if namespace not in _PYTORCHS_OWN:
        return True
    return f"aten::{name}" in COUNTED or (name.startswith(_ALSO_MULTIPLY) and name not in _NO_PRODUCTS)
