"""Keeps this package's own failures out of the training: they are logged, and switch off the part that failed."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)


class Guarded(Protocol):
    """A part of a fit's monitor whose methods must not fail."""

    _failed: bool


P = ParamSpec("P")
Self_ = TypeVar("Self_", bound=Guarded)


def guarded(method: Callable[Concatenate[Self_, P], None]) -> Callable[Concatenate[Self_, P], None]:
    """Log the first failure of a method, and from then on call only what is `guarded_end`."""

    @functools.wraps(method)
    def run(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as exc:
            note_failure(self, exc)

    return run


def guarded_end(method: Callable[Concatenate[Self_, P], None]) -> Callable[Concatenate[Self_, P], None]:
    """Log the failure of a method that closes something, and so is called after failures, too."""

    @functools.wraps(method)
    def run(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as exc:
            note_failure(self, exc)

    return run


def note_failure(part: Guarded, exc: Exception) -> None:
    """Switch a part off, and log why if it is its first failure."""
    if not part._failed:  # noqa: SLF001  (what the protocol is)
        part._failed = True  # noqa: SLF001
        name = getattr(part, "called", type(part).__name__)
        _log.warning("%s failed and is switched off: %s: %s", name, type(exc).__name__, exc)
        _log.debug("", exc_info=exc)
