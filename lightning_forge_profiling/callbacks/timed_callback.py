"""The base class of both callbacks: makes or joins the run of a fit, and passes Lightning's hooks on to it."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import get_ident
from time import perf_counter_ns
from typing import Any, ClassVar, Final, Protocol

import torch

from lightning_forge_profiling.callbacks.lightning_api import Callback, LightningModule, Trainer, accept_late_imports
from lightning_forge_profiling.callbacks.lightning_training import LightningTraining, SetUpParts
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import SWITCHED_OFF, switched_off
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.report.page import run_html
from lightning_forge_profiling.report.terminal import run_text
from lightning_forge_profiling.run.fit_results import FITS, FitResults, NewestResults
from lightning_forge_profiling.run.fit_settings import FitSettings, TimingSettings
from lightning_forge_profiling.run.ledger_parts import begin_ledger
from lightning_forge_profiling.run.run import Phase, Reason, Run
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import Analysis, RunLedger
from lightning_forge_profiling.timing.ledger import LedgerClock

_log = plain_logger(__name__)

# hooks that only manual optimization needs: elsewhere the Trainer's profiler announces backward
_BACKWARD_HOOKS: Final = ("on_before_backward", "on_after_backward")

# hooks of each step that do nothing here, unless a subclass has them
_UNUSED_HOOKS: Final = ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step")
_STEP_HOOKS: Final = (*_BACKWARD_HOOKS, *_UNUSED_HOOKS)

# what Lightning sets on each callback at the start of a run, bound to the module, and never removes
_LOGGING_ATTRIBUTES: Final = ("log", "log_dict")


class OpenLoop(Protocol):
    """A loop without a Trainer that is being profiled."""

    thread: int

    def end(self) -> None:
        """Print the table and close the record."""


class TimedCallback(Callback):
    """Settings for the `Run` that the callbacks in one Trainer share, and the hooks around its steps."""

    loop: ClassVar["OpenLoop | None"] = None  # the loop without a Trainer that is profiled; a fit ends it

    run: Run | None = None  # the fit that is under way
    _begun: SetUpParts | None = None  # of a fit that has begun, until `setup`

    def __init__(self, settings: TimingSettings) -> None:
        super().__init__()
        self.settings = settings
        accept_late_imports()
        self._own_results: FitResults | None = None
        self._newest = NewestResults()
        self.built_ns = perf_counter_ns()

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the results: a copy takes no part in a running fit."""
        transient = {"run", "_begun", "_loops", *_LOGGING_ATTRIBUTES}
        skipped = {name for name in _STEP_HOOKS if self.__dict__.get(name, ...) is None}
        return {name: value for name, value in self.__dict__.items() if name not in transient | skipped}

    @property
    def fit_results(self) -> FitResults:
        """Those of the last fit of this object; of its copies' newest while it has not been in a fit itself."""
        return self._newest.results if self._own_results is None else self._own_results

    @fit_results.setter
    def fit_results(self, results: FitResults) -> None:
        self._own_results = self._newest.results = results

    def analysis(self) -> Analysis | None:
        """The verdict on the last fit, with the findings and figures behind it."""
        return None if self.fit_results.report is None else self.fit_results.report.analysis

    def __repr__(self) -> str:
        """The table of the last fit; before one what any object says."""
        return super().__repr__() if self.fit_results.report is None else run_text(self.fit_results.report)

    def _repr_html_(self) -> str | None:
        """The same table for a notebook; None before a fit."""
        return None if self.fit_results.report is None else run_html(self.fit_results.report)

    def ledger(self) -> RunLedger | None:
        """Where the wall time of the fit went, up to now or of the last fit: parts that sum to it."""
        return self.fit_results.ledger if self.run is None else self.run.ledger.read()

    def join(self, run: Run) -> None:
        """Add to the run what this callback is for. May raise ConfigurationError."""

    def fit_is_over(self) -> None:
        """Keep the results, and nothing else of the fit."""
        self.run = None
        self.use_all_hooks()

    def skip_hooks(self, *, backward: bool) -> None:
        """Have Lightning skip what does nothing here, at a context manager and two strings for each hook and step.

        Args:
            backward: whether the hooks around a manual backward do nothing.
        """
        unused = [name for name in _UNUSED_HOOKS if getattr(type(self), name) is getattr(Callback, name)]
        for name in (*unused, *(_BACKWARD_HOOKS if backward else ())):
            self.__dict__.setdefault(name, None)  # which is not callable, and so is skipped

    def use_all_hooks(self) -> None:
        """Have Lightning call all hooks again."""
        for name in _STEP_HOOKS:
            if self.__dict__.get(name, ...) is None:
                del self.__dict__[name]

    # -- hooks ---------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Any:
        """The module's `log`, which Lightning gives each callback at the start of a run: the first that is noticed."""
        if "log" not in self.__dict__:
            raise AttributeError("log")
        return self.__dict__["log"]

    @log.setter
    def log(self, value: Any) -> None:
        self.__dict__["log"] = value
        try:
            self._run_begins(value.__self__)
        except Exception as exc:  # then the ledger begins with `setup`
            _log.debug("", exc_info=exc)

    @log.deleter
    def log(self) -> None:
        self.__dict__.pop("log", None)

    def _run_begins(self, module: LightningModule) -> None:
        """Time the hooks before `setup`, if this is the first of the callbacks that take part in a fit."""
        trainer: Trainer = module.trainer
        callbacks = active_callbacks(trainer.callbacks)
        if trainer.state.fn != "fit" or not callbacks or callbacks[0] is not self:
            return
        ledger = begin_ledger(max(callback.built_ns for callback in callbacks))
        self._begun = SetUpParts(ledger, trainer, module, callbacks, restores=False)

    def leave_begun(self) -> LedgerClock | None:
        """Give up the ledger that has begun before `setup`, if this callback has one."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        begun.release()
        return begun.ledger

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find or make the run of the fit, and refuse what cannot work."""
        if stage == "fit" and self.settings.enabled:
            loop = TimedCallback.loop
            if loop is not None and loop.thread == get_ident():
                loop.end()
            callbacks = active_callbacks(trainer.callbacks)
            self.take_part(callbacks, lambda: LightningTraining(trainer, pl_module, callbacks))

    def take_part(self, callbacks: Sequence["TimedCallback"], training: Callable[[], Training]) -> None:
        """Join the run of a fit that these callbacks take part in, which the first of them makes."""
        FITS.begun = True
        if self.run is None or not self.run.is_expected(self):
            if self.run is not None:
                self.run.finish(Reason.ABANDONED)
            self.fit_results = FitResults()
            if self not in callbacks:
                return
            _refuse_twins(callbacks)
            ledger = self.leave_begun() or begin_ledger(max(callback.built_ns for callback in callbacks))
            watched = training()
            settings = FitSettings(
                tuple(each.settings for each in callbacks), timing_only=_is_further(callbacks, watched)
            )
            run = Run(watched, callbacks, settings, ledger)
            for callback in callbacks:
                if callback.run is not None:
                    callback.run.finish(Reason.ABANDONED)
                callback.run, callback.fit_results = run, FitResults()
        assert self.run is not None  # noqa: S101
        self.join(self.run)
        self.run.has_joined(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the first step."""
        if self.run is not None:
            self.run.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step: log an entry when one is due, start or stop the profiler."""
        if self.run is not None:
            self.run.step(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Begins `backward` in manual optimization; in automatic optimization the Trainer's profiler announces it."""
        if self.run is not None:
            self.run.regions.forward_in_closure()
            self.run.begin("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends `backward` in manual optimization."""
        if self.run is not None:
            self.run.end("backward")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the sanity check in the ledger."""
        if self.run is not None:
            self.run.begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the sanity check."""
        if self.run is not None:
            self.run.end("sanity_check")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the step."""
        if self.run is not None:
            self.run.begin("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        if self.run is not None:
            self.run.end("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The training loop has ended."""
        if self.run is not None:
            self.run.finish(until=Phase.TRAINED)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the run: no other hook will be called. A failure of the training loop itself is handled already."""
        self.leave_begun()
        if self.run is not None:
            self.run.fail(exception)
        self._forget_logging()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the fit, or whatever else the Trainer ran."""
        self.leave_begun()
        if self.run is not None:
            self.run.finish(until=Phase.REPORTED)
        self._forget_logging()

    def _forget_logging(self) -> None:
        for name in _LOGGING_ATTRIBUTES:
            self.__dict__.pop(name, None)


@cache
def _say_off() -> None:
    _log.warning("%s: nothing is profiled in this process.", SWITCHED_OFF)


def _are_twins(one: TimedCallback, other: TimedCallback) -> bool:
    return isinstance(one, type(other)) or isinstance(other, type(one))


def active_callbacks(callbacks: Iterable[Callback]) -> tuple[TimedCallback, ...]:
    """The enabled callbacks of this package: of each kind those of the script, else the first that `run` added."""
    # a script that gives one list to two Trainers has what was added to the first in the second, too
    ours = [callback for callback in callbacks if isinstance(callback, TimedCallback) and callback.settings.enabled]
    if ours and switched_off():
        _say_off()
        return ()
    chosen = [callback for callback in ours if not callback.settings.injected_by_cli]
    for callback in ours:
        if callback.settings.injected_by_cli and not any(_are_twins(callback, other) for other in chosen):
            chosen.append(callback)
    return tuple(callback for callback in ours if callback in chosen)


def _is_further(callbacks: Iterable[TimedCallback], training: Training) -> bool:
    """Whether this fit gets a line alone. A collective, where the callbacks ask for it: the answer is rank 0's."""
    if any(callback.settings.of_script for callback in callbacks):
        return False
    return training.broadcast(FITS.has_had(training.module))


def _refuse_twins(callbacks: Iterable[TimedCallback]) -> None:
    for callback in callbacks:
        twins = [other for other in callbacks if _are_twins(callback, other)]
        if len(twins) > 1:
            raise ConfigurationError(f"The Trainer has {len(twins)} {type(callback).__name__} callbacks; pass one.")
