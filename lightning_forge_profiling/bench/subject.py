"""What is timed: a function and the arguments that it is called with in turn."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["Subject", "default_name", "find_device"]

_LONGEST_VALUE: Final = 24


class Subject:
    """A function with its argument sets.

    Args:
        fn: the function.
        sets: one tuple of arguments for each call; after the last comes the first again.

    Example:
        >>> seen = []
        >>> subject = Subject(seen.append, [(1,), (2,)])
        >>> subject.call_many(3)
        >>> seen
        [1, 2, 1]
    """

    def __init__(self, fn: Callable[..., object], sets: Sequence[tuple[Any, ...]]) -> None:
        self._fn = fn
        self._next = cycle(sets).__next__
        self.sets = len(sets)

    def call(self) -> None:
        """Call it once. What it returns is let go before the next call."""
        self._fn(*self._next())

    def call_many(self, calls: int) -> None:
        """Call it so many times."""
        fn, arguments = self._fn, self._next
        for _ in repeat(None, calls):
            fn(*arguments())


def find_device(values: object, asked: torch.device | str | int | None) -> torch.device:
    """Where the function runs.

    Args:
        values: the function and its arguments, looked through for tensors and modules.
        asked: what the user said.

    Returns:
        The device asked for; else the first CUDA device among the values; else the CPU where there are tensors, or
        no CUDA device at all; else the current CUDA device.

    Example:
        >>> find_device([torch.zeros(2)], None)
        device(type='cpu')
    """
    if asked is not None:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    else:
        devices = list(_devices(values))
        found = next((device for device in devices if device.type == "cuda"), None)
        if found is not None:
            device = found
        else:
            device = torch.device("cpu" if devices or not torch.cuda.is_available() else "cuda")
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _devices(value: object) -> Iterator[torch.device]:
    if isinstance(value, torch.Tensor):
        yield value.device
    elif isinstance(value, torch.nn.Module):
        yield from (parameter.device for parameter in value.parameters())
    elif isinstance(value, dict):
        yield from _devices(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _devices(item)


def default_name(fn: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    """A name that tells one measurement from another.

    Args:
        fn: the function; one without a name of its own is named by the place where it was written.
        arguments: those of its first call.

    Example:
        >>> default_name(torch.add, (torch.zeros(2, 3), 1))
        'add(float32[2, 3], 1)'
    """
    name = getattr(fn, "__name__", None) or type(fn).__name__
    code = getattr(fn, "__code__", None)
    if name == "<lambda>" and code is not None:
        name = f"<lambda {Path(code.co_filename).name}:{code.co_firstlineno}>"
    return f"{name}({', '.join(_short(argument) for argument in arguments)})"


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, int | float | str | bool | None):
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
    return type(value).__name__
