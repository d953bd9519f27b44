"""Where the function runs: the device asked for, that of its tensors, or the one on which a call allocates memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType

import torch

from lightning_forge_profiling.bench.options import HOST_METHODS
from lightning_forge_profiling.bench.timed_call import TimedCall
from lightning_forge_profiling.errors import ConfigurationError


def device_of(call: TimedCall, asked: torch.device | str | int | None, method: str) -> torch.device:
    """The device to time a call on. May call it once."""
    device = find_device(call.values, asked)
    unsure = device.type == "cpu" and asked is None  # a model on the GPU may take its batches from the CPU
    if (unsure or device.type == "cuda") and _cuda_in_use() and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "A CUDA graph is being captured, and nothing can be timed meanwhile: call benchmark outside of the capture."
        )
    if unsure:
        device = _device_allocated_on(call) or device
    if device.type == "cpu" and method not in HOST_METHODS:
        raise ConfigurationError(
            f"method={method!r} needs a CUDA device, and the function seems to run on the CPU: leave method out, "
            "move its tensors to the GPU, or pass device='cuda' if it does run there."
        )
    return device


def find_device(values: object, asked: torch.device | str | int | None) -> torch.device:
    """Where a function runs, as far as can be known without calling it.

    Example:
        >>> find_device([torch.zeros(2)], None)
        device(type='cpu')
    """
    found = {device.type: device for device in reversed(list(_devices(values)))}
    if "meta" in found:
        raise ConfigurationError(
            "There are tensors on the meta device, which have no data: make them on the CPU or a CUDA device."
        )
    if asked is None:
        not_cpu = found.get("cuda") or next((at for kind, at in found.items() if kind != "cpu"), None)
        device = not_cpu or torch.device("cpu" if found or not _cuda_in_use() else "cuda")
    else:
        device = _parsed(asked)
    if device.type == "cpu" and "cuda" in found:
        raise ConfigurationError(
            f"device='cpu', but there are tensors on {found['cuda']}: leave device out, or move them to the CPU."
        )
    return device if device.type == "cpu" else _with_index(device)


def _parsed(asked: torch.device | str | int) -> torch.device:
    name = f"cuda:{asked}" if isinstance(asked, int) else asked
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or str(device) != str(name):  # torch takes "cuda:256" for "cuda:0"
        raise ConfigurationError(f"device={asked!r} is not a device: pass 'cpu' or one such as 'cuda:0'.")
    return device


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda":
        raise ConfigurationError(f"A function on {device} cannot be timed: only the CPU and CUDA devices can.")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device='{device}', but PyTorch sees no CUDA device here: leave device out, or pass 'cpu'."
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        names = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigurationError(f"device='{device}', but PyTorch sees {names} here.")
    return torch.device("cuda", index)


def _devices(value: object, within: tuple[FunctionType, ...] = ()) -> Iterator[torch.device]:
    """The devices of all tensors and modules in a value: in containers, partials, closures, globals and owners."""
    if isinstance(value, torch.Tensor):
        yield value.device
    elif isinstance(value, torch.nn.Module):
        yield from (tensor.device for tensor in chain(value.parameters(), value.buffers()))
    elif isinstance(value, Mapping):
        yield from _devices(list(value.values()), within)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _devices(item, within)
    elif isinstance(value, partial):
        yield from _devices([value.func, value.args, value.keywords], within)
    elif isinstance(value, FunctionType):
        if value in within:  # it is recursive
            return
        used = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from _devices([each for each in used if isinstance(each, torch.Tensor | torch.nn.Module)])
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # the cell is still empty
                yield from _devices(cell.cell_contents, (*within, value))
    else:
        owner = getattr(value, "__self__", None)
        yield from () if owner is value else _devices(owner, within)


def _device_allocated_on(call: TimedCall) -> torch.device | None:
    """The CUDA device on which one call takes memory from PyTorch; None for none.

    Nearly all work on a GPU does: a copy to it, and every operation that returns a new tensor. A function of the CPU
    is only called once more, CUDA is not started for it, and a CPU build of PyTorch does not call it at all.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    before = _allocated_bytes()
    call.call_first()
    after = _allocated_bytes()
    return next((torch.device("cuda", index) for index, taken in after.items() if taken != before.get(index, 0)), None)


def _allocated_bytes() -> dict[int, int]:
    """How much memory PyTorch has ever allocated on each CUDA device, by its index."""
    if not _cuda_in_use():
        return {}
    key = "allocated_bytes.all.allocated"  # which PyTorch's other allocators count too
    return {index: torch.cuda.memory_stats(index).get(key, 0) for index in range(torch.cuda.device_count())}


def _cuda_in_use() -> bool:
    """Whether PyTorch has used a CUDA device in this process. Asking does not start CUDA."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized  # untyped in PyTorch; false in a forked child
    return is_initialized()
