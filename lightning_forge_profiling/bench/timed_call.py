"""What is timed: a function, the arguments it is called with, and the name of the result."""

import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from numbers import Real
from pathlib import Path
from typing import Any, Final

import torch

from lightning_forge_profiling.errors import ConfigurationError

_LONGEST_VALUE: Final = 24
_LONGEST_SETTING: Final = 80
_WRITES_TO_ARGUMENTS: Final = (
    "it writes to its arguments (x.add_() or the like): each call starts from what the previous one left, and values "
    "that grow or vanish can change its time"
)


class TimedCall:
    """A function with its argument sets."""

    def __init__(
        self,
        fn: Callable[..., object],
        sets: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"name must be a str, got {type(name).__name__}.")
        self.name = default_name(fn, sets[0], kwargs, len(sets)) if name is None else name
        self.sets = len(sets)
        self.values = (fn, *sets, kwargs)
        self.raised = False  # whether one of the calls has
        self._fn = partial(fn, **kwargs) if kwargs else fn
        self._next = cycle(sets).__next__

    def call_first(self) -> list[str]:
        """Make the first call, which may compile for a minute, and check what it returns and changes."""
        arguments = self._next()
        before = list(_versions(arguments))
        returned = self._fn(*arguments)
        if isinstance(returned, Generator | AsyncGenerator | Coroutine):
            if isinstance(returned, Coroutine):
                returned.close()  # or Python warns that it was never awaited
            raise ConfigurationError(
                f"The function returns a {type(returned).__name__}: calling it runs nothing of its body. Time a call "
                "that runs it to the end, such as lambda: list(fn(x)) or lambda: asyncio.run(fn(x))."
            )
        return [_WRITES_TO_ARGUMENTS] if list(_versions(arguments)) != before else []

    def call(self) -> None:
        """Call it once. What it returns is released before the next call."""
        self.call_many(1)

    def call_many(self, calls: int) -> None:
        """Call it `calls` times."""
        fn, arguments = self._fn, self._next
        try:
            for _ in repeat(None, calls):
                fn(*arguments())
        except BaseException:
            self.raised = True
            raise


def _versions(value: object) -> Iterator[int]:
    """How often each tensor in the arguments has been written to, as autograd counts it."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():  # those have no count
            yield value._version  # noqa: SLF001  (documented in PyTorch's notes on autograd, but for the underscore)
    elif isinstance(value, Mapping):
        yield from _versions(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _versions(item)


def argument_sets(fn: object, args: tuple[Any, ...], inputs: object, kwargs: object = None) -> list[tuple[Any, ...]]:
    """The argument tuples of `TimedCall`, from what `benchmark` was given."""
    if not callable(fn):
        raise ConfigurationError(
            f"fn must be callable, got {type(fn).__name__}: pass the function and its arguments separately, as in "
            "benchmark(torch.softmax, x, -1)."
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        given = "keys of other types" if isinstance(kwargs, Mapping) else type(kwargs).__name__
        raise ConfigurationError(f"kwargs must be a dict with str keys, such as {{'dim': -1}}, got {given}.")
    if inputs is None:
        return [args]
    if args:
        raise ConfigurationError("inputs replaces positional arguments: put them into each of its tuples.")
    if not isinstance(inputs, list | tuple) or not inputs:
        given = "an empty one" if isinstance(inputs, list | tuple) else type(inputs).__name__
        raise ConfigurationError(f"inputs must be a list of argument tuples, such as [(x1,), (x2,)], got {given}.")
    for number, one in enumerate(inputs):
        if not isinstance(one, list | tuple):
            raise ConfigurationError(
                f"inputs[{number}] must be a tuple of arguments, as in inputs=[(x1,), (x2,)], got {type(one).__name__}."
            )
    return [tuple(one) for one in inputs]


def default_name(
    fn: Callable[..., object], arguments: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, sets: int = 1
) -> str:
    """The function's name with the types and shapes of its arguments."""
    named = dict(kwargs or {})
    while isinstance(fn, partial):
        arguments, named, fn = fn.args + arguments, {**fn.keywords, **named}, fn.func
    texts = [_short(argument) for argument in arguments]
    texts += [f"{name}={_short(value)}" for name, value in named.items()]
    return f"{_function_name(fn)}({', '.join(texts)}){f' over {sets} inputs' if sets > 1 else ''}"


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


METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")

HOST_METHODS: Final = ("auto", "cpu", "wall")
"""Those that need no GPU. On a CPU all three are the same."""

_MIN_TIME_S: Final = 0.1
_MAX_TIME_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `benchmark` that do not describe the call, checked."""

    method: str = "auto"
    flush_l2: bool = True
    warmup: int | None = None
    min_time: float | None = None
    max_time: float | None = None
    max_noise: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if not isinstance(self.flush_l2, bool):
            raise ConfigurationError(f"flush_l2 must be True or False, got {self.flush_l2!r}.")
        if self.warmup is not None and (type(self.warmup) is not int or self.warmup < 0):
            raise ConfigurationError(
                f"warmup must be a number of calls, 0 or more, got {self.warmup!r}. Leave it out to warm up until the "
                "time of a call is steady."
            )
        for name, value in (("max_time", self.max_time), ("min_time", self.min_time)):
            if value is not None and not (_is_number(value) and 0 <= value < math.inf):
                raise ConfigurationError(f"{name} must be a number of seconds, 0 or more, got {value!r}.")
        if self.min_time_s > self.max_time_s:
            raise ConfigurationError(f"min_time ({self.min_time_s} s) is longer than max_time ({self.max_time_s} s).")
        if not _is_number(self.max_noise) or not self.max_noise > 0:
            raise ConfigurationError(
                f"max_noise must be a number greater than 0, such as 0.01 for 1 %, got {self.max_noise!r}."
            )

    @property
    def min_time_s(self) -> float:
        """`min_time`, by default 0.1 s or `max_time`, whichever is less."""
        default = _MIN_TIME_S if self.max_time is None else min(_MIN_TIME_S, self.max_time)
        return default if self.min_time is None else self.min_time

    @property
    def max_time_s(self) -> float:
        """`max_time`, by default 3 s or `min_time`, whichever is more."""
        default = _MAX_TIME_S if self.min_time is None else max(_MAX_TIME_S, self.min_time)
        return default if self.max_time is None else self.max_time


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
