"""Profiles a loop without a Trainer: calls the callbacks' hooks as a Trainer would, between the loop's own steps."""

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from threading import get_ident
from time import perf_counter_ns
from typing import Any, ClassVar, Final, Literal

import torch

from lightning_forge_profiling.callbacks.loop_watch import LoopWatch
from lightning_forge_profiling.callbacks.plain_training import PlainTraining
from lightning_forge_profiling.callbacks.throughput import ThroughputCallback
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback, active_callbacks
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.guard import OWNED, Guarded, guarded, guarded_end
from lightning_forge_profiling.names import RESERVED
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.batches import UNSEEN
from lightning_forge_profiling.run.training import BatchSource
from lightning_forge_profiling.timing.region import region_sink, set_region_sink

_log = plain_logger(__name__)

_VALIDATION: Final = "validation"


class PlainLoop(Guarded):
    """One loop that is being profiled, by the thread that runs it."""

    called = "The profiling of this loop"

    def __init__(self, callbacks: Sequence[TimedCallback], training: PlainTraining, *, hooked: bool) -> None:
        self.thread, self.hooked = get_ident(), hooked  # whether Fabric's hooks delimit its steps
        self.training = training
        self.in_step = self.validating = False
        self._named_validation = 0
        self._failure: BaseException | None = None
        self._batch: Any = None  # of the step, as the script gives it
        self._samples: float | None = None
        for callback in callbacks:
            callback.built_ns = perf_counter_ns()
        for callback in callbacks:
            callback.take_part(callbacks, lambda: training)
        run = callbacks[0].run
        assert run is not None  # noqa: S101
        self.run, self.timer = run, run.step_timer
        run.readings.is_plain_loop()
        run.start()
        set_region_sink(self)
        self.watch = LoopWatch(self)
        self._ended_ns = perf_counter_ns()
        TimedCallback.loop = self
        OWNED.add(self)

    # -- steps ---------------------------------------------------------------------------------------------------

    @guarded
    def begin_step(self, batch: Any, samples: float | None) -> None:
        """A step begins."""
        self._failure = None  # the script has caught it
        while self.hooked and self._named_validation:  # a loop may announce its beginning alone
            self._end_named_validation()
        self.watch.step_begins()
        self.in_step, self._batch, self._samples = True, batch, samples
        self.run.begin_step()
        self.run.begin("forward")

    @guarded
    def end_step(self, batch: Any = None) -> None:
        """A step ends."""
        self.run.regions.forget_forward()
        fetches = self.watch.fetches
        given = self._batch if batch is None else batch
        batch = fetches.batch if given is None else given
        one_a_step = fetches.seen == 1 or given is not None
        loaders, ends_epoch = fetches.step_ended()
        self.in_step, self._batch = False, None
        self.training.count_step(BatchSource(loaders, one_a_step, self._samples), ends_epoch=ends_epoch)
        if batch is None and self.timer.step:  # that of the first step was fetched before
            batch = UNSEEN
        self.run.regions.now.saw_training_step = True
        self.run.step(batch)
        self.training.step_ended()
        self._ended_ns = perf_counter_ns()

    @guarded
    def leave_step(self, exception: BaseException) -> None:
        """A step is left by an exception. It is no step, and the end of the loop if no other begins."""
        self.run.regions.forget_forward()
        self.run.end("forward")
        self.in_step, self._batch = False, None
        self._failure = _without_frames(exception) if _fails(exception) else None
        if self.run.window is not None and isinstance(exception, torch.OutOfMemoryError):
            self.run.window.failing(exception)  # now, as the script may catch it

    # -- regions that the script names ---------------------------------------------------------------------------

    def open_region(self, name: str) -> object | None:
        """Begin a region."""
        if name not in RESERVED:
            return self.timer.user_regions.open_region(name)
        if get_ident() != self.thread:
            return None
        if name == _VALIDATION:
            self._name_validation()
        elif name == "backward":
            self.run.regions.enter_backward()
        else:
            self.run.begin(name)
        return self

    def close_region(self, name: str, token: object) -> None:
        """End a region."""
        if token is not self:
            self.timer.user_regions.close_region(name, token)
        elif name != _VALIDATION:
            self.run.end(name)
        else:
            self._end_named_validation()

    @guarded
    def _name_validation(self) -> None:
        if self.validating:
            self.leave_validation()
        self._named_validation += 1
        if self._named_validation == 1:
            self.enter_validation()
            self.watch.active = self.validating = False

    @guarded
    def _end_named_validation(self) -> None:
        self._named_validation = max(self._named_validation - 1, 0)
        if not self._named_validation and not self.watch.active and TimedCallback.loop is self:
            self.watch.active = True
            self.leave_validation()

    def enter_validation(self) -> None:
        """Validation begins."""
        self.validating = True
        self.run.begin("validation")

    def leave_validation(self) -> None:
        """Validation ends."""
        self.validating = False
        self.run.end("validation")

    # -- the end -------------------------------------------------------------------------------------------------

    @guarded_end
    def end(self, exception: BaseException | None = None) -> None:
        """The loop has ended: print the table and close the record."""
        if TimedCallback.loop is self:
            TimedCallback.loop = None
        self.watch.release()
        exception = self._failure if exception is None or not _fails(exception) else exception
        ledger = self.run.ledger
        over_ns = self.watch.fetches.ended_ns if self.validating else self._ended_ns
        ledger.turn_to("teardown", max(over_ns, ledger.changed_ns))
        if exception is None:
            self.run.finish()
        else:
            self.run.fail(exception)
            self.training.failure_is_over()

    def leave(self) -> None:
        """This is a forked process, such as a loader's worker."""
        TimedCallback.loop, self.watch.active, self.failed = None, False, True


def _fails(exception: BaseException) -> bool:
    """Whether an exception that ends a loop is a failure."""
    return not (isinstance(exception, GeneratorExit) or (isinstance(exception, SystemExit) and not exception.code))


def _without_frames(exception: BaseException) -> BaseException:
    """The same exception without its traceback, whose frames hold what the step has allocated."""
    kind = type(exception)
    try:
        copy = kind.__new__(kind, *exception.args)
        copy.args = exception.args
    except Exception:
        return RuntimeError(f"{kind.__name__}: {exception}")
    return copy


def running() -> PlainLoop | None:
    """The loop that is being profiled in this process."""
    loop = TimedCallback.loop
    return loop if isinstance(loop, PlainLoop) else None


def _at_exit() -> None:
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules  # where it may be an older exception
    raised = None if interactive else getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    loop = running()
    if loop is not None:
        loop.end(raised)


# atexit's functions come too late: from Python 3.12 on they can start neither threads nor processes
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001


def _is_taken(open_loop: PlainLoop | None, *, hooked: bool) -> bool:
    """Whether this thread or step is another's."""
    if open_loop is None:
        if region_sink() is not None:
            _say_once("step() does nothing in a Trainer's fit, whose batches are the steps.")
            return True
        return False
    if open_loop.thread != get_ident():
        _say_once("step() is timed in one thread at a time: those of another thread are not.")
        return True
    return open_loop.in_step or (hooked and not open_loop.hooked)


@cache
def _say_once(what: str) -> None:
    _log.warning(what)


def _keeps_record() -> TimedCallback:
    """A callback that gives way to one of the user's."""
    callback = ThroughputCallback()
    callback.settings = replace(callback.settings, injected_by_cli=True)
    return callback


class LoopProfiling:
    """Profiles the loop that calls `begin_step` and `end_step`, or these hooks of Fabric's.

    Args:
        callbacks: one callback of each kind, at most.
        added: those that `forge-profiling run` adds; without any a `ThroughputCallback` keeps the record.
        folder: the folder for the record and the traces; None for the working directory.

    Raises:
        ConfigurationError: something else than one callback of each kind, or a `folder` that is no path.
    """

    trainer: ClassVar[Literal["transformers", "loop"]] = "loop"

    def __init__(
        self,
        callbacks: Sequence[TimedCallback] = (),
        *,
        added: Sequence[TimedCallback] = (),
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        name = type(self).__name__
        if not all(isinstance(each, TimedCallback) for each in callbacks):
            raise ConfigurationError(
                f"{name} takes ForgeProfilerCallback and ThroughputCallback objects, got {callbacks!r}."
            )
        kinds = [type(each).__name__ for each in callbacks]
        if len(set(kinds)) < len(kinds):
            raise ConfigurationError(f"{name} takes one callback of each kind, got {', '.join(kinds)}.")
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ConfigurationError(f"log_dir must be a path, got {folder!r}.")
        self._callbacks, self.folder = (*callbacks, *(added or (_keeps_record(),))), folder
        self._loop: PlainLoop | None = None
        self._refused = False
        self.began = False  # whether a loop was to begin

    def _shown(self) -> TimedCallback | None:
        """The callback that has the table of the last loop."""
        return next((one for one in self._callbacks if one.fit_results.report is not None), None)

    def __repr__(self) -> str:
        """The table of the last loop; before one what any object says."""
        shown = self._shown()
        return super().__repr__() if shown is None else repr(shown)

    def _repr_html_(self) -> str | None:
        """The same table for a notebook; None before a loop."""
        shown = self._shown()
        return None if shown is None else shown._repr_html_()

    def loop(self, *, hooked: bool = False) -> PlainLoop | None:
        """The loop, which begins now if it has not begun; None if nothing is to be profiled, or something else is."""
        loop, open_loop = self._loop, running()
        if loop is not None and loop is open_loop and loop.thread == get_ident():
            return loop
        if self._refused or _is_taken(open_loop, hooked=hooked):
            return None
        chosen = active_callbacks(self._callbacks)
        if not chosen:
            self._refused = True
            return None
        if open_loop is not None:
            open_loop.end()
        self._loop, self._refused, self.began = None, True, True  # refused unless it begins
        try:
            self._loop = PlainLoop(chosen, PlainTraining(self.folder, self.trainer), hooked=hooked)
            self._refused = False
        except ConfigurationError:
            raise
        except Exception as exc:
            _log.warning("Nothing of this loop is profiled: %s: %s", type(exc).__name__, exc)
            _log.debug("", exc_info=exc)
        return self._loop

    def end(self, exception: BaseException | None = None) -> None:
        """The loop has ended."""
        if self._loop is not None and self._loop is running():
            self._loop.end(exception)

    # -- Fabric's hooks, which come where the loop calls them ------------------------------------------------------

    def on_train_batch_start(self, batch: Any = None, *_: Any, **__: Any) -> None:
        """A step begins."""
        loop = self.loop(hooked=True)
        if loop is not None and not loop.in_step:
            loop.begin_step(batch, None)

    def on_train_batch_end(self, outputs: Any = None, batch: Any = None, *_: Any, **__: Any) -> None:
        """A step ends."""
        loop = running()
        if loop is None or (loop is self._loop and not loop.in_step):  # the loop may call this hook alone
            self.on_train_batch_start()
            loop = running()
        if loop is not None and loop is self._loop:
            loop.end_step(batch)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The loop has ended."""
        self.end()

    on_fit_end = on_train_end

    def on_exception(self, exception: BaseException | None = None, *_: Any, **__: Any) -> None:
        """The loop has failed."""
        self.end(exception)

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        """Validation begins."""
        loop = running()
        if loop is not None and loop is self._loop:
            loop.open_region(_VALIDATION)

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        """Validation ends."""
        loop = running()
        if loop is not None and loop is self._loop:
            loop.close_region(_VALIDATION, loop)

    on_validation_epoch_start, on_validation_epoch_end = on_validation_start, on_validation_end
