"""Outcome of a recorded window: written, not reached or failed, and where its files are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["waiting", "recording", "written", "not reached", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Outcome of one window on one rank.

    Attributes:
        status: `waiting` and `recording` during the run, then `written`, `not reached` (the run ended before the
            window), `skipped` (another profiler was active) or `failed`.
        message: the reason for `skipped` and `failed`, or a remark.
        steps: steps that were recorded, whole or in part.
        path: the trace; None unless written.
        plugin_path: the copy for TensorBoard; None unless written.
        stall_ms: time that the end of the window held up the training loop.
        start_stall_ms: time that the start of the profiler held it up.
        attached: why CUPTI stays attached to the process after the window, which slows kernel launches, and the fix;
            "" if it does not.
        summary_path: `summary.json` of all ranks, on the lowest recording rank; None without an analysis.
        report_path: `report.html` likewise.
        memory_path: PyTorch's memory snapshot; None unless written.
        memory_message: why there is no snapshot, if one was requested and due.
        pending: whether the run failed before trace, copy and reports were complete; a process beside it finishes
            them.
        url: the remote folder that the files were copied to; "" if they were not.
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
    url: str = ""
