"""Keeps a callback's own failures out of the training: `guarded` logs them and switches the callback off."""

import functools
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

_CLOSING: Final = frozenset({"_note", "_end", "_conclude", "_abandon"})


class Guarded(Protocol):
    """A callback whose hooks must not fail."""

    _failed: bool

    @property
    def _step_timer(self) -> object | None:
        """None outside of a fit."""


P = ParamSpec("P")
Self_ = TypeVar("Self_", bound=Guarded)


def guarded(hook: Callable[Concatenate[Self_, P], None]) -> Callable[Concatenate[Self_, P], None]:
    """Keep a hook's failure out of the training: log it once and from then on do only what closes the fit."""
    closes = hook.__name__ in _CLOSING

    @functools.wraps(hook)
    def run(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._step_timer is None or (self._failed and not closes):
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as exc:
            if not self._failed:
                self._failed = True
                _log.warning("%s failed and is switched off: %s: %s", type(self).__name__, type(exc).__name__, exc)
                _log.debug("", exc_info=exc)

    return run
