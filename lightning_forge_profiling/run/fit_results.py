"""The results of a fit: its report, made when training has ended and amended until the fit is over."""

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol

from msgspec.structs import replace
from torch import nn

from lightning_forge_profiling.diagnosis.rule import in_ms, in_s
from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import in_notebook, print_end
from lightning_forge_profiling.run.run_report import (
    FitParts,
    OtherRanks,
    further_findings,
    recorded_analysis,
    run_report,
    with_ledger,
)
from lightning_forge_profiling.schema import NO_VERDICT, Analysis, RunLedger, RunReport, TraceReport

_log = plain_logger(__name__)


@dataclass(frozen=True, slots=True)
class FitResults:
    """What a callback keeps of a fit."""

    report: RunReport | None = None  # on rank 0
    ledger: RunLedger | None = None
    trace: TraceReport | None = None  # what became of the window
    summary: Mapping[str, float] = field(default_factory=dict)  # the metrics over all steps that count


class NewestResults:
    """The results of the newest fit of a callback or of a deep copy of it, with which wrappers of Lightning train."""

    def __init__(self) -> None:
        self.results = FitResults()

    def __deepcopy__(self, memo: object) -> "NewestResults":
        return self


# counted steps from which a further fit can differ from the first: in a few milliseconds anything may come first
_TELLS: Final = 50
_SHORT: Final = "too short to differ from the first"


@dataclass(frozen=True, slots=True)
class _Fit:
    model: str
    shapes: Hashable
    seconds: float
    verdict: str


class ProcessFits:
    """What was fitted in this process so far."""

    def __init__(self) -> None:
        self.begun = False  # whether any fit was set up
        self._done: list[_Fit] = []

    def has_had(self, module: nn.Module) -> bool:
        """Whether a module of this class and of these parameters was fitted before."""
        key = type(module).__name__, shapes_of(module)
        return any((fit.model, fit.shapes) == key for fit in self._done)

    def add(self, shapes: Hashable, began_s: float, report: RunReport, *, timing_only: bool) -> str:
        """Enter a fit that has ended; returns a line about it."""
        fit = _Fit(report.model, shapes, perf_counter() - began_s, self._verdict(report, timing_only=timing_only))
        self._done.append(fit)
        number = sum(fit.model == done.model for done in self._done)
        run = report.run.timing
        steps = f"{run.all_steps} step{'s' * (run.all_steps != 1)}"
        pace = f" of {in_ms(run.step_ms.mean)}" if run.steps else ""
        return f"forge-profiling: fit {number} of {fit.model}: {in_s(fit.seconds)}, {steps}{pace}, {fit.verdict}"

    def _verdict(self, report: RunReport, *, timing_only: bool) -> str:
        """The verdict: in a line, that of the first fit of this class if its cause is named again."""
        analysis = report.analysis
        if analysis is None:
            return NO_VERDICT
        if not timing_only:
            return analysis.verdict
        first = next((fit.verdict for fit in self._done if fit.model == report.model), "")
        if report.run.timing.steps < _TELLS:
            return _SHORT
        return first if any(finding.code == first for finding in analysis.findings) else analysis.verdict

    def overview(self) -> Iterator[str]:
        """A line on each class of module that was fitted more than once."""
        for model, count in Counter(fit.model for fit in self._done).items():
            if count > 1:
                fits = [fit for fit in self._done if fit.model == model]
                verdicts = Counter(fit.verdict for fit in fits).most_common()
                shapes = len({fit.shapes for fit in fits})
                sizes = f" in {shapes} sizes" if shapes > 1 else ""
                said = ", ".join(f"{verdict} in {number}" for verdict, number in verdicts)
                same = f"the same verdict in all: {verdicts[0][0]}" if len(verdicts) == 1 else said
                yield f"{count} fits of {model}{sizes}, {in_s(sum(fit.seconds for fit in fits))}, {same}"


FITS: Final = ProcessFits()


def shapes_of(module: nn.Module) -> Hashable:
    """Names and shapes of a module's parameters; a lazy one has none yet."""
    shapes = []
    for name, parameter in module.named_parameters():
        shape: tuple[int, ...] = ()
        with suppress(RuntimeError):
            shape = tuple(parameter.shape)
        shapes.append((name, shape))
    return tuple(shapes)


class FitCallback(Protocol):
    """A callback that takes part in a fit."""

    fit_results: FitResults

    def skip_hooks(self, *, backward: bool) -> None:
        """Training begins; `backward`: whether the hooks around a manual backward do nothing."""

    def fit_is_over(self) -> None:
        """Keep the results, and nothing else of the fit."""


class FitReporter:
    """Makes the report on a fit, prints it, and gives each callback the results so far."""

    def __init__(self, fit: FitParts, callbacks: Sequence[FitCallback]) -> None:
        self._fit, self._callbacks = fit, callbacks
        self.report: RunReport | None = None
        self._recorded: Analysis | None = None
        self._began_s = perf_counter()
        self.continues_from = 0  # the optimizer step of the checkpoint that the fit continues from

    def so_far(self, recorded: Analysis | None = None, others: OtherRanks | None = None) -> RunReport:
        """The report on the fit up to now."""
        return run_report(self._fit, recorded, others, continues_from=self.continues_from)

    def make(self, *, interrupted: bool) -> None:
        """Make the report at the end. Rewrites the reports beside the trace, and copies them to a remote folder."""
        fit, report = self._fit, None
        window, log, zero = fit.window, fit.log, fit.training.facts.is_zero
        if fit.step_timer.began and (zero or fit.settings.keeps_record):
            self._recorded = recorded = recorded_analysis(fit.trace())
            others = None if log is None else partial(log.record.other_ranks, interrupted=interrupted)
            report = self.so_far(recorded, others)
            if log is not None and recorded is not None and zero:
                log.record.write_page(report)
        if window is not None:
            window.copy_files(interrupted=interrupted)
        if report is not None:
            self.report = replace(report, trace=fit.trace())  # with the URL that it was copied to
        if report is not None and report.analysis is not None and log is not None and zero:
            log.publish(report.analysis, fit.trace(), interrupted=interrupted)

    def amend(self, ledger: RunLedger) -> RunReport | None:
        """Enter what the ledger has got since the report was made."""
        if self.report is not None:
            self.report = with_ledger(self.report, self._recorded, ledger)
        return self.report

    def print(self, ledger: RunLedger) -> None:
        """Print the table, on rank 0."""
        report, settings, training = self.amend(ledger), self._fit.settings, self._fit.training
        if report is None:
            return
        line, added = "", settings.all_added
        if report.model and added:
            line = FITS.add(shapes_of(training.module), self._began_s, report, timing_only=settings.timing_only)
        if not training.facts.is_zero:
            return
        # standard output belongs to the script, unless a Trainer of it has our callbacks, or a notebook shows it
        shown = training.facts.trainer == "lightning" or in_notebook()
        screen = None if shown and not added else Screen(sys.stderr, wrap=True)
        if settings.timing_only:
            (screen or Screen()).line(line, whole=True)
        else:
            print_end(report, self._files(report), screen)

    def _files(self, report: RunReport) -> Path | None:
        """The folder that `view` finds this fit in, the shortest; None if the fit left no file."""
        trace, log, folder = report.trace, self._fit.log, report.log_folder
        record = None if log is None else log.record.path
        page = None if trace is None or trace.report_path is None else trace.report_path.parent
        only = record is None or record.name == RECORD_FOLDER  # and no further fit in the logger's folder
        left = page or record
        return folder if only and left is not None and folder is not None and folder in left.parents else left

    def publish_results(self, ledger: RunLedger) -> None:
        """Give each callback the results so far."""
        report, log = self.report, self._fit.log
        results = FitResults(
            report=report if self._fit.training.facts.is_zero else None,
            ledger=ledger,
            trace=self._fit.trace(),
            summary={} if log is None else log.summary(),
        )
        for callback in self._callbacks:
            callback.fit_results = results

    def snapshot(self) -> list[FitResults]:
        """What each callback has now."""
        return [callback.fit_results for callback in self._callbacks]

    def follow_failure(self, kept: Sequence[FitResults]) -> None:
        """Enter what a failing fit did after its table, unless another fit has begun since."""
        if any(now is not before for now, before in zip(self.snapshot(), kept, strict=True)):
            return
        ledger, printed = self._fit.step_timer.ledger.read(), self.report
        report = self.amend(ledger)
        self.publish_results(ledger)
        if report and printed and report.analysis and printed.analysis and self._fit.training.facts.is_zero:
            for text in further_findings(printed.analysis, report.analysis):
                _log.warning("After the table: %s", text)
