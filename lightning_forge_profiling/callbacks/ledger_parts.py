"""Feeds the ledger of a fit: which part each announced hook is, and the loggers' calls and compilation."""

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any, Final

from lightning_forge_profiling.callbacks.lightning_api import (
    LightningModule,
    TimedMethod,
    TimedRows,
    Trainer,
    implemented_hooks,
    timed_logging,
    timed_originals,
    timed_rows,
    timed_values,
)
from lightning_forge_profiling.names import EPOCH_METRICS, SELF_LOG
from lightning_forge_profiling.timing.garbage import GarbageTimer
from lightning_forge_profiling.timing.ledger import LOOP, LedgerClock

_HOOKS: Final = ("callback/", "module/")
_ANYWHERE: Final = ("",)


def hook_parts(trainer: Trainer, module: LightningModule, own: Collection[object]) -> dict[str, str]:
    """The parts for the hooks that callbacks, module and data module implement, by the name that Lightning announces.

    This package's own hooks of each training batch are in none: the step timer measures them.
    """
    parts, kinds = {}, {type(one) for one in own}  # one that is inactive beside them has the same actions
    for callback in trainer.callbacks:
        mine = type(callback) in kinds
        for hook in implemented_hooks(callback):
            action = f"[Callback]{callback.state_key}.{hook}"
            if not mine:
                parts[action] = f"callback/{type(callback).__name__}.{hook}"
            elif "train_batch" not in hook:
                parts[action] = "profiler"
    for kind, owner in ("LightningModule", module), ("LightningDataModule", trainer.datamodule):
        for hook in implemented_hooks(owner):
            parts[f"[{kind}]{type(owner).__name__}.{hook}"] = f"{kind.removeprefix('Lightning').lower()}/{hook}"
    scheduler = f"[LightningModule]{type(module).__name__}.lr_scheduler_step"  # Lightning's own steps the scheduler
    return {**parts, scheduler: "module/lr_scheduler_step"}


class LedgerParts:
    """Enters into the ledger what Lightning does not announce, while a training loop runs.

    Only the training thread's time is entered.
    """

    def __init__(self, clock: LedgerClock, trainer: Trainer, warming_up: Callable[[], bool]) -> None:
        self._clock = clock
        self._warming_up = warming_up
        self._thread = get_ident()
        self.compiling = ""
        """The part of a compilation that has begun; end it with `end_compilation`."""
        self._trainer = trainer
        self._computed: int | None = None  # the epoch
        names = " and ".join(dict.fromkeys(type(logger).__name__ for logger in trainer.loggers))
        self._logger_part = f"logger/{names}"
        self._methods: list[TimedMethod | TimedRows] = [
            timed_logging(trainer, partial(self._in_part, self._logger_part, _ANYWHERE)),
            *timed_rows(trainer, self._in_part),
            *timed_values(trainer, partial(self._in_part, SELF_LOG), self._in_epoch_metrics),
            *timed_originals(trainer, trainer.lightning_module, self._outside_hook),
        ]
        self._garbage = GarbageTimer()
        clock.note_garbage(self._garbage)
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        self._compiler = None if dynamo is None else dynamo.callback_handler
        if self._compiler is not None:
            self._compiler.register_start_callback(self._compile_begins)
            self._compiler.register_end_callback(self._compile_ends)

    def close(self) -> None:
        """Restore everything."""
        for method in self._methods:
            method.release()
        self._garbage.close()
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            for listed, ours in (
                (compiler.start_callbacks, self._compile_begins),
                (compiler.end_callbacks, self._compile_ends),
            ):
                if ours in listed:
                    listed.remove(ours)

    def _in_part(self, part: str, around: tuple[str, ...] = (), *, counts: bool = True) -> AbstractContextManager[None]:
        """Enter a part, but inside of a hook only where `around` names its kind: else the time is the hook's."""
        inside = self._clock.innermost()
        ours = get_ident() == self._thread and (inside in LOOP or inside.startswith(around))
        return self._clock.inside(part, counts=counts) if ours else nullcontext()

    def _in_epoch_metrics(self) -> AbstractContextManager[None]:
        """Compute what was logged in an epoch; further calls in the same epoch get the same values."""
        before, self._computed = self._computed, self._trainer.current_epoch
        return self._in_part(EPOCH_METRICS, _HOOKS, counts=before != self._computed)

    def _outside_hook(self, hook: str) -> AbstractContextManager[None]:
        """A hook of the module lets Lightning do what it does without that hook."""
        return self._clock.outside(f"module/{hook}") if get_ident() == self._thread else nullcontext()

    def end_compilation(self) -> None:
        """A batch has ended, and with it any compilation that ended in another thread."""
        self._compile_ends(None)

    def _compile_begins(self, _: Any) -> None:
        if get_ident() == self._thread and not self.compiling:
            self.compiling = "startup/compile" if self._warming_up() else "compile"
            self._clock.enter(self.compiling)

    def _compile_ends(self, _: Any) -> None:
        if get_ident() == self._thread and self.compiling:
            part, self.compiling = self.compiling, ""
            self._clock.exit(part)
