"""The JSON Schema of `summary.json`, made from the dataclasses that are written to it."""

from pathlib import Path
from typing import Final

from lightning_forge_profiling.results.analysis import Analysis
from lightning_forge_profiling.results.json_layout import schema_of

# The copy in the package. `python -m lightning_forge_profiling.report.json_schema > FILE` renews it.
SHIPPED: Final = Path(__file__).with_name("summary.schema.json")


def schema_json() -> bytes:
    """The schema of `summary.json`."""
    return schema_of(Analysis, "forge-profiling summary.json")


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(schema_json())
