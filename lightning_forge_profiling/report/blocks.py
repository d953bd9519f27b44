"""The blocks of reports, named lines and tables: `screen`, `markdown` and `assets/blocks.html` render them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

_T = TypeVar("_T")

Kind = Literal["number", "text", "code", "codes"]


@dataclass(frozen=True, slots=True)
class Text:
    """Text in a style.

    Attributes:
        text: what is shown.
        style: words such as "bold" or "bold green"; "" for none.
        marked: the part of `text` that has the style, "" for all of it.
    """

    text: str
    style: str = ""
    marked: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of text.

    Attributes:
        name: what stands before it.
        text: what it says.
        whole: whether it is never wrapped: a path or a command could not be copied once it is broken.
    """

    name: str
    text: Text
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        kind: what it has: numbers, text, a name as in code, or several such names on lines of their own.
        brief: its heading where there is little room; "" for the same.
    """

    name: str
    kind: Kind = "number"
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        cells: one text for each column.
        strong: whether it is a whole, of which the rows below are parts.
        depth: 1 for a part of the row above, 2 for a part of that.
    """

    cells: tuple[str, ...]
    strong: bool = False
    depth: int = 0


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
