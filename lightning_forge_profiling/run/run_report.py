"""The parts that watch a fit, and the report that they make: its figures, merged with the analysis of its trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import gethostname

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.combine import combine, without_run
from lightning_forge_profiling.diagnosis.ledger_costs import NOTICED_S
from lightning_forge_profiling.diagnosis.ranks import rank_work
from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.names import PROFILER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.report.page import write_reports
from lightning_forge_profiling.run.fit_log import FitLog
from lightning_forge_profiling.run.fit_settings import FitSettings
from lightning_forge_profiling.run.fit_steps import FitSteps
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.folders import logger_folder, tracked_runs
from lightning_forge_profiling.run.host_readings import HostReadings
from lightning_forge_profiling.run.memory_watch import MemoryWatch
from lightning_forge_profiling.run.rank_work import late_steps
from lightning_forge_profiling.run.run_settings import loader_settings, optimizer_settings, restarted_workers
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training, WatchedWaits
from lightning_forge_profiling.schema import (
    Analysis,
    RankWork,
    Recompilation,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunRanks,
    RunReport,
    RunSettings,
    RunTiming,
    TraceReport,
    TrackedRun,
)
from lightning_forge_profiling.timing.ledger import goodput

_log = plain_logger(__name__)


@dataclass(eq=False, repr=False)
class FitParts:
    """The parts, of which some come later or never."""

    training: Training
    settings: FitSettings
    step_timer: StepTimer
    readings: HostReadings
    log: FitLog | None = None
    window: FitWindow | None = None
    fit_steps: FitSteps | None = None  # what ends the steps, once training has begun
    waits: WatchedWaits | None = None  # for other ranks; None for a single one

    @property
    def memory(self) -> MemoryWatch | None:
        """What watches PyTorch's allocator; None without a GPU."""
        return None if self.fit_steps is None else self.fit_steps.events.memory

    def trace(self) -> TraceReport | None:
        """The report on the window; None without one."""
        return None if self.window is None else self.window.report()

    def metrics(self) -> dict[str, float]:
        """The metrics of memory and of `torch.compile` as they are now."""
        return {} if self.fit_steps is None else self.fit_steps.events.metrics()

    def recompilations(self) -> tuple[Recompilation, ...]:
        """What `torch.compile` compiled again."""
        return () if self.fit_steps is None else self.fit_steps.events.recompilations()


def _with_goodput(ledger: RunLedger, timing: RunTiming) -> RunLedger:
    return replace(ledger, goodput=goodput(ledger, timing))


def _per_step(count: float | None, steps: int) -> float | None:
    return count / steps if count and steps else None


def recorded_analysis(trace: TraceReport | None) -> Analysis | None:
    """The analysis of a recorded window, read from its `summary.json`."""
    if trace is None or trace.summary_path is None:
        return None
    try:
        return without_run(read_summary(trace.summary_path))  # one that was asked for has the run as it was then
    except (OSError, ValueError) as exc:
        _log.warning("The trace's analysis could not be read: %s", exc)
        return None


def analysis_of(
    trace: TraceReport | None,
    recorded: Analysis | None,
    run: RunEvidence,
    tracked: tuple[TrackedRun, ...] = (),
) -> Analysis | None:
    """The analysis of run and trace together; the reports beside the trace are rewritten with both."""
    if recorded is None and not run.timing.is_evidence:
        return None
    analysis = replace(combine(recorded, run if run.timing.is_evidence else None), tracked=tracked)
    if recorded is not None and trace is not None and trace.summary_path is not None:
        try:
            write_reports(analysis, None, trace.summary_path.parent)
        except (OSError, ValueError) as exc:
            _log.warning("The reports in %s cover the trace only, not the run: %s", trace.summary_path.parent, exc)
    return analysis


OtherRanks = Callable[[RankWork], Sequence[RankWork]]  # reads the work of the other ranks, given that of this one


def run_report(
    fit: FitParts,
    recorded: Analysis | None = None,
    others: OtherRanks | None = None,
    *,
    continues_from: int = 0,
) -> RunReport:
    """The report on a fit up to now. With the analysis of its trace, the reports beside the trace are rewritten."""
    training, step_timer, log, trace = fit.training, fit.step_timer, fit.log, fit.trace()
    facts = training.facts
    timing = step_timer.timing(restarted_workers(training))
    telemetry, no_telemetry = (None, "") if log is None else log.telemetry(timing)
    run = RunEvidence(
        timing=timing,
        ledger=_with_goodput(step_timer.ledger.read(), timing),
        machine=RunMachine(
            cpu=fit.readings.cpu_use(facts.ranks_on_host),
            telemetry=telemetry,
            no_telemetry=no_telemetry,
            compute=() if log is None else log.compute(timing, trace, recorded),
            growth=None if fit.fit_steps is None else fit.fit_steps.events.host_memory.growth(),
        ),
        ranks=RunRanks(rank=facts.rank, world_size=facts.world_size),
        settings=RunSettings(
            loader=loader_settings(training),
            validation_loader=loader_settings(training, validation=True),
            optimizer=optimizer_settings(training),
            switches=fit.readings.switches,
            trainer=facts.trainer,
            device=facts.device.type,
        ),
        continues_from=continues_from,
        lines=fit.readings.lines(),
        recompilations=fit.recompilations(),
        memory=None
        if fit.memory is None
        else fit.memory.memory(
            samples_per_step=_per_step(timing.samples, timing.steps),
            tokens_per_step=_per_step(timing.tokens, timing.steps),
        ),
    )
    if facts.world_size > 1 and timing.is_evidence:
        waits = None if fit.waits is None else fit.waits.measured(timing)
        late = late_steps([times for times, _ in step_timer.totals.latest])
        mine = rank_work(run, host=gethostname(), waits=waits, late=late)
        works = (mine, *(() if others is None else others(mine)))
        run = replace(run, ranks=replace(run.ranks, works=works))
    folder = logger_folder(training) if facts.is_zero else None
    analysis = analysis_of(trace, recorded, run, tracked_runs(training))
    return RunReport(
        run if analysis is None or analysis.run is None else analysis.run,
        trace,
        device=facts.device_name,
        replicas=facts.replicas,
        log_folder=None if folder is None else folder.path,
        analysis=analysis,
        loops=() if log is None else log.loops,
        model=training.model_name,
    )


def with_ledger(report: RunReport, recorded: Analysis | None, ledger: RunLedger) -> RunReport:
    """The report by a later reading of the ledger; the local reports beside the trace are rewritten, too."""
    analysis = report.analysis
    if analysis is None or analysis.run is None or analysis.run.ledger is None:
        return report
    if _own_s(ledger) - _own_s(analysis.run.ledger) < NOTICED_S:  # could be no finding
        return report
    run = replace(analysis.run, ledger=_with_goodput(ledger, report.run.timing))
    trace = None if report.trace is None or report.trace.url else report.trace
    return replace(report, run=run, analysis=analysis_of(trace, recorded, run, analysis.tracked))


def _own_s(ledger: RunLedger) -> float:
    return ledger.wall_s - ledger.parts.get(PROFILER, 0.0)


def further_findings(before: Analysis, after: Analysis) -> list[str]:
    """Findings of parts of the ledger, as text, that an earlier analysis does not have."""
    known = {finding.evidence.get("part") for finding in before.findings}
    return [
        f"{finding.code}: {finding.title}. {finding.advice}"
        for finding in after.findings
        if finding.evidence.get("part") not in {None, *known}
    ]
