"""Samples the stack of the training thread for some seconds: which line of the user's code a part of the step is in.

A thread of its own looks 50 times a second. It sees the training thread only where that lets go of the interpreter
lock, up to 5 ms late: samples name lines, and how long a part takes is measured at its boundaries. A sampler in the
training thread itself, as pyinstrument's, is not late, but it slows steps in which Python sets the pace by 19 %, this
one at 100 Hz by 1.1 % (`python -m benchmarks.stack_samplers`, pyinstrument 5.1, two cores, 2026-11-24).
"""

import dis
import json
import multiprocessing
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from torch.utils.data._utils import worker

from lightning_forge_profiling.host import ThreadClock, python_threads_s
from lightning_forge_profiling.names import STEPS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.ranks.stacks import is_users, shown_file
from lightning_forge_profiling.run.cpu_account import share_of
from lightning_forge_profiling.run.worker_batches import forget_batches, time_batches
from lightning_forge_profiling.schema import SampledLine, ShareInterval
from lightning_forge_profiling.timing.counters import Marks

_log = plain_logger(__name__)

_PERIOD_S: Final = 0.02
_SAMPLES: Final = 300  # six seconds of steps that count
_ENOUGH: Final = 10  # samples of a part from which its lines are named
_LINES: Final = 3
# samples over which CPU times of threads are compared: the kernel brings those up to date each 1 to 10 ms
_INTERVAL: Final = 12

# a thread that finds the interpreter lock free has it within 0.1 ms; one that has to ask for it waits 5 ms
_LATE_NS: Final = 1_000_000

_HALF: Final = 0.5

# parts of torch whose calls may wait for something else than the interpreter lock
_BLOCKING: Final = ("distributed", "cuda", "multiprocessing", "utils/data")

# in which the thread that calls backward waits for the one that runs it for a GPU
_IN_BACKWARD: Final = "_engine_run_backward"

_LOOPS: Final = ("loops/training_epoch_loop.py", "utils/data/_utils/worker.py")

# nanoseconds in all and without a core, and samples, by file, line and function; "" where none is the user's
LineSums = defaultdict[tuple[str, int, str], list[int]]


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


class Sample(NamedTuple):
    """What a sample stands for: the time since the one before."""

    wall_ns: int
    idle_ns: int  # the part of it in which the sampled thread neither computed nor waited for a core; 0 if unknown
    late_ns: int  # how much later than asked the sampling thread went on, without waiting for a core


class _Code(NamedTuple):
    """What a code object is part of."""

    users: bool
    calls: bool  # whether it calls what may wait for something else than the interpreter lock
    is_loop: bool  # whether it is Lightning's loop or that of a loader's worker, around which is the script
    # the region of the step that it is the outermost function of; None for other code, "" outside of training
    region: str | None


class StackThread:
    """Samples the stack of the thread that creates it."""

    def __init__(self, clock: ThreadClock | None) -> None:
        self.counts = True  # whether to sample at present
        self._clock = clock
        self._sampled = threading.get_ident()
        self._codes: dict[CodeType, _Code] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-stacks", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def add(self, frame: FrameType, sample: Sample) -> None:
        """Called in the sampling thread for each sample; `frame` is the innermost one."""

    def _run(self) -> None:
        try:
            if self._clock is None:
                self._sample(None)
            else:
                with closing(ThreadClock()) as own:
                    self._sample(own)
        except Exception as exc:
            _log.warning("The stack of a thread is not sampled any more: %s: %s", type(exc).__name__, exc)
        finally:
            self._codes.clear()

    def _sample(self, own: ThreadClock | None) -> None:
        samples, before = 0, self._read(own)
        while samples < _SAMPLES and not self._stop.wait(_PERIOD_S):
            now = self._read(own)
            wall_ns, used_ns, waited_ns = (later - earlier for earlier, later in zip(before, now, strict=True))
            before = now
            frame = sys._current_frames().get(self._sampled)  # noqa: SLF001  (the public way to another thread's stack)
            if self.counts and frame is not None:
                samples += 1
                late_ns = max(wall_ns - waited_ns - int(_PERIOD_S * 1e9), 0)
                idle_ns = 0 if self._clock is None else max(wall_ns - used_ns, 0)
                self.add(frame, Sample(wall_ns, idle_ns, late_ns))
            del frame  # its locals are the user's

    def _read(self, own: ThreadClock | None) -> tuple[int, int, int]:
        """The time, the CPU time of the sampled thread with its waits for a core, and the waits of this one."""
        used_ns = 0 if self._clock is None else sum(self._clock.ns())
        return perf_counter_ns(), used_ns, 0 if own is None else own.ns()[1]

    def walk(self, frame: FrameType) -> tuple[tuple[str, int, str], str | None]:
        """The innermost line of the user's code inside the loop, and the region; None outside of the loop."""
        line, region = ("", 0, ""), None
        each: FrameType | None = frame
        while each is not None:
            code = self.classify(each.f_code)
            if code.is_loop:
                return line, region or "other" if region != "" else None
            if code.users and not line[0]:
                line = each.f_code.co_filename, each.f_lineno or 0, each.f_code.co_qualname
            if region is None:
                region = code.region
            each = each.f_back
        return line, None

    def classify(self, code: CodeType) -> _Code:
        """What a code object is part of."""
        known = self._codes.get(code)
        if known is None:
            file = code.co_filename
            of_library = not is_users(file)
            _, torch, within = file.partition("/torch/")
            lightning = "/lightning/" in file or "/pytorch_lightning/" in file
            self._codes[code] = known = _Code(
                users=not of_library,
                calls=within.startswith(_BLOCKING) if torch else not lightning,
                is_loop=of_library and file.endswith(_LOOPS),
                region=stack_region(file, code.co_name) if of_library else None,
            )
        return known


class StackSampler(StackThread):
    """Samples the training thread: its lines by region and hook, and how long it waits for the interpreter lock."""

    def __init__(
        self, part: Callable[[], str], clock: ThreadClock | None, region: Callable[[], str | None] | None = None
    ) -> None:
        super().__init__(clock)
        self._part = part
        self._region = region  # says the region of a plain loop, which is the script's own and so not in the stack
        self._native = threading.get_native_id()
        self._lines: defaultdict[str, LineSums] = defaultdict(new_sums)
        self._interval: list[
            tuple[Sample, bool]
        ] = []  # a quarter of a second; whether the thread may have been blocked
        self._threads_s = python_threads_s(self._native)
        self._marks: Marks[tuple[float, float]] = Marks()
        self._wall_ms = self._held_ms = 0.0  # and of it, waiting for the lock that a thread held
        self._intervals = 0
        self._held_by: Counter[str] = Counter()

    def lines(self) -> dict[str, tuple[SampledLine, ...]]:
        """The lines in which most samples of each part are, by region or part of the ledger."""
        lines = {part: sampled_lines(sums) for part, sums in dict(self._lines).items()}
        return {part: top for part, top in lines.items() if top}

    def gil(self) -> tuple[ShareInterval | None, str]:
        """The share of time in which the thread waited for the interpreter lock, and the name of who had it."""
        if self._clock is None:
            return None, ""
        return share_of(self._marks, self._intervals, (self._wall_ms, self._held_ms)), next(
            (name for name, _ in self._held_by.most_common(1)), ""
        )

    def add(self, frame: FrameType, sample: Sample) -> None:
        """Add a sample to its line, and to the present interval."""
        line, region = self.walk(frame)
        part = self._part()
        if self._region is not None:
            region = self._region()
        hooked = part.startswith(("callback/", "module/", "datamodule/", "logger"))
        if hooked or (region is not None and part == STEPS):
            own = sample._replace(idle_ns=0) if frame.f_code.co_name == _IN_BACKWARD else sample
            add_sample(self._lines[part if hooked else region or ""], line, own)
        self._interval.append((sample, self._may_block(frame)))
        if len(self._interval) >= _INTERVAL:
            self._end_interval()

    def _may_block(self, frame: FrameType) -> bool:
        code = frame.f_code
        return self.classify(code).calls and dis.opname[code.co_code[frame.f_lasti]] not in _NEVER_BLOCK

    def _end_interval(self) -> None:
        """If another Python thread held the lock, add how long training waited for it."""
        before_s, self._threads_s = self._threads_s, python_threads_s(self._native)
        samples, self._interval = self._interval, []
        used_s = {name: now_s - before_s[name] for name, now_s in self._threads_s.items() if name in before_s}
        busiest = max(used_s, key=used_s.__getitem__, default="")
        wall_ns, idle_ns, late_ns = (sum(ns) for ns in zip(*(sample for sample, _ in samples), strict=True))
        held = late_ns > _LATE_NS * len(samples) and used_s.get(busiest, 0.0) * 1e9 > _HALF * idle_ns
        waiting_ns = sum(sample.idle_ns for sample, blocked in samples if held and not blocked)
        if self._intervals >= self._marks.due:
            self._marks.add(self._intervals, (self._wall_ms, self._held_ms))
        self._wall_ms += wall_ns / 1e6
        self._held_ms += waiting_ns / 1e6
        self._intervals += 1
        if held:
            self._held_by[busiest] += 1


def new_sums() -> LineSums:
    """No samples yet."""
    return defaultdict(lambda: [0, 0, 0])


def add_sample(sums: LineSums, line: tuple[str, int, str], sample: Sample) -> None:
    """Add a sample to its line."""
    times = sums[line]
    times[0] += sample.wall_ns
    times[1] += sample.idle_ns
    times[2] += 1


def sampled_lines(sums: LineSums) -> tuple[SampledLine, ...]:
    """The lines of the user's code with most time, at most three; empty for too few samples."""
    now = dict(sums)  # another thread may be adding to them
    whole_ns = sum(ns for ns, _, _ in now.values())
    if sum(samples for _, _, samples in now.values()) < _ENOUGH or not whole_ns:
        return ()
    top = sorted(now.items(), key=lambda item: -item[1][0])[:_LINES]
    return tuple(
        SampledLine(
            file=shown_file(file), line=line, function=function, pct=100 * ns / whole_ns, waiting_pct=100 * idle_ns / ns
        )
        for (file, line, function), (ns, idle_ns, _) in top
        if file
    )


# instructions at which a thread that uses no core waits for the interpreter lock, and nothing else
_NEVER_BLOCK: Final = frozenset(
    {"BINARY_OP", "COMPARE_OP", "RESUME", "JUMP_BACKWARD", "LOAD_FAST", "STORE_FAST", "POP_TOP", "LOAD_GLOBAL"}
)


_WORKER_ID: Final = 10  # the position of the worker's number among the arguments of torch's worker loop (2.4 to 2.13)
_WRITTEN_EVERY: Final = 25

_torchs_loop = worker._worker_loop  # noqa: SLF001
_written_to = -1


class WorkerStacks:
    """Lets the first worker that is forked from here on sample itself, by a replaced worker loop, and reads that."""

    def __init__(self) -> None:
        self._file = -1

    def watch(self) -> None:
        """Replace the loop. Does nothing where workers are not forked: they would have to import this package."""
        global _written_to  # noqa: PLW0603  (what a forked worker inherits)
        start = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if start == "fork" and hasattr(os, "memfd_create") and worker._worker_loop is _torchs_loop:  # noqa: SLF001
            if self._file < 0:
                self._file = os.memfd_create("forge-worker-stacks")
                forget_batches()
            _written_to = self._file
            worker._worker_loop = _sampled_loop  # type: ignore[assignment]  # noqa: SLF001

    def release(self) -> None:
        """Restore torch's loop. Workers that run go on."""
        if worker._worker_loop is _sampled_loop:  # noqa: SLF001
            worker._worker_loop = _torchs_loop  # noqa: SLF001

    def close(self) -> None:
        """Restore torch's loop and forget what was read."""
        self.release()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def lines(self) -> tuple[SampledLine, ...]:
        """The lines that the worker spends most time in, of those that make batches."""
        if self._file < 0:
            return ()
        try:
            written = json.loads(os.pread(self._file, 1 << 20, 0) or b"[]")
        except ValueError:  # written just now
            return ()
        sums = new_sums()
        for file, line, function, *times in written:
            sums[file, line, function] = times
        return sampled_lines(sums)


def _sampled_loop(*arguments: Any) -> None:
    with suppress(Exception):  # the batches come first; a spawned worker inherits no file
        if arguments[_WORKER_ID] == 0:
            time_batches()
        if _written_to >= 0 and arguments[_WORKER_ID] == 0 and os.fstat(_written_to).st_size == 0:
            _Worker(_written_to).start()
    _torchs_loop(*arguments)


class _Worker(StackThread):
    """Samples the thread of a worker that makes batches, and writes what it found twice a second."""

    def __init__(self, written_to: int) -> None:
        super().__init__(ThreadClock())
        self._written_to = written_to
        self._sums, self._samples = new_sums(), 0
        os.pwrite(written_to, b"[]", 0)

    def add(self, frame: FrameType, sample: Sample) -> None:
        """Add a sample to its line, unless the worker waits for a request."""
        line, region = self.walk(frame)
        if line[0] or region == "data":
            add_sample(self._sums, line, sample)
        self._samples += 1
        if self._samples % _WRITTEN_EVERY == 0:
            lines = [[*line, *times] for line, times in self._sums.items()]
            os.pwrite(self._written_to, json.dumps(lines).encode(), 0)
