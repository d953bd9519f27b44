"""A client of the process group's TCPStore whose calls end after a time limit, for a thread beside training.

PyTorch's own client waits for most answers without a limit, and prints a C++ stack for each call that fails. So its
socket is found and given limits by the kernel, and is asked before each call whether the store has closed it.
"""

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from lightning_forge_profiling.plain_text import plain_logger

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
        self._kind, self._host, self._port = type(store), store.host, store.port
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
                made.append(self._kind(self._host, self._port, timeout=limit, wait_for_workers=False))
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
        new = _connected_to(self._port, _sockets(), before)
        if len(new) == 1 and made and not self._interrupted:
            self._use(made[0], new[0])
            return
        for one in new:
            if len(new) == 1:  # of two one is another thread's, which must keep it
                _shut_down(one)  # ends the constructor
            one.close()
        raise ConnectionError(f"no connection to {self._host}:{self._port} that is surely this thread's")

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
            with suppress(OSError):  # closed meanwhile, or not connected
                one = socket.socket(fileno=os.dup(descriptor))
                peer = _peer(one)
                if peer == port:
                    found.append(one)
                else:
                    one.close()
    return found


def _peer(own: socket.socket) -> int | None:
    """The port that a socket is connected to; None if there is none."""
    try:
        address = own.getpeername()
    except OSError:
        return None
    return address[1] if isinstance(address, tuple) else None


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
