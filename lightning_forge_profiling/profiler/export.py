"""Exports a recorded trace to its raw file, and checks that it is whole."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler.profiler import _KinetoProfile

from lightning_forge_profiling.profiler.paths import window_folder
from lightning_forge_profiling.safe_files import open_regular


def export_trace(profiler: _KinetoProfile, raw: Path) -> None:
    """Write the trace of a profiler."""
    with _name_for_kineto(raw) as name:
        profiler.export_chrome_trace(name)
    with suppress(FileNotFoundError), open_regular(raw) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 64, 0))
        if file.read().rstrip().endswith(b"}"):
            return
    raise OSError(f"the trace could not be written whole to {window_folder(raw)} (is the disk full?)")


@contextmanager
def _name_for_kineto(raw: Path) -> Iterator[str]:
    """A name for the raw file that Kineto writes into the JSON unchanged.

    Kineto replaces backslashes in the path, drops line breaks, puts it into the JSON without escaping it, and renames
    its temporary file to the result.
    """
    if json.dumps(str(raw)) == f'"{raw}"':
        yield str(raw)
        return
    with TemporaryDirectory() as plain:
        link = Path(plain) / "window"
        link.symlink_to(raw.parent)
        yield str(link / raw.name)
