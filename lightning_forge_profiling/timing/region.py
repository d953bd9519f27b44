"""`region("attention")`: name a part of your own model and see its time beside the built-in regions."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Final, ParamSpec, Protocol, Self, TypeVar

import torch

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.timing.steps import RESERVED

__all__ = ["RegionSink", "region", "set_region_sink"]

P = ParamSpec("P")
R = TypeVar("R")


class RegionSink(Protocol):
    """Who is told of regions while a callback is active."""

    def open_region(self, name: str) -> object | None:
        """A region begins. Must not raise. Returns what `close_region` needs, None when it is not timed."""

    def close_region(self, name: str, token: object) -> None:
        """The region that `open_region` returned `token` for ends. Must not raise."""


_sinks: Final[dict[int, weakref.ref[RegionSink]]] = {}
"""By the thread whose regions they are sent."""

if hasattr(os, "register_at_fork"):  # a loader's worker process has the thread's number, and must not touch its GPU
    os.register_at_fork(after_in_child=_sinks.clear)


def set_region_sink(sink: RegionSink | None) -> RegionSink | None:
    """Send the regions of this thread to `sink`, which is held weakly; None switches them off. For the callbacks.

    Returns:
        Where they went before, to be put back.
    """
    before = _sinks.pop(get_ident(), None)
    if sink is not None:
        _sinks[get_ident()] = weakref.ref(sink)
    return None if before is None else before()


def _region_sink() -> RegionSink | None:
    """Where the regions of this thread go."""
    sink = _sinks.get(get_ident())
    if sink is None and len(_sinks) == 1 and _works_for_autograd():
        sink = next(iter(_sinks.copy().values()), None)
    return None if sink is None else sink()


def _works_for_autograd() -> bool:
    """Whether this is a thread of autograd's own in a backward pass, as a GPU's part of it has one."""
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  (no public way to ask)
        return False
    # whoever else has a backward pass in a Python thread is no business of the fit's
    started = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))  # noqa: SLF001  (as `threading` takes in what others started)
    return get_ident() not in {thread.ident for thread in started}


class region:  # noqa: N801  (used like a function, as torch.no_grad is)
    """Time a part of a LightningModule under a name of your own; context manager and decorator.

    While a callback of this package is active its device time is logged as `time/NAME_ms`, and a recorded trace shows
    it as a `record_function` span. At all other times it does nothing. Regions may nest; a region inside one of the
    same name is part of the outer one. Inside a `torch.compile`d function and while a CUDA graph is captured there is
    nothing to time: the region is skipped and breaks neither.

    A region belongs to the fit of the thread that enters it. Fits in several threads each have their own regions. In a
    thread that runs no fit, as a pool's or a loader's, and in a loader's worker process it is skipped; but in a thread
    that autograd has of its own, as for the backward pass on a GPU, it belongs to the fit, as long as that is the only
    one in the process.

    Args:
        name: what to call it.

    Raises:
        ConfigurationError: the name is empty or one of the built-in regions' (`data`, `forward`, ...).

    Example:
        >>> with region("attention"):
        ...     scores = torch.ones(2, 2).softmax(-1)
        >>> @region("mlp")
        ... def mlp(x):
        ...     return x.relu()
        >>> mlp(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """

    def __init__(self, name: str) -> None:
        if not name or name in RESERVED:
            raise ConfigurationError(
                f"region({name!r}): the name is {'empty' if not name else 'a built-in region'}; "
                f"choose one that is not among {', '.join(sorted(RESERVED))}."
            )
        self.name = name
        # by thread, innermost last: an object may serve several threads, and be entered inside itself
        self._open: dict[int, list[tuple[RegionSink, object] | None]] = {}

    def __enter__(self) -> None:
        if torch.compiler.is_compiling() or not (_sinks or self._open):
            return
        sink = _region_sink()
        token = None if sink is None else sink.open_region(self.name)
        self._open.setdefault(get_ident(), []).append(None if sink is None or token is None else (sink, token))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling() or not self._open:
            return
        entered = self._open.get(get_ident())
        if not entered:
            return
        opened = entered.pop()
        if not entered:
            del self._open[get_ident()]
        if opened is not None:
            sink, token = opened
            sink.close_region(self.name, token)

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]:
        """Time every call of `function`."""
        name = self.name

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with region(name):
                return function(*args, **kwargs)

        return timed

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """A copy, as of a module that has it, is entered nowhere."""
        return type(self), (self.name,)
