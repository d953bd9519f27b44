"""HTML of results in notebooks, made by `report/notebook.py`, which is imported when one is shown."""


class ShownInNotebook:
    """Base class of the results that notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from lightning_forge_profiling.report.notebook import page  # noqa: PLC0415  (results know no reports)

        return page(self)
