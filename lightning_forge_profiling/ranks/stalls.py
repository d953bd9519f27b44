"""Whether this rank's training thread is stalled, where, and in which collective: a watchdog that only reports."""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import process
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from lightning_forge_profiling.host import ThreadCounts, is_traced, moved_bytes, process_state, thread_counts
from lightning_forge_profiling.names import FIRST_STEP, STEPS, hook_region
from lightning_forge_profiling.ranks.stacks import (
    StacksFile,
    called,
    frames_of,
    innermost,
    kind_of,
    lines_of,
)
from lightning_forge_profiling.schema import Stall

# by backend; a build of PyTorch has those of its backends
_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

_LONGEST: Final = 200  # characters of sizes


class Pending(NamedTuple):
    """A collective that was entered and is not completed."""

    name: str  # such as `all_reduce`
    number: int  # in its process group, from 1
    group: str
    shape: str
    since: float  # Unix time in seconds


class Collectives(NamedTuple):
    """What a process has entered."""

    pending: Pending | None  # the one that was entered first
    entered: dict[str, int]  # the number of the last one, by process group


def read_collectives(training: int) -> Collectives:
    """What this process has entered, without what other Python threads than the training one wait in.

    PyTorch's Flight Recorder records NCCL's and gloo's collectives. A dump halts Python threads, for 70 to 120 ms in a
    large run: it is asked for only where a rank is stalled.
    """
    others = {str(thread.ident) for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}  # noqa: SLF001
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        with suppress(Exception):  # the layout is PyTorch's own
            dump = getattr(torch._C._distributed_c10d, name)  # noqa: SLF001
            entries += json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
    collectives = Collectives(None, {})
    with suppress(Exception):
        collectives = collectives_of(entries, others - {str(training)})
        # a group in which nothing was entered has no entry
        whole = min((entry["record_id"] for entry in entries), default=0) == 0
        for group in torch.distributed.distributed_c10d._world.pg_names.values() if whole else ():  # noqa: SLF001
            collectives.entered.setdefault(str(group), 0)
    return collectives


def collectives_of(entries: list[dict[str, Any]], but: Container[str]) -> Collectives:
    """What a process has entered by the entries of a dump, without those of some threads."""
    entered: dict[str, int] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            group = str(entry["process_group"][0])
            entered[group] = max(entered.get(group, 0), int(entry["collective_seq_id"]))
    pending = min(_pending(entries, but), key=lambda one: (one.since, one.number), default=None)
    return Collectives(pending, entered)


def _pending(entries: list[dict[str, Any]], but: Container[str]) -> Iterator[Pending]:
    for entry in entries:
        if not entry["retired"] and entry["state"] != "completed" and entry.get("thread_id") not in but:
            yield Pending(
                name=entry["profiling_name"].rpartition(":")[2].removeprefix("_"),
                number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
                group=str(entry["process_group"][0]),
                shape=", ".join(" x ".join(map(str, sizes)) for sizes in entry["input_sizes"])[:_LONGEST],
                since=entry["time_created_ns"] / 1e9,
            )


LEAST_S = 30.0
_LEAST_AT_END_S: Final = 5.0  # in a step that never ends, since the fit does
_OF_USUAL: Final = 10.0
PATIENT_S = 600.0
_OF_LONGEST: Final = 10.0

# looks come once a second. After a longer pause the machine was suspended, the process stopped, or the lock held.
_PAUSE_S: Final = 15.0
_ASLEEP_S: Final = 1.0
_SHARE: Final = 0.05  # of a core, from which a thread computes
_BYTES: Final = 1 << 20  # per look, from which a process reads or writes: logs and progress bars are less
_TIMES: Final = 50  # per second that a thread is given a core: in a transfer it is more, for a lock that is polled less


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What tells whether training moves, read without stopping it."""

    step: int  # number of steps that ended
    parts: tuple[str, ...]  # the open parts of the ledger, outermost first
    changed_ns: int  # when the ledger's part changed last, by `time.perf_counter_ns`


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Readings of a process at one moment."""

    at_s: float  # the monotonic clock
    asleep_s: float = 0.0  # for how long the machine has been suspended, in all
    step: int = 0  # number of steps that ended
    part: str = ""  # what may take long without a sign of life, such as `validation`; "" within a step
    changes: object = None  # anything that is another one once training has moved, such as the stack
    used_s: float = 0.0  # CPU time, and waits for a core, of the training thread and of what it waits for
    times: int = 0  # how often the training thread was given a core
    bytes: int = 0  # what the process has read and written


class Stillness:
    """How long nothing in a process has moved, and from when on that is a hang.

    Within a step that is 30 s, ten times the usual step, and the longest time between the ends of two steps so
    far. In parts that may take long, such as validation, it is ten minutes, and ten times the longest of the part.
    """

    def __init__(self) -> None:
        self.same_s = 0.0  # for how long no step ended and the stack was the same
        self.still_s = 0.0  # for how long, besides, nothing was computed
        self._before: Look | None = None
        self._spent_s: defaultdict[str, float] = defaultdict(float)  # since the last step ended, by part
        self._longest_s: dict[str, float] = {}
        self._steps, self._steps_s = 0, 0.0

    @property
    def limit_s(self) -> float:
        """The time without a movement that is a hang, in the present part."""
        part = "" if self._before is None else self._before.part
        longest_s = self._longest_s.get(part, 0.0)
        return max(PATIENT_S, _OF_LONGEST * longest_s) if part else self.step_limit_s

    @property
    def step_limit_s(self) -> float:
        """The same within a step."""
        return max(LEAST_S, self._uncommon_s)

    @property
    def at_end_s(self) -> float:
        """For how long training has stood in the step under way if that never ends; 0 if it has not."""
        stalled = self._before is not None and not self._before.part
        return self.still_s if stalled and self.still_s >= max(_LEAST_AT_END_S, self._uncommon_s) else 0.0

    @property
    def _uncommon_s(self) -> float:
        usual_s = self._steps_s / self._steps if self._steps else 0.0
        return max(self._longest_s.get("", 0.0), _OF_USUAL * usual_s)

    def add(self, look: Look) -> None:
        """Take the readings of another moment."""
        before, self._before = self._before, look
        seconds = 0.0 if before is None else look.at_s - before.at_s
        if before is None or seconds > _PAUSE_S or look.asleep_s - before.asleep_s > _ASLEEP_S:
            self.restart()
            return
        self._spent_s[before.part] += seconds
        if look.step != before.step:
            self._end_steps(look.step - before.step)
        moves = (look.step, look.part, look.changes) != (before.step, before.part, before.changes)
        moves |= look.bytes - before.bytes > _BYTES
        computes = look.used_s - before.used_s > _SHARE * seconds or look.times - before.times > _TIMES * seconds
        self.same_s = 0.0 if moves else self.same_s + seconds
        self.still_s = 0.0 if moves or computes else self.still_s + seconds

    def restart(self) -> None:
        """Count from now on, as after a pause in which nothing can have moved."""
        self.same_s = self.still_s = 0.0
        self._spent_s.clear()

    def _end_steps(self, steps: int) -> None:
        self._steps += max(steps, 0)
        self._steps_s += self._spent_s[""]
        self._spent_s[""] += self._spent_s[FIRST_STEP]  # the second one may take as long
        for part, seconds in self._spent_s.items():
            self._longest_s[part] = max(self._longest_s.get(part, 0.0), seconds)
        self._spent_s.clear()


def patient_part(parts: Sequence[str]) -> str:
    """The open part of the ledger that may take long without a sign of life; "" within a step.

    Examples:
        >>> patient_part(("steps", "validation", "callback/EMA.on_validation_end"))
        'validation'
        >>> patient_part(("steps", "callback/EMA.on_train_batch_end"))
        ''
    """
    long = (part for part in parts if part != STEPS and (not hook_region(part) or "epoch" in part))
    return next(long, "") if parts else "outside the loop"


class StallWatch:
    """Looks at the training thread about once a second, from another thread."""

    def __init__(self, thread_id: int, native_id: int, stacks: StacksFile) -> None:
        self._thread_id, self._native_id, self._stacks = thread_id, native_id, stacks
        self._stillness = Stillness()
        self._step = -1
        self._since_s = 0.0  # when it ended
        # from 30 s without a step's end on: that time, and the innermost line of the user's code
        self.where = 0.0, ""
        # for how long it stood if the fit ended now, and that line; 0 if it moves
        self.at_end = 0.0, ""
        self._ask_s = 0.0  # how long a thread that computes has to look the same until the Flight Recorder is asked
        self._found: dict[str, Any] | None = None  # the fields of `Stall`
        self._asked: int | None = None  # where a worker's stacks begin

    def stall(self, progress: Progress) -> Stall | None:
        """Where the training thread is stalled; None while it moves."""
        frame = sys._current_frames().get(self._thread_id) if progress.step == self._step else None  # noqa: SLF001
        if frame is None:
            self._step, self._since_s = progress.step, time.monotonic()
        no_step_s = time.monotonic() - self._since_s
        self.where = (no_step_s, innermost(lines_of(frame)).place) if no_step_s >= LEAST_S and frame else (0.0, "")
        stillness = self._stillness
        stillness.add(self._reading(progress, frame))
        at_end_s, limit_s = stillness.at_end_s, stillness.limit_s
        self.at_end = (at_end_s, innermost(lines_of(frame)).place) if at_end_s and frame else (0.0, "")
        if frame is None or stillness.same_s < limit_s:
            self._found, self._asked, self._ask_s = None, None, limit_s
        elif self._found is not None:
            self._see_worker(self._found)
        elif stillness.still_s >= limit_s:
            self._find(frame, progress.step, read_collectives(self._thread_id))
        elif stillness.same_s >= self._ask_s:  # NCCL keeps a core busy while it waits
            self._ask_s = 2 * stillness.same_s
            collectives, pending_s = read_collectives(self._thread_id), 0.0
            if collectives.pending is not None:
                pending_s = time.time() - collectives.pending.since
            elif innermost(lines_of(frame)).waits:  # for the others to set up a new group, of which there is no entry
                pending_s = stillness.same_s
            if pending_s >= limit_s:
                self._find(frame, progress.step, collectives)
        return None if self._found is None else Stall(seconds=stillness.same_s, **self._found)

    def _reading(self, progress: Progress, frame: FrameType | None) -> Look:
        """The readings of this moment; without a frame those that tell of a step's end."""
        at_s = time.monotonic()
        look = Look(at_s=at_s, asleep_s=_boot_s() - at_s, step=progress.step, part=patient_part(progress.parts))
        if frame is None:
            return look
        frames = list(frames_of(frame))
        kinds = {kind_of(each.f_code.co_filename) for each in frames}
        # of all that multiprocessing started: `active_children` would reap those that have ended
        workers = list(map(_pid, list(process._children))) if "loader" in kinds else []  # type: ignore[attr-defined]  # noqa: SLF001
        states = [process_state(pid) for pid in workers]
        unknown = ThreadCounts(at_s, 0)  # as if it computed
        counts = thread_counts(os.getpid(), self._native_id) or unknown
        return replace(
            look,
            part="compile" if "compile" in kinds else look.part or ("subprocess" if "subprocess" in kinds else ""),
            changes=(
                progress.changed_ns,
                hash(tuple((id(each.f_code), each.f_lasti) for each in frames)),
                sum(moved_bytes(pid)[0] for pid in workers) >> 10,  # a worker that waits reads nothing
            ),
            used_s=counts.used_s + sum(state.used_s for state in states if state is not None),
            times=counts.times,
            bytes=sum(moved_bytes("self")) - sum(moved_bytes("thread-self")),
        )

    def _find(self, frame: FrameType, step: int, collectives: Collectives) -> None:
        """The training thread is stalled: find out where, unless a debugger holds it."""
        lines, pending = lines_of(frame), collectives.pending
        if any(kind_of(line.file) == "debugger" for line in lines) or is_traced():
            self._stillness.restart()
            return
        end = innermost(lines)
        line = next(islice(frames_of(frame), end.depth if end.place else 0, None))
        call = called(line.f_code, line.f_lasti) if end.place else line.f_code.co_name
        found = {"place": end.place, "call": call, "waits": end.waits, "entered": collectives.entered}
        if pending is not None:
            found |= {"waits": True, "collective": pending.name, "number": pending.number}
            found |= {"group": pending.group, "shape": pending.shape}
        self._found = found
        self._stacks.write(f"training is stalled in step {step}")
        if not found["waits"] and (awaited := _awaited(frame)) is not None:
            number, worker = awaited
            pid = _pid(worker)
            state = process_state(pid)
            what = "" if state is None else _STATES.get(state.letter, "")
            found["worker"] = f"loader worker {number} (pid {pid}){what}"
            forked = state is not None and state.parent == os.getpid()
            self._asked = self._stacks.ask_child(pid) if forked else None

    def _see_worker(self, found: dict[str, Any]) -> None:
        """Take the place from the stacks of the worker, if it has written them."""
        if self._asked is not None:
            lines = self._stacks.child_lines(found["worker"], self._asked)
            if lines:
                found["place"], self._asked = innermost(lines).place, None


# what a letter of the system's says of a process, behind its name
_STATES: Final = {"D": ", which waits for a disk", "T": ", which was stopped", "Z": ", which has ended"}
_FETCHES: Final = {"_try_get_data", "_get_data", "_next_data"}


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _pid(worker: Any) -> int:
    return int(worker._popen.pid)  # noqa: SLF001  (`pid` may reap it)


def _awaited(frame: FrameType) -> tuple[int, Any] | None:
    """The worker, and its number, that a loader waits for."""
    for each in frames_of(frame):
        if kind_of(each.f_code.co_filename) == "loader" and each.f_code.co_name in _FETCHES:
            with suppress(Exception):  # the names are PyTorch's own
                loader = each.f_locals["self"]
                number = int(loader._task_info[loader._rcvd_idx][0])  # noqa: SLF001
                return number, loader._workers[number]  # noqa: SLF001
    return None
