"""What is timed: a function with its arguments, its name, and the device that it runs on."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.clocks import named_device

_LONGEST_VALUE: Final = 24
_LONGEST_SETTING: Final = 80
_WRITES_TO_ARGUMENTS: Final = (
    "it writes to its arguments (x.add_() or the like): each call starts from what the previous one left, and values "
    "that grow or vanish can change its time"
)


class TimedCall:
    """A function with its arguments."""

    def __init__(self, fn: Callable[..., object], arguments: tuple[Any, ...], name: str | None = None) -> None:
        if not callable(fn):
            raise ConfigurationError(
                f"fn must be callable, got {type(fn).__name__}: pass the function and its arguments separately, as in "
                "benchmark(torch.softmax, x, -1)."
            )
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"name must be a str, got {type(name).__name__}.")
        self.name = default_name(fn, arguments) if name is None else name
        self.values = (fn, arguments)
        self.raised = False  # whether one of the calls has

    def call_first(self) -> list[str]:
        """Make the first call, which may compile for a minute, and check what it returns and changes."""
        fn, arguments = self.values
        before = _versions(arguments)
        returned = fn(*arguments)
        if isinstance(returned, Generator | AsyncGenerator | Coroutine):
            if isinstance(returned, Coroutine):
                returned.close()  # or Python warns that it was never awaited
            raise ConfigurationError(
                f"The function returns a {type(returned).__name__}: calling it runs nothing of its body. Time a call "
                "that runs it to the end, such as lambda: list(fn(x)) or lambda: asyncio.run(fn(x))."
            )
        return [_WRITES_TO_ARGUMENTS] if _versions(arguments) != before else []

    def call(self) -> None:
        """Call it once. What it returns is released before the next call."""
        self.call_many(1)

    def call_many(self, calls: int) -> None:
        """Call it `calls` times."""
        fn, arguments = self.values
        try:
            for _ in repeat(None, calls):
                fn(*arguments)
        except BaseException:
            self.raised = True
            raise


def _versions(arguments: object) -> list[int]:
    """How often each tensor in the arguments has been written to, as autograd counts it."""
    tensors = (value for value in _leaves(arguments) if isinstance(value, torch.Tensor))
    # Inference tensors have no count. PyTorch's notes on autograd document `_version`, but for the underscore.
    return [tensor._version for tensor in tensors if not tensor.is_inference()]  # noqa: SLF001


def _leaves(value: object) -> Iterator[object]:
    """A value, or what the containers in it hold."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def default_name(fn: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    """The function's name with the types and shapes of its arguments."""
    named: dict[str, Any] = {}
    while isinstance(fn, partial):
        arguments, named, fn = fn.args + arguments, {**fn.keywords, **named}, fn.func
    texts = [_short(argument) for argument in arguments]
    texts += [f"{name}={_short(value)}" for name, value in named.items()]
    return f"{_function_name(fn)}({', '.join(texts)})"


def _function_name(fn: Callable[..., object]) -> str:
    if isinstance(fn, torch.nn.Module):
        eager = getattr(fn, "_orig_mod", None)  # of torch.compile(module); module.compile() keeps the module
        compiled = eager is not None or getattr(fn, "_compiled_call_impl", None) is not None
        module: torch.nn.Module = fn if eager is None else eager
        setting = _cut(module.extra_repr(), _LONGEST_SETTING)
        return f"{'compiled ' if compiled else ''}{type(module).__name__}{f'({setting})' if setting else ''}"
    eager = getattr(fn, "_torchdynamo_orig_callable", None)  # of torch.compile(function)
    if eager is not None:
        return f"compiled {_function_name(eager)}"
    name = getattr(fn, "__qualname__" if getattr(fn, "__closure__", None) else "__name__", None) or type(fn).__name__
    code = getattr(fn, "__code__", None)
    if name.endswith("<lambda>") and code is not None:
        return f"<lambda {Path(code.co_filename).name}:{code.co_firstlineno}>"
    owner = getattr(fn, "__self__", None)
    return f"{type(owner).__name__}.{name}" if isinstance(owner, torch.Tensor | torch.nn.Module) else str(name)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, int | float | str | bool | None):
        return _cut(repr(value), _LONGEST_VALUE)
    return type(value).__name__


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def device_of(call: TimedCall, asked: torch.device | str | int | None) -> torch.device:
    """The device to time a call on. May call it once."""
    device = find_device(call.values, asked)
    unsure = device.type == "cpu" and asked is None  # a model on the GPU may take its batches from the CPU
    if (unsure or device.type == "cuda") and _cuda_in_use() and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "A CUDA graph is being captured, and nothing can be timed meanwhile: call benchmark outside of the capture."
        )
    return (_device_allocated_on(call) or device) if unsure else device


def find_device(values: object, asked: torch.device | str | int | None) -> torch.device:
    """Where a function runs, as far as can be known without calling it."""
    devices = {device.type: device for device in reversed(list(_devices(values)))}
    if "meta" in devices:
        raise ConfigurationError(
            "There are tensors on the meta device, which have no data: make them on the CPU or a CUDA device."
        )
    device = None if asked is None else named_device(asked)
    if asked is None:
        not_cpu = devices.get("cuda") or next((at for kind, at in devices.items() if kind != "cpu"), None)
        device = not_cpu or torch.device("cpu" if devices or not _cuda_in_use() else "cuda")
    if device is None:
        raise ConfigurationError(f"device={asked!r} is not a device: pass 'cpu' or one such as 'cuda:0'.")
    if device.type == "cpu" and "cuda" in devices:
        raise ConfigurationError(
            f"device='cpu', but there are tensors on {devices['cuda']}: leave device out, or move them to the CPU."
        )
    return device if device.type == "cpu" else _with_index(device)


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


def _devices(values: object, within: tuple[FunctionType, ...] = ()) -> Iterator[torch.device]:
    """The devices of all tensors and modules in values: in containers, partials, closures, globals and owners."""
    for value in _leaves(values):
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, torch.nn.Module):
            yield from (tensor.device for tensor in chain(value.parameters(), value.buffers()))
        elif isinstance(value, partial):
            yield from _devices([value.func, value.args, value.keywords], within)
        elif isinstance(value, FunctionType):
            if value in within:  # it is recursive
                continue
            used = (value.__globals__.get(name) for name in value.__code__.co_names)
            yield from _devices([each for each in used if isinstance(each, torch.Tensor | torch.nn.Module)])
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # the cell is still empty
                    yield from _devices(cell.cell_contents, (*within, value))
        elif (owner := getattr(value, "__self__", None)) is not value:
            yield from _devices(owner, within)


def _device_allocated_on(call: TimedCall) -> torch.device | None:
    """The CUDA device on which one call takes memory from PyTorch; None for none."""
    # Nearly all work on a GPU does: a copy to it, and every operation that returns a new tensor. A function of the CPU
    # is only called once more, CUDA is not started for it, and a CPU build of PyTorch does not call it at all.
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
