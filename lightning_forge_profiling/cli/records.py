"""Finds the record that a command is given, and warns of its problems."""

from pathlib import Path

from lightning_forge_profiling.cli.output import warn
from lightning_forge_profiling.record.reader import RunRecord, records_at


def find_record(path: Path) -> tuple[Path, str]:
    """Folder of the newest record at a path, and its name for messages."""
    newest, *others = records_at(path)
    return newest, f"{newest} (newest of {len(others) + 1} records)" if others else str(newest)


def warn_of_problems(record: RunRecord) -> None:
    """Print what could not be read, as one line on standard error."""
    if record.problems:
        warn("; ".join(record.problems))
