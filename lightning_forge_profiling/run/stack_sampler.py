"""Which line and call of the user's code each part of a fit is in, by samples of the training thread's stack.

Samples say where: how long a part takes is measured at its boundaries.
"""

import _thread
import dis
import gc
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.host import ThreadClock, python_threads_s
from lightning_forge_profiling.names import STARTUP_PROCESS, STEPS
from lightning_forge_profiling.ranks.stacks import (
    TRAINER,
    call_at,
    called,
    is_in_loop,
    is_users,
    library_folders,
    library_name,
    line_at,
    shown_file,
)
from lightning_forge_profiling.run.stack_timer import PERIOD_NS, StackTimer, stack_timer
from lightning_forge_profiling.schema import SampledLine, ShareInterval
from lightning_forge_profiling.timing.counters import Marks

_OFF: Final = 0.1  # a smaller share of the time without a core is not looked into
_ENOUGH: Final = 10  # samples of a part from which its lines are named
_LINES: Final = 5
_MOST: Final = 10_000  # places that are told apart
# samples over which CPU times of threads are compared: the kernel brings those up to date each 1 to 10 ms
_INTERVAL: Final = 12

# in which the thread that calls backward waits for the one that runs it for a GPU
_IN_BACKWARD: Final = "_engine_run_backward"

_LOOPS: Final = ("loops/training_epoch_loop.py", "utils/data/_utils/worker.py")
_COLLATE: Final = "/torch/utils/data/_utils/collate.py"
_MODULE_CALL: Final = "/torch/nn/modules/module.py"
_AROUND: Final = 8  # frames from the function of a region to the user's code that calls it, as by `manual_backward`

_STACK_REGIONS = {
    ("loops", "__next__"): "data",
    ("strategies", "batch_to_device"): "transfer",
    ("strategies", "training_step"): "forward",
    ("strategies", "backward"): "backward",
    ("strategies", "optimizer_step"): "optimizer",
    ("_utils", "fetch"): "data",  # in a loader's worker
}


def stack_region(file: str, function: str) -> str | None:
    """The region whose outermost function in Lightning's code this is; "" for one of validation, None for no such."""
    within = re.split(r"/pytorch/|/pytorch_lightning/|/utils/data/", file)[-1]
    if within == "loops/evaluation_loop.py":
        return ""
    return _STACK_REGIONS.get((within.partition("/")[0], function))


@dataclass(frozen=True, slots=True)
class _Code:
    """What a code object is part of that a stack is searched for."""

    code: CodeType  # kept, so that its identity is no other's
    users: bool = False
    is_loop: bool = False  # whether it is Lightning's loop or that of a loader's worker, around which is the script
    is_fit: bool = False  # whether it is the Trainer's, around which is the call in the script
    # the region of the step that it is the outermost function of; None for other code, "" outside of training
    region: str | None = None


class Place(NamedTuple):
    """Where a thread is in the user's code: the innermost instruction of it, and the function called there.

    Where the Trainer runs none of the user's code, the function is the one that it calls.
    """

    code: CodeType | None = None
    instruction: int = 0
    callee: CodeType | None = None  # None for one in C, or none


_NOWHERE: Final = "", 0, ""


@dataclass
class PlaceTime:
    """How long a thread was in a place."""

    place: Place
    wall_ns: int = 0
    idle_ns: int = 0  # of it, without using or awaiting a core
    samples: int = 0

    @cached_property
    def line(self) -> tuple[str, int, str]:
        """The file, line and function of the place; the function that the Trainer calls, if none is the user's."""
        code = self.place.code
        if code is None:
            return _NOWHERE if self.place.callee is None else ("", 0, library_name(self.place.callee))
        return code.co_filename, line_at(code, self.place.instruction), code.co_qualname

    @cached_property
    def call(self) -> tuple[str, str, bool]:
        """The expression at the place, the name of the function that is called in it, and whether that is in a loop."""
        code, instruction, callee = self.place
        if code is None:
            return "", "", False
        name = called(code, instruction) if callee is None else library_name(callee)
        return call_at(code, instruction), name, is_in_loop(code, instruction)


PlaceSums = dict[tuple[int, int, int], PlaceTime]  # by the identity of its code objects

# by the identity of a code object, as its hash takes microseconds. Most code is nothing special: None, and kept.
_codes: Final[dict[int, _Code | None]] = {}
_others: Final[list[CodeType]] = []


def _classify(code: CodeType) -> _Code | None:
    """What a code object is part of; None if it is nothing special."""
    file = code.co_filename
    if is_users(file):
        found = _Code(code, users=True)
    else:
        found = _Code(
            code,
            is_loop=file.endswith(_LOOPS),
            is_fit=file.endswith(TRAINER) and code.co_name == "_run",
            region=stack_region(file, code.co_name),
        )
    # between a module's call and its forward is nothing that has a name of its own
    special = found if found != _Code(code) or file.endswith(_MODULE_CALL) else None
    _codes[id(code)] = special
    _others.append(code)
    return special


def _outside_collections(frame: FrameType) -> FrameType:
    """The frame that a collection began in: a signal that arrives in one is handled in its callback, if in Python."""
    callbacks = [callback.__code__ for callback in gc.callbacks if hasattr(callback, "__code__")]
    each: FrameType | None = frame if callbacks else None
    for _ in range(_AROUND):
        if each is None:
            break
        if any(each.f_code is code for code in callbacks) and each.f_back is not None:
            frame = each.f_back
        each = each.f_back
    return frame


def find_place(frame: FrameType, *, in_loop: bool) -> tuple[Place, str | None]:
    """The innermost place in the user's code that the Trainer calls, and the region of the step that it is in.

    Args:
        frame: the innermost one.
        in_loop: whether the region is asked for: "other" in none, and None outside of Lightning's loop.
    """
    place, region, callee, called_there, further = Place(), None, None, None, _AROUND
    each: FrameType | None = _outside_collections(frame)
    while each is not None and further:  # a microsecond for each frame, and more the first time
        code = _codes[id(each.f_code)] if id(each.f_code) in _codes else _classify(each.f_code)
        if code is None:
            callee = each.f_code
        elif code.users and place.code is None:
            place = Place(each.f_code, each.f_lasti, callee)
        elif code.is_fit and not in_loop:
            return Place(callee=callee), None
        elif code.is_loop and in_loop:
            region = "other" if region is None else region
            break
        elif region is None and code.region is not None:
            region, called_there = code.region, callee
        if place.code is not None and (region or not in_loop):
            break
        further -= bool(region)
        each = each.f_back
    if place.code is None and called_there is not None and called_there.co_filename.endswith(_COLLATE):
        place = Place(callee=called_there)  # a loader's own work
    return place, region or None


def sampled_lines(sums: PlaceSums, *, loops: bool = True) -> tuple[SampledLine, ...]:
    """The lines of the user's code with most time, with the call that most of it is in; empty for too few samples.

    Args:
        sums: time by place.
        loops: whether to say which are in a loop: no news where the training loop itself is the script's.
    """
    times = [*sums.values()]  # a sample may add to them just now
    whole_ns = sum(each.wall_ns for each in times)
    if sum(each.samples for each in times) < _ENOUGH or not whole_ns:
        return ()
    lines: defaultdict[tuple[str, int, str], list[PlaceTime]] = defaultdict(list)
    for each in times:
        lines[each.line].append(each)
    top = sorted(lines.items(), key=lambda item: -sum(each.wall_ns for each in item[1]))[:_LINES]
    known = [_line(*where, places, whole_ns) for where, places in top if where != _NOWHERE]
    return tuple(line if loops else replace(line, in_loop=False) for line in known)


def _line(file: str, line: int, function: str, times: Sequence[PlaceTime], whole_ns: int) -> SampledLine:
    by_call: Counter[tuple[str, str, bool]] = Counter()
    in_python: dict[tuple[int, int], tuple[str, str, bool]] = {}  # by code and instruction
    for each in sorted(times, key=lambda each: each.place.callee is None):
        made, at = each.call, (id(each.place.code), each.place.instruction)
        known = in_python.get(at)
        if each.place.callee is not None:
            in_python.setdefault(at, made)
        elif known is not None and known[1].rpartition(".")[2] in {made[1], "forward"}:
            made = known  # a sample that comes late finds a function of Python returned, as if it were one of C
        by_call[made] += each.wall_ns
    ns, idle_ns = sum(each.wall_ns for each in times), sum(each.idle_ns for each in times)
    call, callee, in_loop = max(by_call, key=by_call.__getitem__)
    return SampledLine(
        file=shown_file(file) if file else "",
        line=line,
        function=function,
        pct=100 * ns / whole_ns,
        waiting_pct=100 * idle_ns / ns if ns else 0.0,
        call=call,
        callee=callee,
        in_loop=in_loop,
        samples=sum(each.samples for each in times),
    )


class Took(NamedTuple):
    """The time since the sample before."""

    wall_ns: int
    idle_ns: int  # of it, in which the thread neither computed nor waited for a core; 0 if unknown
    waited_ns: int  # of it, in which it waited for a core; 0 if unknown
    now_ns: int


class ThreadTime:
    """The time of the thread that creates this, from one sample to the next, which any thread may take."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.clock: ThreadClock | None = None
        try:
            self.clock = ThreadClock()
            self.clock.ns()
        except (OSError, ValueError):  # as in a sandbox
            self.close()
        self._at = perf_counter_ns(), self._used_ns()
        self._waited_ns = 0 if self.clock is None else self.clock.ns()[1]

    def _used_ns(self) -> int:
        if threading.get_ident() == self._thread:
            return thread_time_ns()
        return 0 if self.clock is None else self.clock.ns()[0]

    def take(self) -> Took:
        """The time since the last call."""
        (then_ns, used_then_ns), self._at = self._at, (perf_counter_ns(), self._used_ns())
        now_ns, used_ns = self._at
        wall_ns, off_ns = now_ns - then_ns, now_ns - then_ns - (used_ns - used_then_ns)
        # the kernel's file takes some 50 us to read between two steps: too much for a thread that computes all the time
        if self.clock is None or off_ns < _OFF * wall_ns:
            return Took(wall_ns, 0, 0, now_ns)
        waited_then_ns, self._waited_ns = self._waited_ns, self.clock.ns()[1]
        waited_ns = min(self._waited_ns - waited_then_ns, off_ns)
        return Took(wall_ns, off_ns - waited_ns, waited_ns, now_ns)

    def close(self) -> None:
        """Close the file that it is read from."""
        clock, self.clock = self.clock, None
        if clock is not None:
            clock.close()


class PlaceTimes:
    """Time by part of the fit and place in the user's code."""

    def __init__(self) -> None:
        self.by_part: dict[str, PlaceSums] = {}
        self._places = 0

    def add(self, part: str, place: Place, took: Took, ns: int) -> None:
        """Add a sample that stands for so much time, of which the thread waited as large a part as since the last."""
        sums = self.by_part.get(part)
        if sums is None:
            sums = self.by_part[part] = {}
        key = id(place.code), place.instruction, id(place.callee)  # hashing code objects takes microseconds
        times = sums.get(key)
        if times is None:
            if self._places >= _MOST:
                return
            self._places += 1
            times = sums[key] = PlaceTime(place)
        times.wall_ns += ns
        times.idle_ns += ns * took.idle_ns // max(took.wall_ns, 1)
        times.samples += max(ns // PERIOD_NS, 1)  # a call in C is seen when it ends

    def lines(self, *, loops: bool = True) -> dict[str, tuple[SampledLine, ...]]:
        """The lines in which most of each part is."""
        lines = {part: sampled_lines(sums, loops=loops) for part, sums in dict(self.by_part).items()}
        return {part: top for part, top in lines.items() if top}


class StackSampler:
    """Samples the thread that starts it: its places by part of the fit, and how long it waits for the interpreter lock.

    Args:
        part: the innermost part of the ledger at present.
    """

    def __init__(self, part: Callable[[], str]) -> None:
        self.counts = False  # whether the present step does
        self.paces = False  # whether the host sets the pace of the steps, so that a wait for the lock costs time
        self.part = part
        # the region of a plain loop, which is the script's own and so not in the stack; None for Lightning's
        self.region: Callable[[], str | None] | None = None
        self.times = PlaceTimes()
        self.lock: LockWaits | None = None
        # for how long the thread waited for a core only because it was woken to be looked at, in nanoseconds
        self.woken_ns = 0
        self._thread: ThreadTime | None = None
        self._timer: StackTimer | None = None
        self._native = self._pid = 0

    @property
    def is_here(self) -> bool:
        """Whether it samples this thread: a forked process inherits no timer."""
        return self._native == threading.get_native_id() and self._pid == os.getpid()

    def start(self) -> None:
        """Begin to sample this thread."""
        self._native, self._pid = threading.get_native_id(), os.getpid()
        self._thread = ThreadTime()
        library_folders()  # it imports, which a signal must not where it interrupts an import: that raises KeyError
        self._timer = stack_timer(self._look)
        if self._timer is not None:
            self._timer.start()

    def pause(self, *, on: bool) -> None:
        """Whether to leave the thread alone for now, as while a profiler records its stacks."""
        if self._timer is not None and self._thread is not None:
            self._thread.take()  # the time until now is not that of the next sample
            self._timer.pause(on=on)

    def stop(self) -> None:
        """End, and restore what was changed."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _look(self, frame: FrameType) -> None:
        if self._thread is None or self._timer is None:
            return
        took, part = self._thread.take(), self.part()
        self.woken_ns += min(took.idle_ns, took.waited_ns, self._timer.late_ns(took.now_ns))
        ns = self._timer.looks.stands_for_ns(took.now_ns)
        if part != STEPS:
            self.times.add(part, find_place(frame, in_loop=False)[0], took, ns)
        elif self.counts:
            place, region = find_place(frame, in_loop=self.region is None)
            region = region if self.region is None else self.region()
            if region is not None:
                # that thread waits for the one that runs the backward pass
                took = took if frame.f_code.co_name != _IN_BACKWARD else took._replace(idle_ns=0)
                self.times.add(region, place, took, ns)
        if self.counts and self.paces and self._thread.clock is not None:
            self.lock = self.lock or LockWaits(self._native)
            self.lock.add(frame, took)


# -- waits for the interpreter lock ------------------------------------------------------------------------------------

# a thread that finds the interpreter lock free has it within 0.1 ms; one that has to ask for it waits 5 ms
_LATE_NS: Final = 1_000_000
_HALF: Final = 0.5
_PROBES: Final = 10
_PROBE_S: Final = 0.01

# parts of torch whose calls may wait for something else than the interpreter lock
_BLOCKING: Final = ("distributed", "cuda", "multiprocessing", "utils/data")

# instructions at which a thread that uses no core waits for the interpreter lock, and nothing else
_NEVER_BLOCK: Final = frozenset(
    {"BINARY_OP", "COMPARE_OP", "RESUME", "JUMP_BACKWARD", "LOAD_FAST", "STORE_FAST", "POP_TOP", "LOAD_GLOBAL"}
)


def may_block(frame: FrameType) -> bool:
    """Whether a thread without a core may wait for something else there than the interpreter lock."""
    code = frame.f_code
    _, torch, within = code.co_filename.partition("/torch/")
    lightning = "/lightning/" in code.co_filename or "/pytorch_lightning/" in code.co_filename
    if code.co_name == _IN_BACKWARD or (within.startswith(_BLOCKING) if torch else not lightning):
        return dis.opname[code.co_code[frame.f_lasti]] not in _NEVER_BLOCK
    return False


class LockWaits:
    """How long a thread waits for the interpreter lock.

    It is suspected where the thread uses no core at instructions that wait for nothing else, while another Python
    thread uses one. That one may compute without the lock: while there is a suspicion, a short-lived thread asks for
    the lock and says how late it got it.

    Args:
        native: the kernel's number of the thread.
    """

    def __init__(self, native: int) -> None:
        self._native = native
        self._samples = self._wall_ns = self._idle_ns = self._blocked_ns = 0
        self._threads_s = python_threads_s(self._native)
        self._probe: _LockProbe | None = None
        self._marks: Marks[tuple[float, float]] = Marks()
        self._wall_ms = self._held_ms = 0.0  # and of it, waiting for the lock that a thread held
        self._intervals = 0
        self._held_by: Counter[str] = Counter()

    def add(self, frame: FrameType, took: Took) -> None:
        """Add a sample."""
        self._samples += 1
        self._wall_ns += took.wall_ns
        self._idle_ns += took.idle_ns
        if took.idle_ns and may_block(frame):
            self._blocked_ns += took.idle_ns
        if self._samples >= _INTERVAL:
            self._end_interval()

    def _end_interval(self) -> None:
        before_s, self._threads_s = self._threads_s, python_threads_s(self._native)
        used_s = {name: now_s - before_s[name] for name, now_s in self._threads_s.items() if name in before_s}
        busiest = max(used_s, key=used_s.__getitem__, default="")
        suspected = used_s.get(busiest, 0.0) * 1e9 > _HALF * self._idle_ns > 0
        held = suspected and self._probe is not None and self._probe.is_late()
        if self._intervals >= self._marks.due:
            self._marks.add(self._intervals, (self._wall_ms, self._held_ms))
        self._wall_ms += self._wall_ns / 1e6
        self._intervals += 1
        if held:
            self._held_ms += (self._idle_ns - self._blocked_ns) / 1e6
            self._held_by[busiest] += 1
        self._samples = self._wall_ns = self._idle_ns = self._blocked_ns = 0
        self._probe = _LockProbe() if suspected else None

    def share(self) -> tuple[ShareInterval | None, str]:
        """The share of time in which the thread waited for it, and the name of who had it."""
        from lightning_forge_profiling.run.cpu_account import share_of  # noqa: PLC0415  (loads torch)

        share = share_of(self._marks, self._intervals, (self._wall_ms, self._held_ms))
        return share, next((name for name, _ in self._held_by.most_common(1)), "")


class _LockProbe:
    """A thread that asks for the interpreter lock ten times within a quarter of a second."""

    def __init__(self) -> None:
        self._late_ns: list[int] = []
        # not by `threading`, whose locks the code that a signal interrupts may hold
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        with closing(ThreadClock()) as clock:
            for _ in range(_PROBES):
                began_ns, waited_ns = perf_counter_ns(), clock.ns()[1]
                time.sleep(_PROBE_S)
                took_ns = perf_counter_ns() - began_ns - (clock.ns()[1] - waited_ns)
                self._late_ns.append(took_ns - int(_PROBE_S * 1e9))

    def is_late(self) -> bool:
        """Whether it had to wait for the lock, on average."""
        late_ns = [*self._late_ns]
        return sum(late_ns) > _LATE_NS * max(len(late_ns), 1)


# -- from the start of the script --------------------------------------------------------------------------------------

_of_process: StackSampler | None = None


def sample_from_start() -> None:
    """Sample this thread from here to the end of the process, for the fits that come."""
    global _of_process  # noqa: PLW0603  (a process has one main thread)
    _of_process = StackSampler(_between_fits)
    _of_process.start()


def _between_fits() -> str:
    return STARTUP_PROCESS


def begin_sampling(part: Callable[[], str]) -> StackSampler:
    """A sampler for a fit that is set up: the one that has sampled the script so far, if there is one."""
    sampler = _of_process
    if sampler is not None and sampler.part is _between_fits and sampler.is_here:
        sampler.part = part
        library_folders.cache_clear()  # by now torch and Lightning are imported
        library_folders()
        _codes.clear()
        return sampler
    sampler = StackSampler(part)
    sampler.start()
    return sampler


def end_sampling(sampler: StackSampler) -> None:
    """The fit is over. What it has sampled stays with it."""
    if sampler is not _of_process:
        sampler.stop()
        return
    sampler.part, sampler.region, sampler.lock = _between_fits, None, None
    sampler.counts = sampler.paces = False
    sampler.times = PlaceTimes()
