"""Copies a module and its batch with shapes and no data."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_forge_profiling.errors import ConfigurationError

NESTED: Final = "Nested tensors cannot be counted: their lengths are values. Count a padded batch."


def fake_copy(module: nn.Module, batch: Any, mode: FakeTensorMode) -> tuple[nn.Module, Any]:
    """Copy both, with fake tensors in place of all tensors."""
    name = type(module).__name__
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ConfigurationError(
            f"{name} cannot be counted, because it has parameters without a shape yet. "
            "Run it once with a batch: that initializes them."
        )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    # Copying a generator copies its state, a tensor that must not be fake.
    memo: dict[int, Any] = {id(held): copy.deepcopy(held) for held in _generators(module, batch)}
    with mode, _CopyShapes(device):
        # the same memo for both, so that what they share stays shared
        memo |= {
            id(parameter): nn.Parameter(_fake(parameter, device), parameter.requires_grad)
            for parameter in module.parameters()
        }
        try:
            copied, batch = copy.deepcopy((module, batch), dict(memo))
        except ConfigurationError:
            raise
        except Exception as exc:
            wrapped = is_wrapped(module)
            what = "it" if wrapped else _what_fails(module, batch, memo)
            advice = " Count it before it is wrapped or sharded." if wrapped else ""
            raise ConfigurationError(
                f"{name} cannot be counted, because {what} cannot be copied ({type(exc).__name__}: {exc}).{advice}"
            ) from exc
    for part in copied.modules():
        if "_device" in vars(part):  # a LightningModule and a metric store their device
            vars(part)["_device"] = device
    return copied, batch


def _generators(module: nn.Module, batch: Any) -> Iterator[torch.Generator]:
    for held in (batch, *map(vars, module.modules())):
        yield from (leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Generator))


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_nested:
        raise ConfigurationError(NESTED)
    if tensor.layout is not torch.strided:  # a sparse one counts as dense
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class _CopyShapes(TorchFunctionMode):
    """Makes `deepcopy` copy tensors as fake ones: buffers, and those in lists and in the batch's classes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, self._device).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # how a parameter that is not registered is copied
            return _fake(args[0], self._device)
        return func(*args, **(kwargs or {}))


def _what_fails(module: nn.Module, batch: Any, memo: dict[int, Any]) -> str:
    """The name of the part that cannot be copied, if it can be found."""
    for what, held in _copied_alone(module, batch):
        try:
            copy.deepcopy(held, dict(memo))
        except Exception:
            return what
    return "it"


def _copied_alone(module: nn.Module, batch: Any) -> Iterator[tuple[str, Any]]:
    yield "the batch", batch
    for path, part in module.named_modules():
        state: Any = None
        with suppress(Exception):
            state = part.__reduce_ex__(4)[2]  # what deepcopy copies: without a Trainer
        if isinstance(state, dict):
            for name, value in state.items():
                if name not in {"_parameters", "_buffers", "_modules"}:
                    yield f"its attribute {path}.{name}".replace(" .", " "), value


_WRAPPERS: Final = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "DTensor"}


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is wrapped or sharded for several devices."""
    held = (*module.modules(), *module.parameters())
    return any(base.__name__ in _WRAPPERS for part in held for base in type(part).__mro__)
