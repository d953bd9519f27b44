"""HTML of results in notebooks: `report/notebook.py` registers it for types that do not know about reports."""

from collections.abc import Callable
from typing import Any

_pages: dict[type, Callable[[Any], str]] = {}


class ShownInNotebook:
    """Base class of results that notebooks show as HTML once `show_with` has been called for their type."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        page = _pages.get(type(self))
        return None if page is None else page(self)


def show_with(kind: type, page: Callable[[Any], str]) -> None:
    """Register the function that renders results of a type as HTML."""
    _pages[kind] = page
