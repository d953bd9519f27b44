"""What became of a recorded window."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Status", "TraceReport"]

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
