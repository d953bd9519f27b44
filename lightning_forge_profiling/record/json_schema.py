"""The JSON Schema of a record's lines, made from the structs that are written."""

from pathlib import Path
from typing import Final

from lightning_forge_profiling.record.lines import Line
from lightning_forge_profiling.report.json_schema import schema_of

SHIPPED: Final = Path(__file__).with_name("record.schema.json")
"""The copy in the package. `python -m lightning_forge_profiling.record.json_schema > FILE` renews it."""


def record_schema_json() -> bytes:
    """The schema of one line."""
    return schema_of(Line, "a line of forge-profiling's forge_record/rankN.jsonl")


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(record_schema_json())
