"""How the pulses of all ranks reach rank 0, without a collective: through their group's store, else through files."""

import os
import re
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from lightning_forge_profiling.names import pulse_name
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.safe_files import make_own_folder, read_regular, write_whole

if TYPE_CHECKING:  # there are builds of PyTorch without it
    from torch._C._distributed_c10d import TCPStore

_log = plain_logger(__name__)
_T = TypeVar("_T")

_LIMIT_S: Final = 3.0
_CONNECT_S: Final = 1.0  # without the store's first answer, so that a busy store takes no part in it
_LONGEST_PAUSE_S: Final = 60.0
_DESCRIPTORS: Final = Path("/proc/self/fd")


def group_store() -> "TCPStore | None":
    """The store that the default process group was made with; None if there is none or it is of another kind."""
    with suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public way to it)
        while isinstance(store, torch.distributed.PrefixStore):  # type: ignore[attr-defined]
            store = store.underlying_store
        if isinstance(store, torch.distributed.TCPStore):  # type: ignore[attr-defined]
            return store
    return None


class StoreClient:
    """A connection of its own to a store. No call raises, or takes much longer than the limit.

    After a failed call the store is left alone until it answers again and a pause of 1, 2, 4, ... 60 s is over. If it
    closed the connection or cannot be reached, it is never asked again.
    """

    def __init__(self, store: "TCPStore", prefix: str, *, limit_s: float = _LIMIT_S) -> None:
        self._kind, self._server = type(store), (store.host, store.port)
        self._prefix, self._limit_s = prefix, limit_s
        self._writers = self._key("writers")  # names those that have a value: `get` of another key would wait for it
        self._announced = self._key("announced")
        self._listed: set[str] = set()
        self._store: TCPStore | None = None
        self._socket: socket.socket | None = None
        self._pause_s, self._quiet_until = 1.0, 0.0
        self._failed = self._gone = self._interrupted = False
        self._wake = threading.Event()

    def publish(self, writer: str, value: bytes) -> bool:
        """Replace a writer's value; returns whether the store has it."""

        def publish(store: "TCPStore") -> bool:
            store.set(self._key(writer), value.decode())
            if writer not in self._listed:
                store.append(self._writers, f"{writer},")  # type: ignore[attr-defined]  # missing in PyTorch's stub
                self._listed.add(writer)
            return store.check([self._key(writer)])  # the other two have no answer, which one that hangs would not give

        return self._call(publish) is True

    def read(self) -> list[bytes] | None:
        """The values of all writers; None if the store cannot be read."""

        def read(store: "TCPStore") -> list[bytes]:
            writers = self._known(store)
            return store.multi_get([self._key(writer) for writer in writers]) if writers else []

        return self._call(read)

    def announce(self, value: bytes) -> None:
        """Replace what all ranks can read."""
        self._call(lambda store: store.set(self._announced, value.decode()))

    def announced(self) -> bytes | None:
        """What was announced last; None if nothing was, or the store cannot be read."""
        return self._call(lambda store: store.get(self._announced) if store.check([self._announced]) else None)

    def clear(self) -> None:
        """Remove the values of all writers, and what was announced."""

        def clear(store: "TCPStore") -> None:
            for key in (*map(self._key, self._known(store)), self._writers, self._announced):
                store.delete_key(key)

        self._call(clear)

    def interrupt(self) -> None:
        """End a call under way in another thread. The store is not asked again."""
        self._interrupted = True
        self._wake.set()
        if (own := self._socket) is not None:
            _shut_down(own)

    def close(self) -> None:
        """Close the connection."""
        self._gone, self._store = True, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _known(self, store: "TCPStore") -> list[str]:
        if not store.check([self._writers]):
            return []
        return sorted({*store.get(self._writers).decode().split(",")} - {""})

    def _call(self, call: "Callable[[TCPStore], _T]") -> _T | None:
        try:
            store = self._ready()
            return None if store is None else call(store)
        except OSError as exc:  # no error of PyTorch is one
            _log.debug("The ranks write files, the store is gone: %s", exc)
            self.close()
        except Exception as exc:
            _log.debug("The ranks write files for now, the store does not answer.", exc_info=exc)
            self._failed = True
            self._quiet_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return None

    def _ready(self) -> "TCPStore | None":
        """The store, if it can be asked now. Raises OSError if it is gone."""
        if self._gone or (self._socket is not None and not self._answers(self._socket)):
            return None
        if self._socket is None or self._failed:
            self._connect()
        return self._store

    def _answers(self, own: socket.socket) -> bool:
        """Whether the store has answered all that it was asked. Raises OSError if it closed the connection."""
        unread = _unread(own)
        return not self._failed or (unread and time.monotonic() >= self._quiet_until)

    def _connect(self) -> None:
        """Connect anew. Raises OSError."""
        made: list[TCPStore] = []
        limit, before = timedelta(seconds=_CONNECT_S), _sockets()

        def make() -> None:
            with suppress(Exception):
                made.append(self._kind(*self._server, timeout=limit, wait_for_workers=False))
            self._wake.set()

        # in a thread of its own: the constructor waits for the store's first answer without a limit
        thread = threading.Thread(target=make, name="forge-ranks-connect", daemon=True)
        self._wake.clear()
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        thread.start()
        self._wake.wait(self._limit_s)
        if not made:
            thread.join(1.1 * _CONNECT_S)  # before that it would try again
        new = _connected_to(self._server[1], _sockets(), before)
        if len(new) == 1 and made and not self._interrupted:
            self._use(made[0], new[0])
            return
        for one in new:
            if len(new) == 1:  # of two one is another thread's, which must keep it
                _shut_down(one)  # ends the constructor
            one.close()
        raise ConnectionError(f"no connection to {self._server[0]}:{self._server[1]} that is surely this thread's")

    def _use(self, store: "TCPStore", own: socket.socket) -> None:
        if self._socket is not None:
            self._socket.close()
        self._store, self._socket, self._listed, self._failed = store, own, set(), False
        store.set_timeout(timedelta(seconds=self._limit_s))
        timeval = struct.pack("ll", int(self._limit_s), int(self._limit_s % 1 * 1e6))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode. Raises OSError on a system that does not list them."""
    found = {}
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(path.name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(path.name)
    return found


def _connected_to(port: int, sockets: Mapping[int, int], but: Container[int]) -> list[socket.socket]:
    """New descriptors of the sockets that are connected to a port, without those of some inodes."""
    found = []
    for inode, descriptor in sockets.items():
        if inode not in but:
            with suppress(OSError):  # closed meanwhile
                one = socket.socket(fileno=os.dup(descriptor))
                address: object = None
                with suppress(OSError):  # not connected
                    address = one.getpeername()
                if isinstance(address, tuple) and address[1] == port:
                    found.append(one)
                else:
                    one.close()
    return found


def _unread(own: socket.socket) -> bool:
    """Whether the store has answered something that was not read. Raises OSError if it closed the connection."""
    try:
        if not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise ConnectionResetError("it has closed the connection")
    except BlockingIOError:
        return False
    return True


def _shut_down(own: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        own.shutdown(socket.SHUT_RDWR)


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
