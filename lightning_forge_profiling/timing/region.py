"""`region("attention")`: name a part of your own model and see its time beside the built-in regions."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

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


_sink: RegionSink | None = None


def set_region_sink(sink: RegionSink | None) -> RegionSink | None:
    """Send the regions of this process to `sink`; None switches them off. For the callbacks.

    Returns:
        Where they went before, to be put back.
    """
    global _sink
    before, _sink = _sink, sink
    return before


class region:  # noqa: N801  (used like a function, as torch.no_grad is)
    """Time a part of a LightningModule under a name of your own; context manager and decorator.

    While a callback of this package is active its device time is logged as `time/NAME_ms`, and a recorded trace shows
    it as a `record_function` span. At all other times it does nothing. Regions may nest; a region inside one of the
    same name is part of the outer one. Inside a `torch.compile`d function and while a CUDA graph is captured there is
    nothing to time: the region is skipped and breaks neither.

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
        self._open: list[tuple[RegionSink, object] | None] = []  # an object may be entered inside itself

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        token = None if _sink is None else _sink.open_region(self.name)
        self._open.append(None if _sink is None or token is None else (_sink, token))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling() or not self._open:
            return
        opened = self._open.pop()
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
