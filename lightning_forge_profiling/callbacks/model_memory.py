"""What a model keeps in memory: parameters, gradients, the optimizer's state, buffers."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from lightning_forge_profiling.schema import ModelMemory


def model_memory(module: torch.nn.Module, optimizers: Iterable[Any], device: str) -> ModelMemory:
    """Bytes of each kind on a kind of device. A storage counts once, to the first kind that has it.

    Args:
        module: the model.
        optimizers: its optimizers, after a step, in which they make their state.
        device: type of the device, such as `cuda`.
    """
    counted: set[tuple[torch.device, int]] = set()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in chain.from_iterable(map(_plain, tensors)):
            if tensor.device.type != device or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr()
            if storage.nbytes() and key not in counted:
                counted.add(key)
                total += storage.nbytes()
        return total

    parameters = list(module.parameters())
    return ModelMemory(
        parameters_bytes=size(parameters),
        gradients_bytes=size(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_bytes=size(tensor for optimizer in optimizers for tensor in _tensors(optimizer.state)),
        buffers_bytes=size(module.buffers()),
    )


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage that one consists of: of a DTensor this rank's part, of a quantized one all parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
