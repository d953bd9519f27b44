"""Feeds the ledger of a fit: which part each announced hook is, and the loggers' calls and compilation."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Final

from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler, ProfilerProxy
from lightning_forge_profiling.callbacks.compilations import Compilations
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer, implemented_hooks
from lightning_forge_profiling.callbacks.wrapped_methods import (
    WrappedLoggerMethod,
    WrappedMethod,
    wrap_last_teardown,
    wrap_logger_method,
    wrap_logging,
    wrap_originals,
    wrap_restoring,
    wrap_self_log,
)
from lightning_forge_profiling.host import process_age_s
from lightning_forge_profiling.names import (
    EPOCH_METRICS,
    SELF_LOG,
    STARTUP_IMPORTS,
    STARTUP_PROCESS,
    STARTUP_SCRIPT,
    STARTUP_TRAINER,
)
from lightning_forge_profiling.plain_text import name_of
from lightning_forge_profiling.timing.garbage import GarbageTimer
from lightning_forge_profiling.timing.ledger import LOOP, LedgerClock


def hook_parts(trainer: Trainer, module: LightningModule, own: Collection[object]) -> dict[str, str]:
    """The parts for the hooks that callbacks, module and data module implement, by Lightning's name of the action."""
    parts, kinds = {}, {type(one) for one in own}  # one that is inactive beside them has the same actions
    for callback in trainer.callbacks:
        mine = type(callback) in kinds
        for hook in implemented_hooks(callback):
            action = f"[Callback]{callback.state_key}.{hook}"
            if not mine:
                parts[action] = f"callback/{name_of(callback)}.{hook}"
            elif "train_batch" not in hook:  # those the step timer measures
                parts[action] = "profiler"
    for kind, owner in ("LightningModule", module), ("LightningDataModule", trainer.datamodule):
        for hook in implemented_hooks(owner):
            parts[f"[{kind}]{type(owner).__name__}.{hook}"] = f"{kind.removeprefix('Lightning').lower()}/{hook}"
    scheduler = f"[LightningModule]{type(module).__name__}.lr_scheduler_step"  # Lightning's own steps the scheduler
    return {**parts, scheduler: "module/lr_scheduler_step"}


class LedgerParts:
    """Enters what Lightning does not announce into the ledger while a training loop runs, of its thread alone."""

    def __init__(self, clock: LedgerClock, trainer: Trainer, warming_up: Callable[[], bool]) -> None:
        self._clock = clock
        self._warming_up = warming_up
        self._thread = get_ident()
        self.compilations = Compilations()
        self.compiling = ""  # the part of a compilation that has begun; end it with `end_compilation`
        self._trainer = trainer
        self._computed: int | None = None  # the epoch
        names = " and ".join(dict.fromkeys(map(name_of, trainer.loggers)))
        self._methods: list[WrappedMethod | WrappedLoggerMethod] = [
            wrap_logging(trainer, partial(self._in_part, f"logger/{names}", ("",))),
            *wrap_logger_method(trainer, "log_metrics", self._in_part),
            *wrap_self_log(trainer, partial(self._in_part, SELF_LOG), self._in_epoch_metrics),
            *wrap_originals(trainer, trainer.lightning_module, self._outside_hook),
        ]
        self._garbage = GarbageTimer()
        clock.note_garbage(self._garbage)
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        self._compiler = None if dynamo is None else dynamo.callback_handler
        if self._compiler is not None:
            self._compiler.register_start_callback(self._compile_begins)
            self._compiler.register_end_callback(self.end_compilation)

    def close(self) -> None:
        """Restore everything."""
        for method in self._methods:
            method.release()
        self._garbage.close()
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            with suppress(ValueError):  # somebody else has cleared the list
                compiler.start_callbacks.remove(self._compile_begins)
            with suppress(ValueError):
                compiler.end_callbacks.remove(self.end_compilation)

    def _in_part(self, part: str, around: tuple[str, ...] = (), *, counts: bool = True) -> AbstractContextManager[None]:
        """Enter a part, but inside of a hook only where `around` names its kind: else the time is the hook's."""
        inside = self._clock.innermost()
        ours = get_ident() == self._thread and (inside in LOOP or inside.startswith(around))
        return self._clock.inside(part, counts=counts) if ours else nullcontext()

    def _in_epoch_metrics(self) -> AbstractContextManager[None]:
        """Compute what was logged in an epoch; further calls in the same epoch get the same values."""
        before, self._computed = self._computed, self._trainer.current_epoch
        return self._in_part(EPOCH_METRICS, ("callback/", "module/"), counts=before != self._computed)

    def _outside_hook(self, hook: str) -> AbstractContextManager[None]:
        """A hook of the module lets Lightning do what it does without that hook."""
        return self._clock.outside(f"module/{hook}") if get_ident() == self._thread else nullcontext()

    def _compile_begins(self, args: Any) -> None:
        if get_ident() == self._thread and not self.compiling:
            self.compiling = "startup/compile" if self._warming_up() else "compile"
            self._clock.enter(self.compiling)
            self.compilations.recording_begins(args, sys._getframe(1), perf_counter_ns())  # noqa: SLF001

    def end_compilation(self, _: Any = None) -> None:
        """A compilation has ended, or a batch and with it any compilation that ended in another thread."""
        if get_ident() == self._thread and self.compiling:
            part, self.compiling = self.compiling, ""
            self._clock.exit(part)
            self.compilations.recording_ends(perf_counter_ns())
            self.compilations.pending = True


_SET_UP: Final = "startup/fit"

# hooks between the beginning of a fit and the training loop, which are called once or twice
_OF_SET_UP: Final = (
    *("prepare_data", "setup", "configure_model", "configure_sharded_model", "configure_optimizers"),
    *("on_load_checkpoint", "on_fit_start", "val_dataloader"),
)
# hooks of the training loop, of which the first is called before it, too
_BEFORE_THE_LOOP: Final = ("train_dataloader", "on_train_start")

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
    ledger = LedgerClock(began_ns, known[0][0] if known else _SET_UP)
    following = [*(part for part, _ in known[1:]), _SET_UP]
    for (_, until_ns), part in zip(known, following, strict=False):
        ledger.turn_to(part, until_ns)
    return ledger


def set_up_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts for the hooks of the set-up, by the name that Lightning announces."""
    of_set_up = {}
    for action, part in parts.items():
        hook = action.rpartition(".")[2]
        if hook in _OF_SET_UP:
            of_set_up[action] = part if part == "profiler" else f"startup/{part.replace('/', '.', 1)}"
        elif hook in _BEFORE_THE_LOOP:
            of_set_up[action] = part
    return of_set_up


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
        failed: Callable[[], object] = bool,
    ) -> None:
        ProfilerProxy.uninstall(trainer)
        self.ledger, self._failed = ledger, failed
        self._methods: tuple[WrappedMethod, ...] = ()
        parts = set_up_parts(hook_parts(trainer, module, own))
        fail = partial(self._fail, trainer)
        trainer.profiler = BoundaryProfiler(trainer.profiler, None, parts=parts, ledger=ledger, raised=fail)
        around = partial(ledger.inside, "startup/restore")
        if restores:
            self._methods = wrap_restoring(trainer, around)

    def _fail(self, trainer: Trainer) -> None:
        """A hook has raised: no hook of this package's may follow."""
        self.close(trainer)
        self._failed()

    def close(self, trainer: Trainer) -> None:
        """Restore everything."""
        for method in self._methods:
            method.release()
        ProfilerProxy.uninstall(trainer)


class TearDown:
    """Enters what follows the training loop into the ledger: hooks, and the loggers' `finalize`."""

    def __init__(
        self, ledger: LedgerClock, trainer: Trainer, parts: Mapping[str, str], over: Callable[[], object]
    ) -> None:
        self._ledger, self._over = ledger, over
        self._parts = {**parts, "save_checkpoint": "checkpoint"}
        self._last: WrappedMethod | None = None
        self._failed: Callable[[], object] | None = None
        self.install(trainer)
        self._loggers = wrap_logger_method(trainer, "finalize", self._in_logger)

    def install(self, trainer: Trainer) -> None:
        """Wrap the Trainer's profiler, also if a hook has assigned another."""
        ProfilerProxy.uninstall(trainer)
        trainer.profiler = BoundaryProfiler(
            trainer.profiler, None, parts=self._parts, ledger=self._ledger, over=self._over, raised=self._raised
        )

    def follow_failure(self, trainer: Trainer, over: Callable[[], object]) -> None:
        """Call `over` at the end of a fit that fails: after `on_exception`, `finalize` and the strategy's teardown."""
        self._failed = over
        self._last = wrap_last_teardown(trainer, over)

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
        ProfilerProxy.uninstall(trainer)
