"""Feeds the ledger of a fit: which part each announced hook is, and the loggers' calls and compilation."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from lightning_forge_profiling.callbacks.lightning_api import (
    LightningModule,
    TimedLogging,
    Trainer,
    implemented_hooks,
)
from lightning_forge_profiling.timing.ledger import LedgerClock

__all__ = ["LedgerParts", "hook_parts"]


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
        mine = any(callback is one for one in own)
        for hook in implemented_hooks(callback):
            action = f"[Callback]{callback.state_key}.{hook}"
            if not mine:
                parts[action] = f"callback/{type(callback).__name__}.{hook}"
            elif "batch" not in hook:
                parts[action] = "profiler"
    for kind, owner in ("LightningModule", module), ("LightningDataModule", trainer.datamodule):
        for hook in implemented_hooks(owner):
            parts[f"[{kind}]{type(owner).__name__}.{hook}"] = f"{kind.removeprefix('Lightning').lower()}/{hook}"
    return parts


class LedgerParts:
    """Enters into the ledger what Lightning does not announce, while a training loop runs.

    Only the training thread's time is entered. Garbage collection is not: a Python function in `gc.callbacks` swallows
    the exception of a signal that arrives while it runs, and so Ctrl-C.

    Args:
        clock: the ledger.
        trainer: of the fit.
        warming_up: whether the current step is a warm-up step, in which compilation is part of the startup.
    """

    def __init__(self, clock: LedgerClock, trainer: Trainer, warming_up: Callable[[], bool]) -> None:
        self._clock = clock
        self._warming_up = warming_up
        self._thread = get_ident()
        self._compiling = ""
        names = " and ".join(dict.fromkeys(type(logger).__name__ for logger in trainer.loggers))
        self._logger_part = f"logger/{names}"
        self._logging = TimedLogging(trainer, self.logging)
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        self._compiler = None if dynamo is None else dynamo.callback_handler
        if self._compiler is not None:
            self._compiler.register_start_callback(self._compile_begins)
            self._compiler.register_end_callback(self._compile_ends)

    def close(self) -> None:
        """Restore everything."""
        self._logging.release()
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            for listed, ours in (
                (compiler.start_callbacks, self._compile_begins),
                (compiler.end_callbacks, self._compile_ends),
            ):
                if ours in listed:
                    listed.remove(ours)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """The loggers are given a row."""
        mine = get_ident() == self._thread
        if mine:
            self._clock.enter(self._logger_part)
        try:
            yield
        finally:
            if mine:
                self._clock.exit(self._logger_part)

    def end_step(self) -> None:
        """A batch has ended, and with it any compilation of which the end was in another thread."""
        if self._compiling:
            self._compile_ends(None)

    def _compile_begins(self, _: Any) -> None:
        if get_ident() == self._thread and not self._compiling:
            self._compiling = "startup/compile" if self._warming_up() else "compile"
            self._clock.enter(self._compiling)

    def _compile_ends(self, _: Any) -> None:
        if get_ident() == self._thread and self._compiling:
            part, self._compiling = self._compiling, ""
            self._clock.exit(part)
