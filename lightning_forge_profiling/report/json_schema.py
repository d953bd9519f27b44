"""The JSON Schema of `summary.json`, made from the dataclasses that are written to it."""

import inspect
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from lightning_forge_profiling.results.analysis import Analysis

SHIPPED: Final = Path(__file__).with_name("summary.schema.json")
"""The copy in the package. `python -m lightning_forge_profiling.report.json_schema > FILE` renews it."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def schema_json() -> bytes:
    """The schema of `summary.json`."""
    return schema_of(Analysis, "forge-profiling summary.json")


def schema_of(kind: Any, title: str) -> bytes:
    """The schema of a type, indented, in the dialect of 2020-12; what fields mean is taken from the docstrings."""
    (schema,), definitions = msgspec.json.schema_components(
        [kind],
        ref_template="#/$defs/{name}",
        schema_hook=lambda _: {"type": "string"},  # paths
    )
    for definition in definitions.values():
        _describe(definition)
    document = {"$schema": _DIALECT, "title": title, **schema, "$defs": definitions}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _describe(definition: dict[str, Any]) -> None:
    """Put the docstring's attributes to the fields, and leave the rest of it as the description of the whole."""
    summary, _, attributes = inspect.cleandoc(definition.get("description", "")).partition("\n\nAttributes:\n")
    definition["description"] = " ".join(summary.split())
    for field, text in _ATTRIBUTE.findall(attributes):
        definition["properties"][field]["description"] = " ".join(text.split())


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(schema_json())
