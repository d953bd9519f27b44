"""A run on a terminal or in a notebook: the end of a fit in some 16 lines of 80 columns, and the whole table."""

import io
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Final

from lightning_forge_profiling.diagnosis.hints import switched_on
from lightning_forge_profiling.diagnosis.machine_rules import MACHINE, MEMORY, growth_words
from lightning_forge_profiling.diagnosis.rule import MIN_STEPS
from lightning_forge_profiling.report import run_table
from lightning_forge_profiling.report.page import run_html
from lightning_forge_profiling.report.run_wording import goodput_words, recompiled_lines
from lightning_forge_profiling.report.screen import NAMES_WIDTH, Line, Screen, Text, wrap
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import Analysis, RunEvidence, RunReport

_NAME: Final = re.compile(r"\((.+)\)$")  # of a device, as in `cuda:0 (NVIDIA H200)`
_LINES: Final = 16
_WIDTH: Final = 80
_FEWEST_ROWS: Final = 4
_VERDICT_LINES: Final = 4  # a straggler with its cause and the line of the code


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
    if table := run_table.step_table(timing, spread=False, most=max(_LINES - taken - 1, _FEWEST_ROWS)):
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
    if timing.is_evidence and (distorting := switched_on(run.settings.switches)):
        yield Line("note", Text(distorting))
    trace = report.trace
    if trace is not None:
        yield from run_table.missing_files(trace)
    if trace is not None and trace.status == "written" and trace.message:
        yield Line("note", Text(trace.message))
    if trace is not None and trace.pending and trace.path is not None:
        yield Line("trace", Text(f"{_short(trace.path)} is being written"), whole=True)


def _beside(analysis: Analysis, run: RunEvidence) -> Iterator[Line]:
    """What is worth a line although it may cost little time so far, unless it is the verdict."""
    if run.memory is not None and run.memory.growth is not None and analysis.verdict != MEMORY:
        yield Line("memory", Text(growth_words(run.memory.growth)))
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
        if finding is not None and finding.source == "trace" and 0 < (steps := report.run.timing.steps) < MIN_STEPS:
            text = f"the verdict is about the recorded steps: {steps} other steady steps, at least {MIN_STEPS} needed"
            yield Line("note", Text(text))
        if analysis.verdict in MACHINE:
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
