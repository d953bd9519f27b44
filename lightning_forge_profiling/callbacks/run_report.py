"""Report on a run: collects its figures, analyses run and trace, and rewrites the trace's reports at the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from socket import gethostname

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.cpu_account import CpuAccount
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings, optimizer_settings, restarted_workers
from lightning_forge_profiling.callbacks.published_results import PUBLISH_S, Result, publish
from lightning_forge_profiling.callbacks.run_analysis import (
    analysis_of,
    run_compute,
    run_evidence,
    run_ledger,
    share_intervals,
)
from lightning_forge_profiling.callbacks.stack_sampler import StackSampler
from lightning_forge_profiling.diagnosis.ledger_costs import NOTICED_S
from lightning_forge_profiling.diagnosis.ranks import rank_work
from lightning_forge_profiling.names import PROFILER
from lightning_forge_profiling.profiler.timeouts import patience_s
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis, RankWork, RunLedger
from lightning_forge_profiling.results.cpu import CpuUse
from lightning_forge_profiling.results.lines import WORKER_LINES, SampledLine
from lightning_forge_profiling.results.switches import Switches
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.blocks import StepBlock
from lightning_forge_profiling.timing.ledger import Ledger
from lightning_forge_profiling.timing.rates import LoopRates
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute

OtherRanks = Callable[[RankWork], Sequence[RankWork]]
"""Reads the work of the other ranks, given that of this one."""


def run_report(
    trainer: Trainer,
    run: RunSummary,
    *,
    on_device: bool,
    trace: TraceReport | None,
    recorded: Analysis | None,
    others: OtherRanks | None,
    gpu: TelemetrySummary | str | None,
    compute: Sequence[Compute],
    ledger: Ledger,
    continues_from: int,
    cpu: CpuAccount | None,
    stacks: StackSampler | None = None,
    worker_lines: tuple[SampledLine, ...] = (),
    blocks: Sequence[StepBlock] = (),
    switches: Switches | None = None,
    loops: tuple[LoopRates, ...] = (),
) -> RunReport:
    """The report on a fit. With the analysis of its trace, the reports beside the trace are rewritten."""
    rates = tuple(run_compute(found) for found in compute)
    evidence = run_evidence(
        run,
        on_device=on_device,
        world_size=trainer.world_size,
        telemetry=gpu if isinstance(gpu, TelemetrySummary) else None,
        compute=rates,
        workers=restarted_workers(trainer),
        loader=loader_settings(trainer),
        ledger=ledger,
        continues_from=continues_from,
    )
    if evidence is not None:
        evidence = replace(
            evidence,
            validation_loader=loader_settings(trainer, validation=True),
            optimizer=optimizer_settings(trainer),
            intervals=share_intervals(blocks),
            lines={
                **({} if stacks is None else stacks.lines()),
                **({WORKER_LINES: worker_lines} if worker_lines else {}),
            },
            cpu=_cpu_use(cpu, stacks, max(int(trainer.num_devices), 1)),
            switches=switches,
            rank=trainer.global_rank,
        )
        if trainer.world_size > 1:
            mine = rank_work(evidence, host=gethostname())
            evidence = replace(evidence, ranks=(mine, *(() if others is None else others(mine))))
    folder = lightning_api.logger_folder(trainer) if trainer.is_global_zero else None
    return RunReport(
        run,
        trace,
        device=lightning_api.device_name(trainer),
        on_device=on_device,
        replicas=lightning_api.replicas(trainer),
        log_folder=None if folder is None else folder.path,
        analysis=analysis_of(trace, recorded, evidence, lightning_api.tracked_runs(trainer)),
        compute=rates,
        gpu=gpu,
        loops=loops,
    )


def _cpu_use(cpu: CpuAccount | None, stacks: StackSampler | None, ranks: int) -> CpuUse | None:
    use = None if cpu is None else cpu.use(ranks)
    if use is None or stacks is None:
        return use
    gil, thread = stacks.gil()
    return replace(use, gil=gil, gil_thread=thread)


def with_ledger(report: RunReport, recorded: Analysis | None, ledger: Ledger) -> RunReport:
    """The report with findings and verdict by a later reading of the ledger; the reports beside the trace have it, too.

    Less than a second could be no finding, and the report stays as it is. So do copies of it in a remote folder.
    """
    analysis = report.analysis
    if analysis is None or analysis.run is None or analysis.run.ledger is None:
        return report
    if _own_s(ledger) - _own_s(analysis.run.ledger) < NOTICED_S:
        return report
    read = run_ledger(ledger, report.run.steady if report.on_device else None)
    trace = None if report.trace is None or report.trace.url else report.trace
    return replace(report, analysis=analysis_of(trace, recorded, replace(analysis.run, ledger=read), analysis.tracked))


def _own_s(ledger: Ledger | RunLedger) -> float:
    return ledger.wall_s - ledger.parts.get(PROFILER, 0.0)


def further_findings(before: RunReport, after: RunReport) -> list[str]:
    """Findings of parts of the ledger, as text, that an earlier report does not have."""
    if before.analysis is None or after.analysis is None:
        return []
    known = {found.evidence.get("part") for found in before.analysis.findings}
    return [
        f"{found.code}: {found.title}. {found.advice}"
        for found in after.analysis.findings
        if found.evidence.get("part") not in {None, *known}
    ]


def publish_run(
    trainer: Trainer,
    analysis: Analysis,
    means: Mapping[str, float],
    trace: TraceReport | None,
    *,
    interrupted: bool,
) -> None:
    """Publish the result to the Trainer's loggers that hold more than scalars. Called on rank 0, after the table."""
    result = Result(
        analysis,
        means,
        step=lightning_api.last_logger_step(trainer),
        trace=trace.url or str(trace.path.parent) if trace is not None and trace.path is not None else "",
        reports=trace.report_path.parent if trace is not None and trace.report_path is not None else None,
    )
    publish(trainer.loggers, result, limit_s=patience_s(trainer.world_size) if interrupted else PUBLISH_S)
