"""HTML of results: pages, one file each, which loads nothing; notebooks. Reports of an analysis as files."""

import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, singledispatch
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightning_forge_profiling.diagnosis.machine_rules import growth_words, memory_layers
from lightning_forge_profiling.json_layout import summary_json
from lightning_forge_profiling.names import REPORT_HTML, SUMMARY_JSON, SUMMARY_MARKDOWN, docs_url
from lightning_forge_profiling.plain_text import LONGEST_KERNEL, all_plain, plain
from lightning_forge_profiling.report import run_wording, wording
from lightning_forge_profiling.report.markdown import markdown
from lightning_forge_profiling.report.run_table import evidence_table, run_table
from lightning_forge_profiling.report.trace_tables import (
    communication_tables,
    rank_tables,
    ranks_table,
    step_table,
    work_table,
)
from lightning_forge_profiling.report.wording import evidence
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import Analysis, RunLedger, RunMemory, RunReport, Timeline

if TYPE_CHECKING:
    from jinja2 import Environment

# Lines of comments, and indentation: for whoever changes a script. Each page would have 16 kB of them.
_FOR_READERS: Final = re.compile(r"^ *//.*\n|^ +", re.MULTILINE)

# In JSON these are in strings only, where an escape means the same. Without them no name can end the block.
_ESCAPED: Final = "<>&"


def asset(name: str) -> str:
    """The text of a file in `assets/`."""
    return files("lightning_forge_profiling.report").joinpath("assets", name).read_text(encoding="utf-8")


def rendered(template: str, **values: Any) -> str:
    """Render a template of `assets/`; values are escaped."""
    return _environment().get_template(template).render(values)


def embedded(content: Any) -> str:
    """JSON that can stand in a `<script>` element."""
    text = msgspec.json.encode(content, enc_hook=dict).decode()  # the hook is for mappings that are no dict
    # a timeline has a million numbers, and hardly ever a name that is not plain
    if "\\" in text or not text.isprintable() or max(map(len, text.split('"')[1::2]), default=0) > LONGEST_KERNEL:
        text = msgspec.json.encode(all_plain(msgspec.json.decode(text))).decode()
    for character in _ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415  (only where HTML is made)

    return Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: plain(value) if type(value) is str else value,  # Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _source(text: str) -> str:
    """How a content security policy names a script or style that is in the page itself."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_SCRIPTS: Final = (
    *("format", "palette", "tips", "links", "table", "lanes", "timeline_canvas", "timeline", "axis", "breakdown"),
    "sections",
)


def report_page(analysis: Analysis, timelines: Sequence[Timeline], record: object = None) -> str:
    """The page of an analysis, with a timeline for each rank; `record` is a `RunView`, the JSON of one, or None."""
    run = analysis.run
    blocks = {
        "summary": embedded({"analysis": analysis, "words": _words(analysis)}),
        "record": embedded(record),
        "timeline": embedded(timelines),
    }
    has_ledger = run is not None and run.ledger is not None
    has_stacks = any(rank.python is not None for rank in analysis.ranks)
    has_charts = record is not None or (
        run is not None and (run.machine.telemetry is not None or run.memory is not None)
    )
    scripts = (
        *_SCRIPTS,
        *(("run",) if has_ledger else ()),
        *(("flame",) if has_stacks else ()),
        *(("readings", "telemetry", "memory") if has_charts else ()),
        *(("record",) if record is not None else ()),
        "main",
    )
    style = asset("report.css")
    script = "\n".join(["'use strict';", *(_FOR_READERS.sub("", asset(f"{name}.js")) for name in scripts)])
    # blocks all requests, and styles and scripts of others
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return rendered("page.html", style=style, script=script, policy=policy, blocks=blocks)


def block_of(page: str, name: str) -> bytes:
    """A block of JSON in a page."""
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


def _memory_words(memory: RunMemory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    layers = [{"name": name, "gib": gib} for name, gib in memory_layers(memory).items()]
    return {"layers": layers, "growth": "" if memory.growth is None else growth_words(memory.growth)}


def _words(analysis: Analysis) -> dict[str, Any]:
    """The sentences and tables that the other reports have too."""
    run, ranks = analysis.run, analysis.ranks
    return {
        "note": wording.findings_note(analysis),
        "ranks": wording.ranks_note(analysis),
        "step": evidence_table(run) if run else None,
        "ledger": run_wording.ledger_table(run.ledger) if run and run.ledger else None,
        "slowest": run_wording.slowest_table(run) if run else None,
        "docs": {finding.code: docs_url(finding.code) for finding in analysis.findings},
        "goodput": run_wording.goodput_words(run.ledger) if run and run.ledger else "",
        "warnings": wording.all_warnings(analysis),
        "hints": [where + text for where, text in wording.hints(analysis)],
        "remarks": list(wording.findings_remarks(analysis)),
        "evidence": [[*evidence(finding)] for finding in analysis.findings],
        "shares": [wording.share_of(analysis, finding) for finding in analysis.findings],
        "memory": _memory_words(run.memory if run else None),
        "parts": [step_table(rank, kinds=True) for rank in ranks],
        "of_ranks": ranks_table(ranks),
        "communication": [*communication_tables(analysis)],
        "details": [rank_tables(rank) for rank in ranks],
        "work": [work_table([rank]) for rank in ranks],
        "said": [
            [text for text in (wording.efficiency(rank), wording.cpu_threads(rank), wording.linked(rank)) if text]
            for rank in ranks
        ],
    }


@singledispatch
def html_of(result: object) -> str:
    """HTML of a result, by its type."""
    raise TypeError(f"notebooks show no {type(result).__name__}")


@html_of.register
def analysis_html(analysis: Analysis) -> str:
    """HTML of the verdict, the findings with their evidence, and the split of the step."""
    findings = [
        (
            finding,
            docs_url(finding.code),
            wording.share_of(analysis, finding),
            [*evidence(finding)],
        )
        for finding in analysis.findings
    ]
    run = None if analysis.run is None else evidence_table(analysis.run)
    rows = run.table if run is not None else ranks_table(analysis.ranks) if analysis.ranks else None
    return rendered(
        "notebook.html", analysis=analysis, findings=findings, title="" if run is None else run.title, rows=rows
    )


@html_of.register
def run_html(report: RunReport) -> str:
    """HTML of the whole table of a run."""
    return rendered("notebook_run.html", table=run_table(report))


@html_of.register
def ledger_html(ledger: RunLedger) -> str:
    """HTML table of the largest parts of a ledger, with their share of the wall time."""
    return rendered("notebook_rows.html", rows=run_wording.ledger_table(ledger))


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where the reports of one analysis lie.

    Attributes:
        summary_json: everything, for programs; `forge-profiling show --schema` describes it.
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
