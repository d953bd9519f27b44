"""Names that tell one measurement from another."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from threading import Lock
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any, Final

import numpy as np
import torch

__all__ = ["Names", "default_name"]

_LONGEST_VALUE: Final = 24
_LONGEST_SETTING: Final = 80
_PLAIN: Final = int | float | complex | str | bytes | range | slice | np.generic | torch.dtype | torch.device | None


class Names:
    """Names that were given, so that another function does not get the same.

    Example:
        >>> def power(n):
        ...     return lambda x: x**n
        >>> square, cube = power(2), power(3)
        >>> names = Names()
        >>> [names.tell_apart("power", fn, [()]) for fn in (square, cube, square)]
        ['power', 'power #2', 'power']
    """

    def __init__(self) -> None:
        self._known: dict[str, list[list[object]]] = {}
        self._lock = Lock()

    def tell_apart(
        self,
        name: str,
        fn: Callable[..., object],
        sets: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The name, with a number where another function has it, or the same one of other arguments.

        A function is the same where it is the same object: what it does cannot be read off it. Tensors among the
        arguments count by all but their values, numbers and text by their values, and anything else is the same where
        it is the same object. Models and tensors are not kept alive for it.

        Args:
            name: by `default_name`.
            fn: the function.
            sets: its argument tuples.
            kwargs: keyword arguments of every call.
        """
        key = _key(part for arguments in sets for part in _unwrapped(fn, arguments, kwargs))
        with self._lock:
            known = self._known.setdefault(name, [])
            if key not in known:
                known.append(key)
            number = known.index(key) + 1
        return name if number == 1 else f"{name} #{number}"


def default_name(
    fn: Callable[..., object], arguments: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, sets: int = 1
) -> str:
    """A name of a function and what it is called with.

    Args:
        fn: the function; one without a name of its own is named by the place where it was written, a compiled one as
            such, for `compare_benchmarks` takes results of one name for runs of one function.
        arguments: those of its first call.
        kwargs: keyword arguments of every call.
        sets: how many argument sets take turns.

    Example:
        >>> from functools import partial
        >>> default_name(torch.add, (torch.zeros(2, 3), 1))
        'add(float32[2, 3], 1)'
        >>> default_name(partial(torch.sum, dim=0), (torch.zeros(2, 3),), {"dtype": torch.float64})
        'sum(float32[2, 3], dim=0, dtype=float64)'
    """
    fn, arguments, given = _unwrapped(fn, arguments, kwargs)
    texts = [_short(argument) for argument in arguments]
    texts += [f"{name}={_short(value)}" for name, value in given.items()]
    return f"{_called(fn)}({', '.join(texts)}){f' over {sets} inputs' if sets > 1 else ''}"


def _unwrapped(
    fn: Callable[..., object], arguments: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    """A function and what it is called with, without the partials around it."""
    given: dict[str, Any] = dict(kwargs or {})
    while isinstance(fn, partial):
        arguments, given, fn = fn.args + arguments, {**fn.keywords, **given}, fn.func
    return fn, arguments, given


def _called(fn: Callable[..., object]) -> str:
    if isinstance(fn, torch.nn.Module):
        eager = getattr(fn, "_orig_mod", None)  # of torch.compile(module); module.compile() leaves it itself
        compiled = eager is not None or getattr(fn, "_compiled_call_impl", None) is not None
        module: torch.nn.Module = fn if eager is None else eager
        setting = _cut(module.extra_repr(), _LONGEST_SETTING)
        return f"{'compiled ' if compiled else ''}{type(module).__name__}{f'({setting})' if setting else ''}"
    eager = getattr(fn, "_torchdynamo_orig_callable", None)  # of torch.compile(function)
    if eager is not None:
        return f"compiled {_called(eager)}"
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


class _Same:
    """Equal to another of the same object for as long as there is that object, which it does not keep.

    Few objects cannot be referred to weakly. Of those it keeps functions and what refers to nothing else, as a memory
    format or a date, for another could come to lie in their place. Any other, as an instance of a class with slots, is
    equal to nothing: it may hold tensors.
    """

    def __init__(self, value: object) -> None:
        self._value: Callable[[], object]
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = (lambda: value) if callable(value) or not gc.is_tracked(value) else lambda: None

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, _Same) and value is not None and value is other._value()

    __hash__ = None  # type: ignore[assignment]  # what it is equal to changes when the object goes


def _key(values: Iterable[object]) -> list[object]:
    """What is equal for values that are the same to a benchmark, and short for a list of a million numbers too."""
    text, objects = sha256(), []
    for part in chain.from_iterable(map(_parts, values)):
        if isinstance(part, _Same):
            objects.append(part)
        text.update(b"\n" if isinstance(part, _Same) else f"{part}\n".encode(errors="surrogatepass"))
    return [text.digest(), *objects]


def _parts(value: object) -> Iterator[str | _Same]:
    """What makes a value the one that it is; a text has no end of a line in it."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        yield _Same(type(value))
        yield f"{value.dtype} {value.shape} {value.device} {value.layout} {strides} {value.requires_grad}"
    elif isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, list | tuple):
        yield _Same(type(value))
        yield f"{len(value)}"
        yield from chain.from_iterable(map(_parts, value))
    elif isinstance(value, dict):
        yield _Same(type(value))
        yield f"{len(value)}"
        yield from chain.from_iterable(map(_parts, chain.from_iterable(value.items())))
    elif isinstance(value, MethodType | BuiltinMethodType | MethodWrapperType) and value.__self__ is not None:
        # Python makes a method anew each time that it is asked for
        yield _Same(value.__func__) if isinstance(value, MethodType) else f"method {value.__name__}"
        if isinstance(value.__self__, torch.Tensor | list | tuple | dict):
            yield from _parts(value.__self__)
        else:
            yield _Same(value.__self__)
    else:
        yield _Same(value)
