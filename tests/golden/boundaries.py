"""The raw boundaries of a fit (a fetch begins, backward ends), kept, and played again into the core.

What is kept is a line for each boundary: the host's clock in nanoseconds, what happened, and its arguments. That is
independent of the core's classes and of the record's layout; `play` is what translates it. No time passes within a
boundary when it is played, so that the same figures follow each time.
"""

import gzip
import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.counters import bucket, known, step_total_ms
from lightning_forge_profiling.timing.events import HostEventSource
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.region import UserRegions
from lightning_forge_profiling.timing.region_clock import RegionClock, WaitClock
from lightning_forge_profiling.timing.steps import StepWork

FOLDER: Final = Path(__file__).parent / "boundaries"

_OF_STEPS: Final = ("start", "end_plain_step", "end_step", "finish")
_OF_REGIONS: Final = (
    *("enter", "exit", "split", "enter_loader_start", "loader_ended", "enter_validation", "exit_validation"),
    *("forward_in_closure", "enter_backward", "forget_forward", "relabel_validation_as_loader_start"),
)
_OF_USER_REGIONS: Final = ("open_region", "close_region")
_OF_WAITS: Final = {"enter": "enter_wait", "exit": "exit_wait", "end_on_gpu": "wait_on_gpu"}  # and what is kept
_OF_LEDGER: Final = ("enter", "exit", "turn_to", "charge", "move", "count_steps", "open_span", "close_span")


class _Keeper:
    """Keeps the boundaries that the training thread and autograd's announce, without those inside of them."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.clock_ns, self.inside = clock_ns, threading.local()
        self.lines: list[list[Any]] = []
        self.timers: list[StepTimer] = []

    def of(self, kind: type, name: str) -> Callable[..., Any]:
        """The method, which is kept when it is called."""
        method = getattr(kind, name)

        @wraps(method)
        def call(it: Any, *arguments: Any, **options: Any) -> Any:
            if getattr(self.inside, "one", False):
                return method(it, *arguments, **options)
            if kind is StepTimer and it not in self.timers:
                self.timers.append(it)
            self.inside.one, at_ns = True, self.clock_ns()
            try:
                given = method(it, *arguments, **options)
            finally:
                self.inside.one = False
            if name in {"end_plain_step", "end_step"}:
                flags = {key: value for key, value in options.items() if key != "began_ns"}
                if name == "end_step" or given:
                    split = it.regions.is_split and name == "end_step"
                    self.lines.append([at_ns, "step", [*arguments[0]], flags, split])
            else:
                said = f"ledger.{name}" if kind is LedgerClock else _OF_WAITS[name] if kind is WaitClock else name
                plain = [each for each in arguments if not _is_token(each)]
                self.lines.append([at_ns, said, plain, options])
            return given

        return call

    def write(self, path: Path) -> None:
        """Write what was kept, behind the settings of the fit."""
        [timer] = self.timers
        regions = [name for name in REGIONS if timer.regions.labels[name] == name]
        began = {"began_ns": timer.ledger.began_ns, "warmup_steps": timer.warmup_steps, "regions": regions}
        path.parent.mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in (began, *self.lines))
        path.write_bytes(gzip.compress(text.encode(), mtime=0))


@contextmanager
def kept(path: Path, clock_ns: Callable[[], int]) -> Iterator[None]:
    """Keep the boundaries of the fit inside."""
    keeper = _Keeper(clock_ns)
    original = {(kind, name): getattr(kind, name) for kind, names in _KINDS for name in names}
    for kind, name in original:
        setattr(kind, name, keeper.of(kind, name))
    try:
        yield
    finally:
        for (kind, name), method in original.items():
            setattr(kind, name, method)
        keeper.write(path)


_KINDS: Final[tuple[tuple[type, Collection[str]], ...]] = (
    *((StepTimer, _OF_STEPS), (RegionClock, _OF_REGIONS), (UserRegions, _OF_USER_REGIONS), (WaitClock, _OF_WAITS)),
    (LedgerClock, _OF_LEDGER),
)


def _is_token(value: object) -> bool:
    return not isinstance(value, str | int | float | bool | None)


class _Clock:
    """Stands still between two boundaries."""

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def __call__(self) -> int:
        return self.ns


class _GpuEvent:
    """An event on a GPU that is some milliseconds behind the host."""

    def __init__(self, gpu: "_Gpu") -> None:
        self._gpu, self.ns = gpu, 0

    def record(self) -> None:
        """Taken behind all that was taken before."""
        gpu = self._gpu
        gpu.events += 1
        self.ns = gpu.latest_ns = max(gpu.latest_ns, gpu.clock() + 2_000_000 + gpu.events % 5 * 100_000)

    def query(self) -> bool:
        """Whether the GPU has come to it."""
        return self.ns <= max(self._gpu.clock(), self._gpu.waited_ns)

    def synchronize(self) -> None:
        """Wait for it."""
        self._gpu.waited_ns = max(self._gpu.waited_ns, self.ns)

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds between both."""
        return float(later.ns - self.ns) / 1e6


class _Gpu:
    """Events of a GPU that is some milliseconds behind the host."""

    on_device = True

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.latest_ns, self.waited_ns, self.events = clock, 0, 0, 0

    def new_event(self) -> _GpuEvent:
        """Not taken yet."""
        return _GpuEvent(self)

    def capturing(self) -> bool:
        """No CUDA graphs."""
        return False

    def stream(self) -> int:
        """One."""
        return 0


class _AsThen:
    """Splits the steps that were split then."""

    def __init__(self, split: dict[int, bool]) -> None:
        self._split = split

    def splits(self, step: int) -> bool:
        """Whether this one was."""
        return self._split.get(step, True)

    def add(self, **_: Any) -> None:
        """Nothing is decided."""


def cases() -> list[str]:
    """The fits that are kept."""
    return sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.gz"))


def play(case: str, *, on_gpu: bool) -> dict[str, Any]:
    """The figures that follow from the boundaries of a fit, on the host alone or beside a GPU."""
    began, *lines = map(json.loads, gzip.decompress((FOLDER / f"{case}.jsonl.gz").read_bytes()).splitlines())
    clock = _Clock(began["began_ns"])
    source: Any = _Gpu(clock) if on_gpu else HostEventSource(clock)
    split, number = {}, 0
    for line in lines:
        if line[1] == "step":
            number += 1
            split[number] = line[4]
    ledger = LedgerClock(clock.ns, "startup/process", clock_ns=clock)
    timer = StepTimer(
        CUDATimerCollection((), events=source, clock_ns=clock),
        regions=began["regions"],
        warmup_steps=began["warmup_steps"],
        budget=_AsThen(split),  # type: ignore[arg-type]
        ledger=ledger,
        bucket=bucket,
        clock_ns=clock,
    )
    tokens: dict[str, list[object]] = {}
    for at_ns, name, arguments, *rest in lines:
        clock.ns = at_ns
        if name == "step":
            work, flags = StepWork(*arguments), rest[0]
            if flags or not timer.end_plain_step(work, at_ns):
                timer.end_step(work, began_ns=at_ns, **flags)
        elif name == "open_region":
            tokens.setdefault(arguments[0], []).append(timer.user_regions.open_region(*arguments))
        elif name == "close_region":
            timer.user_regions.close_region(arguments[0], tokens[arguments[0]].pop())
        elif name.startswith("ledger."):
            getattr(ledger, name.partition(".")[2])(*arguments, **rest[0])
        elif name in _OF_WAITS.values():
            method = next(method for method, said in _OF_WAITS.items() if said == name)
            getattr(timer.waits, method)(*arguments, **rest[0])
        else:
            getattr(timer.regions if name in _OF_REGIONS else timer, name)(*arguments, **rest[0])
    return _figures(timer)


def _figures(timer: StepTimer) -> dict[str, Any]:
    """By names that are not those of the core's classes."""
    run, ledger = timer.timing(), timer.ledger.read()
    left_out = run.left_out
    spread, names = run.step_ms, [name for name in (*REGIONS, *run.user_regions) if name in run.regions]
    return {
        "counted": {name: getattr(run, name) for name in ("steps", "optimizer_steps", "samples", "split_steps")},
        "left_out": [left_out.warmup, left_out.recorded, left_out.untimed, left_out.stalled],
        "step_ms": {name: getattr(spread, name) for name in ("p50", "p95", "min", "max")},
        "mean_step_ms": [spread.mean, run.host_step_ms],
        "regions_device_ms": {name: ms for name in names if (ms := run.regions[name].device_ms)},
        "regions_host_ms": {name: ms for name in names if (ms := run.regions[name].host_ms)},
        "waits_ms": dict(run.waits_ms),
        "excluded_ms": dict(left_out.excluded_ms),
        "slowest": [[slow.step, slow.ms] for slow in run.slowest],
        "wall_s": ledger.wall_s,
        "parts_s": dict(ledger.parts),
        "parts_entered": dict(ledger.counts),
        "blocks": [
            [block.steps, step_total_ms(block), known(block.samples, block.no_samples)]
            for _, block in timer.totals.blocks()
        ],
    }
