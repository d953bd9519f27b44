"""The results of a fit: its report, made when training has ended and amended until the fit is over."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

from msgspec.structs import replace

from lightning_forge_profiling.callbacks.fit_log import FitLog
from lightning_forge_profiling.callbacks.fit_settings import FitSettings
from lightning_forge_profiling.callbacks.fit_window import FitWindow
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loop_trainer import LoopTrainer
from lightning_forge_profiling.callbacks.process_fits import FITS, shapes_of
from lightning_forge_profiling.callbacks.run_report import (
    OtherRanks,
    ReportedFit,
    further_findings,
    recorded_analysis,
    run_report,
    with_ledger,
)
from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.report.run_end import print_end
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.schema import Analysis, RunLedger, RunReport, TraceReport

_log = plain_logger(__name__)


@dataclass(frozen=True, slots=True)
class FitResults:
    """What a callback keeps of a fit."""

    analysis: Analysis | None = None  # on rank 0
    ledger: RunLedger | None = None
    trace: TraceReport | None = None  # what became of the window
    summary: Mapping[str, float] = field(default_factory=dict)  # the metrics over all steps that count


class NewestResults:
    """The results of the newest fit of a callback or of a deep copy of it, with which wrappers of Lightning train."""

    def __init__(self) -> None:
        self.results = FitResults()

    def __deepcopy__(self, memo: object) -> "NewestResults":
        return self


class FitCallback(Protocol):
    """A callback that takes part in a fit."""

    fit_results: FitResults

    def skip_hooks(self, *, backward: bool) -> None:
        """Training begins; `backward`: whether the hooks around a manual backward do nothing."""

    def fit_is_over(self) -> None:
        """Keep the results, and nothing else of the fit."""


class Fit(ReportedFit, Protocol):
    """What watches a fit."""

    @property
    def log(self) -> FitLog | None:
        """What the loggers get, and the record."""

    @property
    def window(self) -> FitWindow | None:
        """The windows."""

    @property
    def settings(self) -> FitSettings:
        """What the callbacks ask for."""

    @property
    def callbacks(self) -> Sequence[FitCallback]:
        """Those that take part."""


class FitReporter:
    """Makes the report on a fit, prints it, and gives each callback the results so far."""

    def __init__(self, monitor: Fit) -> None:
        self._monitor = monitor
        self.report: RunReport | None = None
        self._recorded: Analysis | None = None
        self._began_s = perf_counter()
        self.continues_from = 0  # the optimizer step of the checkpoint that the fit continues from

    def so_far(self, trainer: Trainer, recorded: Analysis | None = None, others: OtherRanks | None = None) -> RunReport:
        """The report on the fit up to now."""
        return run_report(trainer, self._monitor, recorded, others, continues_from=self.continues_from)

    def make(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Make the report at the end. Rewrites the reports beside the trace, and copies them to a remote folder."""
        monitor, report = self._monitor, None
        window, log, zero = monitor.window, monitor.log, trainer.is_global_zero
        if monitor.step_timer.began and (zero or monitor.settings.keeps_record):
            self._recorded = recorded = recorded_analysis(monitor.trace())
            others = None if log is None else partial(log.other_ranks, trainer, interrupted=interrupted)
            report = self.so_far(trainer, recorded, others)
            if log is not None and recorded is not None and zero:
                log.write_page(report)
        if window is not None:
            window.copy_files(trainer, interrupted=interrupted)
        if report is not None:
            self.report = replace(report, trace=monitor.trace())  # with the URL that it was copied to
        if report is not None and report.analysis is not None and log is not None and zero:
            log.publish(trainer, report.analysis, monitor.trace(), interrupted=interrupted)

    def amend(self, ledger: RunLedger) -> RunReport | None:
        """Enter what the ledger has got since the report was made."""
        if self.report is not None:
            self.report = with_ledger(self.report, self._recorded, ledger)
        return self.report

    def print(self, trainer: Trainer, ledger: RunLedger) -> None:
        """Print the table, on rank 0."""
        report, settings = self.amend(ledger), self._monitor.settings
        if report is None:
            return
        line, added = "", settings.all_added
        if report.model and added:
            line = FITS.add(shapes_of(trainer.lightning_module), self._began_s, report, brief=settings.brief)
        if not trainer.is_global_zero:
            return
        # standard output belongs to the script, unless a Trainer of it has our callbacks
        screen = Screen(sys.stderr, wrap=True) if added or isinstance(trainer, LoopTrainer) else None
        if settings.brief:
            (screen or Screen()).line(line, whole=True)
        else:
            print_end(report, self._files(report), screen)

    def _files(self, report: RunReport) -> Path | None:
        """The folder that `view` finds this fit in, the shortest; None if the fit left no file."""
        trace, log, folder = report.trace, self._monitor.log, report.log_folder
        record = None if log is None else log.record_path
        page = None if trace is None or trace.report_path is None else trace.report_path.parent
        only = record is None or record.name == RECORD_FOLDER  # and no further fit in the logger's folder
        left = page or record
        return folder if only and left is not None and folder is not None and folder in left.parents else left

    def keep(self, trainer: Trainer, ledger: RunLedger) -> None:
        """Give each callback the results so far."""
        report, log = self.report, self._monitor.log
        results = FitResults(
            analysis=report.analysis if report is not None and trainer.is_global_zero else None,
            ledger=ledger,
            trace=self._monitor.trace(),
            summary={} if log is None else log.summary(),
        )
        for callback in self._monitor.callbacks:
            callback.fit_results = results

    def kept(self) -> list[FitResults]:
        """What each callback has now."""
        return [callback.fit_results for callback in self._monitor.callbacks]

    def follow_failure(self, trainer: Trainer, kept: Sequence[FitResults]) -> None:
        """Enter what a failing fit did after its table, unless another fit has begun since."""
        if any(now is not before for now, before in zip(self.kept(), kept, strict=True)):
            return
        ledger, printed = self._monitor.ledger.read(), self.report
        report = self.amend(ledger)
        self.keep(trainer, ledger)
        if report and printed and report.analysis and printed.analysis and trainer.is_global_zero:
            for text in further_findings(printed.analysis, report.analysis):
                _log.warning("After the table: %s", text)
