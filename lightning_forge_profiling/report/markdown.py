"""An analysis as GitHub's Markdown, the content of `summary.md`. Names from a trace are untrusted, and are escaped."""

import re
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Final

from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report import run_wording, wording
from lightning_forge_profiling.report.analysis_text import (
    kernels_table,
    ledger_table,
    operators_table,
    ranks_table,
    step_table,
    waits_of_ranks,
)
from lightning_forge_profiling.report.evidence import evidence
from lightning_forge_profiling.report.run_table import evidence_table
from lightning_forge_profiling.report.screen import Column, Table, Text, table_of
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
_LONGEST_NAME: Final = 120


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
        if any(rank.comm.ms_per_step for rank in analysis.ranks):
            yield from ("", "## Communication")
            for block in _communication(analysis):
                yield from markdown_table(block)
        yield from _efficiency(analysis.ranks)
    yield from _run(analysis)
    yield from _findings(analysis)
    if analysis.ranks:
        yield from _details(analysis.ranks)
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
        name, *others = (_cell(text, column) for text, column in zip(row.cells, columns, strict=True))
        first = f"**{name}**" if row.strong else f"{'&emsp;' if row.depth > 1 else ''}{name}"
        yield f"| {' | '.join([first, *others])} |"


def _cell(cell: str | Text, column: Column) -> str:
    text = cell if isinstance(cell, str) else cell.text
    if column.kind == "text":
        return prose(text)
    if column.kind in {"number", "share"} or not text:
        return text
    return ", ".join(map(code_cell, text.split("\n"))) if column.kind == "codes" else code_cell(text)


def _section(title: str, block: Table, note: str = "") -> Iterator[str]:
    """A table below its title; nothing without rows."""
    if block.rows:
        yield from ("", f"## {title}", *(["", note] if note else []), *markdown_table(block))


def _breakdown(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Time breakdown")
    if len(ranks) > 1:
        yield from ("", "Times in milliseconds, shares in percent of the step:")
        yield from markdown_table(ranks_table(ranks, causes=True))
    rank = wording.slowest_rank(ranks)
    yield from ("", f"Rank {rank.rank}{wording.slowest(ranks)}, {code(rank.file)}: {prose(wording.steps_of(rank))}")
    yield from markdown_table(step_table(rank, kinds=True))


def _communication(analysis: Analysis) -> Iterator[Table]:
    """Communication of each rank, then the collectives."""
    yield table_of(
        [rank for rank in analysis.ranks if rank.comm.ms_per_step],
        {
            "rank": wording.rank_name,
            "ms per step": lambda rank: f"{rank.comm.ms_per_step:.3f}",
            "exposed": lambda rank: f"{rank.comm.exposed_ms_per_step:.3f}",
            "holds the step up": lambda rank: f"{rank.comm.holds_up_ms_per_step:.3f}",
            "hidden": lambda rank: f"{rank.comm.hidden_pct:.1f} %",
            "of it waiting for other ranks": waits_of_ranks(analysis),
        },
    )
    if analysis.collectives:
        yield table_of(
            analysis.collectives,
            {
                Column("collective", "code"): lambda one: one.name,
                Column("group", "code"): lambda one: one.group,
                "calls per step": lambda one: f"{one.calls_per_step:.1f}",
                "MB per step": lambda one: f"{one.megabytes_per_step:.1f}",
                "cost, ms per step": lambda one: f"{one.cost_ms_per_step:.3f}",
                "waiting, ms per step": lambda one: f"{one.wait_ms_per_step:.3f}",
            },
        )


def _efficiency(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Efficiency", "")
    for say in (wording.efficiency, wording.cpu_threads, wording.linked):
        texts = (
            (rank.rank, text + " (of a file that is cut off)" * rank.cut_off) for rank in ranks if (text := say(rank))
        )
        yield from (f"- {prose(where + text)}" for where, text in wording.by_text(texts, several=len(ranks) > 1))
    if any(map(wording.used_gpu, ranks)):
        per_rank = table_of(
            filter(wording.used_gpu, ranks),
            {
                "rank": wording.rank_name,
                "GPU busy": lambda rank: f"{rank.gpu.busy_pct:.1f} %",
                "GFLOP per step": lambda rank: f"{rank.flops.per_step / 1e9:.1f}" if rank.flops else "",
                "launches per step": lambda rank: f"{rank.host.launches_per_step:.1f}",
                "device syncs per step": lambda rank: f"{rank.host.device_syncs_per_step:.1f}",
                "Lightning's own": lambda rank: f"{rank.host.lightning_syncs_per_step:.1f}",
                "`cudaMalloc` per step": lambda rank: f"{rank.host.cuda_mallocs_per_step:.1f}",
                "MB to the device per step": lambda rank: f"{rank.host.h2d_bytes_per_step / 1e6:.3f}",
                "peak MB allocated": lambda rank: (
                    f"{rank.memory.peak_allocated_bytes / 1e6:.1f}" if rank.memory else ""
                ),
            },
        )
        yield from markdown_table(per_rank)


def _details(ranks: Sequence[RankSummary]) -> Iterator[str]:
    rank = wording.slowest_rank(ranks)
    if wording.used_gpu(rank):
        regions = table_of(
            rank.regions,
            {
                Column("region", "code"): lambda region: region.name,
                "GPU ms per step": lambda region: f"{region.gpu_ms_per_step:.3f}",
                "of step": lambda region: f"{region.pct:.1f} %",
                "host ms per step": lambda region: f"{region.host_ms_per_step:.3f}",
                "launches per step": lambda region: f"{region.launches_per_step:.1f}",
            },
        )
        yield from _section(f"Regions: rank {rank.rank}", regions)
    syncs = table_of(
        rank.host.syncs,
        {
            Column("cause", "text"): lambda sync: sync.cause,
            Column("where", "code"): lambda sync: sync.where,
            Column("whose", "text"): lambda sync: "Lightning's" if sync.lightning else "yours",
            "per step": lambda sync: f"{sync.per_step:.1f}",
            "host ms per step": lambda sync: f"{sync.host_ms_per_step:.3f}",
        },
    )
    yield from _section(f"Calls that wait for the GPU: rank {rank.rank}", syncs)
    functions = table_of(
        rank.python.users if rank.python else (),
        {
            Column("function", "code"): lambda user: user.where,
            "own ms per step": lambda user: f"{user.own_ms_per_step:.3f}",
            "ms per step": lambda user: f"{user.ms_per_step:.3f}",
            "calls per step": lambda user: wording.calls(user.calls_per_step),
        },
    )
    yield from _section(f"Your functions: rank {rank.rank}", functions, f"{wording.STACKS_NOTE}.")
    copied = table_of(
        rank.copies,
        {
            Column("direction", "text"): lambda copies: copies.direction,
            Column("host memory", "text"): lambda copies: copies.memory,
            "calls per step": lambda copies: f"{copies.calls_per_step:.1f}",
            "MB per step": lambda copies: f"{copies.bytes_per_step / 1e6:.3f}",
            "ms per step": lambda copies: f"{copies.ms_per_step:.3f}",
            "exposed": lambda copies: f"{copies.exposed_ms_per_step:.3f}",
            "GB/s": lambda copies: f"{copies.gb_per_s:.2f}" if copies.gb_per_s else "",
        },
    )
    yield from _section(f"Copies: rank {rank.rank}", copied)
    of_rank = f"rank {rank.rank}{wording.slowest(ranks)}"
    yield from _section(f"Top kernels: {of_rank}", kernels_table(rank.top_kernels[:_LISTED], _LONGEST_NAME, means=True))
    operators = operators_table(rank.operators[:_LISTED], _LONGEST_NAME, on_gpu=wording.used_gpu(rank), shapes=True)
    yield from _section(f"Operators: {of_rank}", operators, "Per step, times in milliseconds:")


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
    if run.timing.slowest:
        slow_steps = table_of(
            list(run_wording.slowest_rows(run)),
            {
                "step": lambda slow: str(slow[0]),
                Column("what took long", "code"): lambda slow: slow[3],
                "ms": lambda slow: f"{slow[1]:.3f}",
                "times the median": lambda slow: f"{slow[2]:.1f}",
            },
        )
        yield from ("", "Slowest steps:", *markdown_table(slow_steps))
    if run.ledger is not None:
        yield from ("", f"Wall time of the run: {run.ledger.wall_s:.2f} s.")
        yield from markdown_table(ledger_table(run.ledger))


def _findings(analysis: Analysis) -> Iterator[str]:
    if not analysis.findings:
        return
    yield from ("", "## Findings", "")
    for number, finding in enumerate(analysis.findings, start=1):
        on_rank = "" if finding.rank is None else f" on rank {finding.rank}"
        url, name = docs_url(finding.code), f"**{prose(finding.code)}**"
        name = f"[{name}]({url})" if url else name
        yield (
            f"{number}. {name}{on_rank}, {finding.share_pct:.1f} % {wording.share_of(analysis, finding)} "
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
