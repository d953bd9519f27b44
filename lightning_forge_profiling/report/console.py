"""An analysis on a terminal: the verdict, then the numbers behind it."""

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_forge_profiling.analysis.rank_summary import CATEGORIES, IDLE_CAUSES, Kernel, Operator, RankSummary
from lightning_forge_profiling.analysis.results import NOTHING_STANDS_OUT, Analysis, Finding
from lightning_forge_profiling.report.text import plain, short, short_kernel_name
from lightning_forge_profiling.report.wording import (
    IDLE_WORDS,
    all_warnings,
    by_text,
    efficiency,
    findings_note,
    linked,
    slowest,
    slowest_rank,
    steps_of,
    used_gpu,
)

__all__ = ["print_analysis"]

_SHOWN_KERNELS = 8
_SHOWN_FINDINGS = 5
_NUMBERS_WIDTH = 46  # what the numbers beside a name need
_NARROWEST_NAME = 20


def print_analysis(analysis: Analysis, console: Console, *, kernels: int = _SHOWN_KERNELS, operators: int = 0) -> None:
    """Print what an analysis found.

    Args:
        analysis: what to print.
        console: where to; it leaves out the colours where it is no terminal.
        kernels: how many kernels to list, those of the slowest rank.
        operators: how many of its operators to list.

    Example:
        >>> analysis = Analysis(source="run", verdict="x", verdict_text="Nothing stands out.", findings=())
        >>> print_analysis(analysis, Console(width=80))
        Nothing stands out.
        <BLANKLINE>
    """
    console.print(_verdict(analysis), highlight=False)
    if note := findings_note(analysis):
        console.print(Text(plain(note), "dim"), highlight=False)
    room = max(_NARROWEST_NAME, console.width - _NUMBERS_WIDTH)
    for title, table in _tables(analysis, kernels, operators, room):
        console.print()
        console.print(Text(plain(title), "bold"), highlight=False)
        console.print(table)
    console.print()
    for style, name, text in _lines(analysis):
        line = Text.assemble((f"{name:<10}", style), " ", plain(text))
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)  # a terminal would break words


def _tables(analysis: Analysis, kernels: int, operators: int, room: int) -> Iterator[tuple[str, Table]]:
    """The tables and their titles; names in them are at most `room` wide."""
    ranks = analysis.ranks
    if ranks:
        rank = slowest_rank(ranks)
        of_rank = f" of rank {rank.rank}{slowest(ranks)}" if len(ranks) > 1 else ""
    if len(ranks) == 1:
        yield steps_of(ranks[0]), _one_rank(ranks[0]) if used_gpu(ranks[0]) else _regions_on_host(ranks[0])
    elif any(map(used_gpu, ranks)):
        yield f"{len(ranks)} ranks, percent of the step; rank {ranks[0].rank}: {steps_of(ranks[0])}", _busy_table(ranks)
        yield "Idle by what the host did meanwhile, percent of the step", _idle_table(analysis)
    elif ranks:
        yield f"{len(ranks)} ranks; rank {ranks[0].rank}: {steps_of(ranks[0])}", _steps_table(ranks)
        yield f"Regions{of_rank}", _regions_on_host(rank)
    if analysis.findings:
        yield "Findings", _findings_table(analysis.findings[:_SHOWN_FINDINGS])
    if ranks:
        if rank.top_kernels[:kernels]:
            yield f"Top kernels{of_rank}", _kernel_table(rank.top_kernels[:kernels], room)
        if rank.operators[:operators]:
            yield f"Operators{of_rank}", _operator_table(rank.operators[:operators], room)


def _verdict(analysis: Analysis) -> Text:
    style = "bold green" if analysis.verdict == NOTHING_STANDS_OUT else "bold yellow"
    text = Text(plain(analysis.verdict_text))
    text.highlight_words([analysis.verdict], style=style)
    return text


def _table(*columns: str, texts: int = 1) -> Table:
    """A table whose first columns, as many as `texts`, are text, and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < texts else "right", no_wrap=True)
    return table


def _regions_on_host(rank: RankSummary) -> Table:
    """What there is of a rank without GPU work."""
    table = _table("", "host ms/step")
    for region in rank.regions:
        if region.host_ms_per_step:
            table.add_row(plain(region.name), f"{region.host_ms_per_step:.3f}")
    return table


def _one_rank(rank: RankSummary) -> Table:
    table = _table("", "ms/step", "of step")

    def row(name: str, ms: float, pct: float, style: str = "") -> None:
        table.add_row(name, f"{ms:.3f}", f"{pct:.1f} %", style=style)

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
    """What there is of the steps of ranks without GPU work."""
    table = _table("rank", "step ms", "median")
    for rank in ranks:
        table.add_row(str(rank.rank), f"{rank.step_ms.mean:.3f}", f"{rank.step_ms.p50:.3f}")
    return table


def _busy_table(ranks: Iterable[RankSummary]) -> Table:
    table = _table("rank", "step ms", "median", "busy", *CATEGORIES, "idle")
    for rank in ranks:
        shares: list[float] = []
        if used_gpu(rank):
            shares = [rank.gpu.busy_pct, *(rank.categories[name].pct for name in CATEGORIES), rank.gpu.idle_pct]
        times = (rank.step_ms.mean, rank.step_ms.p50)
        table.add_row(str(rank.rank), *(f"{ms:.3f}" for ms in times), *(f"{share:.1f}" for share in shares))
    return table


def _idle_table(analysis: Analysis) -> Table:
    waits = {wait.rank: wait.wait_ms_per_step for wait in analysis.rank_waits}
    columns = (*IDLE_CAUSES, *(["waits for others, ms"] if waits else []))
    table = _table("rank", *columns)
    for rank in analysis.ranks:
        shares = (rank.idle[cause].pct if cause in rank.idle else 0.0 for cause in IDLE_CAUSES)
        wait = [f"{waits[rank.rank]:.3f}" if rank.rank in waits else ""] if waits else []
        table.add_row(str(rank.rank), *(f"{share:.1f}" if used_gpu(rank) else "" for share in shares), *wait)
    return table


def _findings_table(findings: Iterable[Finding]) -> Table:
    table = _table("", "of step")
    table.add_column("what, and what to do")
    for position, finding in enumerate(findings):
        on_rank = "" if finding.rank is None else f"rank {finding.rank}: "
        text = Text(plain(f"{on_rank}{finding.title}"), "bold")
        if position:  # the verdict says it of the first
            text.append(f"\n{plain(finding.advice)}", "not bold")
        table.add_row(Text(plain(finding.code)), f"{finding.share_pct:.1f} %", text)
    return table


def _kernel_table(kernels: Iterable[Kernel], room: int) -> Table:
    table = _table("kernel", "kind", "calls", "total ms", "of step", texts=2)
    table.columns[0].no_wrap, table.columns[0].overflow = (
        False,
        "fold",
    )  # two lines, for what tells one elementwise kernel from another comes late
    for kernel in kernels:
        table.add_row(
            Text(short_kernel_name(kernel.name, 2 * room - 4)),
            Text(plain(kernel.kind)),
            str(kernel.calls),
            f"{kernel.total_ms:.3f}",
            f"{kernel.pct:.1f} %",
        )
    return table


def _operator_table(operators: Iterable[Operator], room: int) -> Table:
    table = _table("operator", "calls", "device ms", "self", "host ms", "self", "MB")
    for operator in operators:
        times = (operator.device_ms, operator.self_device_ms, operator.host_ms, operator.self_host_ms)
        table.add_row(
            Text(short(operator.name, room)),
            str(operator.calls),
            *(f"{ms:.3f}" for ms in times),
            "" if operator.allocated_bytes is None else f"{operator.allocated_bytes / 1e6:.1f}",
        )
    return table


def _lines(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    """What there is to say in a line each: its style, its heading, its text."""
    several = len(analysis.ranks) > 1
    if analysis.ranks:
        yield "bold", "compute", efficiency(slowest_rank(analysis.ranks))
        if joined := linked(slowest_rank(analysis.ranks)):
            yield "bold", "linked", joined
    hidden = len(analysis.findings) - _SHOWN_FINDINGS
    if hidden > 0:
        yield "bold", "findings", f"{hidden} more with smaller shares: see the reports"
    for where, text in by_text(((hint.rank, hint.text) for hint in analysis.hints), several):
        yield "bold", "hint", where + text
    for difference in analysis.differences:
        yield "bold", "difference", difference
    yield from (("yellow", "warning", warning) for warning in all_warnings(analysis))
