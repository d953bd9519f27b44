"""What is said at the end of a run: the evidence of its steps, the analysis of run and trace, and the table."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings, restarted_workers
from lightning_forge_profiling.callbacks.rank_clocks import rank_clock, read_clocks, write_clock
from lightning_forge_profiling.callbacks.run_analysis import analysis_of, recorded_analysis, run_compute, run_evidence
from lightning_forge_profiling.callbacks.step_timer import StepRecorder
from lightning_forge_profiling.report.run_output import print_run
from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.analysis import Analysis, RankClock
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.run_totals import RunSummary
from lightning_forge_profiling.timing.utilization import Compute

__all__ = ["Reporting", "leave_clock", "report_run"]


class Reporting(Protocol):
    """A callback that has something to say."""

    def trace_report(self) -> TraceReport | None:
        """What became of the window, where it records one."""

    def telemetry(self, run: RunSummary) -> TelemetrySummary | str | None:
        """What the GPU's sensors said, or why nothing; None where nobody asked."""

    def compute(
        self, trainer: Trainer, run: RunSummary, trace: TraceReport | None, recorded: Analysis | None
    ) -> tuple[Compute, ...]:
        """How fast the run computed."""


def leave_clock(trainer: Trainer, recorder: StepRecorder, callbacks: Sequence[Reporting]) -> None:
    """Called on every rank: which of them is late shows in their live steps alone, and rank 0 prints."""
    run, trace = recorder.summary(), _trace(callbacks)
    if trainer.world_size > 1 and not run.only_warmup and trace is not None and trace.path is not None:
        with suppress(OSError):  # without it the trace alone says who is late
            write_clock(trace.path.parent, rank_clock(trainer.global_rank, run.steady))


def report_run(
    trainer: Trainer, recorder: StepRecorder, callbacks: Sequence[Reporting], *, interrupted: bool
) -> Analysis | None:
    """Called on rank 0: analyse the run, write the trace's reports anew and print the table.

    Args:
        trainer: of the fit.
        recorder: of its steps.
        callbacks: those of this package.
        interrupted: whether it ended by an exception, after which other ranks may leave nothing.
    """
    run, trace, on_device = recorder.summary(), _trace(callbacks), recorder.timers.on_device
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
    )
    analysis = analysis_of(trace, recorded, evidence)
    print_run(
        RunReport(
            run,
            trace,
            device=lightning_api.device_name(trainer),
            on_device=on_device,
            replicas=lightning_api.replicas(trainer),
            log_folder=lightning_api.logger_folder(trainer),
            analysis=analysis,
            compute=compute,
            gpu=gpu,
        )
    )
    return analysis


def _trace(callbacks: Sequence[Reporting]) -> TraceReport | None:
    return next((report for callback in callbacks if (report := callback.trace_report()) is not None), None)
