"""Feeds the ledger of a fit: which part each announced hook is, and the loggers' calls and compilation."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Final

from lightning_forge_profiling.host import process_age_s
from lightning_forge_profiling.names import (
    COMPILE,
    SET_UP,
    STARTUP_IMPORTS,
    STARTUP_PROCESS,
    STARTUP_SCRIPT,
    STARTUP_TRAINER,
)
from lightning_forge_profiling.run.compilations import Compilations
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.timing.garbage import GarbageTimer
from lightning_forge_profiling.timing.ledger import LOOP, LedgerClock


class LedgerParts:
    """Enters what no hook announces into the ledger while a training loop runs, of its thread alone."""

    def __init__(self, clock: LedgerClock, training: Training, warming_up: Callable[[], bool]) -> None:
        self._clock = clock
        self._warming_up = warming_up
        self._thread = get_ident()
        self.compilations = Compilations()
        self.compiling = ""  # the part of a compilation that has begun; end it with `end_compilation`
        self._calls = training.time_calls(self)
        self._garbage = GarbageTimer()
        clock.note_garbage(self._garbage)
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        self._compiler = None if dynamo is None else dynamo.callback_handler
        if self._compiler is not None:
            self._compiler.register_start_callback(self._compile_begins)
            self._compiler.register_end_callback(self.end_compilation)

    def close(self) -> None:
        """Restore everything."""
        for call in self._calls:
            call.release()
        self._garbage.close()
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            with suppress(ValueError):  # somebody else has cleared the list
                compiler.start_callbacks.remove(self._compile_begins)
            with suppress(ValueError):
                compiler.end_callbacks.remove(self.end_compilation)

    def inside(self, part: str, around: tuple[str, ...] = (), *, counts: bool = True) -> AbstractContextManager[None]:
        """Enter a part, but inside of a hook only where `around` names its kind: else the time is the hook's."""
        inside = self._clock.innermost()
        ours = get_ident() == self._thread and (inside in LOOP or inside.startswith(around))
        return self._clock.inside(part, counts=counts) if ours else nullcontext()

    def outside_hook(self, hook: str) -> AbstractContextManager[None]:
        """A hook of the module lets Lightning do what it does without that hook."""
        return self._clock.outside(f"module/{hook}") if get_ident() == self._thread else nullcontext()

    def _compile_begins(self, args: Any = None) -> None:
        if get_ident() == self._thread and not self.compiling:
            self.compiling = "startup/compile" if self._warming_up() else COMPILE
            self._clock.enter(self.compiling)
            self.compilations.recording_begins(args, sys._getframe(1), perf_counter_ns())  # noqa: SLF001

    def end_compilation(self, _: Any = None) -> None:
        """A compilation has ended, or a batch and with it any compilation that ended in another thread."""
        if get_ident() == self._thread and self.compiling:
            part, self.compiling = self.compiling, ""
            self._clock.exit(part)
            self.compilations.recording_ends(perf_counter_ns())
            self.compilations.pending = True


_IMPORTERS: Final = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external", "runpy"})

_fits = count()  # counts the fits of this process


def _at_top_level(frame: FrameType | None) -> bool:
    """Whether code at the top level of modules imports this module, and no function of the script's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name != "<module>" and package not in {*_IMPORTERS, __package__.partition(".")[0]}:
            return False
        frame = frame.f_back
    return True


# when torch, Lightning and what the script imports before this package were imported; None if a function of the script
# imports it, or the Trainer under `forge-profiling run`: then the script has done other work before
_IMPORTED_NS: Final = perf_counter_ns() if _at_top_level(sys._getframe()) else None  # noqa: SLF001


def begin_ledger(built_ns: int) -> LedgerClock:
    """The ledger of a fit that begins now: with the process, or with the fit in an interactive or a later one."""
    first, now_ns = next(_fits) == 0 and not hasattr(sys, "ps1") and "ipykernel" not in sys.modules, perf_counter_ns()
    began_ns = now_ns - int(((process_age_s() if first else None) or 0.0) * 1e9)
    untils = [(STARTUP_PROCESS, built_ns), (STARTUP_TRAINER, now_ns)]
    if _IMPORTED_NS is not None:
        untils = [(STARTUP_IMPORTS, _IMPORTED_NS), (STARTUP_SCRIPT, built_ns), (STARTUP_TRAINER, now_ns)]
    # a forked process, or a copied callback, has times from before its own process
    known = [(part, until_ns) for part, until_ns in untils if until_ns > began_ns]
    ledger = LedgerClock(began_ns, known[0][0] if known else SET_UP)
    following = [*(part for part, _ in known[1:]), SET_UP]
    for (_, until_ns), part in zip(known, following, strict=False):
        ledger.turn_to(part, until_ns)
    return ledger
