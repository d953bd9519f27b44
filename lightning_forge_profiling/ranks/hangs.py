"""Whether this rank is stalled, and which ranks of its machine are silent: gone, stopped, or blocked.

Each rank sends a datagram a second to the next lower one of its machine, the lowest to the highest, by sockets that
have names and no files. While a call in C holds the interpreter lock, no thread of its process runs Python. Then the
neighbour misses the datagrams, and has faulthandler's handler write the stack of a training thread that waits.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final, Literal, NamedTuple

from lightning_forge_profiling.host import moved_bytes, process_state, thread_counts
from lightning_forge_profiling.names import stacks_name
from lightning_forge_profiling.ranks.stacks import (
    Line,
    StacksFile,
    append_stacks,
    ask_thread,
    innermost,
    is_in_step,
    parse_dump,
    read_dump,
)
from lightning_forge_profiling.ranks.stalls import Look, Progress, StallWatch, Stillness
from lightning_forge_profiling.schema import SilentRank, Stall

_SILENT_S: Final = 5.0
_LONG_S: Final = 10.0
_PAUSE_S: Final = 15.0  # of this rank's own: then it cannot tell for how long others were silent
_SEARCH_S: Final = 10.0
_MOST: Final = 1024  # datagrams that are read in a row
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group, which the kernel adds
_NOBODY: Final = _CREDENTIALS.pack(0, -1, -1)
_DESCRIPTOR: Final = struct.Struct("i")
_NONE: Final = _DESCRIPTOR.pack(-1)
_LAYOUT: Final = struct.Struct("!5Q?2d")


class Life(NamedTuple):
    """What a rank says to its neighbour."""

    rank: int
    pid: int
    started: int  # when the process was: in ticks from boot
    training: int  # native id of the training thread
    signal: int  # that has the stack of the thread written that gets it; 0 if there is none
    ended: bool = False
    limit_s: float = 0.0  # the time without a movement that is a hang, in the part of the ledger it is in
    step_limit_s: float = 0.0  # the same within a step


class _Peer:
    """A rank that is heard here."""

    def __init__(self) -> None:
        self.memory = -1  # that its stacks are written to, shared with it

    def hear(self, life: Life, now: float) -> None:
        """It lives; its silence, if there is one, begins now."""
        self.life, self.heard_s = life, now
        self.stillness = Stillness()
        self.asked: int | None = None  # where its stack will begin
        self.lines: list[Line] = []

    def close(self) -> None:
        """Close the memory."""
        if self.memory >= 0:
            os.close(self.memory)

    def silent(self, now: float, folder: Path) -> SilentRank | None:
        """What the system says of it; None if it has been heard lately."""
        life, seconds = self.life, now - self.heard_s
        process = self._process(seconds, now, folder / stacks_name(life.rank))
        if not process:
            return None
        place, _, waits = innermost(self.lines)
        return SilentRank(rank=life.rank, pid=life.pid, process=process, seconds=seconds, place=place, waits=waits)

    def _process(
        self, seconds: float, now: float, stacks: Path
    ) -> Literal["", "gone", "stopped", "blocked", "running"]:
        state = process_state(self.life.pid)
        if state is None or state.exits or state.started != self.life.started:
            return "gone"
        if seconds < _SILENT_S:
            return ""
        if state.letter == "T":
            return "stopped"
        blocked = state.letter != "t" and self._is_blocked(now, stacks)  # `t`: by a debugger
        return "blocked" if blocked else "running" if seconds > _LONG_S else ""

    def _is_blocked(self, now: float, file: Path) -> bool:
        """Whether its training thread has used no core for too long, by another look."""
        life, counts = self.life, thread_counts(self.life.pid, self.life.training)
        if counts is None:
            return False
        look = Look(at_s=now, used_s=counts.used_s, times=counts.times, bytes=sum(moved_bytes(life.pid)))
        self.stillness.add(look)
        if self.stillness.still_s < life.step_limit_s:
            return False
        self._find(file)
        # what it said last may be of a moment before it came into a step
        return self.stillness.still_s >= life.limit_s or is_in_step(self.lines)

    def _find(self, file: Path) -> None:
        """Have the stack written, or read it."""
        life = self.life
        if self.asked is None:
            self.asked = ask_thread(life.pid, life.training, life.signal, self.memory)
        elif not self.lines:
            text = read_dump(self.memory, self.asked)
            self.lines = parse_dump(text)
            if self.lines:
                append_stacks(file, f"rank {life.rank} runs no Python", text)


class Neighbours:
    """Says that this rank lives, and watches those that say it here. No method raises or waits."""

    def __init__(self, folder: Path, run: str, rank: int, world_size: int, *, memory: int) -> None:
        self._folder, self._run, self._memory = folder, run, memory
        self._given: int | None = None  # the rank that shares the memory
        self._order = [*range(rank - 1, -1, -1), *range(world_size - 1, rank, -1)]
        self._target: int | None = None
        self._search_s = self._beat_s = 0.0
        self._pause_s = 1.0
        self._peers: dict[int, _Peer] = {}
        self._socket: socket.socket | None = None
        with suppress(OSError, AttributeError):  # only Linux has such sockets
            credentials = socket.SO_PASSCRED
            self._socket = own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.settimeout(0.0)
            own.setsockopt(socket.SOL_SOCKET, credentials, 1)
            own.bind(self._name(rank))

    def beat(self, own: Life) -> tuple[SilentRank, ...]:
        """Say that this rank lives; returns those of this machine that should have said so and did not."""
        now = time.monotonic()
        if self._socket is None:
            return ()
        self._send(self._socket, _LAYOUT.pack(*own), now)
        paused, self._beat_s = now - self._beat_s > _PAUSE_S, now
        for life, memory in self._received(self._socket):
            peer = self._peers.setdefault(life.rank, _Peer())
            peer.hear(life, now)
            if memory >= 0:
                peer.close()
                peer.memory = memory
            if life.ended:
                self._peers.pop(life.rank).close()
        for peer in self._peers.values() if paused else ():
            peer.hear(peer.life, now)
        found = (peer.silent(now, self._folder) for peer in self._peers.values())
        return tuple(one for one in found if one is not None)

    def close(self) -> None:
        """Close the socket, and what others share."""
        if self._socket is not None:
            self._socket.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _name(self, rank: int) -> bytes:
        return f"\0forge-profiling-{self._run}-{rank}".encode()

    def _send(self, own: socket.socket, message: bytes, now: float) -> None:
        candidates = [] if self._target is None else [self._target]
        if self._target is None and now < self._search_s:
            return
        for rank in chain(candidates, self._order):
            shared = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(self._memory))]
            try:
                own.sendmsg([message], shared if self._memory >= 0 and self._given != rank else [], 0, self._name(rank))
            except BlockingIOError:  # it does not read them, now
                self._target = rank
                return
            except OSError:
                continue
            self._target = self._given = rank
            return
        self._target, self._search_s = None, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _SEARCH_S)  # others begin a little later

    def _received(self, own: socket.socket) -> Iterator[tuple[Life, int]]:
        """What came from processes of this user whose ids are the same here as there, and the memory they share."""
        space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_DESCRIPTOR.size)
        with suppress(OSError):  # there is no more
            for _ in range(_MOST):
                message, extra, _, _ = own.recvmsg(_LAYOUT.size, space, socket.MSG_CMSG_CLOEXEC)
                parts = {kind: data for _, kind, data in extra}
                pid, user, _ = _CREDENTIALS.unpack(parts.get(socket.SCM_CREDENTIALS, _NOBODY))
                [memory] = _DESCRIPTOR.unpack(parts.get(socket.SCM_RIGHTS, _NONE))
                life = Life(*_LAYOUT.unpack(message)) if len(message) == _LAYOUT.size else None
                if life is not None and user == os.getuid() and pid == life.pid:
                    yield life, memory
                elif memory >= 0:
                    os.close(memory)


class HangWatch(StallWatch):
    """All that a rank says of hangs: whether it is stalled, and which ranks of its machine are silent.

    Made by the training thread before the fit has loaders; another thread looks about once a second.
    """

    def __init__(self, folder: Path, run: str, rank: int, world_size: int) -> None:
        stacks = StacksFile(folder / stacks_name(rank))
        super().__init__(threading.get_ident(), threading.get_native_id(), stacks)
        self._neighbours = Neighbours(folder, run, rank, world_size, memory=stacks.memory)
        own = process_state(os.getpid())
        started = 0 if own is None else own.started
        self._life = Life(rank, os.getpid(), started, training=threading.get_native_id(), signal=stacks.signal)

    def look(self, progress: Progress, *, ended: bool) -> tuple[Stall | None, tuple[SilentRank, ...]]:
        """Where this rank is stalled, None while it moves; and the ranks of this machine that are silent."""
        stall = None if ended else self.stall(progress)
        limit_s, step_limit_s = self._stillness.limit_s, self._stillness.step_limit_s
        return stall, self._neighbours.beat(
            self._life._replace(ended=ended, limit_s=limit_s, step_limit_s=step_limit_s)
        )

    def close(self) -> None:
        """Leave neither handler nor socket behind, nor an empty file."""
        self._neighbours.close()
        self._stacks.close()
