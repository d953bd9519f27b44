"""How the pulses of all ranks reach rank 0, without a collective: through their group's store, else through files."""

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from lightning_forge_profiling.names import pulse_name
from lightning_forge_profiling.ranks.store import StoreClient, group_store
from lightning_forge_profiling.safe_files import make_own_folder, read_regular, write_whole

_MANY: Final = 64  # of more ranks those of a host share one connection to the store
_FILES_S: Final = 5.0  # between two looks at the files beside a store, and between the files of many ranks
_LIVE_S: Final = 10.0
_MOST_BYTES: Final = 1 << 16  # of one message
_ANNOUNCED: Final = "announced"
_NAME: Final = re.compile(pulse_name(r"(\d{1,9})"))


class Channel:
    """Takes the latest message of this rank, a line of UTF-8, and gives those of all.

    No call raises or waits for another rank, and none takes much longer than the store's time limit.
    """

    def __init__(
        self, folder: Path, rank: int, *, store: StoreClient | None, host: "HostFolder | None", many: bool
    ) -> None:
        self._folder, self._rank, self._store, self._host, self._many = folder, rank, store, host, many
        self._write_at = self._look_at = 0.0  # by the monotonic clock

    def send(self, message: bytes) -> None:
        """Replace this rank's message."""
        messages = {self._rank: message}
        if self._host is not None:
            with suppress(OSError):  # this rank then sends its own
                messages = self._host.exchange(message)
        joined = b"\n".join(messages.values())
        if not messages or (self._store is not None and self._store.publish(str(self._rank), joined)):
            return
        now = time.monotonic()
        if not self._many or now >= self._write_at:
            self._write_at = now + _FILES_S
            for rank, each in messages.items():
                with suppress(OSError):  # such as a folder that is on another host
                    write_whole(self._folder / pulse_name(rank), each)

    def receive(self) -> list[bytes]:
        """What ranks have sent, in no order; besides a rank's latest message it may have earlier ones."""
        published = None if self._store is None else self._store.read()
        messages = [message for joined in published or () for message in joined.split(b"\n")]
        now = time.monotonic()
        if (published is None and not self._many) or now >= self._look_at:  # a store may not hear of every rank
            self._look_at = now + _FILES_S
            messages += _messages(self._folder).values()
        return messages

    def announce(self, message: bytes) -> None:
        """Give all ranks a message of rank 0's, in place of the one before."""
        if self._store is not None:
            self._store.announce(message)

    def announced(self) -> bytes | None:
        """The latest message of rank 0's to all; None if the store has none."""
        host = self._host
        with suppress(OSError):
            if host is not None and not host.passes:
                return host.announced()
        message = None if self._store is None else self._store.announced()
        if host is not None and message is not None:
            with suppress(OSError):
                host.announce(message)
        return message

    def interrupt(self) -> None:
        """End a call under way in another thread; from then on there are only files."""
        if self._store is not None:
            self._store.interrupt()

    def close(self) -> None:
        """Leave nothing behind in the store and on the host."""
        if self._store is not None:
            if self._rank == 0:
                self._store.clear()
            self._store.close()
        if self._host is not None:
            with suppress(OSError):
                self._host.close()


class HostFolder:
    """The messages of the ranks of one host, in a folder on it; the lowest rank that is live passes all of them on."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._own = folder, rank, folder / pulse_name(rank)
        self.passes = True  # whether this rank passes on what others have left

    def exchange(self, message: bytes) -> dict[int, bytes]:
        """Leave this rank's message; returns those that it has to pass on, by rank. Raises OSError."""
        make_own_folder(self._folder)
        write_whole(self._own, message)
        self.passes = min(self._live(self._own.stat().st_mtime), default=self._rank) >= self._rank
        return _messages(self._folder) if self.passes else {}

    def announce(self, message: bytes) -> None:
        """Pass on what rank 0 announces. Raises OSError."""
        write_whole(self._folder / _ANNOUNCED, message)

    def announced(self) -> bytes:
        """What was passed on. Raises OSError."""
        return read_regular(self._folder / _ANNOUNCED, _MOST_BYTES)

    def close(self) -> None:
        """Leave the last message to the ranks that are live; the last one removes the folder. Raises OSError."""
        now = self._own.stat().st_mtime
        os.utime(self._own, (0, 0))  # no longer live
        if not self._live(now):
            shutil.rmtree(self._folder)

    def _live(self, now: float) -> list[int]:
        live = []
        for rank, path in _files(self._folder).items():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime > now - _LIVE_S:
                    live.append(rank)
        return live


def open_channel(folder: Path, run: str, rank: int, world_size: int) -> Channel:
    """The channel of a run, whose id is another one after an elastic restart. It connects when it is first used."""
    many, store, host = world_size > _MANY, group_store(), None
    if many:
        with suppress(OSError):  # there is no temporary folder
            host = HostFolder(Path(tempfile.gettempdir(), f"forge-ranks-{run}"), rank)
    client = None if store is None else StoreClient(store, f"forge_profiling/{run}")
    return Channel(folder, rank, store=client, host=host, many=many)


def _files(folder: Path) -> dict[int, Path]:
    """The files of messages in a folder, by rank. Raises OSError."""
    return {int(named[1]): path for path in folder.iterdir() if (named := _NAME.fullmatch(path.name))}


def _messages(folder: Path) -> dict[int, bytes]:
    """The messages in a folder, in order of the ranks; {} for none."""
    messages: dict[int, bytes] = {}
    with suppress(OSError):
        for rank, path in sorted(_files(folder).items()):
            with suppress(OSError):
                messages[rank] = read_regular(path, _MOST_BYTES)
    return messages
