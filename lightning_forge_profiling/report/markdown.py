"""An analysis as GitHub's Markdown: the content of `summary.md`."""

from collections.abc import Iterator, Sequence
from shlex import quote

from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.markdown_tables import host_tables, kernel_table, operator_table, table
from lightning_forge_profiling.report.run_wording import (
    compute_lines,
    goodput_words,
    ledger_rows,
    run_notes,
    slowest_rows,
    telemetry_words,
    timing_lines,
)
from lightning_forge_profiling.report.text import code, code_cell, prose
from lightning_forge_profiling.report.wording import (
    IDLE_WORDS,
    all_warnings,
    by_text,
    cpu_threads,
    efficiency,
    findings_note,
    findings_remarks,
    linked,
    rank_name,
    share_of,
    slowest,
    slowest_rank,
    step_on_host,
    steps_of,
    used_gpu,
)
from lightning_forge_profiling.results.analysis import Analysis, RunLedger
from lightning_forge_profiling.results.rank import CATEGORIES, IDLE_CAUSES, RankSummary


def markdown(analysis: Analysis) -> str:
    """All that `summary.md` holds.

    Example:
        >>> print(markdown(Analysis(source="a.json", verdict="x", verdict_text="Nothing <b>stands out.", findings=())))
        # Profile of `a.json`
        <BLANKLINE>
        **Verdict:** Nothing &lt;b&gt;stands out.
        <BLANKLINE>
    """
    return "\n".join(_lines(analysis)) + "\n"


def _lines(analysis: Analysis) -> Iterator[str]:
    yield from (f"# Profile of {code(analysis.source)}", "", f"**Verdict:** {prose(analysis.verdict_text)}")
    if note := findings_note(analysis):
        yield from ("", f"{prose(note)}.")
    if analysis.ranks:
        yield from _breakdown(analysis.ranks)
        yield from _collectives(analysis)
        yield from _efficiency(analysis.ranks)
    yield from _run(analysis)
    yield from _findings(analysis)
    if analysis.ranks:
        yield from host_tables(slowest_rank(analysis.ranks))
        yield from kernel_table(analysis.ranks)
        yield from operator_table(analysis.ranks)
    yield from _remarks(analysis)
    if analysis.ranks:
        yield from _how_to_view(analysis)


def _breakdown(ranks: Sequence[RankSummary]) -> Iterator[str]:
    yield from ("", "## Time breakdown")
    if len(ranks) > 1:
        shares = ("busy", *CATEGORIES, "idle", *(f"idle: {cause}" for cause in IDLE_CAUSES))
        columns = ("rank", "step ms", "median", *(shares if any(map(used_gpu, ranks)) else ()))
        yield from ("", "Times in milliseconds, shares in percent of the step:")
        yield from table(columns, (_rank_row(rank)[: len(columns)] for rank in ranks))
    rank = slowest_rank(ranks)
    yield from ("", f"Rank {rank.rank}{slowest(ranks)}, {code(rank.file)}: {prose(steps_of(rank))}")
    yield from table(("part of the step", "ms per step", "of step"), _parts(rank) if used_gpu(rank) else _on_host(rank))


def _rank_row(rank: RankSummary) -> list[str]:
    times = [rank_name(rank), f"{rank.step_ms.mean:.3f}", f"{rank.step_ms.p50:.3f}"]
    if not used_gpu(rank):
        return [*times, *([""] * (2 + len(CATEGORIES) + len(IDLE_CAUSES)))]
    categories = [rank.categories[name].pct for name in CATEGORIES]
    causes = [rank.idle[cause].pct if cause in rank.idle else 0.0 for cause in IDLE_CAUSES]
    return [*times, *(f"{share:.1f}" for share in (rank.gpu.busy_pct, *categories, rank.gpu.idle_pct, *causes))]


def _parts(rank: RankSummary) -> Iterator[list[str]]:
    """Rows of the parts of a step: its name, milliseconds and percentage."""

    def row(name: str, ms: float, pct: float) -> list[str]:
        return [name, f"{ms:.3f}", f"{pct:.1f} %"]

    yield row("**step**", rank.step_ms.mean, 100.0)
    yield row("**busy**", rank.gpu.busy_ms_per_step, rank.gpu.busy_pct)
    for name in CATEGORIES:
        yield row(name, rank.categories[name].ms_per_step, rank.categories[name].pct)
        kinds = [(part.ms_per_step, part.pct, kind) for kind, part in rank.kinds.items() if part.category == name]
        if [kind for _, _, kind in kinds] != [name]:
            yield from (row(f"&emsp;{prose(kind)}", ms, pct) for ms, pct, kind in sorted(kinds, reverse=True))
    yield row("**idle**", rank.gpu.idle_ms_per_step, rank.gpu.idle_pct)
    for cause in IDLE_CAUSES:
        if cause in rank.idle:
            yield row(f"&emsp;{IDLE_WORDS[cause]}", rank.idle[cause].ms_per_step, rank.idle[cause].pct)


def _on_host(rank: RankSummary) -> Iterator[list[str]]:
    for name, ms, pct, style in step_on_host(rank):
        yield [f"**{prose(name)}**" if style else prose(name), f"{ms:.3f}", f"{pct:.1f} %"]


def _collectives(analysis: Analysis) -> Iterator[str]:
    ranks = [rank for rank in analysis.ranks if rank.comm.ms_per_step]
    if not ranks:
        return
    yield from ("", "## Communication")
    waits = {wait.rank: f"{wait.wait_ms_per_step:.3f}" for wait in analysis.rank_waits}
    yield from table(
        ("rank", "ms per step", "exposed", "hidden", "of it waiting for other ranks"),
        (
            (
                rank_name(rank),
                f"{rank.comm.ms_per_step:.3f}",
                f"{rank.comm.exposed_ms_per_step:.3f}",
                f"{rank.comm.hidden_pct:.1f} %",
                waits.get(rank.rank, ""),
            )
            for rank in ranks
        ),
    )
    if analysis.collectives:
        yield from table(
            ("collective", "group", "calls per step", "MB per step", "cost, ms per step", "waiting, ms per step"),
            (
                (
                    code_cell(found.name),
                    code_cell(found.group),
                    f"{found.calls_per_step:.1f}",
                    f"{found.megabytes_per_step:.1f}",
                    f"{found.cost_ms_per_step:.3f}",
                    f"{found.wait_ms_per_step:.3f}",
                )
                for found in analysis.collectives
            ),
            texts=2,
        )


def _efficiency(ranks: Sequence[RankSummary]) -> Iterator[str]:
    said = [
        where + text
        for say in (efficiency, cpu_threads, linked)
        for where, text in by_text(((rank.rank, _of_file(rank, say(rank))) for rank in ranks), several=len(ranks) > 1)
        if text
    ]
    yield from ("", "## Efficiency", "", *(f"- {prose(text)}" for text in said))
    if not any(map(used_gpu, ranks)):
        return
    yield from table(
        (
            "rank",
            "GPU busy",
            "GFLOP per step",
            "launches per step",
            "device syncs per step",
            "Lightning's own",
            "`cudaMalloc` per step",
            "MB to the device per step",
            "peak MB allocated",
        ),
        (
            (
                rank_name(rank),
                f"{rank.gpu.busy_pct:.1f} %",
                f"{rank.flops.per_step / 1e9:.1f}" if rank.flops else "",
                f"{rank.host.launches_per_step:.1f}",
                f"{rank.host.device_syncs_per_step:.1f}",
                f"{rank.host.lightning_syncs_per_step:.1f}",
                f"{rank.host.cuda_mallocs_per_step:.1f}",
                f"{rank.host.h2d_bytes_per_step / 1e6:.3f}",
                f"{rank.memory.peak_allocated_bytes / 1e6:.1f}" if rank.memory else "",
            )
            for rank in filter(used_gpu, ranks)
        ),
    )


def _of_file(rank: RankSummary, text: str) -> str:
    return f"{text}; of a file that is cut off" if text and rank.cut_off else text


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
    columns = ("region", "device ms per step", "host ms per step") if run.on_device else ("region", "ms per step")
    rows = ((code_cell(name), f"{part.device_ms:.3f}", f"{part.host_ms:.3f}") for name, part in run.regions.items())
    yield from table(columns, (row[: len(columns)] for row in rows))
    if run.slowest:
        yield from ("", "Slowest steps:")
        found = slowest_rows(run)
        cells = (
            (str(step), code_cell(why) if why else "", f"{ms:.3f}", f"{times:.1f}") for step, ms, times, why in found
        )
        yield from table(("step", "what took long", "ms", "times the median"), cells, texts=2)
    yield from _ledger(run.ledger)


def _ledger(ledger: RunLedger | None) -> Iterator[str]:
    if ledger is None:
        return
    goodput = goodput_words(ledger)
    yield from ("", f"Wall time of the run: {ledger.wall_s:.2f} s{goodput and f', {goodput}'}.", "")
    cells = (
        (code_cell(name), f"{s:.3f}", f"{100 * s / ledger.wall_s:.1f} %", "" if count is None else str(count))
        for name, s, count in ledger_rows(ledger)
    )
    yield from table(("part", "seconds", "of the run", "times"), cells)


def _findings(analysis: Analysis) -> Iterator[str]:
    if not analysis.findings:
        return
    yield from ("", "## Findings", "")
    for number, finding in enumerate(analysis.findings, start=1):
        on_rank = "" if finding.rank is None else f" on rank {finding.rank}"
        yield (
            f"{number}. **{prose(finding.code)}**{on_rank}, {finding.share_pct:.1f} % {share_of(analysis, finding)} "
            f"(from the {finding.source}): {prose(finding.title)}."
        )
        yield f"   - {prose(finding.remedy)}"
        evidence = (
            f"{prose(name)}: {value:.4g}" if isinstance(value, int | float) else f"{prose(name)}: {prose(value)}"
            for name, value in finding.evidence.items()
        )
        yield f"   - Evidence: {'; '.join(evidence)}"
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
