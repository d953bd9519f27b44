"""What became of a recorded window."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning_forge_profiling.tracing.folders import report_path, summary_path

__all__ = ["Status", "TraceReport", "finished", "handed_over"]

Status = Literal["waiting", "recording", "written", "not reached", "stood aside", "failed"]


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What became of one window on one rank.

    Attributes:
        status: `waiting` and `recording` while the run goes on, then `written`, `not reached` (the run ended before
            the window), `stood aside` (another profiler was at work) or `failed`.
        message: why, where the status is one of the last two, or a remark.
        steps: the steps that were recorded, whole or in part.
        path: the trace, None unless written.
        plugin_path: the copy for TensorBoard, None unless written.
        stall_ms: how long the training loop was held up at the end of the window.
        start_stall_ms: how long it was held up where the profiler was started.
        attached: why CUPTI stays attached to the process after the window, which slows kernel launches, and what to
            do; "" where it does not.
        summary_path: what the analysis found, None without one; all ranks' analysis is the lowest recording rank's.
        report_path: the same for a browser, None without one.
        memory_path: PyTorch's memory snapshot, None unless written.
        memory_message: why there is none, where one was asked for and due.
        pending: whether the run came down before trace, copy and reports were complete: a process beside it goes on
            with them, and they appear once they are.
    """

    status: Status = "waiting"
    message: str = ""
    steps: tuple[int, ...] = ()
    path: Path | None = None
    plugin_path: Path | None = None
    stall_ms: float = 0.0
    start_stall_ms: float = 0.0
    attached: str = ""
    summary_path: Path | None = None
    report_path: Path | None = None
    memory_path: Path | None = None
    memory_message: str = ""
    pending: bool = False


def handed_over(report: TraceReport) -> TraceReport:
    """The report where nobody waits for the child process any longer.

    Args:
        report: as it was when the child was told to go on.
    """
    if report.status != "written" or report.path is None:
        return report
    message = "the run ended before trace and reports were complete: they are still being written"
    return replace(report, pending=True, message=message)


def finished(report: TraceReport, problem: str, *, analyzed: bool) -> TraceReport:
    """The report once the child process has ended: of the files it was to write, those that are there.

    Args:
        report: as it was when the child was told to go on.
        problem: what went wrong, "" when nothing did.
        analyzed: whether this rank's child was to analyse the traces.
    """

    def there(path: Path | None) -> Path | None:
        return path if path is not None and path.is_file() else None

    path = there(report.path)
    lost = report.status == "written" and path is None
    reports = path.parent if path is not None and analyzed else None
    return replace(
        report,
        status="failed" if lost or (problem and path is None) else report.status,
        message=problem or (f"{report.path} was removed" if lost else report.message),
        path=path,
        plugin_path=there(report.plugin_path),  # another rank's child may publish it, or have yet to
        summary_path=there(summary_path(reports)) if reports else None,
        report_path=there(report_path(reports)) if reports else None,
    )
