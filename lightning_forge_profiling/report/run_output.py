"""Where the table at the end of a fit is shown: on a terminal, in a file, or as the output of a notebook's cell."""

import io
import sys
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Final

from lightning_forge_profiling.report.run_table import Line, Row, RunTable, run_table
from lightning_forge_profiling.report.screen import Screen, Table, Text, clean, width_of
from lightning_forge_profiling.report.text import escaped
from lightning_forge_profiling.results.run_report import RunReport

NAMES_WIDTH: Final = 11
"""Of the names before lines of text."""
_BAR_WIDTH: Final = 24
_SHORTEST_BAR: Final = 6
_GAP: Final = 3
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"

_LEFT: Final = "padding:1px 6px;text-align:left;vertical-align:top"
_RIGHT: Final = "padding:1px 6px;text-align:right;white-space:nowrap"
_BAR: Final = "display:inline-block;height:0.8em;background:#4d97d6;width:{:.1f}%"
_BAR_CELL: Final = "padding:1px 6px;width:14em;text-align:left"


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
    shares = [_share(row) for row in table.rows]
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


def _share(row: Row) -> str:
    return "" if row.pct is None else f"{row.pct:.1f} %"


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
        {"text/html": _html(table), "text/plain": text.getvalue().strip()}, raw=True
    )


def _html(table: RunTable) -> str:
    """The table as HTML; names of others cannot add markup."""
    title = f'<p style="margin:0.6em 0 0.2em"><b>{escaped(table.title)}</b></p>'
    return f"<div>{_lines(table.verdict)}{title}{_rows(table)}{_lines(table.lines)}</div>"


def _rows(table: RunTable) -> str:
    if not table.rows:
        return ""
    first, *others = table.headings
    head = "".join(f'<th style="{_RIGHT}">{escaped(name)}</th>' for name in (first, "", *others))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, table.rows))}</tbody></table>"


def _row(row: Row) -> str:
    name = escaped(row.name)
    bar = "" if row.pct is None else f'<span style="{_BAR.format(min(row.pct, 100.0))}"></span>'
    cells = "".join(f'<td style="{_RIGHT}">{escaped(text)}</td>' for text in (_share(row), *row.times))
    first = f"<b>{name}</b>" if row.pct is None else name
    return f'<tr><td style="{_LEFT}">{first}</td><td style="{_BAR_CELL}">{bar}</td>{cells}</tr>'


def _lines(lines: Sequence[Line]) -> str:
    rows = "".join(
        f'<tr><td style="{_LEFT}"><b>{escaped(line.name)}</b></td><td style="{_LEFT}">{_marked(line)}</td></tr>'
        for line in lines
    )
    return f"<table>{rows}</table>" if rows else ""


def _marked(line: Line) -> str:
    text = clean(line.text)
    before, marked, after = text.text.partition(text.marked) if text.marked else (text.text, "", "")
    html = escape(before) + (f"<b>{escape(marked)}</b>" if marked else "") + escape(after)
    return f"<code>{html}</code>" if line.whole else html
