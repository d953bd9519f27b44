"""The JSON Schema of `summary.json`, made from the dataclasses that are written to it."""

import inspect
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_forge_profiling.results import analysis as results
from lightning_forge_profiling.results import flops, loader_settings, saving
from lightning_forge_profiling.results import host as host_summary
from lightning_forge_profiling.results import rank as rank_summary
from lightning_forge_profiling.results import telemetry as telemetry_summary

__all__ = ["SHIPPED", "schema_json"]

SHIPPED: Final = Path(__file__).with_name("summary.schema.json")
"""The copy in the package. `python -m lightning_forge_profiling.report.json_schema > FILE` renews it."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def schema_json() -> bytes:
    """The schema, indented, in the dialect of 2020-12; what fields mean is taken from the docstrings."""
    (schema,), definitions = msgspec.json.schema_components([results.Analysis], ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        homes = (results, rank_summary, host_summary, flops, loader_settings, saving, telemetry_summary)
        _describe(definition, next(getattr(home, name) for home in homes if hasattr(home, name)))
    document = {"$schema": _DIALECT, "title": "forge-profiling summary.json", **schema, "$defs": definitions}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _describe(definition: dict[str, Any], described: type) -> None:
    """Put the docstring's attributes to the fields, and leave the rest of it as the description of the whole."""
    summary, _, attributes = inspect.cleandoc(described.__doc__ or "").partition("\n\nAttributes:\n")
    definition["description"] = " ".join(summary.split())
    for field, text in _ATTRIBUTE.findall(attributes):
        definition["properties"][field]["description"] = " ".join(text.split())


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(schema_json())
