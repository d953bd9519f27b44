"""`forge-profiling schema`: the JSON Schema of `summary.json`, or of a record's lines."""

import argparse
from importlib.resources import files

from lightning_forge_profiling.cli.output import write_json


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of summary.json, or of a record's lines",
        description="Print the JSON Schema (2020-12) of summary.json, which is also what analyze --json prints.",
        epilog="examples:\n  forge-profiling schema > summary.schema.json\n"
        "  forge-profiling schema --record > record.schema.json",
    )
    parser.add_argument("--record", action="store_true", help="that of a line of forge_record/rankN.jsonl instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    room = "record" if arguments.record else "report"
    name = "record.schema.json" if arguments.record else "summary.schema.json"
    write_json(files("lightning_forge_profiling").joinpath(room, name).read_bytes())
    return 0
