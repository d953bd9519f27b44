"""An analysis on a terminal, and the tables that other reports have too."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from lightning_forge_profiling.report import wording
from lightning_forge_profiling.report.run_wording import ledger_rows
from lightning_forge_profiling.report.screen import Column, Row, Screen, Table, Text, columns_of, table_of
from lightning_forge_profiling.schema import (
    CATEGORIES,
    IDLE_CAUSES,
    Analysis,
    Finding,
    Kernel,
    Operator,
    RankSummary,
    RunLedger,
)

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
    screen.line(wording.verdict(analysis))
    if note := wording.findings_note(analysis):
        screen.line(Text(note, "dim"))
    if note := wording.ranks_note(analysis):
        screen.line(Text(f"{note}.", "dim"))
    if all(rank.cpu is not None for rank in analysis.ranks):
        operators = operators or kernels  # there are no kernels to show
    screen.tables(_printed_tables(analysis, kernels, operators, screen.width))
    for name, text in _printed_remarks(analysis):
        screen.line(text, name=Text(name, "yellow" if name == "warning" else "bold"), column=_NAMES_WIDTH)


def _printed_tables(analysis: Analysis, kernels: int, operators: int, width: int) -> Iterator[tuple[str, Table]]:
    ranks = analysis.ranks
    if ranks:
        rank = wording.slowest_rank(ranks)
        of_rank = f" of rank {rank.rank}{wording.slowest(ranks)}" if len(ranks) > 1 else ""
    if len(ranks) == 1:
        yield wording.steps_of(ranks[0]), step_table(ranks[0])
    elif any(map(wording.used_gpu, ranks)):
        title = f"{_number_of(analysis)} ranks, percent of the step; rank {ranks[0].rank}: {wording.steps_of(ranks[0])}"
        yield title, ranks_table(ranks)
        yield "Idle by host activity, percent of the step", idle_table(analysis)
    elif ranks:
        yield f"{_number_of(analysis)} ranks; rank {ranks[0].rank}: {wording.steps_of(ranks[0])}", ranks_table(ranks)
        yield f"The step on the host{of_rank}", step_table(rank)
    if analysis.findings:
        shown = analysis.findings[:_SHOWN_FINDINGS]
        averaged = any("mean" in wording.share_of(analysis, finding) for finding in shown)
        yield f"Findings{', shares averaged over the ranks' if averaged else ''}", _findings_table(shown)
    if ranks and rank.top_kernels[:kernels]:
        yield f"Top kernels{of_rank}", kernels_table(rank.top_kernels[:kernels], _name_room(width - _BESIDE_KERNELS))
    if ranks and rank.operators[:operators]:
        name_width = _name_room(width - _BESIDE_OPERATORS)
        table = operators_table(rank.operators[:operators], name_width, on_gpu=wording.used_gpu(rank))
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
        share = f"{finding.share_pct:.1f} %{wording.between(finding)}"
        rows.append(Row((finding.code, share, Text(f"{on_rank}{finding.title}", "bold"))))
        if position:  # the first one's is in the verdict
            rows.append(Row(("", "", finding.remedy)))
    return Table(columns_of("", "of step", "what, and what to do", align="<><"), tuple(rows))


def _printed_remarks(analysis: Analysis) -> Iterator[tuple[str, str]]:
    if analysis.ranks:
        rank = wording.slowest_rank(analysis.ranks)
        cut = " (of a file that is cut off)" if rank.cut_off else ""
        for name, text in (
            ("compute", wording.efficiency(rank)),
            ("threads", wording.cpu_threads(rank)),
            ("linked", wording.linked(rank)),
        ):
            if text:
                yield name, text + cut
        if functions := wording.users_functions(rank):
            yield "functions", f"{functions}. {wording.STACKS_NOTE}"
    yield from (("note", remark) for remark in wording.findings_remarks(analysis))
    hidden = len(analysis.findings) - _SHOWN_FINDINGS
    if hidden > 0:
        yield "findings", f"{hidden} more: see the reports"
    yield from (("hint", where + text) for where, text in wording.hints(analysis))
    yield from (("difference", difference) for difference in analysis.differences)
    yield from (("warning", warning) for warning in wording.all_warnings(analysis))


_SHAPES: Final = 2
_MS: Final = Column("ms per step", brief="ms/step")
_OF_STEP: Final = Column("of step")
_CALLS: Final = Column("calls per step", brief="calls/step")


def step_table(rank: RankSummary, *, kinds: bool = False) -> Table:
    """The step of a rank: busy time by category and, with `kinds`, by kind; idle time by cause. On a CPU by region."""
    rows = _on_gpu(rank, kinds=kinds) if wording.used_gpu(rank) else wording.step_on_host(rank)
    cells = tuple(Row((name, f"{ms:.3f}", f"{pct:.1f} %"), depth == 0, depth) for name, ms, pct, depth in rows)
    return Table((Column("part of the step", "text", brief=" "), _MS, _OF_STEP), cells)


def _on_gpu(rank: RankSummary, *, kinds: bool) -> Iterator[tuple[str, float, float, int]]:
    yield "step", rank.step_ms.mean, 100.0, 0
    yield "busy", rank.gpu.busy_ms_per_step, rank.gpu.busy_pct, 0
    for name in CATEGORIES:
        share = rank.categories[name]
        is_hidden = not kinds and name == "comm" and rank.comm.ms_per_step
        hidden = f" ({rank.comm.hidden_pct:.0f} % hidden)" if is_hidden else ""
        yield f"{name}{hidden}", share.ms_per_step, share.pct, 1
        parts = [(part.ms_per_step, part.pct, kind) for kind, part in rank.kinds.items() if part.category == name]
        if kinds and [kind for _, _, kind in parts] != [name]:
            yield from ((kind, ms, pct, 2) for ms, pct, kind in sorted(parts, reverse=True))
    yield "idle", rank.gpu.idle_ms_per_step, rank.gpu.idle_pct, 0
    for cause in IDLE_CAUSES:
        if cause in rank.idle and (kinds or rank.idle[cause].ms_per_step):
            yield wording.IDLE_WORDS[cause], rank.idle[cause].ms_per_step, rank.idle[cause].pct, 2


def ranks_table(ranks: Sequence[RankSummary], *, causes: bool = False) -> Table:
    """Step times and shares of the step of each rank; with `causes`, those of idle time too."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {
        "rank": wording.rank_name,
        "step ms": lambda rank: f"{rank.step_ms.mean:.3f}",
        "median": lambda rank: f"{rank.step_ms.p50:.3f}",
    }
    if any(map(wording.used_gpu, ranks)):
        columns["busy"] = _on_gpu_only(lambda rank: rank.gpu.busy_pct)
        for name in CATEGORIES:
            columns[name] = _on_gpu_only(lambda rank, name=name: rank.categories[name].pct)  # type: ignore[misc]
        columns["idle"] = _on_gpu_only(lambda rank: rank.gpu.idle_pct)
        if causes:
            columns |= _idle_columns("idle: ")
    return table_of(ranks, columns)


def _on_gpu_only(pct: Callable[[RankSummary], float]) -> Callable[[RankSummary], str]:
    return lambda rank: f"{pct(rank):.1f}" if wording.used_gpu(rank) else ""


def _idle_columns(before: str) -> dict[str | Column, Callable[[RankSummary], str]]:
    def pct(cause: str) -> Callable[[RankSummary], str]:
        return _on_gpu_only(lambda rank: rank.idle[cause].pct if cause in rank.idle else 0.0)

    return {before + cause: pct(cause) for cause in IDLE_CAUSES}


def idle_table(analysis: Analysis) -> Table:
    """Idle time of each rank by cause, and its waiting for other ranks."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {"rank": wording.rank_name, **_idle_columns("")}
    if analysis.rank_waits:
        columns["waits for others, ms"] = waits_of_ranks(analysis)
    return table_of(analysis.ranks, columns)


def waits_of_ranks(analysis: Analysis) -> Callable[[RankSummary], str]:
    """What a column of waits says of each rank."""
    waits = {wait.rank: f"{wait.wait_ms_per_step:.3f}" for wait in analysis.rank_waits}
    return lambda rank: waits.get(rank.rank, "")


def kernels_table(kernels: Sequence[Kernel], name_width: int, *, means: bool = False) -> Table:
    """Kernels, with the mean time of a call if asked for."""
    labels = wording.kernel_labels([kernel.name for kernel in kernels], name_width)
    mean: dict[str | Column, Callable[[Kernel], str]] = {"mean µs": lambda kernel: f"{kernel.mean_us:.1f}"}
    return table_of(
        kernels,
        {
            Column("kernel", "code"): lambda kernel: labels[kernel.name],
            Column("kind", "text"): lambda kernel: kernel.kind,
            _CALLS: lambda kernel: wording.calls(kernel.calls_per_step),
            _MS: lambda kernel: f"{kernel.ms_per_step:.3f}",
            **(mean if means else {}),
            _OF_STEP: lambda kernel: f"{kernel.pct:.1f} %",
        },
    )


def operators_table(operators: Sequence[Operator], name_width: int, *, on_gpu: bool, shapes: bool = False) -> Table:
    """Operators, without columns that would be empty; with the shapes of their inputs if asked for."""
    labels = wording.operator_labels([operator.name for operator in operators], name_width)
    columns: dict[str | Column, Callable[[Operator], str]] = {
        Column("operator", "code"): lambda operator: labels[operator.name]
    }
    if shapes and any(operator.input_shapes for operator in operators):
        columns[Column("input shapes", "codes")] = lambda operator: "\n".join(
            wording.short(shape, name_width) for shape in operator.input_shapes[:_SHAPES]
        )
    columns["calls"] = lambda operator: wording.calls(operator.calls_per_step)
    if on_gpu:
        columns["self GPU"] = lambda operator: f"{operator.self_device_ms_per_step:.3f}"
        columns["GPU"] = lambda operator: f"{operator.device_ms_per_step:.3f}"
    columns["self host"] = lambda operator: f"{operator.self_host_ms_per_step:.3f}"
    columns["host"] = lambda operator: f"{operator.host_ms_per_step:.3f}"
    if any(operator.allocated_bytes_per_step is not None for operator in operators):
        columns["MB"] = lambda operator: f"{(operator.allocated_bytes_per_step or 0.0) / 1e6:.1f}"
    return table_of(operators, columns)


def ledger_table(ledger: RunLedger, decimals: int = 3) -> Table:
    """Parts of a run's wall time."""
    return table_of(
        ledger_rows(ledger),
        {
            Column("part", "code"): lambda part: part[0],
            "seconds": lambda part: f"{part[1]:.{decimals}f}",
            "of the run": lambda part: f"{100 * part[1] / ledger.wall_s:.1f} %" if ledger.wall_s > 0 else "",
            "times": lambda part: "" if part[2] is None else str(part[2]),
        },
    )
