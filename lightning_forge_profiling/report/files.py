"""Writes summary.json, summary.md and report.html."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_forge_profiling.kineto.files import summary_json
from lightning_forge_profiling.names import REPORT_HTML, SUMMARY_JSON, SUMMARY_MARKDOWN
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import Analysis, Timeline


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where the reports of one analysis lie.

    Attributes:
        summary_json: everything, for programs; `forge-profiling schema` describes it.
        summary_markdown: for a pull request or an editor.
        html: with the timeline, for a browser.
    """

    summary_json: Path
    summary_markdown: Path
    html: Path


def write_reports(
    analysis: Analysis, timelines: Sequence[Timeline] | None, folder: str | os.PathLike[str]
) -> ReportPaths:
    """Write `summary.json`, `summary.md` and `report.html`, each complete or not at all.

    Args:
        analysis: what to report.
        timelines: what the HTML's timeline shows, one per rank; None keeps those of the page that is replaced, and what
            it shows of the run's record.
        folder: where to, made if need be; earlier reports in it are replaced.

    Returns:
        Where they are.

    Raises:
        OSError: a file could not be read or written.
        ValueError: `timelines` is None, and `report.html` is a page of something else.

    Examples:
        >>> from tempfile import mkdtemp
        >>> analysis = Analysis(source="run", verdict="nothing stands out", verdict_text="", findings=())
        >>> write_reports(analysis, (), f"{mkdtemp()}/reports").html.name
        'report.html'
    """
    from lightning_forge_profiling.report.page import record_of, report_page, timelines_of  # noqa: PLC0415

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(folder / SUMMARY_JSON, folder / SUMMARY_MARKDOWN, folder / REPORT_HTML)
    record: Any = None
    if timelines is None:
        timelines = ()
        if paths.html.is_file():
            page = read_regular(paths.html).decode()
            timelines, record = timelines_of(page), record_of(page)
    write_whole(paths.summary_json, summary_json(analysis))
    write_whole(paths.summary_markdown, markdown(analysis).encode(errors="replace"))
    write_whole(paths.html, report_page(analysis, timelines, record).encode(errors="replace"))
    return paths
