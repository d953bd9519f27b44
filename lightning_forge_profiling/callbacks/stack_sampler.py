"""Samples the stack of the training thread for some seconds: which line of the user's code a part of the step is in.

A thread of its own looks 50 times a second. It sees the training thread only where that lets go of the interpreter
lock, up to 5 ms late: samples name lines, and how long a part takes is measured at its boundaries. A sampler in the
training thread itself, as pyinstrument's, is not late, but it slows steps in which Python sets the pace by 19 %, this
one at 100 Hz by 1.6 % (`python -m benchmarks.stack_samplers`, pyinstrument 5.1, two cores, 2026-11-24).
"""

import dis
import site
import sys
import sysconfig
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Final, NamedTuple

from lightning_forge_profiling.callbacks.lightning_api import stack_region
from lightning_forge_profiling.diagnosis.block_bootstrap import share_interval
from lightning_forge_profiling.host import ThreadClock, python_threads_s
from lightning_forge_profiling.names import STEPS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.results.interval import ShareInterval
from lightning_forge_profiling.results.lines import SampledLine
from lightning_forge_profiling.timing.blocks import StepBlocks

_log = plain_logger(__name__)

_PERIOD_S: Final = 0.02
_SAMPLES: Final = 300
"""Six seconds of steps that count."""

_ENOUGH: Final = 10
"""Samples of a part from which its lines are named."""

_LINES: Final = 3
_INTERVAL: Final = 12
"""Samples over which CPU times of threads are compared: the kernel brings those up to date each 1 to 10 ms."""

_LATE_NS: Final = 1_000_000
"""A thread that finds the interpreter lock free has it within 0.1 ms; one that has to ask for it waits 5 ms."""

_HALF: Final = 0.5
_BLOCKING: Final = ("distributed", "cuda", "multiprocessing", "utils/data")
"""Parts of torch whose calls may wait for something else than the interpreter lock."""

_PACKAGE: Final = str(Path(__file__).parent.parent)


class _Place(NamedTuple):
    """What a code object is part of."""

    users: bool
    calls: bool
    """Whether it calls what may wait for something else than the interpreter lock."""
    is_loop: bool
    """Whether it is Lightning's loop, around which is the script."""
    region: str | None
    """The region of the step that it is the outermost function of; None for other code, "" outside of training."""


class StackSampler:
    """Samples the stack of the thread that creates it, and how long it waits for the interpreter lock.

    Args:
        part: returns the innermost part of the ledger.
        clock: CPU time of the thread; None if unknown.
    """

    def __init__(self, part: Callable[[], str], clock: ThreadClock | None) -> None:
        self._part, self._clock = part, clock
        self._sampled = threading.get_ident()
        self._native = threading.get_native_id()
        self._folders = _library_folders()
        self._places: dict[CodeType, _Place] = {}
        self._lines: defaultdict[str, defaultdict[tuple[str, int, str], list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0, 0])
        )
        self._held = StepBlocks()
        self._intervals = 0
        self._held_by: Counter[str] = Counter()
        self.counts = True
        """Whether the current step counts: others are not sampled."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def lines(self) -> dict[str, tuple[SampledLine, ...]]:
        """The lines in which most samples of each part are, by region or part of the ledger."""
        found = {}
        for part, lines in dict(self._lines).items():
            whole_ns = sum(ns for ns, _, _ in lines.values())
            if sum(samples for _, _, samples in lines.values()) < _ENOUGH or not whole_ns:
                continue
            top = sorted(lines.items(), key=lambda item: -item[1][0])[:_LINES]
            found[part] = tuple(
                SampledLine(
                    file=_shown(file),
                    line=line,
                    function=function,
                    pct=100 * ns / whole_ns,
                    waiting_pct=None if self._clock is None else 100 * idle_ns / max(ns, 1),
                )
                for (file, line, function), (ns, idle_ns, _) in top
                if file
            )
        return {part: lines for part, lines in found.items() if lines}

    def gil(self) -> tuple[ShareInterval | None, str]:
        """The share of time in which the thread waited for the interpreter lock, and the name of who had it."""
        blocks = self._held.read()
        interval = share_interval(
            [block.region_ms["gil"] for block in blocks],
            [block.ms for block in blocks],
            [block.steps for block in blocks],
        )
        return interval, next((name for name, _ in self._held_by.most_common(1)), "")

    def _run(self) -> None:
        try:
            own = ThreadClock() if self._clock is not None else None
            try:
                self._sample(own)
            finally:
                self._places.clear()
                if own is not None:
                    own.close()
        except Exception as exc:
            _log.warning("The training thread's stack is not sampled any more: %s: %s", type(exc).__name__, exc)

    def _sample(self, own: ThreadClock | None) -> None:
        samples, before = 0, self._read(own)
        interval = _Interval(self._native)
        while samples < _SAMPLES and not self._stop.wait(_PERIOD_S):
            now = self._read(own)
            if self.counts:
                samples += 1
                self._add(before, now, interval)
                if interval.samples >= _INTERVAL:
                    self._end(interval)
                    interval = _Interval(self._native)
            else:
                interval = _Interval(self._native)
            before = now

    def _read(self, own: ThreadClock | None) -> tuple[int, int, int]:
        """The time, the CPU time of the sampled thread with its waits for a core, and the waits of this one."""
        used_ns = 0 if self._clock is None else sum(self._clock.ns())
        return perf_counter_ns(), used_ns, 0 if own is None else own.ns()[1]

    def _add(self, before: tuple[int, int, int], now: tuple[int, int, int], interval: "_Interval") -> None:
        wall_ns, used_ns, waited_ns = (later - earlier for earlier, later in zip(before, now, strict=True))
        idle_ns = max(wall_ns - used_ns, 0)
        frame = sys._current_frames().get(self._sampled)  # noqa: SLF001  (the public way to another thread's stack)
        if frame is None:
            return
        part, line, blocking = self._where(frame)
        del frame  # its locals are the training's
        if part:
            sums = self._lines[part][line]
            for place, ns in enumerate((wall_ns, idle_ns, 1)):
                sums[place] += ns
        interval.samples += 1
        interval.wall_ns += wall_ns
        interval.late_ns += max(wall_ns - waited_ns - int(_PERIOD_S * 1e9), 0)
        interval.idle_ns += idle_ns
        interval.waiting_ns += 0 if blocking else idle_ns

    def _where(self, frame: FrameType) -> tuple[str, tuple[str, int, str], bool]:
        """The part of the step, the innermost line of the user's code, and whether that may be in a blocking call."""
        line, region = ("", 0, ""), None
        blocking = self._may_block(frame)
        each: FrameType | None = frame
        while each is not None:
            place = self._places.get(each.f_code) or self._place(each.f_code)
            if place.users and not line[0]:
                line = each.f_code.co_filename, each.f_lineno or 0, each.f_code.co_qualname
            if place.region is not None and region is None:
                region = place.region
            if place.is_loop:
                break
            each = each.f_back
        part = self._part()
        if part.startswith(("callback/", "module/", "datamodule/", "logger")):
            return part, line, blocking
        return ("" if part != STEPS or region == "" or each is None else region or "other"), line, blocking

    def _may_block(self, frame: FrameType) -> bool:
        code = frame.f_code
        place = self._places.get(code) or self._place(code)
        return place.calls and dis.opname[code.co_code[frame.f_lasti]] not in _NEVER_BLOCK

    def _place(self, code: CodeType) -> _Place:
        file = code.co_filename
        of_library = file.startswith(("<frozen", *self._folders))
        _, torch, within = file.partition("/torch/")
        lightning = "/lightning/" in file or "/pytorch_lightning/" in file
        self._places[code] = found = _Place(
            users=not of_library,
            calls=within.startswith(_BLOCKING) if torch else not lightning,
            is_loop=of_library and file.endswith("loops/training_epoch_loop.py"),
            region=stack_region(file, code.co_name) if of_library else None,
        )
        return found

    def _end(self, interval: "_Interval") -> None:
        """Add a quarter of a second: if another Python thread held the lock, how long training waited for it."""
        before_s, now_s = interval.threads_s, python_threads_s(self._native)
        busy_s, busiest = max(
            ((now_s[name] - s, name) for name, s in before_s.items() if name in now_s), default=(0.0, "")
        )
        late = interval.late_ns > _LATE_NS * interval.samples
        held = late and busy_s * 1e9 > _HALF * interval.idle_ns
        self._held.add(self._intervals, interval.wall_ns / 1e6, {"gil": interval.waiting_ns / 1e6 if held else 0.0})
        self._intervals += 1
        if held:
            self._held_by[busiest] += 1


class _Interval:
    """Sums over some samples."""

    def __init__(self, sampled: int) -> None:
        self.samples = self.wall_ns = self.late_ns = self.idle_ns = self.waiting_ns = 0
        self.threads_s = python_threads_s(sampled)


_NEVER_BLOCK: Final = frozenset(
    {"BINARY_OP", "COMPARE_OP", "RESUME", "JUMP_BACKWARD", "LOAD_FAST", "STORE_FAST", "POP_TOP", "LOAD_GLOBAL"}
)
"""Instructions at which a thread that uses no core waits for the interpreter lock, and nothing else."""


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages(), _PACKAGE}
    return tuple(sorted(f"{path}/" for path in found))


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
