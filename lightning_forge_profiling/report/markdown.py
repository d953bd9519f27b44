"""An analysis as GitHub's Markdown, the content of `summary.md`. Names from a trace are untrusted, and are escaped."""

import re
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Final

from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report import wording
from lightning_forge_profiling.report.run_table import evidence_table
from lightning_forge_profiling.report.run_wording import ledger_table, slowest_table
from lightning_forge_profiling.report.screen import Column, Table, Text
from lightning_forge_profiling.report.trace_tables import (
    communication_tables,
    rank_tables,
    ranks_table,
    step_table,
    work_table,
)
from lightning_forge_profiling.report.wording import evidence
from lightning_forge_profiling.schema import Analysis, RankSummary

# GitHub makes links, notifications or images of these in text, but not in a code span: mentions, addresses,
# issues (#1, GH-1, TICKET-1, CVE-2026-1), emoji (:bug:), mathematics ($x$), commits.
_LIVE = re.compile(r"[@#]\w|\$|://|www\.|\w-\d|:[\w+-]+:|(?<![^\W_])[0-9a-f]{7,40}(?![^\W_])", re.IGNORECASE)
_WORD = re.compile(r"[^\s|]+")  # without pipes, which end a table's cell even in a code span
# An underscore inside a word is no markup, and setting names are full of them.
_MARKUP = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])")
_LIST = re.compile(r"^(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+=]))")  # or the line below a heading


def prose(text: str) -> str:
    """Text escaped for a line or cell of GitHub's Markdown; a word it would link or notify becomes a code span."""
    text = plain(text).strip()
    pieces: list[str] = []
    shown = 0
    for word in _WORD.finditer(text):
        if _LIVE.search(word[0]):
            live = word[0].rstrip(".,;!?") or word[0]
            pieces += [_escaped(text[shown : word.start()]), code(live)]
            shown = word.start() + len(live)
    return _LIST.sub(r"\g<0>\\", "".join([*pieces, _escaped(text[shown:])]))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\g<0>", text)


def code(text: str) -> str:
    """Text as a code span of Markdown, outside of tables."""
    text = plain(text) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def code_cell(text: str) -> str:
    """Text as a code span in a table cell, with its pipes escaped."""
    # Parsers differ on a backslash before an escaped pipe: drop it.
    return re.sub(r"\\*\|", r"\|", code(text))


_LISTED: Final = 20  # kernels and operators


def markdown(analysis: Analysis) -> str:
    """All that `summary.md` holds."""
    return "\n".join(_markdown_lines(analysis)) + "\n"


def _markdown_lines(analysis: Analysis) -> Iterator[str]:
    yield from (f"# Profile of {code(analysis.source)}", "", f"**Verdict:** {prose(analysis.verdict_text)}")
    if note := wording.findings_note(analysis):
        yield from ("", f"{prose(note)}.")
    if note := wording.ranks_note(analysis):
        yield from ("", f"{prose(note)}.")
    if analysis.ranks:
        yield from _breakdown(analysis.ranks)
        for block in communication_tables(analysis):
            yield from ("", f"## {block.title}", *markdown_table(block))
        yield from _efficiency(analysis.ranks)
    yield from _run(analysis)
    yield from _findings(analysis)
    if analysis.ranks:
        slowest = wording.slowest_rank(analysis.ranks)
        yield from _details(slowest, f"rank {slowest.rank}{wording.slowest(analysis.ranks)}")
    yield from _remarks(analysis)
    if analysis.ranks:
        yield from _how_to_view(analysis)


def markdown_table(block: Table) -> Iterator[str]:
    """A table in Markdown; "" comes before it."""
    columns = block.columns
    yield ""
    yield f"| {' | '.join(column.name for column in columns)} |"
    yield f"|{'|'.join('---:' if column.kind in {'number', 'share'} else '---' for column in columns)}|"
    for row in block.rows:
        cells = (*row.cells, *([""] * (len(columns) - len(row.cells))))
        name, *others = (_cell(text, column) for text, column in zip(cells, columns, strict=True))
        first = f"**{name}**" if row.strong else f"{'&emsp;' if row.depth > 1 else ''}{name}"
        yield f"| {' | '.join([first, *others])} |"


def _cell(cell: str | Text, column: Column) -> str:
    text = cell if isinstance(cell, str) else cell.text
    if column.kind == "text":
        return prose(text)
    if column.kind in {"number", "share"} or not text:
        return text
    return ", ".join(map(code_cell, text.split("\n"))) if column.kind == "codes" else code_cell(text)


def _breakdown(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Time breakdown")
    if len(ranks) > 1:
        yield from ("", "Times in milliseconds, shares in percent of the step:")
        yield from markdown_table(ranks_table(ranks, causes=True))
    rank = wording.slowest_rank(ranks)
    yield from ("", f"Rank {rank.rank}{wording.slowest(ranks)}, {code(rank.file)}: {prose(wording.steps_of(rank))}")
    yield from markdown_table(step_table(rank, kinds=True))


def _efficiency(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Efficiency", "")
    for say in (wording.efficiency, wording.cpu_threads, wording.linked):
        texts = (
            (rank.rank, text + " (of a file that is cut off)" * rank.cut_off) for rank in ranks if (text := say(rank))
        )
        yield from (f"- {prose(where + text)}" for where, text in wording.by_text(texts, several=len(ranks) > 1))
    work = work_table(ranks)
    if work.rows:
        yield from markdown_table(work)


def _details(rank: RankSummary, of_rank: str) -> Iterator[str]:
    for table in rank_tables(rank, _LISTED).values():
        yield from ("", f"## {table.title}: {of_rank}", *(["", table.note] if table.note else []))
        yield from markdown_table(table)


def _run(analysis: Analysis) -> Iterator[str]:
    run = analysis.run
    if run is None:
        return
    table = evidence_table(run)
    yield from ("", "## The whole run", "", f"{prose(table.title)}.")
    if table.table is not None:
        yield from markdown_table(table.table)
    yield ""
    yield from (f"- {line.name}: {prose(line.text.text)}" for line in table.lines)
    slowest = slowest_table(run)
    for block in (slowest, *(() if run.ledger is None else (ledger_table(run.ledger),))):
        if block.rows:
            yield from ("", f"{block.title}:", *markdown_table(block))


def _findings(analysis: Analysis) -> Iterator[str]:
    if not analysis.findings:
        return
    yield from ("", "## Findings", "")
    for number, finding in enumerate(analysis.findings, start=1):
        on_rank = "" if finding.rank is None else f" on rank {finding.rank}"
        url, name = docs_url(finding.code), f"**{prose(finding.code)}**"
        name = f"[{name}]({url})" if url else name
        yield (
            f"{number}. {name}{on_rank}, {wording.share_of(analysis, finding)} "
            f"(from the {finding.source}): {prose(finding.title)}."
        )
        yield f"   - {prose(finding.remedy)}"
        if finding.fix:
            yield f"   - Try: {code(finding.fix)}"
        yield f"   - Evidence: {'; '.join(f'{prose(name)}: {prose(value)}' for name, value, _ in evidence(finding))}"
    for remark in wording.findings_remarks(analysis):
        yield from ("", prose(remark))


def _remarks(analysis: Analysis) -> Iterator[str]:
    sections = {
        "Hints": [where + text for where, text in wording.hints(analysis)],
        "Where the trace and the run differ": analysis.differences,
        "Warnings": wording.all_warnings(analysis),
    }
    for title, texts in sections.items():
        if texts:
            yield from ("", f"## {title}", "")
            yield from (f"- {prose(text)}" for text in texts)


def _how_to_view(analysis: Analysis) -> Iterator[str]:
    source = quote(plain(analysis.source))
    trace = source  # Perfetto shows one
    if len(analysis.ranks) > 1:
        trace = quote(plain(f"{analysis.source}/{wording.slowest_rank(analysis.ranks).file}"))
    yield from ("", "## How to view", "")
    yield f"- The report with the timeline: {code(f'forge-profiling view {source}')}"
    yield f"- The trace in [Perfetto](https://ui.perfetto.dev): {code(f'forge-profiling view --perfetto {trace}')}"
    yield (
        f"- TensorBoard: {code(f'forge-profiling export {source} --for tensorboard --out plugin')}, then "
        "`tensorboard --logdir plugin`, tab *PyTorch Profiler*"
    )
