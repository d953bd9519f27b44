"""Names that tell one measurement from another."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch

__all__ = ["Names", "default_name"]

_LONGEST_VALUE: Final = 24
_LONGEST_SETTING: Final = 80
_DEEPEST: Final = 4  # functions that hold functions, and themselves


class Names:
    """Names that were given, so that another function does not get the same.

    Example:
        >>> def power(n):
        ...     return lambda x: x**n
        >>> names = Names()
        >>> [names.tell_apart("power", fn) for fn in (power(2), power(3), power(2))]
        ['power', 'power #2', 'power']
    """

    def __init__(self) -> None:
        self._known: dict[str, list[Hashable]] = {}
        self._lock = Lock()

    def tell_apart(
        self,
        name: str,
        fn: Callable[..., object],
        arguments: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The name, with a number where another function has it, or the same one of other arguments.

        Two functions are the same where they were written in the same place and hold the same: numbers and text,
        tensors of one type and shape, modules that print alike. So are arguments.

        Args:
            name: by `default_name`.
            fn: the function.
            arguments: those of its first call.
            kwargs: keyword arguments of every call.
        """
        fn, arguments, given = _unwrapped(fn, arguments, kwargs)
        key = (_identity(fn), _identity(arguments, depth=1), _identity(given, depth=1))
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
        >>> default_name(partial(torch.sum, dim=0), (torch.zeros(2, 3),))
        'sum(float32[2, 3], dim=0)'
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
    if isinstance(value, int | float | str | bool | None):
        return _cut(repr(value), _LONGEST_VALUE)
    return type(value).__name__


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _identity(value: object, depth: int = 0) -> Hashable:
    """What two values have in common that are the same to a benchmark."""
    value = getattr(value, "_torchdynamo_orig_callable", value)  # of a compiled function, which its name says
    if isinstance(value, CodeType):
        return value
    if isinstance(value, torch.nn.Module | int | float | str | None):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _short(value)
    if (parts := _parts(value)) and depth <= _DEEPEST:
        return tuple(_identity(part, depth + 1) for part in parts)
    return id(value) if depth == 0 else getattr(value, "__qualname__", type(value).__qualname__)


def _parts(value: object) -> list[object]:
    """What makes a function or a container the one that it is."""
    match value:
        case partial():
            return [value.func, *value.args, *value.keywords, *value.keywords.values()]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return [value.__code__, *cells, *(value.__defaults__ or ())]
        case MethodType() | BuiltinMethodType():
            owner = value.__self__
            return [value.__name__, owner if isinstance(owner, torch.Tensor | torch.nn.Module) else id(owner)]
        case list() | tuple():
            return list(value)
        case dict():
            return [*value, *value.values()]
    return []


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (reading it tells)
    except ValueError:  # it has no value yet
        return False
    return True
