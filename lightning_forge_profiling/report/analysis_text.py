"""An analysis on a terminal."""

from collections.abc import Iterable, Iterator
from typing import Final

from lightning_forge_profiling.report import wording
from lightning_forge_profiling.report.screen import Row, Screen, Table, Text, columns_of
from lightning_forge_profiling.report.trace_tables import (
    idle_table,
    kernels_table,
    operators_table,
    ranks_table,
    step_table,
)
from lightning_forge_profiling.schema import Analysis, Finding

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
