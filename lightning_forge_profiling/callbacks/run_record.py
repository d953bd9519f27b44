"""Makes the lines of a fit's record and decides when; a thread writes them."""

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite
from time import perf_counter, thread_time
from typing import Final, Literal

from lightning_forge_profiling.callbacks.guard import guarded
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.run_begin import RecordPlace, begin_line, with_origin
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.timeouts import ctrl_c_ends
from lightning_forge_profiling.record.lines import End, Event, Interval, State
from lightning_forge_profiling.record.segments import Segments
from lightning_forge_profiling.record.writer import RecordWriter
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.telemetry import TelemetrySeries, TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import Rates

_log = plain_logger(__name__)

_INTERVAL_S: Final = 0.05
"""Rows logged in quicker succession share a line."""

_STATE_S: Final = 5.0
_STATE_SHARE: Final = 0.01
"""Shortest pause between states, as a share of the run's time: totals change ever more slowly."""

_COST: Final = 0.0002
"""Largest share of the run that the training thread spends on states, at some milliseconds each, and again on
intervals, at some 0.1 ms each."""

_CLOSE_S: Final = 3.0
_CLOSE_WITH_PEERS_S: Final = 1.0
"""Lightning kills ranks that have not ended within 5 s of the first one that failed."""

_LONGEST_TEXT: Final = 2000

_EVENTS: Final = ("validation", "checkpoint")


class RunRecord:
    """The record of one fit on this rank. No method raises: a failure is logged once and ends the record."""

    def __init__(
        self,
        trainer: Trainer,
        place: RecordPlace,
        step_timer: StepTimer,
        *,
        report: Callable[[], RunReport],
        metrics: Callable[[], Mapping[str, float]],
        ledger: LedgerClock,
    ) -> None:
        self._failed = False
        self._step_timer = step_timer
        self._report, self._metrics, self._ledger = report, metrics, ledger
        self._logged: Mapping[str, float] = {}
        self._logger_step = 0
        self._parts_before: Mapping[str, float] = {}
        self._trace_status = "waiting"
        self._exception = ""
        self._loop_ended = False
        self._alone = trainer.world_size == 1
        self._segments = 1
        self._began_s = perf_counter()
        self._next_interval_s, self._next_state_s = 0.0, self._began_s + _STATE_S
        begin, folder = begin_line(trainer, place), place.folder
        self._writer = RecordWriter(lambda: Segments(folder, with_origin(begin, folder)))
        weakref.finalize(self, self._writer.close, 0)  # ends the thread if a fit is abandoned without a hook

    @guarded
    def row(self, metrics: Mapping[str, float], logger_step: int) -> None:
        """Called for each row that the loggers get."""
        self._logged, self._logger_step = metrics, logger_step
        if not self.interval_due():
            return  # its steps will be in the next interval
        now_s = perf_counter()
        if not self._next_interval_s or self._writer.segments > self._segments:
            self._next_state_s = now_s
        began_s = thread_time()
        self._write_interval()
        self._next_interval_s = now_s + self._pause_s(began_s, _INTERVAL_S)

    def interval_due(self) -> bool:
        """Whether `row` would write a line."""
        return not self._failed and perf_counter() >= self._next_interval_s and self._writer.takes

    @property
    def state_due_s(self) -> float:
        """When the totals are due, by `time.perf_counter`."""
        return inf if self._failed else self._next_state_s

    @guarded
    def state(self) -> None:
        """Write the totals so far."""
        now_s, began_s = perf_counter(), thread_time()
        self._write_state(self._report())
        self._next_state_s = now_s + self._pause_s(began_s, max(_STATE_S, _STATE_SHARE * (now_s - self._began_s)))

    def _pause_s(self, began_s: float, least_s: float) -> float:
        """Pause before the next line of a kind. `began_s` is the thread's CPU time at which the last one was begun."""
        spent_s = thread_time() - began_s
        return max(least_s, spent_s / _COST)

    @guarded
    def window(self, trace: TraceReport | None) -> None:
        """Write an event if the profiler has started or stopped."""
        if trace is None or trace.status == self._trace_status:
            return
        self._trace_status = trace.status
        if trace.status == "recording":
            self._write_event("window", "the profiler started", trace.start_stall_ms / 1e3)
        elif trace.status == "written":
            steps = ", ".join(map(str, trace.steps))
            self._write_event("window", f"steps {steps} were recorded to {trace.path}", trace.stall_ms / 1e3)
        else:
            self._write_event("window", f"{trace.status}: {trace.message}")

    @guarded
    def failing(self, exception: BaseException) -> None:
        """Write and sync the exception of a failing run before anything else is tried."""
        self._exception = _words(exception)
        self._write_event("exception", self._exception)
        self._writer.sync()

    @guarded
    def loop_ended(self) -> None:
        """Write the totals at the end of the training loop: the end of the fit may take long, or fail."""
        self._loop_ended = True
        self._write_interval(last=True)
        self._write_state(self._report())
        self._writer.sync()

    def close(self, report: RunReport | None) -> None:
        """Write the end and end the thread."""
        self._write_end(report)
        with ctrl_c_ends():
            ended = self._writer.close(_CLOSE_S if self._alone or not self._exception else _CLOSE_WITH_PEERS_S)
        if not ended:
            _log.warning("The disk takes long to write the run's record, whose end may be missing.")

    @guarded
    def _write_end(self, report: RunReport | None) -> None:
        if report is not None:
            self.window(report.trace)
            self._write_state(report, final=True)
        outcome: Literal["finished", "failed"] = "finished" if self._loop_ended and not self._exception else "failed"
        step = self._step_timer.step
        self._writer.write(End(at=time.time(), step=step, outcome=outcome, exception=self._exception))

    def _write_interval(self, *, last: bool = False) -> None:
        rates, histogram = self._step_timer.totals.take_interval(last=last)
        ledger, now = self._ledger.read_parts(), time.time()
        before, self._parts_before = self._parts_before, ledger.parts
        spent = {name: s - before.get(name, 0.0) for name, s in ledger.parts.items() if s > before.get(name, 0.0)}
        for span in self._ledger.take_latest():
            if span.part in _EVENTS:
                at = now - ledger.wall_s + span.end_s
                self._writer.write(Event(at=at, step=span.step or 0, kind=span.part, seconds=span.seconds))
        if not rates.steps:
            return
        line = Interval(
            at=time.time(),
            step=self._step_timer.step,
            logger_step=self._logger_step,
            counted=rates.steps,
            optimizer_steps=rates.optimizer_steps,
            samples=rates.samples,
            tokens=rates.tokens,
            device_ms=_rounded(_within_step(rates, rates.device_ms)),
            host_ms=_rounded(_within_step(rates, rates.host_ms)) if self._step_timer.timers.on_device else {},
            steps_us=histogram,
            ledger_s=_rounded(spent),
            metrics=_rounded(self._logged),
        )
        self._writer.write(line)

    def _write_state(self, report: RunReport, *, final: bool = False) -> None:
        self._segments = self._writer.segments
        state = State(
            at=time.time(),
            step=self._step_timer.step,
            report=_slim(report, final=final),
            metrics={name: value for name, value in self._metrics().items() if isfinite(value)},
            steps_us=self._step_timer.totals.histogram(),
        )
        self._writer.write(state)

    def _write_event(self, kind: str, text: str, seconds: float = 0.0) -> None:
        self._writer.write(Event(at=time.time(), step=self._step_timer.step, kind=kind, text=text, seconds=seconds))


def _within_step(rates: Rates, by_region: Mapping[str, float]) -> dict[str, float]:
    """Times without custom regions, which overlap the built-in ones."""
    return {name: max(ms, 0.0) for name, ms in by_region.items() if name not in rates.user_regions}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values with six digits, a third of a float's, since most of a record is numbers. JSON has no infinity or NaN."""
    return {name: float(f"{value:.6g}") for name, value in values.items() if -inf < value < inf}


def _slim(report: RunReport, *, final: bool) -> RunReport:
    """The report without its large parts: figures of each rank's trace, times of single steps, curves of the sensors.

    The final state keeps the curves.
    """
    run = replace(report.run, before_window_ms=(), after_window_ms=())
    return replace(
        report, run=run, analysis=_slim_analysis(report.analysis, final=final), gpu=_without_curves(report.gpu)
    )


def _slim_analysis(analysis: Analysis | None, *, final: bool) -> Analysis | None:
    if analysis is None:
        return None
    run = analysis.run
    if run is not None and run.telemetry is not None and not final:
        run = replace(run, telemetry=replace(run.telemetry, series=TelemetrySeries()))
    return replace(analysis, ranks=(), run=run)


def _without_curves(gpu: TelemetrySummary | str | None) -> TelemetrySummary | str | None:
    return replace(gpu, series=TelemetrySeries()) if isinstance(gpu, TelemetrySummary) else gpu


def _words(exception: BaseException) -> str:
    """Type and message of an exception, cut to a limit."""
    message = ""
    with suppress(Exception):
        message = str(exception)
    name = type(exception).__name__
    return (f"{name}: {message}" if message else name)[:_LONGEST_TEXT]
