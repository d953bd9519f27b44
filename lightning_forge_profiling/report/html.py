"""An analysis as a web page: one file that loads nothing."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lightning_forge_profiling.report.labels import kernel_labels
from lightning_forge_profiling.report.page import asset, filled, page
from lightning_forge_profiling.report.run_wording import compute_lines, ledger_rows, run_notes, slowest_rows
from lightning_forge_profiling.report.wording import cpu_threads, findings_note, findings_remarks, share_of
from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.timeline import Timeline

_SCRIPTS: Final = (
    *("format", "palette", "table", "lanes", "timeline_canvas", "timeline", "axis", "breakdown", "sections", "main"),
)
_OF_LEDGER: Final = ("run",)
_OF_STACKS: Final = ("flame",)
_OF_TELEMETRY: Final = ("readings", "telemetry")
_FOR_READERS: Final = re.compile(r"^ *//.*\n|^ +", re.MULTILINE)
"""Lines of comments, and indentation: for whoever changes a script. Each page would have 16 kB of them."""

_SHOWN_OF_NAME: Final = 70
"""A kernel's name is shown so far at least, in the two lines that it has."""
_LABEL: Final = 80

_BLOCK: Final = '<script type="application/json" id="forge-{}">{}</script>'

# Inside of JSON these stand in strings only, where an escape means the same. Without them no name can end the block.
_ESCAPED: Final = "<>&\u2028\u2029"


def html_report(analysis: Analysis, timelines: Sequence[Timeline]) -> str:
    """The report as a web page.

    The page holds the results as two blocks of JSON and draws itself from them. Its content security policy lets it
    load nothing, and run no script but its own, which is named by its hash: a name in a trace could not run even if it
    got into the page as markup.

    Example:
        >>> page = html_report(Analysis(source="run", verdict="x", verdict_text="", findings=()), [])
        >>> page.splitlines()[0]
        '<!DOCTYPE html>'
    """
    scripts = (_FOR_READERS.sub("", asset(f"{name}.js")) for name in _scripts(analysis))
    script = "\n".join(["'use strict';", *scripts])
    values = {"script": script, "summary": _summary(analysis), "timeline": _block("timeline", timelines)}
    return page("Profiling report", filled(asset("report.html"), values), script=script)


def _scripts(analysis: Analysis) -> tuple[str, ...]:
    """The names of the scripts that a page needs, the one that draws it last."""
    run = analysis.run
    needed = (
        *(_OF_LEDGER if run is not None and run.ledger is not None else ()),
        *(_OF_STACKS if any(rank.python is not None for rank in analysis.ranks) else ()),
        *(_OF_TELEMETRY if run is not None and run.telemetry is not None else ()),
    )
    return (*_SCRIPTS[:-1], *needed, _SCRIPTS[-1])


def timelines_of(html: str) -> tuple[Timeline, ...]:
    """The timelines that a page shows.

    Example:
        >>> timelines_of("<html></html>")
        Traceback (most recent call last):
            ...
        ValueError: not a report of forge-profiling: it has no timeline
    """
    opening, closing = _BLOCK.format("timeline", "|").split("|")
    _, found, rest = html.partition(f"\n{opening}")
    if not found:
        raise ValueError("not a report of forge-profiling: it has no timeline")
    return msgspec.json.decode(rest.partition(closing)[0], type=tuple[Timeline, ...])


def _summary(analysis: Analysis) -> str:
    """The results, and the sentences that the other reports have too."""
    compute = analysis.run.compute if analysis.run else ()
    words = {
        "note": findings_note(analysis),
        "compute": tuple(compute_lines(compute)),
        "parts": [
            {"part": name, "seconds": s, "times": count}
            for name, s, count in ledger_rows(analysis.run.ledger if analysis.run else None)
        ],
        "slowest": [
            {"step": step, "ms": ms, "times": times, "cause": why}
            for step, ms, times, why in (slowest_rows(analysis.run) if analysis.run else ())
        ],
        "labels": _labels(analysis),
        "run": list(run_notes(analysis.run) if analysis.run else ()),
        "remarks": list(findings_remarks(analysis)),
        "shares": [share_of(analysis, finding) for finding in analysis.findings],
        "threads": cpu_threads(analysis.ranks[0]) if analysis.ranks else "",
    }
    return _block("summary", {"analysis": analysis, "words": words})


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


def _block(name: str, content: Any) -> str:
    encoded = msgspec.json.encode(content, enc_hook=dict)  # the hook is for mappings that are no dict
    text = encoded.decode()
    for character in _ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _BLOCK.format(name, text)
