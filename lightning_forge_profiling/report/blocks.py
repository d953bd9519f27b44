"""The blocks of reports, named lines and tables: `screen`, `markdown` and `assets/blocks.html` render them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

_T = TypeVar("_T")

Kind = Literal["number", "text", "code", "codes"]


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
    kind: Kind = "number"  # what it has: numbers, text, a name as in code, or several such names on lines of their own
    brief: str = ""  # its heading where there is little room; "" for the same


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    cells: tuple[str, ...]  # one text for each column
    strong: bool = False  # whether it is a whole, of which the rows below are parts
    depth: int = 0  # 1 for a part of the row above, 2 for a part of that


@dataclass(frozen=True, slots=True)
class Rows:
    """A table."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def rows_of(items: Iterable[_T], columns: Mapping[str | Column, Callable[[_T], str]]) -> Rows:
    """A row for each item, and a column for each heading with what it says of an item. The first column is text."""
    headings = [
        heading if isinstance(heading, Column) else Column(heading, "number" if position else "text")
        for position, heading in enumerate(columns)
    ]
    return Rows(tuple(headings), tuple(Row(tuple(say(item) for say in columns.values())) for item in items))
