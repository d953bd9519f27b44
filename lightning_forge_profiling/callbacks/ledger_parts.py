"""Feeds the ledger of a fit: which part each announced hook is, and loggers, compilation and garbage collection."""

import gc
import sys
from collections.abc import Callable, Collection
from functools import partial
from threading import get_ident
from typing import Any, Final

from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer, implemented_hooks
from lightning_forge_profiling.timing.ledger import LedgerClock

__all__ = ["LedgerParts", "hook_parts"]

_OLDEST: Final = 2
"""Collecting the younger generations takes microseconds."""

_LOGGER_CALLS: Final = ("log_metrics", "save")


def hook_parts(trainer: Trainer, module: LightningModule, own: Collection[object]) -> dict[str, str]:
    """The parts for the hooks that callbacks, module and data module implement, by the name that Lightning announces.

    This package's own hooks of each batch are in none: the step timer measures them.

    Args:
        trainer: of the fit.
        module: the module that it trains.
        own: this package's callbacks.
    """
    parts = {}
    for callback in trainer.callbacks:
        for hook in implemented_hooks(callback):
            action = f"[Callback]{callback.state_key}.{hook}"
            if callback not in own:
                parts[action] = f"callback/{type(callback).__name__}.{hook}"
            elif "batch" not in hook:
                parts[action] = "profiler"
    for kind, owner in ("LightningModule", module), ("LightningDataModule", trainer.datamodule):
        for hook in implemented_hooks(owner):
            parts[f"[{kind}]{type(owner).__name__}.{hook}"] = f"{kind.removeprefix('Lightning').lower()}/{hook}"
    return parts


class LedgerParts:
    """Enters into the ledger what Lightning does not announce, while a training loop runs.

    Args:
        clock: the ledger.
        loggers: the Trainer's loggers.
        warming_up: whether the current step is a warm-up step, in which compilation is part of the startup.
    """

    def __init__(self, clock: LedgerClock, loggers: Collection[Any], warming_up: Callable[[], bool]) -> None:
        self._clock = clock
        self._warming_up = warming_up
        self._thread = get_ident()
        self._compiling = 0
        self._part = ""
        self._undo: list[Callable[[], object]] = []
        gc.callbacks.append(self._collecting)
        self._undo.append(partial(_remove, gc.callbacks, self._collecting))
        for logger in loggers:
            part = f"logger/{type(logger).__name__}"
            for call in _LOGGER_CALLS:
                if call not in vars(logger):
                    setattr(logger, call, _Timed(logger, call, clock, part))
                    self._undo.append(partial(vars(logger).pop, call, None))
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        if dynamo is not None:
            handler = dynamo.callback_handler
            handler.register_start_callback(self._compile_begins)
            handler.register_end_callback(self._compile_ends)
            self._undo += [
                partial(_remove, handler.start_callbacks, self._compile_begins),
                partial(_remove, handler.end_callbacks, self._compile_ends),
            ]

    def close(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.pop()()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < _OLDEST or get_ident() != self._thread:
            return
        if phase == "start":
            self._clock.enter("gc")
        else:
            self._clock.exit("gc")

    def _compile_begins(self, _: Any) -> None:
        if get_ident() == self._thread:
            self._compiling += 1
            if self._compiling == 1:
                self._part = "startup/compile" if self._warming_up() else "compile"
                self._clock.enter(self._part)

    def _compile_ends(self, _: Any) -> None:
        if get_ident() == self._thread and self._compiling:
            self._compiling -= 1
            if not self._compiling:
                self._clock.exit(self._part)


class _Timed:
    """A method of a logger, timed as a part of the ledger. A copy of it is the method."""

    def __init__(self, logger: Any, call: str, clock: LedgerClock, part: str) -> None:
        self._logger, self._call, self._clock, self._part = logger, call, clock, part
        self._method = getattr(logger, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.enter(self._part, counts=self._call == "log_metrics")
        try:
            return self._method(*args, **kwargs)
        finally:
            self._clock.exit(self._part)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method, (self._logger, self._call)


def _method(logger: Any, call: str) -> Any:
    return partial(getattr(type(logger), call), logger)


def _remove(listed: list[Any], item: Any) -> None:
    if item in listed:
        listed.remove(item)
