"""Lines and tables, one model of both for terminals, HTML and Markdown; and the terminal that they are printed on."""

import io
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Final, Literal, TextIO, TypeVar

from lightning_forge_profiling.plain_text import plain

_T = TypeVar("_T")

# numbers, text, a name as in code, several such names on lines of their own, or shares, which have a bar beside them
Kind = Literal["number", "text", "code", "codes", "share"]


@dataclass(frozen=True, slots=True)
class Text:
    """Text in a style."""

    text: str  # what is shown
    style: str = ""  # words such as "bold" or "bold green"; "" for none
    marked: str = ""  # the part of `text` that has the style, "" for all of it


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of text."""

    name: str  # what stands before it
    text: Text  # what it says
    whole: bool = False  # whether it is never wrapped: a path or a command could not be copied once it is broken


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    kind: Kind = "number"  # what it has
    brief: str = ""  # its heading where there is little room; "" for the same
    means: str = ""  # what it has, where its heading does not say so


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    cells: tuple[str | Text, ...]  # one for each column; those missing at the end are empty
    strong: bool = False  # whether it is a whole, of which other rows are parts
    depth: int = 0  # 1 for a part of the row above, 2 for a part of that
    style: str = ""  # of its cells
    share: float | None = None  # what a bar shows, in percent; None for no bar
    key: str = ""  # what it is of, where its first cell says that otherwise: a kernel's whole name


@dataclass(frozen=True, slots=True)
class Table:
    """A table, which every report renders."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    note: str = ""  # what to know of all rows, in a sentence
    ruled: bool = True  # whether a terminal has a rule below the headings, which are bold then
    steady: bool = False  # whether its columns stay where they are from frame to frame


def columns_of(*headings: str, align: str = "<") -> tuple[Column, ...]:
    """A column for each heading: of text for "<", and of numbers for ">" and where `align` ends."""
    kinds: dict[str, Kind] = {"<": "text", ">": "number"}
    aligned = zip(headings, align.ljust(len(headings), ">"), strict=True)
    return tuple(Column(name, kinds[each]) for name, each in aligned)


Say = str | Callable[[_T], str]  # what a column says of an item: text such as "{.mean_us:.1f}", or a function


def table_of(
    items: Iterable[_T],
    columns: "Mapping[str | Column, Say[_T]]",
    *,
    title: str = "",
    note: str = "",
    key: str = "",
) -> Table:
    """A row for each item; `key` is text, too. The first column is text; one that says nothing of any is left out."""
    headings = [
        heading if isinstance(heading, Column) else Column(heading, "number" if position else "text")
        for position, heading in enumerate(columns)
    ]
    says = [say.format if isinstance(say, str) else say for say in columns.values()]
    rows = [Row(tuple(say(item) for say in says), key=key.format(item)) for item in items]
    said = [place for place in range(len(headings)) if place == 0 or any(row.cells[place] for row in rows)]
    kept = (replace(row, cells=tuple(row.cells[place] for place in said)) for row in rows)
    return Table(tuple(headings[place] for place in said), tuple(kept), title, note)


_CODES: Final = MappingProxyType({"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"})
# spaces between columns and the least width of the widest text column, in the order they are tried
_LAYOUTS: Final = ((3, 20), (2, 20), (1, 12))
_BAR_WIDTH: Final = 24
_SHORTEST_BAR: Final = 6
_GAP: Final = 3
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def painted(text: Text, line: str) -> str:
    """A line of the text with a terminal's codes for the style."""
    part = text.marked or line.strip()
    if not (text.style and part):
        return line
    codes = ";".join(_CODES[word] for word in text.style.split())
    return line.replace(part, f"\x1b[{codes}m{part}\x1b[0m", 1)


def clean(text: str | Text) -> Text:
    """The text without terminal escape sequences, which names in a trace can contain."""
    text = Text(text) if isinstance(text, str) else text
    return replace(text, text=plain(text.text), marked=plain(text.marked))


def width_of(text: str) -> int:
    """Columns that text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_width_of_character, text))


def _width_of_character(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:  # stands on the character before it
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


def shown_width(line: str) -> int:
    """Columns that a line takes which has codes for styles."""
    return width_of(_STYLE.sub("", line))


def padded(text: str, width: int, align: str = "<") -> str:
    """Text filled up with spaces, on its left where `align` is ">"."""
    space = " " * (width - width_of(text))
    return space + text if align == ">" else text + space


def wrap(text: str, width: int) -> list[str]:
    """Text in lines of at most `width` columns, broken between words, and in a word that is longer than a line."""
    if width_of(text) <= width:
        return [text]
    indent = " " * min(len(text) - len(text.lstrip()), width - 1)
    room = width - len(indent)
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if width_of(longer) <= room:
            lines[-1] = longer
        else:
            lines[-1:] = [*filter(None, lines[-1:]), *_pieces(word, room)]
    return [indent + line for line in lines]


def _pieces(word: str, width: int) -> Iterator[str]:
    piece = ""
    for character in word:
        if piece and width_of(piece + character) > width:
            yield piece
            piece = ""
        piece += character
    yield piece


def table_lines(table: Table, width: int) -> list[str]:
    """A table in lines of at most `width` columns. Wide text wraps; numbers are never cut, so a line can be wider."""
    grid = _Grid(table, width)
    first, *others = range(len(grid.align))
    lines: list[str] = []
    while others:
        parts = ([first, *others[:count]] for count in range(len(others), 0, -1))
        part = next((part for part in parts if grid.fits(part, width)), [first, others[0]])
        lines += [*([""] if lines else []), *grid.block(part, width)]  # columns without room follow below the others
        others = others[len(part) - 1 :]
    return lines


class _Grid:
    """The cells of a table on a terminal: its headings, and a column of bars before that of the shares."""

    def __init__(self, table: Table, width: int) -> None:
        headings = [column.brief or column.name for column in table.columns]
        kinds, count = [column.kind for column in table.columns], len(headings)
        cells = [[*row.cells, *([""] * (count - len(row.cells)))] for row in table.rows]
        for row, texts in zip(table.rows, cells, strict=True):
            if row.depth:
                texts[0] = f"  {_plain(texts[0])}"
        if any(row.share is not None for row in table.rows) and len(cells) > 1:
            place = kinds.index("share")
            taken = sum(max(map(width_of, map(_plain, column))) for column in zip(headings, *cells, strict=True))
            room = min(_BAR_WIDTH, width - taken - _GAP * count)
            if room >= _SHORTEST_BAR:
                kinds.insert(place, "text")
                headings.insert(place, "")
                for row, texts in zip(table.rows, cells, strict=True):
                    texts.insert(place, _bar(row.share or 0.0, room).ljust(room if table.steady else 0))
        self.align = ["<" if kind in {"text", "code", "codes"} else ">" for kind in kinds]
        styles = ["bold" if row.strong else row.style for row in table.rows]
        self._is_ruled = any(headings) and table.ruled
        if any(headings):
            cells.insert(0, [*headings])
            styles.insert(0, "bold" if table.ruled else "dim")
        self._rows = [
            [replace(cell, style=cell.style or style) for cell in map(clean, texts)]
            for style, texts in zip(styles, cells, strict=True)
        ]

    def fits(self, columns: Sequence[int], width: int) -> bool:
        gap, widths = self._layout(columns, width)
        return sum(widths) + gap * (len(widths) - 1) <= width

    def _layout(self, columns: Sequence[int], width: int) -> tuple[int, list[int]]:
        """The spaces between these columns, and their widths."""
        widths = [max((width_of(row[column].text) for row in self._rows), default=0) for column in columns]
        texts = (position for position, column in enumerate(columns) if self.align[column] == "<")
        widest = max(texts, key=lambda position: widths[position], default=0)
        for gap, narrowest in _LAYOUTS:
            narrow = min(widths[widest], narrowest)
            room = width - sum(widths) + widths[widest] - gap * (len(columns) - 1)
            if room >= narrow:
                break
        widths[widest] = max(narrow, min(widths[widest], room))
        return gap, widths

    def block(self, columns: Sequence[int], width: int) -> Iterator[str]:
        gap, widths = self._layout(columns, width)
        for number, row in enumerate(self._rows):
            cells = [row[column] for column in columns]
            wrapped = [wrap(cell.text, room) for cell, room in zip(cells, widths, strict=True)]
            for parts in zip_longest(*wrapped, fillvalue=""):
                aligned = (
                    padded(part, room, self.align[column])
                    for part, room, column in zip(parts, widths, columns, strict=True)
                )
                styled = (painted(cell, part) for cell, part in zip(cells, aligned, strict=True))
                yield (" " * gap).join(styled).rstrip()
            if number == 0 and self._is_ruled:
                yield "─" * (sum(widths) + gap * (len(widths) - 1))


NAMES_WIDTH: Final = 11  # of the names before lines of text
_NARROWEST: Final = 20
_STYLE: Final = re.compile(r"\x1b\[[\d;]*m")
_ASCII: Final = str.maketrans("─µ…█▉▊▋▌▍▎▏▁▂▃▄▅▆▇", "-u~#####   __..-=+")


def _bar(pct: float, width: int) -> str:
    full, eighths = divmod(round(min(pct, 100.0) / 100 * width * 8), 8)
    return "█" * full + (_EIGHTHS[eighths] if eighths else "")


def _plain(cell: str | Text) -> str:
    return cell if isinstance(cell, str) else cell.text


class Screen:
    """A stream that reports are printed on."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        width: int | None = None,
        wrap: bool | None = None,
        colours: bool | None = None,
    ) -> None:
        self._stream = stream or sys.stdout or io.StringIO()  # a process without a console has no sys.stdout
        self.width = max(_NARROWEST, width or shutil.get_terminal_size().columns)  # in columns
        isatty = getattr(self._stream, "isatty", None)  # what stands in for sys.stdout may have `write` alone
        terminal = isatty is not None and isatty()
        self._wrap = terminal if wrap is None else wrap
        allowed = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colours = (terminal and allowed) if colours is None else colours

    def line(self, text: str | Text = "", *, name: str | Text = "", column: int = 0, whole: bool = False) -> None:
        """Print a line. Where sentences wrap, they wrap beside its name."""
        text, name = clean(text), clean(name)
        start = padded(name.text, column) + " " if name.text or column else ""
        room = max(_NARROWEST // 2, self.width - width_of(start))
        first, *others = wrap(text.text, room) if self._wrap and not whole else [text.text]
        self._write(painted(name, start) + painted(text, first))
        for line in others:
            self._write(" " * width_of(start) + painted(text, line))

    def lines(self, lines: Iterable[Line]) -> None:
        """Print named lines."""
        for line in lines:
            self.line(line.text, name=Text(line.name, "bold"), column=NAMES_WIDTH, whole=line.whole)

    def table(self, table: Table) -> None:
        """Print a table."""
        for line in table_lines(table, self.width):
            self._write(line)

    def tables(self, titled: Iterable[tuple[str, Table]]) -> None:
        """Print tables below their titles, with an empty line before each and after the last."""
        for title, table in titled:
            self.line()
            self.line(Text(title, "bold"))
            self.table(table)
        self.line()

    def flush(self) -> None:
        """Write out what is buffered: the process may be killed next."""
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            flush()

    def _write(self, line: str) -> None:
        if not self.colours:
            line = _STYLE.sub("", line)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            line.encode(encoding)
        except UnicodeEncodeError:
            line = line.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        self._stream.write(f"{line}\n")
