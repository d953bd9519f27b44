"""`FitMonitor`: everything that watches one fit of a Trainer, made in `setup` and ended in one place."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from time import perf_counter_ns
from typing import Any

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.batches import WorkCounter
from lightning_forge_profiling.callbacks.boundary_profiler import ProfilerProxy
from lightning_forge_profiling.callbacks.cpu_account import ACCOUNT_PERIOD_S
from lightning_forge_profiling.callbacks.fit_log import FitLog, Live
from lightning_forge_profiling.callbacks.fit_results import FitCallback, FitReporter, FitResults
from lightning_forge_profiling.callbacks.fit_settings import FitSettings
from lightning_forge_profiling.callbacks.fit_window import FitWindow
from lightning_forge_profiling.callbacks.host_readings import HostReadings
from lightning_forge_profiling.callbacks.ledger_parts import LedgerParts, SetUpParts, TearDown, hook_parts
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, StepProgress, Trainer
from lightning_forge_profiling.callbacks.memory_watch import MemoryWatch, memory_watch
from lightning_forge_profiling.callbacks.rank_waits import RankWaits
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.callbacks.wrapped_methods import watch_failure, watch_validation
from lightning_forge_profiling.diagnosis.ledger_rules import recompiled
from lightning_forge_profiling.diagnosis.machine_rules import growth_words
from lightning_forge_profiling.forks import OWNED
from lightning_forge_profiling.guard import Guarded, guarded, guarded_end
from lightning_forge_profiling.names import PROFILER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.collector import nsight_ranges
from lightning_forge_profiling.schema import LoopRates, MemoryGrowth, Recompilation, TraceReport
from lightning_forge_profiling.timing.budget import TimingBudget
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.counters import bucket
from lightning_forge_profiling.timing.garbage import count_collections_anew
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.region import RegionSink, set_region_sink

_log = plain_logger(__name__)


class FitMonitor(Guarded):
    """Owns what watches a fit, and ends it. Each callback may call a method for the same event; the first call acts."""

    called = "The profiling of this fit"

    def __init__(
        self,
        trainer: Trainer,
        callbacks: Sequence[FitCallback],
        settings: FitSettings,
        ledger: LedgerClock,
    ) -> None:
        self.callbacks, self.settings, self.ledger = callbacks, settings, ledger
        self.window: FitWindow | None = None
        self.log: FitLog | None = None
        nsight = nsight_ranges(os.environ)
        self.step_timer = StepTimer(
            CUDATimerCollection((), device=trainer.strategy.root_device),
            regions=settings.regions,
            warmup_steps=settings.warmup_steps,
            # Nsight's timeline shows the regions of each step
            budget=TimingBudget(settings.overhead if nsight is None else None),
            ledger=ledger,
            bucket=bucket if settings.keeps_record else None,
            nsight=nsight,
        )
        self._ended = self._closed = self._concluded = self._checking = False
        self._progress: StepProgress | None = None
        self._awaited = list(callbacks)
        self._watched = (
            watch_failure(trainer.fit_loop, partial(self._loop_failed, trainer)),
            watch_validation(trainer, self.enter_validation),
        )
        self._set_up: SetUpParts | None = None
        self._tear_down: TearDown | None = None
        self._reporter = FitReporter(self)
        self._proxy: ProfilerProxy | None = None
        self._previous_sink: RegionSink | None = None
        self._counter: WorkCounter | None = None
        self.waits: RankWaits | None = None  # for other ranks; None for a single one
        self._ledger_parts: LedgerParts | None = None
        self.memory: MemoryWatch | None = None  # on a GPU
        self._steps_ahead: int | None = None  # that the fit will train, if that is known when it begins
        self.readings = HostReadings(self.step_timer)
        self._ended_batch = -1
        self._kind_of_step = (False, True)
        self._after_window = False
        self._automatic = True
        self._due_s = self._reads_s = 0.0
        OWNED.add(self)

    def leave(self) -> None:
        """This is a forked process: the fit is none of its own."""
        self.failed = self._ended = self._closed = self._concluded = True
        self.window = self.log = self._progress = None
        self.step_timer.regions.active = False
        for callback in self.callbacks:
            callback.fit_is_over()

    # -- before the training loop --------------------------------------------------------------------------------

    def awaits(self, callback: FitCallback) -> bool:
        """Whether the callback takes part and has not been set up yet."""
        return any(callback is awaited for awaited in self._awaited)

    def has_joined(self, callback: FitCallback, trainer: Trainer, module: LightningModule) -> None:
        """A callback has been set up; after the last of them the hooks of the set-up are timed."""
        self._awaited = [awaited for awaited in self._awaited if awaited is not callback]
        if not self._awaited:  # from here on none of us looks at the user's profiler
            self._watch_set_up(trainer, module)

    def add_log(self, trainer: Trainer, loop_rates: Callable[[], Mapping[str, LoopRates]]) -> None:
        """Log metrics and keep a record. Agrees on the record's folder: a collective."""
        self.log = FitLog(trainer, self.settings, self.step_timer, loop_rates=loop_rates, metrics=self.metrics)

    def add_window(self, trainer: Trainer) -> None:
        """Record windows, if any is asked for. Agrees on their folder: a collective. May raise ConfigurationError."""
        if self.settings.recording is not None:
            self.window = FitWindow(trainer, self.settings.recording, self.step_timer)

    @guarded
    def _watch_set_up(self, trainer: Trainer, module: LightningModule) -> None:
        failed = bool if self.log is None else self.log.finish
        self._set_up = SetUpParts(self.ledger, trainer, module, self.callbacks, failed=failed)
        self.readings.workers.watch()

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """The training loop begins: wrap the Trainer's profiler, and start the first step."""
        if self.window is not None:  # a collective, and so apart from what may fail on one rank
            self.window.choose(trainer)
        self._begin(trainer, module)

    @guarded
    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        if self._progress is not None:
            return
        self._ended = False
        self._reporter.continues_from = int(trainer.global_step)
        self._progress = progress = lightning_api.step_progress(trainer, module)
        self._automatic = module.automatic_optimization
        self._counter = self._work_counter(module, progress)
        self._leave_set_up(trainer)
        self.readings.begin(trainer)
        actions = lightning_api.actions(trainer, module)._replace(fetched=partial(self._fetch_ends, trainer))
        self.step_timer.regions.each_fetch = lightning_api.has_unsized_loader(trainer)
        self._proxy = ProfilerProxy(self.step_timer, actions, hook_parts(trainer, module, self.callbacks))
        self._proxy.install(trainer)
        self._previous_sink = set_region_sink(self.step_timer.user_regions)
        self._ledger_parts = LedgerParts(self.ledger, trainer, self._warming_up)
        self._measure_waits(trainer)
        self.memory = memory_watch(trainer, began_ns=self.ledger.began_ns, say=self._memory_grows)
        self._steps_ahead = lightning_api.batches_ahead(trainer).of_fit
        self.step_timer.start()
        for callback in self.callbacks:
            callback.skip_hooks(backward=module.automatic_optimization)
        if self.window is not None:
            self.window.before_start = self.readings.pause  # it takes CPU time, which is not the steps'
            self.window.begin(trainer)
        self.ledger.count_steps(on=not (self.recording or self._warming_up()))
        if self.log is not None:
            self.log.begin(
                trainer,
                self._counter,
                report=partial(self._reporter.so_far, trainer),
                live=Live(self.waits, self.readings.cpu_so_far, self.window),
            )
        count_collections_anew()

    def _measure_waits(self, trainer: Trainer) -> None:
        if trainer.world_size > 1 and self.waits is None:
            self.waits = RankWaits(trainer, self.step_timer)

    def _work_counter(self, module: LightningModule, progress: StepProgress) -> WorkCounter:
        asked = self.settings.throughput
        return WorkCounter(
            self.settings.batch_size_fn,
            None if asked is None else asked.tokens_fn,
            None if asked is None else asked.flops_per_batch,
            module,
            self.ledger,
            updates=progress.updates.completed,
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self.window is not None and self.window.running

    def _fetch_ends(self, trainer: Trainer) -> None:
        if lightning_api.has_exhausted_loader(trainer):
            self.step_timer.regions.loader_ended()

    def end_step(self, trainer: Trainer, batch: Any) -> None:
        """End the step, move the window on, and log an entry when one is due."""
        now_ns, progress = perf_counter_ns(), self._progress
        if progress is None or progress.batches.total.ready == self._ended_batch:
            return
        self._ended_batch = progress.batches.total.ready
        window = self.window
        recorded = records = window is not None and window.running
        self._end_step(trainer, batch, progress, now_ns, recorded=recorded)
        if window is not None:
            window.end_step(trainer)
            records = window.running
        # the first step after a window has what this rank waits for others, whose traces take longer to export
        self._after_window = recorded and not records and trainer.world_size > 1
        warms_up = self._warming_up()
        if self.memory is not None and now_ns >= self.memory.due_ns and trainer.global_step and not warms_up:
            with self.step_timer.own_work():
                self.memory.end_step(self.step_timer.step - 1, now_ns)
        kind = records or self._after_window, warms_up
        if kind != self._kind_of_step or now_ns / 1e9 >= self._due_s:
            self._between_steps(trainer, kind, now_ns / 1e9)

    @guarded
    def _end_step(self, trainer: Trainer, batch: Any, progress: StepProgress, now_ns: int, *, recorded: bool) -> None:
        step_timer, proxy = self.step_timer, self._proxy
        if proxy is None or self._counter is None or self._ledger_parts is None:
            return
        work = self._counter.count(
            batch,
            trainer,
            step_timer.step,
            updates=progress.updates.completed,
            each_changes=self._automatic and trainer.accumulate_grad_batches == 1,  # which a callback may change
        )
        saw_all, recorded = proxy.saw_step(trainer, trained=batch is not None), recorded or self._after_window
        began_ns = max(now_ns, self.ledger.changed_ns) if self._counter.calls_user else now_ns
        ends_epoch = bool(progress.batches.is_last_batch)
        usual = saw_all and not (recorded or ends_epoch)
        if not (usual and step_timer.end_plain_step(work, began_ns)):
            step_timer.end_step(work, recorded=recorded, ends_epoch=ends_epoch, saw_all=saw_all, began_ns=began_ns)
        if self._ledger_parts.compiling:
            self._ledger_parts.end_compilation()
        if self._ledger_parts.compilations.pending:
            self._look_for_recompilations()

    def _look_for_recompilations(self) -> None:
        if self._ledger_parts is not None:
            for one in self._ledger_parts.compilations.look(self.step_timer.step - 1):
                kind = "graph-break" if one.kind == "graph break" else "recompilation"
                self._note(kind, recompiled(one), one.seconds)

    def _memory_grows(self, growth: MemoryGrowth) -> None:
        text = growth_words(growth)
        self._note("memory-growth", text)
        if self._steps_ahead is None or growth.full_step < self._steps_ahead:
            _log.warning("%s%s.", text[0].upper(), text[1:])

    def _note(self, kind: str, text: str, seconds: float = 0.0) -> None:
        if self.log is not None:
            self.log.note(kind, text, seconds)

    def metrics(self) -> dict[str, float]:
        """The metrics of memory and of `torch.compile` as they are now."""
        self._look_for_recompilations()
        metrics = {} if self.memory is None else self.memory.metrics()
        return metrics if self._ledger_parts is None else metrics | self._ledger_parts.compilations.metrics()

    def recompilations(self) -> tuple[Recompilation, ...]:
        """What `torch.compile` compiled again in this fit."""
        self._look_for_recompilations()
        return () if self._ledger_parts is None else self._ledger_parts.compilations.recompilations

    @guarded
    def _between_steps(self, trainer: Trainer, kind: tuple[bool, bool], now_s: float) -> None:
        """Do what comes seldom: a log entry, a line of the record, a reading of CPU times, steps of another kind."""
        reads = kind != self._kind_of_step or now_s >= self._reads_s  # else an entry waits for the Trainer's interval
        if reads:
            self.readings.look_up_switches(trainer, recording=self.recording)
            self._look_for_recompilations()  # PyTorch announces a compilation, but not that it gives one up
        if self.log is not None and now_s >= self.log.due_s:
            self.log.end_step(trainer)
        counts = not any(kind)
        if kind != self._kind_of_step:
            self._kind_of_step = kind
            self.ledger.count_steps(on=counts)
            if self.log is not None:
                latest = None if self.window is None else self.window.latest()
                self.log.other_steps_come(recording=kind[0], trace=latest)
        if reads:
            self.readings.between_steps(now_s, counts=counts)
            self._reads_s = now_s + ACCOUNT_PERIOD_S
        self._due_s = min(inf if self.log is None else self.log.due_s, self._reads_s)

    def _warming_up(self) -> bool:
        return self.step_timer.step < self.step_timer.warmup_steps

    # -- between steps -------------------------------------------------------------------------------------------

    @guarded
    def enter_sanity_check(self, trainer: Trainer) -> None:
        """Enter the sanity check in the ledger; what `self.log` meets in it, it keeps."""
        if not self._checking:
            self._checking = True
            self._measure_waits(trainer)
            self.readings.workers.release()
            self.ledger.enter("sanity_check")

    def exit_sanity_check(self) -> None:
        """Leave it."""
        if self._checking:
            self._checking = False
            self.readings.workers.watch()
            self.ledger.exit("sanity_check")

    def enter_validation(self) -> None:
        """A validation run begins."""
        self._pause_readings()
        self.step_timer.regions.enter_validation()

    @guarded
    def _pause_readings(self) -> None:
        self.readings.pause()
        if self.memory is not None:
            self.memory.pause()

    @guarded
    def validation_starts(self, trainer: Trainer) -> None:
        """Leave validation out of the step."""
        if self._proxy is not None:
            self._proxy.follow(trainer)
            self.step_timer.regions.enter_validation()  # a profiler that was assigned just now has not seen it begin
        if self.log is not None:
            self.log.pause()

    @guarded
    def validation_ends(self, trainer: Trainer) -> None:
        """Training goes on."""
        if self._proxy is not None:
            self._proxy.follow(trainer)
        if self.memory is not None:
            self.memory.resume()
        if not any(self._kind_of_step):
            self.readings.resume()
        if self.log is not None and not self.recording:
            self.log.resume()

    # -- the end -------------------------------------------------------------------------------------------------

    def _loop_failed(self, trainer: Trainer, exception: BaseException) -> None:
        if self.step_timer.began:  # it is ours, and not a tuner's before it
            self.fail(trainer, exception)

    def fail(self, trainer: Trainer, exception: BaseException) -> None:
        """Close a failing run without waiting for anything: other ranks may be elsewhere."""
        if self.window is not None:
            self.window.failing(exception)
        if self.log is not None:
            self.log.failing(exception)
        self.end(trainer, interrupted=True)
        self.close(trainer, interrupted=True)

    @guarded_end
    def end(self, trainer: Trainer, *, interrupted: bool) -> None:
        """The training loop has ended: stop timing, write what an unfinished window has, log the last entry."""
        if self._ended:
            return
        self._ended = True
        self._restore_trainer(trainer, wait=not interrupted)
        with self.ledger.inside(PROFILER):
            if self.window is not None:
                self.window.end(interrupted=interrupted)
            if self.log is not None:
                self.log.end(trainer)

    def _leave_set_up(self, trainer: Trainer) -> None:
        """Restore what was replaced in `setup`; by the time that training begins its loader's workers are there."""
        self.readings.workers.release()
        watching, self._set_up = self._set_up, None
        if watching is not None:
            watching.close(trainer)

    def _restore_trainer(self, trainer: Trainer, *, wait: bool) -> None:
        """Stop timing, and restore what was replaced when the training loop began."""
        self._leave_set_up(trainer)
        if self.waits is not None:
            self.waits.close()
        proxy, self._proxy, self._progress = self._proxy, None, None
        if proxy is None:
            return
        proxy.uninstall(trainer)
        self.step_timer.stood_still(perf_counter_ns(), ends=False)
        self._end_readings()
        set_region_sink(self._previous_sink)
        if self._ledger_parts is not None:
            self._ledger_parts.close()
        try:
            self.step_timer.finish(wait=wait)  # last: Ctrl-C may end the wait
        finally:
            self._begin_tear_down(trainer)

    def _begin_tear_down(self, trainer: Trainer) -> None:
        self.ledger.turn_to("teardown")
        parts = hook_parts(trainer, trainer.lightning_module, self.callbacks)
        over = partial(self._conclude, trainer, interrupted=False)
        self._tear_down = TearDown(self.ledger, trainer, parts, over)

    def _leave_tear_down(self, trainer: Trainer) -> None:
        leaving, self._tear_down = self._tear_down, None
        if leaving is not None:
            leaving.close(trainer)

    @guarded_end
    def _end_readings(self) -> None:
        self.readings.end()

    def abandon(self, trainer: Trainer) -> None:
        """Close a fit that ended without calling any hook."""
        if not self._closed:
            self._abandon(trainer)
        self._conclude(trainer, interrupted=True)
        self._leave_tear_down(trainer)

    @guarded_end
    def _abandon(self, trainer: Trainer) -> None:
        for watched in self._watched:
            watched.release()
        self._restore_trainer(trainer, wait=False)
        self._finish(interrupted=True)

    def close(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Hand the results over as they are in this package's last hook, and conclude as soon as the fit is over."""
        if not self._closed:
            self._closed = True
            for watched in self._watched:
                watched.release()
            self._close(trainer, interrupted=interrupted)
        if interrupted:  # in a process that another one has started, no hook follows
            self._conclude(trainer, interrupted=True)
            self._follow_failure(trainer)

    @guarded_end
    def _close(self, trainer: Trainer, *, interrupted: bool) -> None:
        self._leave_set_up(trainer)
        if self.waits is not None:  # of a sanity check that no training followed
            self.waits.close()
        if self._tear_down is None:
            self._begin_tear_down(trainer)
        else:
            self._tear_down.install(trainer)  # who kept ours may have assigned it since
        with self.ledger.inside(PROFILER):
            self._finish(interrupted=interrupted)
            self._reporter.make(trainer, interrupted=interrupted)
        self._reporter.keep(trainer, self.ledger.read())

    def _finish(self, *, interrupted: bool) -> None:
        if self.window is not None:
            self.window.finish(interrupted=interrupted)
        if self.log is not None:
            self.log.finish()

    @guarded_end
    def _conclude(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Print the table, close the record, and hand the results over."""
        if self._concluded:
            return
        self._concluded = True
        if not interrupted:
            self._leave_tear_down(trainer)
        ledger = self.ledger.read()
        try:
            self._reporter.print(trainer, ledger)
        finally:
            try:
                if self.log is not None:
                    self.log.conclude(trainer, self._reporter.report, interrupted=interrupted)
            finally:
                self.readings.workers.close()
                self._reporter.keep(trainer, ledger)
                for callback in self.callbacks:
                    callback.fit_is_over()

    def _follow_failure(self, trainer: Trainer) -> None:
        """Enter into the results what a failing fit does after its table, if it gets there before another begins."""
        if self._tear_down is not None:
            self._tear_down.follow_failure(trainer, partial(self._end_of_failure, trainer, self._reporter.kept()))

    @guarded_end
    def _end_of_failure(self, trainer: Trainer, kept: Sequence[FitResults]) -> None:
        self._leave_tear_down(trainer)
        self._reporter.follow_failure(trainer, kept)

    # -- results -------------------------------------------------------------------------------------------------

    def trace(self) -> TraceReport | None:
        """The report on the window; None without one."""
        return None if self.window is None else self.window.report()
