"""The blocks of reports: named lines, and the one model of a table, for terminals, HTML and Markdown."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

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


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    cells: tuple[str | Text, ...]  # one for each column; those missing at the end are empty
    strong: bool = False  # whether it is a whole, of which other rows are parts
    depth: int = 0  # 1 for a part of the row above, 2 for a part of that
    style: str = ""  # of its cells
    share: float | None = None  # what a bar shows, in percent; None for no bar


@dataclass(frozen=True, slots=True)
class Table:
    """A table, which every report renders."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    ruled: bool = True  # whether a terminal has a rule below the headings, which are bold then
    steady: bool = False  # whether its columns stay where they are from frame to frame


def columns_of(*headings: str, align: str = "<") -> tuple[Column, ...]:
    """A column for each heading: of text for "<", and of numbers for ">" and where `align` ends."""
    kinds: dict[str, Kind] = {"<": "text", ">": "number"}
    aligned = zip(headings, align.ljust(len(headings), ">"), strict=True)
    return tuple(Column(name, kinds[each]) for name, each in aligned)


def table_of(items: Iterable[_T], columns: Mapping[str | Column, Callable[[_T], str]]) -> Table:
    """A row for each item, and a column for each heading with what it says of an item. The first column is text."""
    headings = [
        heading if isinstance(heading, Column) else Column(heading, "number" if position else "text")
        for position, heading in enumerate(columns)
    ]
    return Table(tuple(headings), tuple(Row(tuple(say(item) for say in columns.values())) for item in items))
