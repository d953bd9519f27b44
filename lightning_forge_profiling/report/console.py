"""An analysis on a terminal: the verdict, then the numbers behind it."""

from collections.abc import Iterable, Iterator, Sequence

from lightning_forge_profiling.report.labels import kernel_labels, operator_labels
from lightning_forge_profiling.report.screen import Screen, Table, Text
from lightning_forge_profiling.report.wording import (
    IDLE_WORDS,
    STACKS_NOTE,
    all_warnings,
    between,
    by_text,
    calls,
    cpu_threads,
    efficiency,
    findings_note,
    findings_remarks,
    linked,
    operator_columns,
    rank_name,
    share_of,
    slowest,
    slowest_rank,
    step_on_host,
    steps_of,
    used_gpu,
    users_functions,
    verdict,
)
from lightning_forge_profiling.results.analysis import Analysis, Finding
from lightning_forge_profiling.results.rank import CATEGORIES, IDLE_CAUSES, Kernel, Operator, RankSummary

_SHOWN_KERNELS = 8
_SHOWN_FINDINGS = 5
_NAMES_WIDTH = 10
_NAME_LINES = 2  # lines of a name: elementwise kernels differ late in theirs
_BESIDE_KERNELS, _BESIDE_OPERATORS = 46, 56  # columns that the rest of the table takes
_NARROWEST_NAME = 20


def print_analysis(
    analysis: Analysis, screen: Screen | None = None, *, kernels: int = _SHOWN_KERNELS, operators: int = 0
) -> None:
    """Print what an analysis found.

    Example:
        >>> print_analysis(Analysis(source="run", verdict="x", verdict_text="Nothing stands out.", findings=()))
        Nothing stands out.
        <BLANKLINE>
    """
    screen = screen or Screen()
    screen.line(verdict(analysis))
    if note := findings_note(analysis):
        screen.line(Text(note, "dim"))
    if all(rank.cpu is not None for rank in analysis.ranks):
        operators = operators or kernels  # there are no kernels to show
    screen.tables(_tables(analysis, kernels, operators, screen.width))
    for style, name, text in _lines(analysis):
        screen.line(text, name=Text(name, style), column=_NAMES_WIDTH)


def _tables(analysis: Analysis, kernels: int, operators: int, width: int) -> Iterator[tuple[str, Table]]:
    """The titles and the tables."""
    ranks = analysis.ranks
    if ranks:
        rank = slowest_rank(ranks)
        of_rank = f" of rank {rank.rank}{slowest(ranks)}" if len(ranks) > 1 else ""
    if len(ranks) == 1:
        yield steps_of(ranks[0]), _one_rank(ranks[0]) if used_gpu(ranks[0]) else _step_on_host(ranks[0])
    elif any(map(used_gpu, ranks)):
        yield f"{len(ranks)} ranks, percent of the step; rank {ranks[0].rank}: {steps_of(ranks[0])}", _busy_table(ranks)
        yield "Idle by host activity, percent of the step", _idle_table(analysis)
    elif ranks:
        yield f"{len(ranks)} ranks; rank {ranks[0].rank}: {steps_of(ranks[0])}", _steps_table(ranks)
        yield f"The step on the host{of_rank}", _step_on_host(rank)
    if analysis.findings:
        shown = analysis.findings[:_SHOWN_FINDINGS]
        averaged = any("mean" in share_of(analysis, finding) for finding in shown)
        yield f"Findings{', shares averaged over the ranks' if averaged else ''}", _findings_table(shown)
    if ranks:
        if rank.top_kernels[:kernels]:
            yield f"Top kernels{of_rank}", _kernel_table(rank.top_kernels[:kernels], width - _BESIDE_KERNELS)
        if rank.operators[:operators]:
            title = f"Operators{of_rank}: per step, times in milliseconds"
            yield title, _operator_table(rank.operators[:operators], width - _BESIDE_OPERATORS, on_gpu=used_gpu(rank))


def _step_on_host(rank: RankSummary) -> Table:
    """The step of a rank without GPU work, by region."""
    table = Table("", "ms/step", "of step")
    for name, ms, pct, style in step_on_host(rank):
        table.row(name, f"{ms:.3f}", f"{pct:.1f} %", style=style)
    return table


def _one_rank(rank: RankSummary) -> Table:
    table = Table("", "ms/step", "of step")

    def row(name: str, ms: float, pct: float, style: str = "") -> None:
        table.row(name, f"{ms:.3f}", f"{pct:.1f} %", style=style)

    row("step", rank.step_ms.mean, 100.0, "bold")
    row("busy", rank.gpu.busy_ms_per_step, rank.gpu.busy_pct, "bold")
    for name in CATEGORIES:
        share = rank.categories[name]
        hidden = f" ({rank.comm.hidden_pct:.0f} % hidden)" if name == "comm" and rank.comm.ms_per_step else ""
        row(f"  {name}{hidden}", share.ms_per_step, share.pct)
    row("idle", rank.gpu.idle_ms_per_step, rank.gpu.idle_pct, "bold")
    for cause in IDLE_CAUSES:
        if cause in rank.idle and rank.idle[cause].ms_per_step:
            row(f"  {IDLE_WORDS[cause]}", rank.idle[cause].ms_per_step, rank.idle[cause].pct)
    return table


def _steps_table(ranks: Iterable[RankSummary]) -> Table:
    """Step times of ranks without GPU work."""
    table = Table("rank", "step ms", "median")
    for rank in ranks:
        table.row(rank_name(rank), f"{rank.step_ms.mean:.3f}", f"{rank.step_ms.p50:.3f}")
    return table


def _busy_table(ranks: Iterable[RankSummary]) -> Table:
    table = Table("rank", "step ms", "median", "busy", *CATEGORIES, "idle")
    for rank in ranks:
        shares: list[float] = []
        if used_gpu(rank):
            shares = [rank.gpu.busy_pct, *(rank.categories[name].pct for name in CATEGORIES), rank.gpu.idle_pct]
        times = (rank.step_ms.mean, rank.step_ms.p50)
        table.row(rank_name(rank), *(f"{ms:.3f}" for ms in times), *(f"{share:.1f}" for share in shares))
    return table


def _idle_table(analysis: Analysis) -> Table:
    waits = {wait.rank: wait.wait_ms_per_step for wait in analysis.rank_waits}
    columns = (*IDLE_CAUSES, *(["waits for others, ms"] if waits else []))
    table = Table("rank", *columns)
    for rank in analysis.ranks:
        shares = (rank.idle[cause].pct if cause in rank.idle else 0.0 for cause in IDLE_CAUSES)
        wait = [f"{waits[rank.rank]:.3f}" if rank.rank in waits else ""] if waits else []
        table.row(rank_name(rank), *(f"{share:.1f}" if used_gpu(rank) else "" for share in shares), *wait)
    return table


def _findings_table(findings: Iterable[Finding]) -> Table:
    table = Table("", "of step", "what, and what to do", align="<><")
    for position, finding in enumerate(findings):
        on_rank = "" if finding.rank is None else f"rank {finding.rank}: "
        table.row(
            finding.code, f"{finding.share_pct:.1f} %{between(finding)}", Text(f"{on_rank}{finding.title}", "bold")
        )
        if position:  # the first one's is in the verdict
            table.row("", "", finding.remedy)
    return table


def _kernel_table(kernels: Sequence[Kernel], name_width: int) -> Table:
    table = Table("kernel", "kind", "calls/step", "ms/step", "of step", align="<<")
    labels = kernel_labels([kernel.name for kernel in kernels], _NAME_LINES * max(name_width, _NARROWEST_NAME))
    for label, kernel in zip(labels, kernels, strict=True):
        numbers = calls(kernel.calls_per_step), f"{kernel.ms_per_step:.3f}", f"{kernel.pct:.1f} %"
        table.row(label, kernel.kind, *numbers)
    return table


def _operator_table(operators: Sequence[Operator], name_width: int, *, on_gpu: bool) -> Table:
    """A table of operators, without columns that would be empty."""
    columns = operator_columns(operators, on_gpu=on_gpu)
    table = Table("operator", *columns)
    labels = operator_labels([operator.name for operator in operators], _NAME_LINES * max(name_width, _NARROWEST_NAME))
    for label, operator in zip(labels, operators, strict=True):
        table.row(label, *(write(operator) for write in columns.values()))
    return table


def _lines(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    """Remarks of a line each: style, heading, text."""
    several = len(analysis.ranks) > 1
    if analysis.ranks:
        rank = slowest_rank(analysis.ranks)
        cut = "; of a file that is cut off" if rank.cut_off else ""
        for name, text in (("compute", efficiency(rank)), ("threads", cpu_threads(rank)), ("linked", linked(rank))):
            if text:
                yield "bold", name, text + cut
        if functions := users_functions(rank):
            yield "bold", "functions", f"{functions}. {STACKS_NOTE}"
    for remark in findings_remarks(analysis):
        yield "bold", "note", remark
    hidden = len(analysis.findings) - _SHOWN_FINDINGS
    if hidden > 0:
        yield "bold", "findings", f"{hidden} more: see the reports"
    for where, text in by_text(((hint.rank, hint.text) for hint in analysis.hints), several):
        yield "bold", "hint", where + text
    for difference in analysis.differences:
        yield "bold", "difference", difference
    yield from (("yellow", "warning", warning) for warning in all_warnings(analysis))
