"""The end of a run: collect its figures, analyse run and trace, rewrite the reports, print the table, publish it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings, restarted_workers
from lightning_forge_profiling.callbacks.published_results import PUBLISH_S, Result, publish
from lightning_forge_profiling.callbacks.rank_clocks import rank_clock, read_clocks, write_clock
from lightning_forge_profiling.callbacks.run_analysis import analysis_of, recorded_analysis, run_compute, run_evidence
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.profiler.timeouts import patience_s
from lightning_forge_profiling.report.run_output import print_run
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis, RankClock
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.ledger import Ledger
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute

__all__ = ["Reporting", "leave_clock", "publish_run", "report_run"]


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
        """Copy what belongs to a remote folder."""


def leave_clock(trainer: Trainer, step_timer: StepTimer, callbacks: Sequence[Reporting]) -> None:
    """Write this rank's step times for rank 0: only live steps, which no profiler slowed, show which rank is late."""
    run, trace = step_timer.summary(), _trace(callbacks)
    if trainer.world_size > 1 and not run.only_warmup and trace is not None and trace.path is not None:
        with suppress(OSError):  # without it the trace alone says who is late
            write_clock(trace.path.parent, rank_clock(trainer.global_rank, run.steady))


def report_run(
    trainer: Trainer,
    step_timer: StepTimer,
    callbacks: Sequence[Reporting],
    *,
    ledger: Ledger | None = None,
    interrupted: bool,
) -> Analysis | None:
    """Analyse the run, rewrite the reports and print the table. Called on rank 0.

    Args:
        trainer: of the fit.
        step_timer: has the run's totals.
        callbacks: the callbacks of this package.
        ledger: where the run's wall time went.
        interrupted: whether the fit ended by an exception, after which other ranks may write nothing.
    """
    run, trace, on_device = step_timer.summary(), _trace(callbacks), step_timer.timers.on_device
    gpu = next((said for callback in callbacks if (said := callback.telemetry(run)) is not None), None)
    recorded = recorded_analysis(trace)
    rates = [found for callback in callbacks for found in callback.compute(trainer, run, trace, recorded)]
    compute = tuple(run_compute(found) for found in rates)
    clocks: tuple[RankClock, ...] = ()
    if trace is not None and trace.path is not None and recorded is not None and not interrupted:
        clocks = read_clocks(trace.path.parent, [rank.rank for rank in recorded.ranks])
    evidence = run_evidence(
        run,
        on_device=on_device,
        world_size=trainer.world_size,
        telemetry=gpu if isinstance(gpu, TelemetrySummary) else None,
        compute=compute,
        clocks=clocks,
        workers=restarted_workers(trainer),
        loader=loader_settings(trainer),
        ledger=ledger,
    )
    analysis = analysis_of(trace, recorded, evidence, lightning_api.tracked_runs(trainer))
    for callback in callbacks:
        callback.copy_files(trainer, interrupted=interrupted)
    folder = lightning_api.logger_folder(trainer)
    print_run(
        RunReport(
            run,
            _trace(callbacks),
            device=lightning_api.device_name(trainer),
            on_device=on_device,
            replicas=lightning_api.replicas(trainer),
            log_folder=None if folder is None else folder.path,
            analysis=analysis,
            compute=compute,
            gpu=gpu,
        )
    )
    return analysis


def publish_run(
    trainer: Trainer,
    analysis: Analysis,
    means: Mapping[str, float],
    callbacks: Sequence[Reporting],
    *,
    interrupted: bool,
) -> None:
    """Give the result to the Trainer's loggers that hold more than scalars. Called on rank 0, after the table.

    Args:
        trainer: of the fit.
        analysis: of the run.
        means: the logged metrics over all steps that count.
        callbacks: the callbacks of this package.
        interrupted: whether the fit ended by an exception, after which there is little time.
    """
    trace = _trace(callbacks)
    result = Result(
        analysis,
        means,
        step=lightning_api.last_logger_step(trainer),
        trace=trace.url or str(trace.path.parent) if trace is not None and trace.path is not None else "",
        reports=trace.report_path.parent if trace is not None and trace.report_path is not None else None,
    )
    publish(trainer.loggers, result, limit_s=patience_s(trainer.world_size) if interrupted else PUBLISH_S)


def _trace(callbacks: Sequence[Reporting]) -> TraceReport | None:
    return next((report for callback in callbacks if (report := callback.trace_report()) is not None), None)
