"""`forge-profiling schema`: the JSON Schema of `summary.json`, or of a record's lines."""

import argparse

from lightning_forge_profiling.cli.shared import write_json


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
    write_json(schema_json(of_record=arguments.record))
    return 0


def schema_json(*, of_record: bool = False) -> bytes:
    """The schema of `summary.json`, or of a line of a record, made from what is written to it."""
    from lightning_forge_profiling.json_layout import schema_of  # noqa: PLC0415

    if of_record:
        from lightning_forge_profiling.record.lines import Line  # noqa: PLC0415

        return schema_of(Line, "a line of forge-profiling's forge_record/rankN.jsonl")
    from lightning_forge_profiling.schema import Analysis  # noqa: PLC0415

    return schema_of(Analysis, "forge-profiling summary.json")
