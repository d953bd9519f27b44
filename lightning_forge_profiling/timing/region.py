"""`region("attention")`: times a part of a model under a name, beside the built-in regions."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from types import TracebackType
from typing import Final, ParamSpec, Protocol, Self, TypeVar

import torch

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import RESERVED
from lightning_forge_profiling.plain_text import name_of, plain_logger
from lightning_forge_profiling.timing.region_clock import RegionClock
from lightning_forge_profiling.timing.steps import NAMED_BY_LOOP

_log = plain_logger(__name__)

_ANNOUNCED: Final = "region(%r) is not timed in a Trainer's fit: Lightning announces the built-in regions."

P = ParamSpec("P")
R = TypeVar("R")


class RegionSink(Protocol):
    """Receives the regions of a thread while a callback is active."""

    def open_region(self, name: str) -> object | None:
        """Start a region. Must not raise. Returns the token for `close_region`, or None if it is not timed."""

    def close_region(self, name: str, token: object) -> None:
        """End the region that `open_region` returned `token` for. Must not raise."""


_sinks: Final[dict[int, weakref.ref[RegionSink]]] = {}  # the sink of each thread's regions, by thread id

if hasattr(os, "register_at_fork"):  # a loader's worker process has the same thread id, and must not touch the GPU
    os.register_at_fork(after_in_child=_sinks.clear)


def set_region_sink(sink: RegionSink | None) -> RegionSink | None:
    """Send the regions of this thread to `sink`, held weakly; None switches them off. For the callbacks."""
    before = _sinks.pop(get_ident(), None)
    if sink is not None:
        _sinks[get_ident()] = weakref.ref(sink)
    return None if before is None else before()


def region_sink() -> RegionSink | None:
    """The sink of this thread's regions."""
    sink = _sinks.get(get_ident())
    if sink is None and len(_sinks) == 1 and _works_for_autograd():
        sink = next(iter(_sinks.copy().values()), None)
    return None if sink is None else sink()


def _works_for_autograd() -> bool:
    """Whether this is one of autograd's own threads in a backward pass, which run its GPU part."""
    if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  (no public way to ask)
        return False
    # a backward pass in another Python thread does not belong to the fit
    started = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))  # noqa: SLF001  (as `threading` takes in what others started)
    return get_ident() not in {thread.ident for thread in started}


# regions of the user's beyond these are not timed, so that names made up in a loop cannot grow without end
MAX_USER_REGIONS: Final = 64


class UserRegions:
    """Times the user's regions, which overlap the built-in ones, in the steps that are split."""

    def __init__(self, regions: RegionClock) -> None:
        self._regions = regions
        self._depth: dict[str, int] = {}
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._said_announced = False

    def open_region(self, name: str) -> object | None:
        """Begin a region."""
        regions = self._regions
        if name in RESERVED:
            if not self._said_announced:
                self._said_announced = True
                _log.warning(_ANNOUNCED, name)
            return None
        if not regions.active or regions.validating or not regions.is_split:
            return None
        try:
            with self._lock:
                depth = self._depth.get(name, 0)
                if not depth:
                    if name not in self._depth and len(self._depth) >= MAX_USER_REGIONS:
                        return None
                    regions.timers.add_region(name)
                    regions.timers.start(name)
                self._depth[name] = depth + 1
            return regions.followers.show(name) or self
        except Exception as exc:
            regions.note_failure(exc)
            return None

    def close_region(self, name: str, token: object) -> None:
        """End a region."""
        try:
            if isinstance(token, AbstractContextManager):
                token.__exit__(None, None, None)
            with self._lock:
                self._depth[name] -= 1
                if not self._depth[name] and self._regions.active:
                    self._regions.timers.stop(name)
        except Exception as exc:
            self._regions.note_failure(exc)


class region:  # noqa: N801  (used like a function, as torch.no_grad is)
    """Times a part of a LightningModule under a custom name; context manager and decorator.

    While a callback of this package is active, the region's device time is logged as `time/NAME_ms`, and a recorded
    trace shows it as a `record_function` span. At all other times it does nothing. Regions may nest; a region inside
    one of the same name is part of the outer one. Inside a function compiled by `torch.compile` and while a CUDA graph
    is captured, the region is skipped; it causes no graph break and does not invalidate the capture.

    A region belongs to the fit that runs in its thread. In threads without a fit, such as a thread pool's, and in a
    DataLoader's worker processes it is skipped. Autograd's own threads, which run the backward pass on a GPU, belong to
    the fit if it is the only one in the process.

    In a plain loop (`step`) the names `data`, `transfer`, `forward`, `backward`, `optimizer`, `validation` and
    `checkpoint` are the built-in regions, which partition the step. In a Trainer's fit, where Lightning announces
    those, regions with such a name are skipped with a warning.

    Args:
        name: the name in metrics, tables and traces; cut at 200 characters.

    Raises:
        ConfigurationError: the name is empty or reserved (`other`, `profiler`, `step`, ...).

    Examples:
        >>> with region("attention"):
        ...     scores = torch.ones(2, 2).softmax(-1)
        >>> @region("mlp")
        ... def mlp(x):
        ...     return x.relu()
        >>> mlp(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """

    def __init__(self, name: str) -> None:
        name = name_of(name)
        if not name or (name in RESERVED and name not in NAMED_BY_LOOP):
            raise ConfigurationError(
                f"region({name!r}): the name is {'empty' if not name else 'reserved'}; "
                f"choose one that is not among {', '.join(sorted(RESERVED.difference(NAMED_BY_LOOP)))}."
            )
        self.name = name
        # by thread, innermost last: one object may be entered in several threads, and inside itself
        self._open: dict[int, list[tuple[RegionSink, object] | None]] = {}

    def __enter__(self) -> None:
        if torch.compiler.is_compiling() or not (_sinks or self._open):
            return
        sink = region_sink()
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
        """Copies, such as those made with a module, are not entered."""
        return type(self), (self.name,)
