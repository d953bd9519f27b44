"""`print_profiler_summary`: the analysis of a `torch.profiler` that the user runs."""

import os
from typing import Protocol

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.profiler.config import required_local_folder, trace_path
from lightning_forge_profiling.report.page import write_reports
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.terminal import print_analysis
from lightning_forge_profiling.safe_files import name_for_kineto, whole_file_by_name
from lightning_forge_profiling.schema import Analysis


class Profiler(Protocol):
    """The part of `torch.profiler.profile` that is used."""

    def export_chrome_trace(self, path: str) -> None:
        """Write what was recorded."""


def print_profiler_summary(
    prof: Profiler, trace_dir: str | os.PathLike[str], *, rank: int | None = None
) -> Analysis | None:
    """Print what bounds the recorded steps, and write the trace and the reports.

    Call it after the profiler's `with` block. The trace goes to `trace_dir/rankN.trace.json.gz`, the reports
    (`summary.json`, `summary.md`, `report.html`) beside it. If the profiler has exported its trace already, as with
    `on_trace_ready=tensorboard_trace_handler(trace_dir)`, the traces in `trace_dir` are analysed. With several ranks
    each writes its trace, and rank 0 reports on its own; `forge-profiling show trace_dir` compares all of them.

    Args:
        prof: a `torch.profiler.profile` that has stopped.
        trace_dir: the folder for the trace and the reports; created if missing.
        rank: this process's rank; None for the environment's `RANK`, or 0.

    Returns:
        The analysis on rank 0, None on others.

    Raises:
        ConfigurationError: the profiler has recorded nothing, or has not stopped, or `trace_dir` is a file or cannot be
            written.
        TraceError: its trace cannot be analysed.
        OSError: a file could not be written.

    Examples:
        >>> import contextlib, io, tempfile, torch
        >>> from torch.profiler import profile
        >>> with profile() as prof:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     analysis = print_profiler_summary(prof, tempfile.mkdtemp())
        >>> [operator.name for operator in analysis.ranks[0].operators if operator.name == "aten::mm"]
        ['aten::mm']
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    try:
        folder = required_local_folder(trace_dir)
    except TypeError as exc:
        raise ConfigurationError(f"trace_dir must be a path, got {trace_dir!r}.") from exc
    folder.mkdir(parents=True, exist_ok=True)
    trace = trace_path(folder, rank)
    try:
        with whole_file_by_name(trace) as part, name_for_kineto(part) as name:
            prof.export_chrome_trace(name)
    except RuntimeError as exc:
        if "already saved" not in str(exc):
            raise
        trace = folder  # the user's own handler has written it, hopefully there
    except (AssertionError, AttributeError) as exc:
        raise ConfigurationError("The profiler has recorded nothing yet: call this after its `with` block.") from exc
    if rank:
        return None
    result = analyze(trace)
    print_analysis(result.analysis)
    paths = write_reports(result.analysis, result.timelines, folder)
    Screen().line(f"report     {paths.html}", whole=True)
    return result.analysis
