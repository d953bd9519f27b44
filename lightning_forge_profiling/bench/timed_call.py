"""What is timed: a function and the arguments that it is called with in turn."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, cycle, repeat
from types import FunctionType
from typing import Any, Final

import torch

from lightning_forge_profiling.errors import ConfigurationError

__all__ = ["Subject", "argument_sets", "cuda_in_use", "find_device", "gpu_taken_by"]

_WRITES: Final = (
    "it writes to its arguments (x.add_() or the like): each call works on what the one before has left, and values "
    "that grow or vanish can change what it takes"
)


class Subject:
    """A function with its argument sets.

    Args:
        fn: the function.
        sets: one tuple of arguments for each call; after the last comes the first again.
        kwargs: keyword arguments of every call.

    Example:
        >>> seen = []
        >>> subject = Subject(seen.append, [(1,), (2,)])
        >>> subject.call_many(3)
        >>> seen
        [1, 2, 1]
    """

    def __init__(
        self, fn: Callable[..., object], sets: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._fn = partial(fn, **kwargs) if kwargs else fn
        self._next = cycle(sets).__next__
        self.sets = len(sets)
        self.failed = False
        """Whether a call has raised."""

    def call_first(self) -> list[str]:
        """Call it for the first time, which may compile for a minute, and look at what it returns and changes.

        Returns:
            What makes a time of it less than it seems, in sentences.

        Raises:
            ConfigurationError: a call does nothing yet.
        """
        arguments = self._next()
        before = list(_versions(arguments))
        returned = self._fn(*arguments)
        if isinstance(returned, Generator | AsyncGenerator | Coroutine):
            if isinstance(returned, Coroutine):
                returned.close()  # or Python warns that nobody awaited it
            raise ConfigurationError(
                f"The function returns a {type(returned).__name__}: calling it runs nothing of its body. Time what "
                "runs it to the end, such as lambda: list(fn(x)) or lambda: asyncio.run(fn(x))."
            )
        return [_WRITES] if list(_versions(arguments)) != before else []

    def call(self) -> None:
        """Call it once. What it returns is let go before the next call."""
        self.call_many(1)

    def call_many(self, calls: int) -> None:
        """Call it so many times."""
        fn, arguments = self._fn, self._next
        try:
            for _ in repeat(None, calls):
                fn(*arguments())
        except BaseException:
            self.failed = True
            raise


def _versions(value: object) -> Iterator[int]:
    """How often each tensor among the arguments has been written to, as autograd counts it."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():  # which nobody counts
            yield value._version  # noqa: SLF001  (documented in PyTorch's notes on autograd, but for the underscore)
    elif isinstance(value, Mapping):
        yield from _versions(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _versions(item)


def argument_sets(fn: object, args: tuple[Any, ...], inputs: object, kwargs: object = None) -> list[tuple[Any, ...]]:
    """The argument tuples to take turns, from what `benchmark` was given.

    Args:
        fn: the function.
        args: its arguments.
        inputs: several argument tuples instead, or None.
        kwargs: keyword arguments of every call, or None.

    Raises:
        ConfigurationError: it is no function, or these are no argument tuples.

    Example:
        >>> argument_sets(print, (1, 2), None), argument_sets(print, (), [(1,), [2]])
        ([(1, 2)], [(1,), (2,)])
    """
    if not callable(fn):
        raise ConfigurationError(
            f"fn is a {type(fn).__name__}, which cannot be called: give the function and its arguments apart, as in "
            "benchmark(torch.softmax, x, -1)."
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        given = "of other keys than names" if isinstance(kwargs, Mapping) else f"a {type(kwargs).__name__}"
        raise ConfigurationError(f"kwargs is {given}: give keyword arguments by name, as in kwargs={{'dim': -1}}.")
    if inputs is None:
        return [args]
    if args:
        raise ConfigurationError("inputs takes the place of arguments: put them into each of its tuples.")
    if not isinstance(inputs, list | tuple) or not inputs:
        given = "empty" if isinstance(inputs, list | tuple) else f"a {type(inputs).__name__}"
        raise ConfigurationError(f"inputs is {given}: give a list of argument tuples, as in inputs=[(x1,), (x2,)].")
    for number, one in enumerate(inputs):
        if not isinstance(one, list | tuple):
            raise ConfigurationError(
                f"inputs[{number}] is a {type(one).__name__}: each is a tuple of arguments, as in "
                "inputs=[(x1,), (x2,)]."
            )
    return [tuple(one) for one in inputs]


def gpu_taken_by(subject: Subject) -> torch.device | None:
    """Call a function once, to see on which CUDA device PyTorch takes memory for it; None for none.

    Nearly all that works on one does: a copy to it, and every operation that returns something new. It costs a function
    of the CPU nothing else, and does not start CUDA. A PyTorch for the CPU alone does not call it.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    before = _taken_bytes()
    subject.call_first()
    after = _taken_bytes()
    return next((torch.device("cuda", index) for index, taken in after.items() if taken != before.get(index, 0)), None)


def cuda_in_use() -> bool:
    """Whether PyTorch has used a CUDA device in this process. It does not start CUDA to ask."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized  # untyped in PyTorch; false in a forked child
    return is_initialized()


def _taken_bytes() -> dict[int, int]:
    """How much memory PyTorch has taken in all on each CUDA device, by its number."""
    if not cuda_in_use():
        return {}
    key = "allocated_bytes.all.allocated"  # which PyTorch's other allocators count too
    return {index: torch.cuda.memory_stats(index).get(key, 0) for index in range(torch.cuda.device_count())}


def find_device(values: object, asked: torch.device | str | int | None) -> torch.device:
    """Where the function runs, as far as can be told without calling it.

    Args:
        values: the function and its arguments, looked through for tensors and modules.
        asked: what the user said.

    Returns:
        The device asked for; else the first CUDA device among the values; else the CPU where there are tensors, or
        nothing in this process has used CUDA; else the current CUDA device.

    Raises:
        ConfigurationError: nothing can be timed there.

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
        here = found.get("cuda") or next((at for kind, at in found.items() if kind != "cpu"), None)
        device = here or torch.device("cpu" if found or not cuda_in_use() else "cuda")
    else:
        named = f"cuda:{asked}" if isinstance(asked, int) else asked
        try:
            device = torch.device(named)
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(f"device={asked!r} is no device: give 'cpu' or 'cuda:0', say.") from error
        if str(device) != str(named):  # it takes "cuda:256" for "cuda:0"
            raise ConfigurationError(f"device={asked!r} is no device: give 'cpu' or 'cuda:0', say.")
    if device.type == "cpu":
        if "cuda" in found:
            raise ConfigurationError(
                f"device='cpu', but there are tensors on {found['cuda']}: leave device out, or move them to the CPU."
            )
        return device
    return _cuda(device)


def _cuda(device: torch.device) -> torch.device:
    """The device with its index."""
    if device.type != "cuda":
        raise ConfigurationError(f"A function on {device} cannot be timed here: it takes the CPU or a CUDA device.")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device='{device}', but PyTorch sees no CUDA device here: leave device out, or 'cpu'."
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        names = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigurationError(f"device='{device}', but PyTorch sees {names} here.")
    return torch.device("cuda", index)


def _devices(value: object, within: tuple[FunctionType, ...] = ()) -> Iterator[torch.device]:
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
        if value in within:  # one that calls itself
            return
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from _devices([each for each in named if isinstance(each, torch.Tensor | torch.nn.Module)])
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                yield from _devices(cell.cell_contents, (*within, value))
    else:
        owner = getattr(value, "__self__", None)
        yield from () if owner is value else _devices(owner, within)
