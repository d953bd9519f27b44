"""Keeps this package out of the training's way: a failing part is switched off, and in forked processes all of it."""

import functools
import os
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakSet

from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

# What belongs to the process that made it. `leave()` of each is called in a forked process, such as a loader's worker,
# which has no other thread, and where locks may be held for ever.
OWNED: Final[WeakSet[Any]] = WeakSet()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [one.leave() for one in list(OWNED)])


class Guarded:
    """A part of what watches a fit, whose methods do not raise: its first failure is logged and switches it off."""

    called: str
    failed = False

    def note_failure(self, exc: Exception) -> None:
        """Switch this part off, and log why if it is its first failure."""
        if not self.failed:
            self.failed = True
            _log.warning("%s failed and is switched off: %s: %s", self.called, type(exc).__name__, exc)
            _log.debug("", exc_info=exc)


P = ParamSpec("P")
Part = TypeVar("Part", bound=Guarded)
Method = Callable[Concatenate[Part, P], None]


def _guard(method: Method[Part, P], *, always: bool) -> Method[Part, P]:
    @functools.wraps(method)
    def run(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if always or not self.failed:
            try:
                method(self, *args, **kwargs)
            except Exception as exc:
                self.note_failure(exc)

    return run


def guarded(method: Method[Part, P]) -> Method[Part, P]:
    """A method that a failure switches off."""
    return _guard(method, always=False)


def guarded_end(method: Method[Part, P]) -> Method[Part, P]:
    """A method that closes something, and so is called after failures, too."""
    return _guard(method, always=True)
