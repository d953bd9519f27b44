"""The page of an analysis: a run, and the window that was recorded in it, as far as there is either."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lightning_forge_profiling.report.labels import kernel_labels
from lightning_forge_profiling.report.page import embedded, web_page
from lightning_forge_profiling.report.run_wording import compute_lines, ledger_rows, run_notes, slowest_rows
from lightning_forge_profiling.report.wording import cpu_threads, findings_note, findings_remarks, share_of
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.timeline import Timeline

_SCRIPTS: Final = (
    *("format", "palette", "table", "lanes", "timeline_canvas", "timeline", "axis", "breakdown", "sections"),
)
_SHOWN_OF_NAME: Final = 70
"""A kernel's name is shown so far at least, in the two lines that it has."""
_LABEL: Final = 80


def report_page(analysis: Analysis, timelines: Sequence[Timeline], record: object = None) -> str:
    """The page of an analysis.

    It holds the results as blocks of JSON and draws itself from them.

    Args:
        analysis: the results.
        timelines: the timeline of each rank of the recorded window.
        record: what the run's record adds, a `RunView` or the JSON of one; None without a record.

    Example:
        >>> page = report_page(Analysis(source="run", verdict="x", verdict_text="", findings=()), [])
        >>> page.splitlines()[0]
        '<!DOCTYPE html>'
    """
    run = analysis.run
    blocks = {
        "summary": embedded({"analysis": analysis, "words": _words(analysis)}),
        "record": embedded(record),
        "timeline": embedded(timelines),
    }
    has_ledger = run is not None and run.ledger is not None
    has_stacks = any(rank.python is not None for rank in analysis.ranks)
    has_charts = record is not None or (run is not None and run.telemetry is not None)
    scripts = (
        *_SCRIPTS,
        *(("run",) if has_ledger else ()),
        *(("flame",) if has_stacks else ()),
        *(("readings", "telemetry") if has_charts else ()),
        *(("record",) if record is not None else ()),
        "main",
    )
    return web_page("report.html", scripts=scripts, blocks=blocks)


def block_of(page: str, name: str) -> bytes:
    """A block of JSON in a page.

    Example:
        >>> block_of("<html></html>", "timeline")
        Traceback (most recent call last):
            ...
        ValueError: not a report of forge-profiling: it has no timeline
    """
    _, opening, rest = page.partition(f'\n<script type="application/json" id="forge-{name}">')
    if not opening:
        raise ValueError(f"not a report of forge-profiling: it has no {name}")
    return rest.partition("</script>")[0].encode()


def timelines_of(page: str) -> tuple[Timeline, ...]:
    """The timelines that a page shows."""
    return msgspec.json.decode(block_of(page, "timeline"), type=tuple[Timeline, ...])


def record_of(page: str) -> Any:
    """What a page shows of the run's record; None without one."""
    return msgspec.json.decode(block_of(page, "record"))


def _words(analysis: Analysis) -> dict[str, Any]:
    """The sentences that the other reports have too."""
    run = analysis.run
    return {
        "note": findings_note(analysis),
        "compute": list(compute_lines(run.compute if run else ())),
        "parts": [
            {"part": name, "seconds": s, "times": count} for name, s, count in ledger_rows(run.ledger if run else None)
        ],
        "slowest": [
            {"step": step, "ms": ms, "times": times, "cause": why}
            for step, ms, times, why in (slowest_rows(run) if run else ())
        ],
        "labels": _labels(analysis),
        "run": list(run_notes(run) if run else ()),
        "remarks": list(findings_remarks(analysis)),
        "shares": [share_of(analysis, finding) for finding in analysis.findings],
        "threads": cpu_threads(analysis.ranks[0]) if analysis.ranks else "",
    }


def _labels(analysis: Analysis) -> dict[str, str]:
    """Labels for kernels whose names begin alike in the two lines that the table shows."""
    labels: dict[str, str] = {}
    for rank in analysis.ranks:
        names = [kernel.name for kernel in rank.top_kernels]
        alike = Counter(name[:_SHOWN_OF_NAME] for name in dict.fromkeys(names))
        labels |= {
            name: label
            for name, label in zip(names, kernel_labels(names, _LABEL), strict=True)
            if len(name) > _SHOWN_OF_NAME and alike[name[:_SHOWN_OF_NAME]] > 1
        }
    return labels
