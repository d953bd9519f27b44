"""Where the table at the end of a fit is shown: on a terminal, in a file, or as the output of a notebook's cell."""

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from lightning_forge_profiling.report.blocks import Line, Text
from lightning_forge_profiling.report.page import rendered
from lightning_forge_profiling.report.run_table import RunTable, run_table
from lightning_forge_profiling.report.screen import Screen, Table, width_of
from lightning_forge_profiling.results.run_report import RunReport

NAMES_WIDTH: Final = 11
"""Of the names before lines of text."""
_BAR_WIDTH: Final = 24
_SHORTEST_BAR: Final = 6
_GAP: Final = 3
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def print_run(report: RunReport, screen: Screen | None = None) -> None:
    """Show the table."""
    table = run_table(report)
    if screen is None and _in_notebook():
        _show_in_notebook(table)
    else:
        _print(table, screen or Screen(wrap=True))


# -- as text ---------------------------------------------------------------------------------------------------------


def _print(table: RunTable, screen: Screen) -> None:
    screen.line()
    _print_lines(table.verdict, screen)
    if table.verdict:
        screen.line()
    screen.line(Text(table.title, "bold"))
    if table.rows:
        screen.table(step_table(table, screen.width))
    if table.lines:
        screen.line()
    _print_lines(table.lines, screen)
    screen.line()
    screen.flush()


def _print_lines(lines: Sequence[Line], screen: Screen) -> None:
    for line in lines:
        screen.line(line.text, name=Text(line.name, "bold"), column=NAMES_WIDTH, whole=line.whole)


def step_table(table: RunTable, width: int) -> Table:
    """The rows of a table with a bar for each share, as far as there is room for bars."""
    first, *columns = table.headings
    names = (first, *(row.name for row in table.rows))
    shares = [row.share for row in table.rows]
    cells = (columns, *((share, *row.times) for share, row in zip(shares, table.rows, strict=True)))
    widths = [max(map(width_of, column)) for column in (names, *zip(*cells, strict=True))]
    taken = sum(widths) + _GAP * len(widths)
    room = min(_BAR_WIDTH, width - taken)
    with_bars = room >= _SHORTEST_BAR and len(table.rows) > 1
    lines = Table(*([""] * (1 + with_bars + len(columns))), align="<<" if with_bars else "<")
    lines.row(first, *([""] * with_bars), *columns, style="dim")
    for row, share in zip(table.rows, shares, strict=True):
        bars = [_bar(row.pct or 0.0, room)] if with_bars else []
        lines.row(row.name, *bars, share, *row.times, style="bold" if row.pct is None else "")
    return lines


def _bar(pct: float, width: int) -> str:
    full, eighths = divmod(round(min(pct, 100.0) / 100 * width * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")


# -- in a notebook ---------------------------------------------------------------------------------------------------


def _in_notebook() -> bool:
    """Whether this process runs a notebook's cells, whose output can be HTML."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _show_in_notebook(table: RunTable) -> None:
    """Add one output to the cell that runs, with the text for what shows no HTML."""
    text = io.StringIO()
    _print(table, Screen(text, wrap=True))
    import_module("IPython.display").display(
        {"text/html": rendered("notebook_run.html", table=table), "text/plain": text.getvalue().strip()},
        raw=True,
    )
