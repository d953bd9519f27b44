"""What is printed: the end of a fit in some 16 lines of 80 columns, the whole table, the analysis of a trace."""

import io
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Final

from lightning_forge_profiling.diagnosis.growth import GROWTH
from lightning_forge_profiling.diagnosis.machine_rules import MACHINE, MEMORY, UNRELIABLE, growth_words
from lightning_forge_profiling.diagnosis.rule import MIN_STEPS, REGION_OF
from lightning_forge_profiling.report import run_table, wording
from lightning_forge_profiling.report.page import run_html
from lightning_forge_profiling.report.run_wording import goodput_words, recompiled_lines
from lightning_forge_profiling.report.screen import NAMES_WIDTH, Line, Row, Screen, Table, Text, columns_of, wrap
from lightning_forge_profiling.report.trace_tables import (
    idle_table,
    kernels_table,
    modules_table,
    operators_table,
    ranks_table,
    step_table,
)
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import Analysis, Finding, RunEvidence, RunReport

_NAME: Final = re.compile(r"\((.+)\)$")  # of a device, as in `cuda:0 (NVIDIA H200)`
_LINES: Final = 16
_WIDTH: Final = 80
_FEWEST_ROWS: Final = 4
_VERDICT_LINES: Final = 5  # a straggler with its cause and the line of the code


def print_end(report: RunReport, files: Path | None, screen: Screen | None = None) -> None:
    """Print what a fit ends with; a notebook gets the whole table. `files` has the rest, for `view`."""
    if screen is None and in_notebook():
        print_run(report)
        return
    screen = screen or Screen(wrap=True)
    screen.width = min(screen.width, _WIDTH)
    titles = wrap(_title(report), screen.width)
    above, below = list(_rates(report)), list(_end(report, files, screen.width))
    taken = 1 + len(titles) + sum(_height(line, screen.width) for line in (*above, *below)) + bool(below)
    timing = report.run.timing
    screen.line()
    for line in titles:
        screen.line(Text(line, "bold"))
    findings = () if report.analysis is None else report.analysis.findings
    named = next((REGION_OF[each.code] for each in findings if each.code in REGION_OF), "")
    if table := run_table.step_table(timing, spread=False, most=max(_LINES - taken - 1, _FEWEST_ROWS), named=named):
        screen.table(table)
    screen.lines(above)
    if below:
        screen.line()
    screen.lines(below)
    screen.flush()


def _height(line: Line, width: int) -> int:
    return 1 if line.whole else len(wrap(line.text.text, width - NAMES_WIDTH - 1))


def _title(report: RunReport) -> str:
    run, named = report.run.timing, _NAME.search(report.device)
    spread = "" if run.step_ms.p95 is None else f" (p95 {digits(run.step_ms.p95)})"
    on = report.device if named is None else named[1]
    return run_table.step_title(report, f"{spread}, {run.steps} of {run.all_steps} steps on {on}")


def _rates(report: RunReport) -> Iterator[Line]:
    run, timing = report.run, report.run.timing
    if timing.steps:
        shares = (one.pct_of_peak for one in run.machine.compute if one.kind == "mfu")
        mfu = next((pct for pct in shares if pct is not None), None)
        yield Line("throughput", Text(run_table.throughput(report) + ("" if mfu is None else f", MFU {mfu:.1f} %")))
    if timing.is_evidence and run.ledger is not None and (words := goodput_words(run.ledger)):
        yield Line("goodput", Text(words))
    yield from run_table.figure_notes(timing)
    if timing.is_evidence and report.analysis is not None:
        yield from _beside(report.analysis, run)
    trace = report.trace
    if trace is not None:
        yield from run_table.missing_files(trace)
    if trace is not None and trace.status == "written" and trace.message:
        yield Line("note", Text(trace.message))
    if trace is not None and trace.pending and trace.path is not None:
        yield Line("trace", Text(f"{_short(trace.path)} is being written"), whole=True)


def _beside(analysis: Analysis, run: RunEvidence) -> Iterator[Line]:
    """What is worth a line although it may cost little time so far, unless it is the verdict."""
    on_gpu = None if run.memory is None else run.memory.growth
    for growth, code in (on_gpu, MEMORY), (run.machine.growth, GROWTH):
        if growth is not None and analysis.verdict != code:
            yield Line("memory", Text(growth_words(growth)))
    again = next(recompiled_lines(run, graph_breaks=False), "")
    if again and analysis.verdict != "compile-bound":
        yield Line("compile", Text(again))


def _end(report: RunReport, files: Path | None, width: int) -> Iterator[Line]:
    """The verdict and what follows from it."""
    analysis, room = report.analysis, width - NAMES_WIDTH - 1
    if analysis is None:
        yield from run_table.no_verdict(report.run.timing)
    else:
        finding, said = run_table.of_verdict(analysis), run_table.conclusion(analysis)
        yield Line("verdict", Text(_cut(said.text, room, _VERDICT_LINES), said.style, said.marked))
        if finding is not None:
            yield from run_table.to_try(finding)
            yield from run_table.saves(finding)
            yield from run_table.then(analysis)
        if finding is not None and finding.source == "trace" and 0 < (steps := report.run.timing.steps) < MIN_STEPS:
            text = f"the verdict is about the recorded steps: {steps} other steady steps, at least {MIN_STEPS} needed"
            yield Line("note", Text(text))
        if analysis.verdict in UNRELIABLE:
            yield from run_table.also(analysis)
        else:
            machine = (one for one in analysis.findings if one.code in MACHINE)
            yield from (Line("also", Text(f"{one.code}: {one.title}.")) for one in machine)
    if report.trace is not None and report.trace.memory_path is not None:
        yield Line("snapshot", Text(str(report.trace.memory_path)), whole=True)
    if report.trace is not None and report.trace.url:
        yield Line("copied to", Text(report.trace.url), whole=True)
    if files is not None:
        yield Line("more", Text(f"forge-profiling view {quote(_short(files))}"), whole=True)


def _cut(text: str, width: int, lines: int) -> str:
    """Text of at most so many lines, cut between words."""
    shown = wrap(text, width)
    return text if len(shown) <= lines else f"{' '.join(shown[:lines]).rsplit(' ', 1)[0]} …"


def _short(path: Path) -> str:
    """A path from the working directory where it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def print_run(report: RunReport, screen: Screen | None = None) -> None:
    """Show the whole table; in a notebook as one output of the cell that runs."""
    if screen is None and in_notebook():
        shown = {"text/html": run_html(report), "text/plain": run_text(report)}
        import_module("IPython.display").display(shown, raw=True)
    else:
        print_table(run_table.run_table(report), screen or Screen(wrap=True))


def run_text(report: RunReport) -> str:
    """The whole table as text."""
    text = io.StringIO()
    print_table(run_table.run_table(report), Screen(text, wrap=True))
    return text.getvalue().strip()


def print_table(table: run_table.RunTable, screen: Screen) -> None:
    """Print it as text."""
    screen.line()
    screen.lines(table.verdict)
    if table.verdict:
        screen.line()
    screen.line(Text(table.title, "bold"))
    if table.table is not None:
        screen.table(table.table)
    if table.lines:
        screen.line()
    screen.lines(table.lines)
    screen.line()
    screen.flush()


def in_notebook() -> bool:
    """Whether this process runs a notebook's cells, whose output can be HTML."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


_SHOWN_KERNELS: Final = 8
_SHOWN_FINDINGS: Final = 5
_PRINTED_MODULE_PCT: Final = 5.0
_NAME_LINES: Final = 2  # lines of a name: elementwise kernels differ late in theirs
_BESIDE_KERNELS, _BESIDE_OPERATORS = 46, 56  # columns that the rest of the table takes
_NARROWEST_NAME: Final = 20


def print_analysis(
    analysis: Analysis, screen: Screen | None = None, *, kernels: int = _SHOWN_KERNELS, operators: int = 0
) -> None:
    """Print what an analysis found."""
    screen = screen or Screen()
    screen.lines(run_table.verdict_lines(analysis))
    notes = wording.findings_note(analysis).removeprefix("Note: "), wording.ranks_note(analysis)
    screen.lines(Line("note", Text(f"{note}.", "dim")) for note in notes if note)
    if all(rank.cpu is not None for rank in analysis.ranks):
        operators = operators or kernels  # there are no kernels to show
    screen.tables(_printed_tables(analysis, kernels, operators, screen.width))
    for name, text in _printed_remarks(analysis):
        screen.line(text, name=Text(name, "yellow" if name == "warning" else "bold"), column=NAMES_WIDTH)


def _printed_tables(analysis: Analysis, kernels: int, operators: int, width: int) -> Iterator[tuple[str, Table]]:
    ranks = analysis.ranks
    if ranks:
        rank = wording.slowest_rank(ranks)
        of_rank = f" of rank {rank.rank}{wording.slowest(ranks)}" if len(ranks) > 1 else ""
    if len(ranks) == 1:
        yield wording.steps_of(ranks[0]), step_table(ranks[0])
    elif any(map(wording.used_gpu, ranks)):
        title = f"{_number_of(analysis)} ranks; rank {ranks[0].rank}: {wording.steps_of(ranks[0])}"
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
    if ranks and (table := modules_table(rank, least_pct=_PRINTED_MODULE_PCT)).rows:
        yield f"Modules{of_rank}: each with those in it, ms per step; * stands for equal layers", table


def _number_of(analysis: Analysis) -> str:
    shown = len(analysis.ranks)
    return f"{shown} of {analysis.all_ranks:,}" if analysis.all_ranks > shown else f"{shown}"


def _name_room(column: int) -> int:
    return _NAME_LINES * max(column, _NARROWEST_NAME)


def _findings_table(findings: Iterable[Finding]) -> Table:
    rows = []
    for position, finding in enumerate(findings):
        on_rank = "" if finding.rank is None else f"rank {finding.rank}: "
        share = "" if finding.of == "times" else f"{finding.share_pct:.1f} %{wording.between(finding)}"
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
