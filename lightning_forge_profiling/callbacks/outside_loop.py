"""Feeds the ledger of a fit before and after its training loop: imports, script, set-up hooks, teardown, loggers."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from time import perf_counter_ns
from types import FrameType
from typing import Final

from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler, StandIn
from lightning_forge_profiling.callbacks.ledger_parts import hook_parts
from lightning_forge_profiling.callbacks.lightning_api import (
    LightningModule,
    TimedMethod,
    Trainer,
    timed_finalize,
    timed_last_teardown,
    timed_restoring,
)
from lightning_forge_profiling.host import process_age_s
from lightning_forge_profiling.names import STARTUP_IMPORTS, STARTUP_PROCESS, STARTUP_SCRIPT, STARTUP_TRAINER
from lightning_forge_profiling.timing.ledger import LedgerClock

_SET_UP: Final = "startup/fit"

_OF_SET_UP: Final = (
    *("prepare_data", "setup", "configure_model", "configure_sharded_model", "configure_optimizers"),
    *("on_load_checkpoint", "on_fit_start", "val_dataloader"),
)
"""Hooks between the beginning of a fit and the training loop, which are called once or twice."""
_BEFORE_THE_LOOP: Final = ("train_dataloader", "on_train_start")
"""Hooks of the training loop, of which the first is called before it, too."""

_IMPORTERS: Final = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external", "runpy"})

_fits = count()
"""Counts the fits of this process."""


def _at_top_level(frame: FrameType | None) -> bool:
    """Whether code at the top level of modules imports this module, and no function of the script's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name != "<module>" and package not in {*_IMPORTERS, __package__.partition(".")[0]}:
            return False
        frame = frame.f_back
    return True


_IMPORTED_NS: Final = perf_counter_ns() if _at_top_level(sys._getframe()) else None  # noqa: SLF001
"""When torch, Lightning and what the script imports before this package were imported; None if a function of the
script imports it, or the Trainer under `forge-profiling run`: then the script has done other work before."""


def begin_ledger(built_ns: int) -> LedgerClock:
    """The ledger of a fit that begins now: with the process, or with the fit in an interactive or a later one."""
    first, now_ns = next(_fits) == 0 and not hasattr(sys, "ps1") and "ipykernel" not in sys.modules, perf_counter_ns()
    began_ns = now_ns - int(((process_age_s() if first else None) or 0.0) * 1e9)
    untils = [(STARTUP_PROCESS, built_ns), (STARTUP_TRAINER, now_ns)]
    if _IMPORTED_NS is not None:
        untils = [(STARTUP_IMPORTS, _IMPORTED_NS), (STARTUP_SCRIPT, built_ns), (STARTUP_TRAINER, now_ns)]
    # a forked process, or a copied callback, has times from before its own process
    known = [(part, until_ns) for part, until_ns in untils if until_ns > began_ns]
    ledger = LedgerClock(began_ns, known[0][0] if known else _SET_UP)
    following = [*(part for part, _ in known[1:]), _SET_UP]
    for (_, until_ns), part in zip(known, following, strict=False):
        ledger.turn_to(part, until_ns)
    return ledger


def set_up_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts for the hooks of the set-up, by the name that Lightning announces.

    Example:
        >>> set_up_parts({"[LightningModule]GPT.configure_optimizers": "module/configure_optimizers"})
        {'[LightningModule]GPT.configure_optimizers': 'startup/module.configure_optimizers'}
    """
    found = {}
    for action, part in parts.items():
        hook = action.rpartition(".")[2]
        if hook in _OF_SET_UP:
            found[action] = part if part == "profiler" else f"startup/{part.replace('/', '.', 1)}"
        elif hook in _BEFORE_THE_LOOP:
            found[action] = part
    return found


class SetUpParts:
    """Enters the hooks of a fit's set-up into the ledger, until the training loop."""

    def __init__(
        self,
        ledger: LedgerClock,
        trainer: Trainer,
        module: LightningModule,
        own: Collection[object],
        *,
        restores: bool = True,
    ) -> None:
        StandIn.leave(trainer)
        self.ledger = ledger
        self._methods: tuple[TimedMethod, ...] = ()
        parts = set_up_parts(hook_parts(trainer, module, own))
        leave = partial(self.close, trainer)  # after an exception no hook of this package's may follow
        trainer.profiler = BoundaryProfiler(trainer.profiler, None, parts=parts, ledger=ledger, raised=leave)
        around = partial(ledger.inside, "startup/restore")
        if restores:
            self._methods = timed_restoring(trainer, around)

    def close(self, trainer: Trainer) -> None:
        """Restore everything."""
        for method in self._methods:
            method.release()
        StandIn.leave(trainer)


class TearDown:
    """Enters what follows the training loop into the ledger: hooks, and the loggers' `finalize`."""

    def __init__(
        self, ledger: LedgerClock, trainer: Trainer, parts: Mapping[str, str], over: Callable[[], object]
    ) -> None:
        self._ledger, self._over = ledger, over
        self._parts = {**parts, "save_checkpoint": "checkpoint"}
        self._last: TimedMethod | None = None
        self._failed: Callable[[], object] | None = None
        self.take_place(trainer)
        self._loggers = timed_finalize(trainer, self._in_logger)

    def take_place(self, trainer: Trainer) -> None:
        """Wrap the Trainer's profiler, also if a hook has assigned another."""
        StandIn.leave(trainer)
        trainer.profiler = BoundaryProfiler(
            trainer.profiler, None, parts=self._parts, ledger=self._ledger, over=self._over, raised=self._raised
        )

    def follow_failure(self, trainer: Trainer, over: Callable[[], object]) -> None:
        """Call `over` at the end of a fit that fails: after `on_exception`, `finalize` and the strategy's teardown."""
        self._failed = over
        self._last = timed_last_teardown(trainer, over)

    @contextmanager
    def _in_logger(self, part: str) -> Iterator[None]:
        try:
            with self._ledger.inside(part):
                yield
        except BaseException:
            self._raised()
            raise

    def _raised(self) -> None:
        """A hook or a logger has raised: in a fit that has failed already, nothing else follows."""
        if self._failed is not None:
            self._failed()

    def close(self, trainer: Trainer) -> None:
        """Restore everything."""
        for method in self._loggers:
            method.release()
        if self._last is not None:
            self._last.release()
        StandIn.leave(trainer)
