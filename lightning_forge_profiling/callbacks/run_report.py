"""Report on a run: collects its figures, analyses run and trace, and rewrites the trace's reports at the end."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.cpu_account import CpuAccount
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings, optimizer_settings, restarted_workers
from lightning_forge_profiling.callbacks.published_results import PUBLISH_S, Result, publish
from lightning_forge_profiling.callbacks.rank_clocks import RankFigures, rank_clock, read_figures, write_figures
from lightning_forge_profiling.callbacks.run_analysis import (
    analysis_of,
    recorded_analysis,
    run_compute,
    run_evidence,
    run_ledger,
)
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.diagnosis.ledger_ranks import ledger_differences
from lightning_forge_profiling.profiler.timeouts import patience_s
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.ledger import Ledger
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute


class Reporting(Protocol):
    """A callback that contributes to the table at the end of a run."""

    def trace_report(self) -> TraceReport | None:
        """The report on the window; None for a callback that records none."""

    def telemetry(self, run: RunSummary) -> TelemetrySummary | str | None:
        """The GPU's telemetry, or why there is none; None if not asked for."""

    def compute(
        self, trainer: Trainer, run: RunSummary, trace: TraceReport | None, recorded: Analysis | None
    ) -> tuple[Compute, ...]:
        """The run's compute rates."""

    def copy_files(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Copy the files that belong to a remote folder."""


def leave_figures(
    trainer: Trainer, step_timer: StepTimer, callbacks: Sequence[Reporting], ledger: Ledger | None
) -> None:
    """Write this rank's step times and ledger for rank 0.

    Only live steps, which no profiler slowed, show which rank is late.

    Args:
        trainer: the fit's Trainer.
        step_timer: has the run's totals.
        callbacks: the callbacks of this package.
        ledger: this rank's ledger so far.
    """
    run, trace = step_timer.summary(), trace_of(callbacks)
    if trainer.world_size > 1 and not run.only_warmup and trace is not None and trace.path is not None:
        with suppress(OSError):  # the trace alone then shows which rank is late
            clock = rank_clock(trainer.global_rank, run.steady)
            write_figures(trace.path.parent, RankFigures(clock, None if ledger is None else run_ledger(ledger)))


def run_report(
    trainer: Trainer,
    step_timer: StepTimer,
    callbacks: Sequence[Reporting],
    *,
    ledger: Ledger | None = None,
    continues_from: int = 0,
    cpu: CpuAccount | None = None,
    interrupted: bool,
) -> RunReport:
    """The report at the end of a fit. Rewrites the reports beside the trace, and copies them to a remote folder.

    Args:
        trainer: the fit's Trainer.
        step_timer: has the run's totals.
        callbacks: the callbacks of this package.
        ledger: the run's ledger.
        continues_from: the optimizer step that the fit began with.
        cpu: the account of the cores' use.
        interrupted: whether the fit ended by an exception, after which other ranks may write nothing.
    """
    trace = trace_of(callbacks)
    recorded = recorded_analysis(trace)
    ranks: tuple[RankFigures, ...] = ()
    if trace is not None and trace.path is not None and recorded is not None and not interrupted:
        ranks = read_figures(trace.path.parent, [rank.rank for rank in recorded.ranks])
    report = _report(
        trainer, step_timer, callbacks, ledger, recorded=recorded, ranks=ranks, continues_from=continues_from, cpu=cpu
    )
    for callback in callbacks:
        callback.copy_files(trainer, interrupted=interrupted)
    return replace(report, trace=trace_of(callbacks))  # with the URL that it was copied to


def report_so_far(
    trainer: Trainer,
    step_timer: StepTimer,
    callbacks: Sequence[Reporting],
    *,
    ledger: Ledger | None = None,
    continues_from: int = 0,
    cpu: CpuAccount | None = None,
) -> RunReport:
    """The report on a running fit, without the analysis of its trace.

    Args:
        trainer: the fit's Trainer.
        step_timer: has the run's totals.
        callbacks: the callbacks of this package.
        ledger: the run's ledger.
        continues_from: the optimizer step that the fit began with.
        cpu: the account of the cores' use.
    """
    return _report(trainer, step_timer, callbacks, ledger, continues_from=continues_from, cpu=cpu)


def _report(
    trainer: Trainer,
    step_timer: StepTimer,
    callbacks: Sequence[Reporting],
    ledger: Ledger | None,
    *,
    recorded: Analysis | None = None,
    ranks: Sequence[RankFigures] = (),
    continues_from: int = 0,
    cpu: CpuAccount | None = None,
) -> RunReport:
    trace = trace_of(callbacks)
    run, on_device = step_timer.summary(), step_timer.timers.on_device
    gpu = next((said for callback in callbacks if (said := callback.telemetry(run)) is not None), None)
    rates = [found for callback in callbacks for found in callback.compute(trainer, run, trace, recorded)]
    compute = tuple(run_compute(found) for found in rates)
    evidence = run_evidence(
        run,
        on_device=on_device,
        world_size=trainer.world_size,
        telemetry=gpu if isinstance(gpu, TelemetrySummary) else None,
        compute=compute,
        clocks=[each.clock for each in ranks],
        workers=restarted_workers(trainer),
        loader=loader_settings(trainer),
        ledger=ledger,
        differences=ledger_differences({each.clock.rank: each.ledger for each in ranks if each.ledger is not None}),
        continues_from=continues_from,
    )
    if evidence is not None:
        evidence = replace(
            evidence,
            validation_loader=loader_settings(trainer, validation=True),
            optimizer=optimizer_settings(trainer),
            cpu=None if cpu is None else cpu.use(max(int(trainer.num_devices), 1)),
        )
    folder = lightning_api.logger_folder(trainer) if trainer.is_global_zero else None
    return RunReport(
        run,
        trace,
        device=lightning_api.device_name(trainer),
        on_device=on_device,
        replicas=lightning_api.replicas(trainer),
        log_folder=None if folder is None else folder.path,
        analysis=analysis_of(trace, recorded, evidence, lightning_api.tracked_runs(trainer)),
        compute=compute,
        gpu=gpu,
    )


def publish_run(
    trainer: Trainer,
    analysis: Analysis,
    means: Mapping[str, float],
    callbacks: Sequence[Reporting],
    *,
    interrupted: bool,
) -> None:
    """Publish the result to the Trainer's loggers that hold more than scalars. Called on rank 0, after the table.

    Args:
        trainer: the fit's Trainer.
        analysis: analysis of the run.
        means: logged metrics over all counted steps.
        callbacks: the callbacks of this package.
        interrupted: whether the fit ended by an exception, after which there is little time.
    """
    trace = trace_of(callbacks)
    result = Result(
        analysis,
        means,
        step=lightning_api.last_logger_step(trainer),
        trace=trace.url or str(trace.path.parent) if trace is not None and trace.path is not None else "",
        reports=trace.report_path.parent if trace is not None and trace.report_path is not None else None,
    )
    publish(trainer.loggers, result, limit_s=patience_s(trainer.world_size) if interrupted else PUBLISH_S)


def trace_of(callbacks: Sequence[Reporting]) -> TraceReport | None:
    """The report on the window, if one of the callbacks records one."""
    return next((report for callback in callbacks if (report := callback.trace_report()) is not None), None)
