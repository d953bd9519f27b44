"""`forge-profiling schema`: the JSON Schema of `summary.json`."""

import argparse
from importlib.resources import files

from lightning_forge_profiling.cli.output import write_json

__all__ = ["add_to"]


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of summary.json",
        description="Print the JSON Schema (2020-12) of summary.json, which is also what analyze --json prints.",
        epilog="example:\n  forge-profiling schema > summary.schema.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    write_json(files("lightning_forge_profiling.report").joinpath("summary.schema.json").read_bytes())
    return 0
