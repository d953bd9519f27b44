"""`Run`: one training from its set-up to its end, whatever drives it and whatever ends it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Any

from lightning_forge_profiling.guard import OWNED, Guarded, guarded, guarded_end
from lightning_forge_profiling.names import PROFILER
from lightning_forge_profiling.profiler.collector import nsight_ranges
from lightning_forge_profiling.run.batches import WorkCounter
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.fit_record import Live
from lightning_forge_profiling.run.fit_results import FitCallback, FitReporter, FitResults
from lightning_forge_profiling.run.fit_settings import FitSettings
from lightning_forge_profiling.run.fit_steps import FitSteps, StepMode
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.host_readings import HostReadings
from lightning_forge_profiling.run.run_report import FitParts
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Ending, Training
from lightning_forge_profiling.schema import LoopRates
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.completed_steps import TimingBudget
from lightning_forge_profiling.timing.counters import bucket
from lightning_forge_profiling.timing.garbage import count_collections_anew
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.region_clock import RegionClock


class Phase(IntEnum):
    """How far a fit has come."""

    SETTING_UP = auto()
    CHECKING = auto()  # the sanity check, after which setting up goes on
    TRAINING = auto()
    TRAINED = auto()  # the training loop has ended
    REPORTED = auto()  # the results are there; the user's hooks, loggers and checkpoints may follow
    OVER = auto()


class Reason(Enum):
    """Why a fit ends."""

    FINISHED = auto()
    FAILED = auto()  # by an exception: other ranks may be elsewhere, and nothing is waited for
    ABANDONED = auto()  # it ended without calling any hook, and another one begins


class Run(FitParts, Guarded):
    """Times one training, and ends what it has started. Knows neither a Trainer nor a loop: adapters of these call it.

    Several callbacks may report the same event; the first acts.
    """

    called = "The profiling of this fit"

    def __init__(
        self, training: Training, callbacks: Sequence[FitCallback], settings: FitSettings, ledger: LedgerClock
    ) -> None:
        nsight = nsight_ranges(os.environ)
        step_timer = StepTimer(
            CUDATimerCollection((), device=training.facts.device),
            regions=settings.regions,
            warmup_steps=settings.warmup_steps,
            # Nsight's timeline shows the regions of each step
            budget=TimingBudget(settings.overhead if nsight is None else None),
            ledger=ledger,
            bucket=bucket if settings.keeps_record else None,
            nsight=nsight,
        )
        super().__init__(training, settings, step_timer, HostReadings(step_timer))
        self.callbacks, self.phase = callbacks, Phase.SETTING_UP
        self._awaited = list(callbacks)
        self._reporter = FitReporter(self, callbacks)
        self._ending: Ending | None = None
        # what each phase has started registers its end there
        self._ends = {phase: ExitStack() for phase in (Phase.SETTING_UP, Phase.TRAINING, Phase.REPORTED)}
        for watched in training.watch(self._loop_failed, self._validation):
            self._ends[Phase.REPORTED].callback(watched.release)
        OWNED.add(self)

    @property
    def ledger(self) -> LedgerClock:
        """The ledger of the run."""
        return self.step_timer.ledger

    @property
    def regions(self) -> RegionClock:
        """The clock of the built-in regions."""
        return self.step_timer.regions

    def leave(self) -> None:
        """This is a forked process: the fit is none of its own."""
        self.note_no_more()
        self.phase = Phase.OVER
        self.window = self.log = self.fit_steps = None
        self.regions.active = False
        for callback in self.callbacks:
            callback.fit_is_over()

    def note_no_more(self) -> None:
        """Switch off what watches the steps."""
        self.failed = True
        if self.fit_steps is not None:
            self.fit_steps.failed = True

    def note_failure(self, exc: Exception) -> None:
        """Switch the profiling off, and log why if it is the first failure."""
        super().note_failure(exc)
        self.note_no_more()

    # -- before the training loop --------------------------------------------------------------------------------

    def is_expected(self, callback: FitCallback) -> bool:
        """Whether the callback takes part and has not been set up yet."""
        return any(callback is awaited for awaited in self._awaited)

    def has_joined(self, callback: FitCallback) -> None:
        """A callback has been set up; after the last of them the hooks of the set-up are timed."""
        self._awaited = [awaited for awaited in self._awaited if awaited is not callback]
        if not self._awaited:  # from here on none of us looks at the user's profiler
            self._watch_set_up()

    def add_log(self, loop_rates: Callable[[], Mapping[str, LoopRates]]) -> None:
        """Log metrics and keep a record. Agrees on the record's folder: a collective."""
        self.log = FitLog(self.training, self.settings, self.step_timer, loop_rates=loop_rates, metrics=self.metrics)

    def add_window(self) -> None:
        """Record windows, if any is asked for. Agrees on their folder: a collective. May raise ConfigurationError."""
        if self.settings.recording is not None:
            self.window = FitWindow(self.training, self.settings.recording, self.step_timer)

    @guarded
    def _watch_set_up(self) -> None:
        set_up = self._ends[Phase.SETTING_UP]
        set_up.callback(self.training.time_set_up(self.ledger, self._set_up_failed).release)
        self.readings.sample_stacks()
        self.readings.workers.watch()
        set_up.callback(self.readings.workers.release)

    def _set_up_failed(self) -> None:
        """End what would outlive the fit: where a callback raises in `on_exception`, no hook of ours is called."""
        self.readings.end_stacks()
        self._finish_log()

    def start(self) -> None:
        """Training begins, and with it the first step."""
        if self.window is not None:  # a collective, and so apart from what may fail on one rank
            self.window.choose()
        self._start()

    @guarded
    def _start(self) -> None:
        if self.phase not in {Phase.SETTING_UP, Phase.TRAINED}:
            return
        self.phase = Phase.TRAINING
        self._reporter.continues_from = self.training.updates
        # by the time that training begins its loader's workers are there
        self._ends[Phase.SETTING_UP].close()
        ends = self._ends[Phase.TRAINING]
        self.fit_steps = steps = FitSteps(
            self.training,
            self.step_timer,
            self._work_counter(),
            self.readings,
            window=self.window,
            log=self.log,
            failed=self.note_failure,
        )
        steps.begin(ends)
        self._measure_waits()
        self.step_timer.start()
        for callback in self.callbacks:
            callback.skip_hooks(backward=self.training.automatic)
        if self.window is not None:
            self.window.before_start = self.readings.recording_begins
            self.window.after_end = self.readings.recording_ends
            self.window.begin()
        self.ledger.count_steps(on=not (self.recording or steps.warming_up()))
        if self.log is not None:
            live = Live(self.waits, self.readings.cpu_so_far, self.window)
            self.log.begin(steps.counter, report=self._reporter.so_far, live=live)
        count_collections_anew()

    def _measure_waits(self) -> None:
        if self.waits is None:
            self.waits = waits = self.training.time_waits(self.step_timer)
            if waits is not None:
                self._ends[Phase.TRAINING].callback(waits.close)

    def _work_counter(self) -> WorkCounter:
        asked = self.settings.throughput
        return WorkCounter(
            self.settings.batch_size_fn,
            None if asked is None else asked.tokens_fn,
            None if asked is None else asked.flops_per_batch,
            self.training.module,
            self.ledger,
            updates=self.training.progress().updates.completed,
            automatic=self.training.automatic,
        )

    # -- between steps -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> FitSteps | None:
        """What ends the steps; None unless it trains."""
        return self.fit_steps if self.phase is Phase.TRAINING else None

    @property
    def recording(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self.window is not None and self.window.running

    def begin(self, span: str) -> None:
        """A span begins: a built-in region of the step, `"validation"` or `"sanity_check"`.

        Validation may be announced twice, before its workers start and by its hook: both count as one.
        """
        if span == "validation":
            self._pause_readings()
            self._watch_validation()
            self.regions.enter_validation()
        elif span == "sanity_check":
            self._begin_sanity_check()
        else:
            self.regions.enter(span)

    def end(self, span: str) -> None:
        """The span ends, with any region still open in it."""
        if span == "validation":
            self._go_on()
        elif span == "sanity_check":
            self._end_sanity_check()
        else:
            self.regions.exit(span)

    def begin_step(self) -> None:
        """A batch is trained on, and not skipped."""
        if self.window is not None:
            self.window.begin_step()

    def step(self, batch: Any) -> None:
        """A step has ended, and the next one begins."""
        if self.phase is Phase.TRAINING and self.fit_steps is not None:  # `steps` without the call
            self.fit_steps.end_step(batch)

    @guarded
    def _begin_sanity_check(self) -> None:
        if self.phase is Phase.SETTING_UP:
            self.phase = Phase.CHECKING
            self._measure_waits()
            self.readings.workers.release()
            self.ledger.enter("sanity_check")

    def _end_sanity_check(self) -> None:
        if self.phase is Phase.CHECKING:
            self.phase = Phase.SETTING_UP
            self.readings.workers.watch()
            self.ledger.exit("sanity_check")

    @contextmanager
    def _validation(self) -> Iterator[None]:
        """A validation run, perhaps of the sanity check, with the start of its workers."""
        self.begin("validation")
        self.regions.start_validation_loader()
        self.readings.validation_workers.watch()
        try:
            yield
        finally:
            self.readings.validation_workers.release()

    @guarded
    def _pause_readings(self) -> None:
        self.readings.pause()
        if self.memory is not None:
            self.memory.pause()

    @guarded
    def _watch_validation(self) -> None:
        if self.steps is not None:
            self.steps.boundaries.follow()  # a profiler that was assigned just now
        if self.log is not None:
            self.log.pause()

    @guarded
    def _go_on(self) -> None:
        if self.steps is not None:
            self.steps.boundaries.validation_ends()
        if self.memory is not None:
            self.memory.resume()
        if self.steps is not None and self.steps.mode is StepMode.COUNTED:
            self.readings.resume()
        if self.log is not None and not self.recording:
            self.log.resume()

    # -- the end -------------------------------------------------------------------------------------------------

    def _loop_failed(self, exception: BaseException) -> None:
        if self.step_timer.began:  # it is ours, and not a tuner's before it
            self.fail(exception)

    def fail(self, exception: BaseException) -> None:
        """End a failing fit without waiting for anything: other ranks may be elsewhere."""
        if self.window is not None:
            self.window.failing(exception)
        if self.log is not None:
            self.log.failing(exception)
        self.finish(Reason.FAILED)  # in a process that another one has started, no hook follows
        if self._ending is not None:
            self._ending.follow_failure(partial(self._end_of_failure, self._reporter.snapshot()))

    def finish(self, reason: Reason = Reason.FINISHED, *, until: Phase = Phase.OVER) -> None:
        """End what has not ended yet, up to a phase: the loop, its results, the fit."""
        ends = {Phase.TRAINED: self._end_training, Phase.REPORTED: self._report, Phase.OVER: self._conclude}
        for phase, end in ends.items():
            if self.phase < phase <= until:
                self.phase = phase
                end(reason)

    @guarded_end
    def _end_training(self, reason: Reason) -> None:
        """Stop timing, restore what was replaced, write what an unfinished window has, log the last entry."""
        try:
            with ExitStack() as last, self._ends[Phase.TRAINING], self._ends[Phase.SETTING_UP]:
                if self.step_timer.began:
                    last.callback(self._begin_ending)
                    last.callback(self.step_timer.finish, wait=reason is Reason.FINISHED)  # Ctrl-C may end the wait
        except Exception as exc:
            self.note_failure(exc)
        if reason is Reason.ABANDONED or (reason is Reason.FINISHED and not self.step_timer.began):
            return
        with self.ledger.inside(PROFILER):
            if self.window is not None:
                self.window.end(interrupted=reason is Reason.FAILED)
            if self.log is not None:
                self.log.end()

    def _begin_ending(self) -> None:
        """Time what follows the training loop."""
        self.ledger.turn_to("teardown")
        self._ending = self.training.time_ending(self.ledger, self.finish)

    def _leave_ending(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.release()

    @guarded_end
    def _report(self, reason: Reason) -> None:
        """Hand the results over as they are in this package's last hook; the fit ends as soon as all hooks have."""
        interrupted = reason is not Reason.FINISHED
        self._ends[Phase.REPORTED].close()
        if reason is Reason.ABANDONED:
            self._finish_parts(interrupted=True)
            return
        if self._ending is None:
            self._begin_ending()
        else:
            self._ending.install()  # who kept ours may have assigned it since
        with self.ledger.inside(PROFILER):
            self._finish_parts(interrupted=interrupted)
            self._reporter.make(interrupted=interrupted)
        self._reporter.publish_results(self.ledger.read())

    def _finish_parts(self, *, interrupted: bool) -> None:
        if self.window is not None:
            self.window.finish(interrupted=interrupted)
        self._finish_log()

    def _finish_log(self) -> None:
        if self.log is not None:
            self.log.finish()

    @guarded_end
    def _conclude(self, reason: Reason) -> None:
        """Print the table, close the record, and hand the results over."""
        with ExitStack() as ends:
            if reason is Reason.ABANDONED:
                ends.callback(self._leave_ending)
            elif reason is Reason.FINISHED:
                self._leave_ending()
            ledger = self.ledger.read()
            for callback in self.callbacks:
                ends.callback(callback.fit_is_over)
            ends.callback(self._reporter.publish_results, ledger)
            ends.callback(self.readings.workers.close)
            ends.callback(self.readings.validation_workers.close)
            ends.callback(self.readings.end_stacks)
            ends.callback(self._close_record, reason)
            self._reporter.print(ledger)

    def _close_record(self, reason: Reason) -> None:
        if self.log is not None:
            self.log.record.close(self._reporter.report, interrupted=reason is not Reason.FINISHED)

    @guarded_end
    def _end_of_failure(self, kept: Sequence[FitResults]) -> None:
        """Enter into the results what a failing fit does after its table, if it gets there before another begins."""
        self._leave_ending()
        self._reporter.follow_failure(kept)
