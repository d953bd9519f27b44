"""What the table of a run, its record and its page are made from."""

from dataclasses import dataclass
from pathlib import Path

from lightning_forge_profiling.results.analysis import Analysis, RunCompute
from lightning_forge_profiling.results.telemetry import TelemetrySummary
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.rates import LoopRates
from lightning_forge_profiling.timing.run_totals import RunSummary


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is known at the end of a run.

    Attributes:
        run: where its time went on rank 0.
        trace: what became of the recorded window, None without one.
        device: what it trained on, in words.
        on_device: whether times are device times.
        replicas: data-parallel replicas.
        log_folder: where TensorBoard should look, None without a logger.
        analysis: of the steps that count and of the trace, None where there is neither.
        compute: how fast a device computed; empty if unknown.
        gpu: the GPU's sensors, or why they could not be read; None if telemetry is off.
        loops: what the validation runs did.
        model: the class of the module; "" if unknown.
    """

    run: RunSummary
    trace: TraceReport | None
    device: str
    on_device: bool
    replicas: int
    log_folder: Path | None
    analysis: Analysis | None = None
    compute: tuple[RunCompute, ...] = ()
    gpu: TelemetrySummary | str | None = None
    loops: tuple[LoopRates, ...] = ()
    model: str = ""
