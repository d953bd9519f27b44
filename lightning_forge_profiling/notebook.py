"""HTML of results in notebooks. The package's `__init__` names the module that makes it: results know no reports."""

from importlib import import_module
from typing import ClassVar


class ShownInNotebook:
    """Base class of the results that notebooks show as HTML."""

    __slots__ = ()

    renderer: ClassVar[str]  # the module whose `html_of` makes HTML of a result, imported when one is shown

    def _repr_html_(self) -> str:
        return str(import_module(self.renderer).html_of(self))
