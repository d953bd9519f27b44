"""An analysis as GitHub's Markdown: the content of `summary.md`."""

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Final

from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.analysis_tables import (
    communication_tables,
    copies_table,
    efficiency_table,
    functions_table,
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
from lightning_forge_profiling.report.blocks import Column, Rows
from lightning_forge_profiling.report.run_wording import (
    compute_lines,
    goodput_words,
    run_notes,
    telemetry_words,
    timing_lines,
)
from lightning_forge_profiling.report.text import code, code_cell, prose
from lightning_forge_profiling.report.wording import (
    STACKS_NOTE,
    all_warnings,
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
)
from lightning_forge_profiling.schema import Analysis, RankSummary

_KERNELS: Final = 20
_OPERATORS: Final = 20
_LONGEST_NAME: Final = 120


def markdown(analysis: Analysis) -> str:
    """All that `summary.md` holds."""
    return "\n".join(_lines(analysis)) + "\n"


def _lines(analysis: Analysis) -> Iterator[str]:
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
                yield from table(block)
        yield from _efficiency(analysis.ranks)
    yield from _run(analysis)
    yield from _findings(analysis)
    if analysis.ranks:
        yield from _details(analysis.ranks)
    yield from _remarks(analysis)
    if analysis.ranks:
        yield from _how_to_view(analysis)


def table(block: Rows) -> Iterator[str]:
    """A table in Markdown; "" comes before it."""
    columns = block.columns
    yield ""
    yield f"| {' | '.join(column.name for column in columns)} |"
    yield f"|{'|'.join('---:' if column.kind == 'number' else '---' for column in columns)}|"
    for row in block.rows:
        name, *others = (_cell(text, column) for text, column in zip(row.cells, columns, strict=True))
        first = f"**{name}**" if row.strong else f"{'&emsp;' if row.depth > 1 else ''}{name}"
        yield f"| {' | '.join([first, *others])} |"


def _cell(text: str, column: Column) -> str:
    if column.kind == "text":
        return prose(text)
    if column.kind == "number" or not text:
        return text
    return ", ".join(map(code_cell, text.split("\n"))) if column.kind == "codes" else code_cell(text)


def _section(title: str, block: Rows, note: str = "") -> Iterator[str]:
    """A table below its title; nothing without rows."""
    if block.rows:
        yield from ("", f"## {title}", *(["", note] if note else []), *table(block))


def _breakdown(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Time breakdown")
    if len(ranks) > 1:
        yield from ("", "Times in milliseconds, shares in percent of the step:")
        yield from table(ranks_table(ranks, causes=True))
    rank = slowest_rank(ranks)
    yield from ("", f"Rank {rank.rank}{slowest(ranks)}, {code(rank.file)}: {prose(steps_of(rank))}")
    yield from table(step_table(rank, kinds=True))


def _efficiency(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Efficiency", "")
    for say in (efficiency, cpu_threads, linked):
        texts = (
            (rank.rank, text + " (of a file that is cut off)" * rank.cut_off) for rank in ranks if (text := say(rank))
        )
        yield from (f"- {prose(where + text)}" for where, text in by_text(texts, several=len(ranks) > 1))
    if any(map(used_gpu, ranks)):
        yield from table(efficiency_table(ranks))


def _details(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """The tables of the slowest rank."""
    rank = slowest_rank(ranks)
    if used_gpu(rank):
        yield from _section(f"Regions: rank {rank.rank}", regions_table(rank))
    yield from _section(f"Calls that wait for the GPU: rank {rank.rank}", syncs_table(rank))
    yield from _section(f"Your functions: rank {rank.rank}", functions_table(rank), f"{STACKS_NOTE}.")
    yield from _section(f"Copies: rank {rank.rank}", copies_table(rank))
    of_rank = f"rank {rank.rank}{slowest(ranks)}"
    yield from _section(
        f"Top kernels: {of_rank}", kernels_table(rank.top_kernels[:_KERNELS], _LONGEST_NAME, means=True)
    )
    operators = operators_table(rank.operators[:_OPERATORS], _LONGEST_NAME, on_gpu=used_gpu(rank), shapes=True)
    yield from _section(f"Operators: {of_rank}", operators, "Per step, times in milliseconds:")


def _run(analysis: Analysis) -> Iterator[str]:
    run = analysis.run
    if run is None:
        return
    steps = run.step_ms
    p95 = "" if steps.p95 is None else f", 95th percentile {steps.p95:.3f} ms"
    yield from ("", "## The whole run", "")
    yield f"{run.steps} steps, median {steps.p50:.3f} ms{p95}, longest {steps.max:.3f} ms."
    yield from (
        text
        for line in (*timing_lines(run), *run_notes(run), *compute_lines(run.compute))
        for text in ("", f"{prose(line)}.")
    )
    if run.telemetry is not None:
        words = ", ".join(telemetry_words(run.telemetry))
        yield from ("", f"GPU of rank 0, {code(run.telemetry.device)}: {prose(words)}.")
    yield from table(run_regions_table(run))
    if run.slowest:
        yield from ("", "Slowest steps:", *table(slowest_table(run)))
    if run.ledger is not None:
        goodput = goodput_words(run.ledger)
        yield from ("", f"Wall time of the run: {run.ledger.wall_s:.2f} s{goodput and f', {goodput}'}.", "")
        yield from table(ledger_table(run.ledger))


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
