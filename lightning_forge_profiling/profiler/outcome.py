"""Updates the report on a window when its child process has ended, or continues alone."""

from dataclasses import replace
from pathlib import Path

from lightning_forge_profiling.names import REPORT_HTML, SUMMARY_JSON
from lightning_forge_profiling.results.trace_report import TraceReport


def handed_over(report: TraceReport) -> TraceReport:
    """The report if the child process continues alone."""
    if report.status != "written" or report.path is None:
        return report
    message = "the run ended before trace and reports were complete: they are still being written"
    return replace(report, pending=True, message=message)


def finished(report: TraceReport, problem: str, *, analyzed: bool) -> TraceReport:
    """The report once the child process has ended, with those of its files that exist."""

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
        summary_path=there(reports / SUMMARY_JSON) if reports else None,
        report_path=there(reports / REPORT_HTML) if reports else None,
    )
