"""An analysis as text: on a terminal, and as GitHub's Markdown, the content of `summary.md`."""

from collections.abc import Iterable, Iterator, Sequence
from shlex import quote
from typing import Final

from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.analysis_tables import (
    communication_tables,
    copies_table,
    efficiency_table,
    functions_table,
    idle_table,
    kernels_table,
    ledger_table,
    operators_table,
    ranks_table,
    regions_table,
    run_regions_table,
    slowest_table,
    step_table,
    syncs_table,
)
from lightning_forge_profiling.report.blocks import Column, Row, Table, Text, columns_of
from lightning_forge_profiling.report.run_wording import (
    compute_lines,
    goodput_words,
    run_notes,
    telemetry_words,
    timing_lines,
)
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.text import code, code_cell, prose
from lightning_forge_profiling.report.wording import (
    STACKS_NOTE,
    all_warnings,
    between,
    by_text,
    cpu_threads,
    efficiency,
    evidence_words,
    findings_note,
    findings_remarks,
    linked,
    ranks_note,
    share_of,
    slowest,
    slowest_rank,
    steps_of,
    used_gpu,
    users_functions,
    verdict,
)
from lightning_forge_profiling.schema import Analysis, Finding, RankSummary

_SHOWN_KERNELS: Final = 8
_SHOWN_FINDINGS: Final = 5
_NAMES_WIDTH: Final = 10
_NAME_LINES: Final = 2  # lines of a name: elementwise kernels differ late in theirs
_BESIDE_KERNELS, _BESIDE_OPERATORS = 46, 56  # columns that the rest of the table takes
_NARROWEST_NAME: Final = 20


def print_analysis(
    analysis: Analysis, screen: Screen | None = None, *, kernels: int = _SHOWN_KERNELS, operators: int = 0
) -> None:
    """Print what an analysis found."""
    screen = screen or Screen()
    screen.line(verdict(analysis))
    if note := findings_note(analysis):
        screen.line(Text(note, "dim"))
    if note := ranks_note(analysis):
        screen.line(Text(f"{note}.", "dim"))
    if all(rank.cpu is not None for rank in analysis.ranks):
        operators = operators or kernels  # there are no kernels to show
    screen.tables(_printed_tables(analysis, kernels, operators, screen.width))
    for name, text in _printed_remarks(analysis):
        screen.line(text, name=Text(name, "yellow" if name == "warning" else "bold"), column=_NAMES_WIDTH)


def _printed_tables(analysis: Analysis, kernels: int, operators: int, width: int) -> Iterator[tuple[str, Table]]:
    """The titles and the tables."""
    ranks = analysis.ranks
    if ranks:
        rank = slowest_rank(ranks)
        of_rank = f" of rank {rank.rank}{slowest(ranks)}" if len(ranks) > 1 else ""
    if len(ranks) == 1:
        yield steps_of(ranks[0]), step_table(ranks[0])
    elif any(map(used_gpu, ranks)):
        title = f"{_number_of(analysis)} ranks, percent of the step; rank {ranks[0].rank}: {steps_of(ranks[0])}"
        yield title, ranks_table(ranks)
        yield "Idle by host activity, percent of the step", idle_table(analysis)
    elif ranks:
        yield f"{_number_of(analysis)} ranks; rank {ranks[0].rank}: {steps_of(ranks[0])}", ranks_table(ranks)
        yield f"The step on the host{of_rank}", step_table(rank)
    if analysis.findings:
        shown = analysis.findings[:_SHOWN_FINDINGS]
        averaged = any("mean" in share_of(analysis, finding) for finding in shown)
        yield f"Findings{', shares averaged over the ranks' if averaged else ''}", _findings_table(shown)
    if ranks and rank.top_kernels[:kernels]:
        yield f"Top kernels{of_rank}", kernels_table(rank.top_kernels[:kernels], _name_room(width - _BESIDE_KERNELS))
    if ranks and rank.operators[:operators]:
        name_width = _name_room(width - _BESIDE_OPERATORS)
        table = operators_table(rank.operators[:operators], name_width, on_gpu=used_gpu(rank))
        yield f"Operators{of_rank}: per step, times in milliseconds", table


def _number_of(analysis: Analysis) -> str:
    shown = len(analysis.ranks)
    return f"{shown} of {analysis.all_ranks:,}" if analysis.all_ranks > shown else f"{shown}"


def _name_room(column: int) -> int:
    return _NAME_LINES * max(column, _NARROWEST_NAME)


def _findings_table(findings: Iterable[Finding]) -> Table:
    rows = []
    for position, finding in enumerate(findings):
        on_rank = "" if finding.rank is None else f"rank {finding.rank}: "
        share = f"{finding.share_pct:.1f} %{between(finding)}"
        rows.append(Row((finding.code, share, Text(f"{on_rank}{finding.title}", "bold"))))
        if position:  # the first one's is in the verdict
            rows.append(Row(("", "", finding.remedy)))
    return Table(columns_of("", "of step", "what, and what to do", align="<><"), tuple(rows))


def _printed_remarks(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Names and texts of the lines below the tables."""
    if analysis.ranks:
        rank = slowest_rank(analysis.ranks)
        cut = " (of a file that is cut off)" if rank.cut_off else ""
        for name, text in (("compute", efficiency(rank)), ("threads", cpu_threads(rank)), ("linked", linked(rank))):
            if text:
                yield name, text + cut
        if functions := users_functions(rank):
            yield "functions", f"{functions}. {STACKS_NOTE}"
    yield from (("note", remark) for remark in findings_remarks(analysis))
    hidden = len(analysis.findings) - _SHOWN_FINDINGS
    if hidden > 0:
        yield "findings", f"{hidden} more: see the reports"
    for where, text in by_text(((hint.rank, hint.text) for hint in analysis.hints), len(analysis.ranks) > 1):
        yield "hint", where + text
    yield from (("difference", difference) for difference in analysis.differences)
    yield from (("warning", warning) for warning in all_warnings(analysis))


_LISTED: Final = 20  # kernels and operators
_LONGEST_NAME: Final = 120


def markdown(analysis: Analysis) -> str:
    """All that `summary.md` holds."""
    return "\n".join(_markdown_lines(analysis)) + "\n"


def _markdown_lines(analysis: Analysis) -> Iterator[str]:
    yield from (f"# Profile of {code(analysis.source)}", "", f"**Verdict:** {prose(analysis.verdict_text)}")
    if note := findings_note(analysis):
        yield from ("", f"{prose(note)}.")
    if note := ranks_note(analysis):
        yield from ("", f"{prose(note)}.")
    if analysis.ranks:
        yield from _breakdown(analysis.ranks)
        if any(rank.comm.ms_per_step for rank in analysis.ranks):
            yield from ("", "## Communication")
            for block in communication_tables(analysis):
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
    yield f"|{'|'.join('---:' if column.kind == 'number' else '---' for column in columns)}|"
    for row in block.rows:
        name, *others = (_cell(text, column) for text, column in zip(row.cells, columns, strict=True))
        first = f"**{name}**" if row.strong else f"{'&emsp;' if row.depth > 1 else ''}{name}"
        yield f"| {' | '.join([first, *others])} |"


def _cell(cell: str | Text, column: Column) -> str:
    text = cell if isinstance(cell, str) else cell.text
    if column.kind == "text":
        return prose(text)
    if column.kind == "number" or not text:
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
    rank = slowest_rank(ranks)
    yield from ("", f"Rank {rank.rank}{slowest(ranks)}, {code(rank.file)}: {prose(steps_of(rank))}")
    yield from markdown_table(step_table(rank, kinds=True))


def _efficiency(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Efficiency", "")
    for say in (efficiency, cpu_threads, linked):
        texts = (
            (rank.rank, text + " (of a file that is cut off)" * rank.cut_off) for rank in ranks if (text := say(rank))
        )
        yield from (f"- {prose(where + text)}" for where, text in by_text(texts, several=len(ranks) > 1))
    if any(map(used_gpu, ranks)):
        yield from markdown_table(efficiency_table(ranks))


def _details(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """The tables of the slowest rank."""
    rank = slowest_rank(ranks)
    if used_gpu(rank):
        yield from _section(f"Regions: rank {rank.rank}", regions_table(rank))
    yield from _section(f"Calls that wait for the GPU: rank {rank.rank}", syncs_table(rank))
    yield from _section(f"Your functions: rank {rank.rank}", functions_table(rank), f"{STACKS_NOTE}.")
    yield from _section(f"Copies: rank {rank.rank}", copies_table(rank))
    of_rank = f"rank {rank.rank}{slowest(ranks)}"
    yield from _section(f"Top kernels: {of_rank}", kernels_table(rank.top_kernels[:_LISTED], _LONGEST_NAME, means=True))
    operators = operators_table(rank.operators[:_LISTED], _LONGEST_NAME, on_gpu=used_gpu(rank), shapes=True)
    yield from _section(f"Operators: {of_rank}", operators, "Per step, times in milliseconds:")


def _run(analysis: Analysis) -> Iterator[str]:
    run = analysis.run
    if run is None:
        return
    steps = run.timing.step_ms
    p95 = "" if steps.p95 is None else f", 95th percentile {steps.p95:.3f} ms"
    yield from ("", "## The whole run", "")
    yield f"{run.timing.steps} steps, median {steps.p50:.3f} ms{p95}, longest {steps.max:.3f} ms."
    yield from (
        text
        for line in (*timing_lines(run), *run_notes(run), *compute_lines(run.machine.compute))
        for text in ("", f"{prose(line)}.")
    )
    if run.machine.telemetry is not None:
        words = ", ".join(telemetry_words(run.machine.telemetry))
        yield from ("", f"GPU of rank 0, {code(run.machine.telemetry.device)}: {prose(words)}.")
    yield from markdown_table(run_regions_table(run))
    if run.timing.slowest:
        yield from ("", "Slowest steps:", *markdown_table(slowest_table(run)))
    if run.ledger is not None:
        goodput = goodput_words(run.ledger)
        yield from ("", f"Wall time of the run: {run.ledger.wall_s:.2f} s{goodput and f', {goodput}'}.", "")
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
            f"{number}. {name}{on_rank}, {finding.share_pct:.1f} % {share_of(analysis, finding)} "
            f"(from the {finding.source}): {prose(finding.title)}."
        )
        yield f"   - {prose(finding.remedy)}"
        if finding.fix:
            yield f"   - Try: {code(finding.fix)}"
        yield f"   - Evidence: {'; '.join(evidence_words(finding, prose))}"
    for remark in findings_remarks(analysis):
        yield from ("", prose(remark))


def _remarks(analysis: Analysis) -> Iterator[str]:
    hints = by_text(((hint.rank, hint.text) for hint in analysis.hints), several=len(analysis.ranks) > 1)
    sections = {
        "Hints": [where + text for where, text in hints],
        "Where the trace and the run differ": analysis.differences,
        "Warnings": all_warnings(analysis),
    }
    for title, texts in sections.items():
        if texts:
            yield from ("", f"## {title}", "")
            yield from (f"- {prose(text)}" for text in texts)


def _how_to_view(analysis: Analysis) -> Iterator[str]:
    source = quote(plain(analysis.source))
    trace = source  # Perfetto shows one
    if len(analysis.ranks) > 1:
        trace = quote(plain(f"{analysis.source}/{slowest_rank(analysis.ranks).file}"))
    yield from ("", "## How to view", "")
    yield f"- The report with the timeline: {code(f'forge-profiling view {source}')}"
    yield f"- The trace in [Perfetto](https://ui.perfetto.dev): {code(f'forge-profiling view --perfetto {trace}')}"
    yield (
        f"- TensorBoard: {code(f'forge-profiling tensorboard {source} --out plugin')}, then "
        "`tensorboard --logdir plugin`, tab *PyTorch Profiler*"
    )
