"""HTML of results in notebooks. The package's `__init__` names the module that makes it: results know no reports."""

import sys
from importlib import import_module


class ShownInNotebook:
    """Base class of the results that notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        renderer = vars(sys.modules[__name__.partition(".")[0]])["NOTEBOOK_RENDERER"]  # imported when one is shown
        return str(import_module(renderer).html_of(self))
