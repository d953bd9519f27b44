"""What happens at each step of a fit, from the beginning of its training loop to its end."""

from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from math import inf
from time import perf_counter_ns
from typing import Any, Final

from lightning_forge_profiling.diagnosis.ledger_rules import recompiled
from lightning_forge_profiling.diagnosis.machine_rules import growth_words
from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.batches import WorkCounter
from lightning_forge_profiling.run.containers import Containers
from lightning_forge_profiling.run.cpu_account import ACCOUNT_PERIOD_S
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.host_memory import HostMemory
from lightning_forge_profiling.run.host_readings import HostReadings
from lightning_forge_profiling.run.ledger_parts import LedgerParts
from lightning_forge_profiling.run.memory_watch import memory_watch
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import MemoryGrowth, Recompilation
from lightning_forge_profiling.timing.region import set_region_sink

_log = plain_logger(__name__)


class StepMode(Enum):
    """What a step is for: whether it is recorded, or comes right after one that was, and whether it warms up."""

    COUNTED = False, False
    WARM_UP = False, True
    RECORDED = True, False
    RECORDED_IN_WARM_UP = True, True

    def __init__(self, recorded: bool, _: bool) -> None:
        self.recorded = recorded  # whether the profiler disturbs it


_MODES: Final = {mode.value: mode for mode in StepMode}


class StepEvents:
    """Recompilations and memory that grows: they are noticed between steps, and are events of the record."""

    def __init__(self, training: Training, step_timer: StepTimer, log: FitLog | None) -> None:
        self._step_timer, self._log = step_timer, log
        self._of_fit = training.ahead().of_fit
        self.ledger_parts: LedgerParts | None = None  # while it trains; what was compiled is known after that too
        self.host_memory = HostMemory(Containers(training.objects), self.memory_grows, training.worker_processes)
        self.memory = memory_watch(
            training,
            began_ns=step_timer.ledger.began_ns,
            say=self.memory_grows,
            find_holder=self.host_memory.holder,
        )

    def look_for_recompilations(self) -> None:
        """Note what `torch.compile` has compiled again since the last look."""
        if self.ledger_parts is not None:
            for one in self.ledger_parts.compilations.look(self._step_timer.step - 1):
                kind = "graph-break" if one.kind == "graph break" else "recompilation"
                self._note(kind, recompiled(one), one.seconds)

    def memory_grows(self, growth: MemoryGrowth) -> None:
        """Note it, and warn if it will not last."""
        text = growth_words(growth)
        self._note("memory-growth", text)
        if growth.full_step is not None and (self._of_fit is None or growth.full_step < self._of_fit):
            _log.warning("%s%s.", text[0].upper(), text[1:])

    def _note(self, kind: str, text: str, seconds: float = 0.0) -> None:
        if self._log is not None:
            self._log.record.note(kind, text, seconds)

    def metrics(self) -> dict[str, float]:
        """The metrics of memory and of `torch.compile` as they are now."""
        self.look_for_recompilations()
        metrics = {} if self.memory is None else self.memory.metrics()
        return metrics if self.ledger_parts is None else metrics | self.ledger_parts.compilations.metrics()

    def recompilations(self) -> tuple[Recompilation, ...]:
        """What `torch.compile` compiled again in this fit."""
        self.look_for_recompilations()
        return () if self.ledger_parts is None else self.ledger_parts.compilations.recompilations


class FitSteps(Guarded):
    """Times the steps of a fit, and does between them what comes seldom."""

    called = "The profiling of this fit"

    def __init__(
        self,
        training: Training,
        step_timer: StepTimer,
        counter: WorkCounter,
        readings: HostReadings,
        *,
        window: FitWindow | None,
        log: FitLog | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.training, self.step_timer, self.counter = training, step_timer, counter
        self._readings, self._window, self._log, self._note_failure = readings, window, log, failed
        self.progress = training.progress()
        self.events = StepEvents(training, step_timer, log)
        self._ended_batch = -1
        self.mode = StepMode.WARM_UP
        self._due_s = self._reads_s = self._quiet_ns = 0.0  # until when a plain step has nothing to do

    def note_failure(self, exc: Exception) -> None:
        """The fit is no longer profiled."""
        self.failed = True
        self._note_failure(exc)

    def begin(self, ends: ExitStack) -> None:
        """The training loop begins; what it starts registers its end in `ends`."""
        step_timer, training = self.step_timer, self.training
        self.events.ledger_parts = parts = LedgerParts(step_timer.ledger, training, self.warming_up)
        ends.callback(parts.close)
        ends.callback(set_region_sink, set_region_sink(step_timer.user_regions))
        ends.callback(self._readings.end)
        ends.callback(lambda: self.events.host_memory.end(step_timer.step - 1))
        self._readings.begin(training)
        ends.callback(self._stops)
        step_timer.regions.each_fetch = training.has_unsized_loader()
        self.boundaries = training.time_steps(step_timer)
        ends.callback(self.boundaries.release)

    def _stops(self) -> None:
        self.step_timer.stood_still(perf_counter_ns(), ends=False)

    def warming_up(self) -> bool:
        """Whether the step under way does not count yet."""
        return self.step_timer.step < self.step_timer.warmup_steps

    @property
    def recording(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self._window is not None and self._window.running

    def end_step(self, batch: Any) -> None:
        """End the step, move the window on, and log an entry when one is due."""
        # a step of 2 ms evicts these lines from the caches, and each further call costs several times what it does in
        # a loop
        now_ns, ended = perf_counter_ns(), self.progress.batches.total.ready
        if ended == self._ended_batch:
            return
        self._ended_batch = ended
        window = self._window
        recorded = records = window is not None and window.running
        plain = False
        if not self.failed:
            try:
                plain = self._end_step(batch, now_ns, recorded=recorded)
            except Exception as exc:
                self.note_failure(exc)
        if window is not None:
            window.end_step()
            records = window.running
        if plain and not records and now_ns < self._quiet_ns:
            return
        # the first step after a window has what this rank waits for others, whose traces take longer to export
        after_window = recorded and not records and self.training.facts.world_size > 1
        memory, host = self.events.memory, self.events.host_memory
        warms_up = self.step_timer.step < self.step_timer.warmup_steps
        if now_ns >= host.due_ns and not warms_up:
            with self.step_timer.profiler_overhead():
                host.end_step(self.step_timer.step - 1, now_ns)
        if memory is not None and now_ns >= memory.due_ns and self.training.updates and not warms_up:
            with self.step_timer.profiler_overhead():
                memory.end_step(self.step_timer.step - 1, now_ns)
        mode = _MODES[records or after_window, warms_up]
        if mode is not self.mode or now_ns / 1e9 >= self._due_s:
            self._between_steps(mode, now_ns / 1e9, batch)
        due_ns = min(host.due_ns, inf if memory is None else memory.due_ns, 1e9 * self._due_s)
        self._quiet_ns = due_ns if self.mode is StepMode.COUNTED else 0.0

    def _end_step(self, batch: Any, now_ns: int, *, recorded: bool) -> bool:
        """End the step in the timer; whether nothing but its end was timed."""
        step_timer, parts = self.step_timer, self.events.ledger_parts
        if parts is None:
            return False
        work = self.counter.count(batch, self.training, step_timer.step, updates=self.progress.updates.completed)
        seen, recorded = self.boundaries.saw_step(trained=batch is not None), recorded or self.mode.recorded
        began_ns = max(now_ns, step_timer.ledger.changed_ns) if self.counter.calls_user else now_ns
        ends_epoch = bool(self.progress.batches.is_last_batch)
        usual = seen and not (recorded or ends_epoch)
        plain = usual and step_timer.end_plain_step(work, began_ns)
        if ends_epoch:
            self.counter.ends_epoch()
        if not plain:
            step_timer.end_step(
                work,
                recorded=recorded,
                ends_epoch=ends_epoch,
                all_boundaries_seen=seen,
                began_ns=began_ns,
            )
        if parts.compiling:
            parts.end_compilation()
        if parts.compilations.pending:
            self.events.look_for_recompilations()
        return plain

    @guarded
    def _between_steps(self, mode: StepMode, now_s: float, batch: Any) -> None:
        """Do what comes seldom: a log entry, a line of the record, a reading of CPU times, steps of another mode."""
        reads = mode is not self.mode or now_s >= self._reads_s  # else an entry waits for the Trainer's interval
        if reads:
            self._readings.look_up_switches(self.training, batch, recording=self.recording)
            self.events.look_for_recompilations()  # PyTorch announces a compilation, but not that it gives one up
        if self._log is not None and now_s >= self._log.due_s:
            self._log.end_step()
        counts = mode is StepMode.COUNTED
        if mode is not self.mode:
            self.mode = mode
            self.step_timer.ledger.count_steps(on=counts)
            if self._log is not None:
                latest = None if self._window is None else self._window.latest()
                self._log.other_steps_come(recording=mode.recorded, trace=latest)
        if reads:
            self._readings.between_steps(now_s, counts=counts)
            self._reads_s = now_s + ACCOUNT_PERIOD_S
        self._due_s = min(inf if self._log is None else self._log.due_s, self._reads_s)
