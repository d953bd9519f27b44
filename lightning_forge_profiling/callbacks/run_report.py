"""The report on a fit: its figures as evidence, merged with the analysis of its trace, whose reports are rewritten."""

from collections.abc import Callable, Mapping, Sequence
from socket import gethostname

from msgspec.structs import replace

from lightning_forge_profiling.callbacks.fit_parts import FitParts
from lightning_forge_profiling.callbacks.folders import logger_folder, tracked_runs
from lightning_forge_profiling.callbacks.run_settings import loader_settings, optimizer_settings, restarted_workers
from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_PIECES, share_intervals, step_drift, window_effect
from lightning_forge_profiling.diagnosis.combine import combine, without_run
from lightning_forge_profiling.diagnosis.ledger_costs import NOTICED_S
from lightning_forge_profiling.diagnosis.ranks import rank_work
from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.names import OWN_WORK, PROFILER, REGIONS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.report.page import write_reports
from lightning_forge_profiling.schema import (
    Analysis,
    RankWork,
    Rates,
    RunEvidence,
    RunLedger,
    RunMachine,
    RunRanks,
    RunReport,
    RunSettings,
    RunSummary,
    RunTiming,
    ShareInterval,
    SlowStep,
    TelemetrySummary,
    TimedStep,
    TraceReport,
    TrackedRun,
    WorkerRestarts,
)
from lightning_forge_profiling.timing.counters import Marks, step_total_ms
from lightning_forge_profiling.timing.estimate import region_pieces
from lightning_forge_profiling.timing.ledger import LedgerClock, goodput
from lightning_forge_profiling.timing.run_totals import RunTotals, own_ms, region_times

_log = plain_logger(__name__)


def run_evidence(
    run: RunSummary, *, on_device: bool, ledger: RunLedger | None = None, clock: LedgerClock | None = None
) -> RunEvidence | None:
    """The figures of timer and ledger for rules and reports; None if no step counts."""
    steady = run.steady
    if run.only_warmup or not steady.steps:
        return None
    long_parts = {} if clock is None else clock.long_parts()
    timing = RunTiming(
        steps=steady.steps,
        on_device=on_device,
        step_ms=run.step_ms,
        regions=run.regions,
        user_regions=steady.user_regions,
        gpu_starved_pct=run.gpu_starved_pct,
        split_steps=steady.split_steps if steady.split_steps < steady.steps else None,
        overhead_us=steady.overhead_us,
        window_effect=window_effect(run.before_window_ms, run.after_window_ms),
        typical_mean_ms=run.typical_mean_ms,
        unknown_ms=steady.unknown_ms / steady.steps,
        unknown_steps=steady.unknown_steps,
        all_steps=run.steps,
        drift=step_drift([*run.first_ms], [*run.first_ms.values()]),
        slowest=tuple(_slow_step(slow, long_parts.get(slow.step, {}), clock) for slow in run.slowest),
    )
    return RunEvidence(
        timing=timing, ledger=None if ledger is None else _with_goodput(ledger, steady if on_device else None)
    )


def run_intervals(totals: RunTotals, parts: Marks[Mapping[str, int]] | None = None) -> dict[str, ShareInterval]:
    """The share of each region and each part of the ledger with its interval, by name; not of those under 1 %."""
    parts = parts or Marks()
    every = max(totals.block_length, parts.every)
    blocks = totals.blocks(every)
    if len(blocks) < FEWEST_PIECES:
        return {}
    ends = [(parts.at(step) or {}, parts.at(step + every) or {}) for step, _ in blocks]
    names = dict.fromkeys(name for _, after in ends for name in after)
    parts_ms = {name: [(after.get(name, 0) - before.get(name, 0)) / 1e6 for before, after in ends] for name in names}
    counters = [block for _, block in blocks]
    whole, steps = [*map(step_total_ms, counters)], [block.steps for block in counters]
    regions = region_pieces(counters)
    regions_ms = {name: [one.get(name, 0.0) for one in regions] for name in REGIONS}
    regions_ms[OWN_WORK] = [own_ms(one) for one in regions]
    return share_intervals({**parts_ms, **regions_ms}, whole, steps)


def _slow_step(slow: TimedStep, parts: Mapping[str, float], clock: LedgerClock | None) -> SlowStep:
    return SlowStep(
        step=slow.step,
        ms=slow.ms,
        end_s=None if clock is None or not slow.ended_ns else (slow.ended_ns - clock.began_ns) / 1e9,
        parts_ms={name: 1e3 * seconds for name, seconds in parts.items()},
        regions_ms={name: ms for name, ms in region_times(slow.device_ms).items() if name in REGIONS},
    )


def _with_goodput(ledger: RunLedger, on_device: Rates | None) -> RunLedger:
    return replace(ledger, goodput=goodput(ledger, on_device))


def _worker_restarts(steady: Rates, workers: int) -> WorkerRestarts | None:
    if not workers or not steady.loader_starts:
        return None
    return WorkerRestarts(
        count=steady.loader_starts,
        workers=workers,
        device_ms=steady.loader_start_ms / steady.steps,
        host_ms=steady.loader_start_host_ms / steady.steps,
    )


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
    evidence: RunEvidence | None,
    tracked: tuple[TrackedRun, ...] = (),
) -> Analysis | None:
    """The analysis of run and trace together; the reports beside the trace are rewritten with both."""
    if recorded is None and evidence is None:
        return None
    analysis = replace(combine(recorded, evidence), tracked=tracked)
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
    run, on_device = step_timer.summary(), step_timer.timers.on_device
    gpu = None if log is None else log.telemetry(run)
    compute = () if log is None else log.compute(run, trace, recorded)
    evidence = run_evidence(run, on_device=on_device, ledger=fit.step_timer.ledger.read(), clock=fit.step_timer.ledger)
    if evidence is not None:
        evidence = replace(
            evidence,
            timing=replace(
                evidence.timing,
                worker_restarts=_worker_restarts(run.steady, restarted_workers(training)),
                intervals=run_intervals(step_timer.totals, fit.step_timer.ledger.marks()),
            ),
            machine=RunMachine(
                cpu=fit.readings.cpu_use(facts.ranks_on_host),
                telemetry=gpu if isinstance(gpu, TelemetrySummary) else None,
                compute=compute,
            ),
            ranks=RunRanks(rank=facts.rank, world_size=facts.world_size),
            settings=RunSettings(
                loader=loader_settings(training),
                validation_loader=loader_settings(training, validation=True),
                optimizer=optimizer_settings(training),
                switches=fit.readings.switches,
            ),
            continues_from=continues_from,
            lines=fit.readings.lines(),
            recompilations=fit.recompilations(),
            memory=None
            if fit.memory is None
            else fit.memory.memory(
                samples_per_step=_per_step(run.steady.samples, run.steady.steps),
                tokens_per_step=_per_step(run.steady.tokens, run.steady.steps),
            ),
        )
        if facts.world_size > 1:
            waits = None if fit.waits is None else fit.waits.measured(run.steady)
            mine = rank_work(evidence, host=gethostname(), waits=waits)
            works = (mine, *(() if others is None else others(mine)))
            evidence = replace(evidence, ranks=replace(evidence.ranks, works=works))
    folder = logger_folder(training) if facts.is_zero else None
    return RunReport(
        run,
        trace,
        device=facts.device_name,
        on_device=on_device,
        replicas=facts.replicas,
        log_folder=None if folder is None else folder.path,
        analysis=analysis_of(trace, recorded, evidence, tracked_runs(training)),
        compute=compute,
        gpu=gpu,
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
    read = _with_goodput(ledger, report.run.steady if report.on_device else None)
    trace = None if report.trace is None or report.trace.url else report.trace
    return replace(report, analysis=analysis_of(trace, recorded, replace(analysis.run, ledger=read), analysis.tracked))


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
