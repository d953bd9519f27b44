"""The reports as files beside a trace."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import msgspec

from lightning_forge_profiling.analysis.results import Analysis
from lightning_forge_profiling.analysis.timeline import Timeline
from lightning_forge_profiling.report.markdown import markdown

__all__ = ["ReportPaths", "summary_json", "write_file", "write_reports"]


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where the reports of one analysis lie.

    Attributes:
        summary_json: everything, for programs; `summary.schema.json` of this package describes it.
        summary_markdown: for a pull request or an editor.
        html: with the timeline, for a browser.
    """

    summary_json: Path
    summary_markdown: Path
    html: Path


def write_reports(analysis: Analysis, timelines: Sequence[Timeline], folder: Path) -> ReportPaths:
    """Write `summary.json`, `summary.md` and `report.html`, each complete or not at all.

    Args:
        analysis: what to report.
        timelines: what the HTML's timeline shows, one a rank.
        folder: where to; earlier reports in it are replaced.

    Returns:
        Where they are.

    Raises:
        OSError: a file could not be written.
    """
    from lightning_forge_profiling.report.html import html_report  # noqa: PLC0415  (only where a page is wanted)

    paths = ReportPaths(folder / "summary.json", folder / "summary.md", folder / "report.html")
    write_file(paths.summary_json, summary_json(analysis))
    write_file(paths.summary_markdown, markdown(analysis).encode(errors="replace"))
    write_file(paths.html, html_report(analysis, timelines).encode(errors="replace"))
    return paths


def summary_json(analysis: Analysis) -> bytes:
    """The content of `summary.json`: indented, with a final newline.

    Example:
        >>> text = summary_json(Analysis(source="run", verdict="x", verdict_text="", findings=()))
        >>> msgspec.json.decode(text)["source"]
        'run'
    """
    encoded = msgspec.json.encode(analysis, enc_hook=dict)  # the hook is for mappings that are no dict
    return msgspec.json.format(encoded, indent=2) + b"\n"


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all; into a pipe or a device it is written as it is.

    Args:
        path: where to.
        content: all of it.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    part = path.with_name(f".{token_hex(8)}.tmp")  # no name of a user's
    try:
        with part.open("xb") as file:
            file.write(content)
        part.replace(path)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc  # names the file that was asked for
    finally:
        with suppress(OSError):  # it has become the file, or was never made
            part.unlink()
