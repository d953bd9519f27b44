"""Number formats of matrix products: of a module, and whether a GPU computes fp32 in TF32."""

from collections import Counter
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_forge_profiling.torch_versions import float32_products

_TF32_SINCE: Final = (8, 0)  # the first compute capability with TF32: Ampere

_NAMES: Final = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}


def dtype_name(dtype: torch.dtype | str) -> str | None:
    """The name of a type in the table of peaks."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


def parameter_dtype(module: nn.Module) -> str:
    """The type of most of a module's floating-point parameters, by number of elements; `fp32` without any."""
    elements: Counter[str] = Counter()
    for parameter in module.parameters():
        name = dtype_name(parameter.dtype)
        if name is not None and parameter.is_floating_point():
            elements[name] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else "fp32"


def has_tf32(device: torch.device) -> bool:
    """Whether a device can compute fp32 products as TF32."""
    if device.type != "cuda" or torch.version.hip is not None:  # ROCm has no such switch that works by itself
        return False
    return torch.cuda.get_device_capability(device) >= _TF32_SINCE


def fp32_runs_as_tf32(module: nn.Module) -> bool:
    """Whether PyTorch lets a GPU that `has_tf32` compute this module's fp32 products in it."""
    # The defaults differ: cuDNN allows TF32, matrix products do not. Then most of the module's layers decide; a
    # recurrent one has two products, of its input and of its state, in each direction.
    allowed = tf32_allowed()
    products: Counter[bool] = Counter()
    for part in module.modules():
        if isinstance(part, _ConvNd):
            products[allowed.convolutions] += 1
        elif isinstance(part, nn.RNNBase):
            products[allowed.recurrent] += 2 * part.num_layers * (1 + part.bidirectional)
        elif isinstance(part, nn.Linear):
            products[allowed.products] += 1
    return allowed.products if products[True] == products[False] else products[True] > products[False]


class Tf32Allowed(NamedTuple):
    """Which layers PyTorch lets a GPU compute in TF32."""

    products: bool
    convolutions: bool
    recurrent: bool


def tf32_allowed() -> Tf32Allowed:
    """PyTorch's current settings."""
    cudnn = torch.backends.cudnn
    parts = (torch.backends.cuda.matmul, *(getattr(cudnn, name, cudnn) for name in ("conv", "rnn")))
    return Tf32Allowed(*(float32_products(each) == "tf32" for each in parts))
