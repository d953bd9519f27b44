"""Records that the user names, as the commands on them find and call them."""

from pathlib import Path

from lightning_forge_profiling.cli.output import warn
from lightning_forge_profiling.record.reader import RunRecord, records_at


def find_record(path: Path) -> tuple[Path, str]:
    """The folder of the newest record at a path, and what to call it.

    Raises:
        RecordError: there is none.
        OSError: the folder cannot be listed.
    """
    newest, *others = records_at(path)
    return newest, f"{newest} (newest of {len(others) + 1} records)" if others else str(newest)


def warn_of_problems(record: RunRecord) -> None:
    """Say in one line on standard error what could not be read."""
    if record.problems:
        warn("; ".join(record.problems))
