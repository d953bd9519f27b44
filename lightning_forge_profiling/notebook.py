"""How a notebook shows a result: `report/notebook.py` says it for types of rooms that know nothing of reports."""

from collections.abc import Callable
from typing import Any

_pages: dict[type, Callable[[Any], str]] = {}


class ShownInNotebook:
    """Base of a result that is the output of a notebook's cell as HTML, once `show_with` was called for its type."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        page = _pages.get(type(self))
        return None if page is None else page(self)


def show_with(kind: type, page: Callable[[Any], str]) -> None:
    """Let a notebook show every result of a type by what `page` makes of it."""
    _pages[kind] = page
