"""Makes the lines of a fit's record and decides when; a thread writes them."""

import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from secrets import token_hex
from time import perf_counter, thread_time
from typing import Any, Final, Literal, NamedTuple, TypedDict

import torch
from msgspec.structs import replace

from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.names import RECORD_FOLDER, REGIONS
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import ctrl_c_ends
from lightning_forge_profiling.profiler.config import numbered_folders
from lightning_forge_profiling.record.writer import (
    RecordWriter,
    Segments,
    command_line,
    git_commit,
    record_of_checkpoint,
)
from lightning_forge_profiling.run.folders import run_folder
from lightning_forge_profiling.run.run_settings import loader_settings
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import (
    Begin,
    End,
    EventLine,
    IntervalLine,
    RunReport,
    State,
    StepCounters,
    StepGroup,
    TelemetrySeries,
    TraceReport,
)
from lightning_forge_profiling.torch_versions import float32_products

_log = plain_logger(__name__)


class RecordFolder(NamedTuple):
    """Folder and id of a run's record, the same on all ranks."""

    path: Path
    run: str  # id of the run
    url: str = ""  # remote folder that it is copied to at the end; "" for none


def claim_record_folder(training: Training) -> RecordFolder | None:
    """Create the folder of this run's record on rank 0 and broadcast it; None, with a warning, if that fails."""
    run = run_folder(training)
    claimed: RecordFolder | None = None
    if training.facts.is_zero:
        try:
            folder = _new_folder(run.path.absolute() / RECORD_FOLDER)  # the working directory may change
            claimed = RecordFolder(folder, token_hex(8), (run / folder.name).url)
        except OSError as exc:
            _log.warning("This run will have no record: %s", exc)
    return training.broadcast(claimed)


def _new_folder(first: Path) -> Path:
    first.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered_folders(first):
        try:
            folder.mkdir(mode=0o775)
        except FileExistsError:
            continue
        return folder
    raise AssertionError  # numbered_folders is endless


def begin_line(training: Training, folder: RecordFolder) -> Begin:
    """The first line of this rank's record, without what `with_origin` adds."""
    ahead, facts = training.ahead(), training.facts
    return Begin(
        run=folder.run,
        rank=facts.rank,
        world_size=facts.world_size,
        at=time.time(),
        versions=_versions(),
        host=socket.gethostname(),
        device=facts.device_name,
        gpu=facts.gpu_uuid,
        settings={**_settings(training), "train_batches": ahead.of_epoch},
        batches=ahead.of_fit,
        first_epoch=ahead.epoch,
        first_batch=ahead.batch,
        loader=loader_settings(training),
        argv=command_line(sys.argv),
        restored_from=training.checkpoint,
    )


def with_origin(begin: Begin, own: Path) -> Begin:
    """The first line with what files of others say, which may be on a disk that hangs: not for the training thread."""
    with suppress(Exception):  # such as a working directory that was removed
        begin = replace(begin, commit=git_commit(Path.cwd()))
    with suppress(Exception):
        continues = record_of_checkpoint(Path(begin.restored_from), but=own) if begin.restored_from else ""
        begin = replace(begin, continues=continues)
    return begin


def _versions() -> dict[str, str]:
    package = __name__.partition(".")[0]
    modules = ("torch", "lightning", "pytorch_lightning", "numpy", package)
    versions = {name: str(vars(sys.modules[name]).get("__version__", "")) for name in modules if name in sys.modules}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **versions, **cuda}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer interface
        return float32_products(torch.backends.cuda.matmul)


def _settings(training: Training) -> dict[str, str | int | float | bool | None]:
    settings: dict[str, Any] = {
        **training.described(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": _matmul_precision(),
        "module": training.model_name,
    }
    scalar = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, scalar) else str(value) for name, value in settings.items()}


_INTERVAL_S: Final = 0.05  # log entries in quicker succession share a line
_STATE_S: Final = 5.0
# shortest pause between states, as a share of the run's time: totals change ever more slowly
_STATE_SHARE: Final = 0.01

# largest share of the run that the training thread spends on states, at some milliseconds each, and on intervals, at
# some 0.1 ms each
_STATE_COST: Final = 0.0005
_INTERVAL_COST: Final = 0.0002

_CLOSE_S: Final = 3.0
_CLOSE_WITH_PEERS_S: Final = 1.0  # Lightning kills ranks that have not ended within 5 s of the first one that failed
_LONGEST_TEXT: Final = 2000

_EVENTS: Final = ("validation", "checkpoint")
_SUMS: Final = ("samples", "tokens", "flops", "between_ms", "timing_us", "log_entries_us")


class _When(TypedDict):
    at: float
    set_s: int


class _Clock:
    """The time of a record's lines, by a clock that cannot be set."""

    def __init__(self, at: float, now_s: float) -> None:
        self._at, self.began_s = at, now_s  # the time, and `time.perf_counter` at that time

    def now(self) -> _When:
        """The time, and how many whole seconds the machine's clock was set by."""
        at = self._at + perf_counter() - self.began_s
        return {"at": at, "set_s": round(time.time() - at)}


class RunRecorder(Guarded):
    """The record of one fit on this rank. No method raises: a failure is logged once and ends the record."""

    called = "RunRecorder"

    def __init__(
        self,
        training: Training,
        folder: RecordFolder,
        step_timer: StepTimer,
        *,
        report: Callable[[], RunReport],
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self._step_timer = step_timer
        self._report, self._metrics = report, metrics
        self._logged: tuple[Mapping[str, float], int] = {}, 0  # the latest entry of the loggers, and its step
        self._parts_before: Mapping[str, float] = {}
        self._trace_status = "waiting"
        self._exception = ""
        self._loop_ended = False
        self._alone = training.facts.world_size == 1
        self._segments = 1
        begin, path = begin_line(training, folder), folder.path
        self._clock = _Clock(begin.at, perf_counter())
        self._next_interval_s, self._next_state_s = 0.0, self._clock.began_s + _STATE_S
        self._writer = RecordWriter(lambda: Segments(path, with_origin(begin, path)))
        weakref.finalize(self, self._writer.close, 0)  # ends the thread if a fit is abandoned without a hook

    @guarded
    def log_entry(self, metrics: Mapping[str, float], logger_step: int) -> None:
        """Called for each entry that the loggers get."""
        self._logged = metrics, logger_step
        now_s = perf_counter()
        if now_s < self._next_interval_s or not self._writer.takes:
            return  # its steps will be in the next interval
        if not self._next_interval_s or self._writer.segments > self._segments:
            self._next_state_s = now_s
        began_s = thread_time()
        self._write_interval()
        self._next_interval_s = now_s + max(_INTERVAL_S, (thread_time() - began_s) / _INTERVAL_COST)

    @property
    def state_due_s(self) -> float:
        """When the totals are due, by `time.perf_counter`."""
        return inf if self.failed else self._next_state_s

    @guarded
    def state(self) -> None:
        """Write the totals so far."""
        now_s, began_s = perf_counter(), thread_time()
        self._write_state(self._report())
        took_s = thread_time() - began_s
        self._next_state_s = now_s + max(_STATE_S, _STATE_SHARE * (now_s - self._clock.began_s), took_s / _STATE_COST)

    @guarded
    def window(self, trace: TraceReport | None) -> None:
        """Write an event if the profiler has started or stopped."""
        if trace is None or trace.status == self._trace_status:
            return
        self._trace_status = trace.status
        if trace.status == "recording":
            self.note("window", "the profiler started", trace.start_stall_ms / 1e3)
        elif trace.status == "written":
            steps = ", ".join(map(str, trace.steps))
            self.note("window", f"steps {steps} were recorded to {trace.path}", trace.stall_ms / 1e3)
            self._next_state_s = 0.0  # what analyses the trace reads it
        else:
            self.note("window", f"{trace.status}: {trace.message}")

    @guarded
    def failing(self, exception: BaseException) -> None:
        """Write and sync the exception of a failing run before anything else is tried."""
        self._exception = _words(exception)
        self.note("exception", self._exception)
        self._writer.sync()

    @guarded
    def loop_ended(self) -> None:
        """Write the totals at the end of the training loop: the end of the fit may take long, or fail."""
        self._loop_ended = True
        self._write_interval(last=True)
        self._write_state(self._report())
        self._writer.sync()

    def close(self, report: RunReport | None) -> None:
        """Write the end and end the thread."""
        self._write_end(report)
        with ctrl_c_ends():
            ended = self._writer.close(_CLOSE_S if self._alone or not self._exception else _CLOSE_WITH_PEERS_S)
        if not ended:
            _log.warning("The disk takes long to write the run's record, whose end may be missing.")

    @guarded
    def _write_end(self, report: RunReport | None) -> None:
        if report is not None:
            self.window(report.trace)
            self._write_state(report, final=True)
        self._writer.write(self.end_line())

    def end_line(self) -> End:
        """How the run ends."""
        outcome: Literal["finished", "failed"] = "finished" if self._loop_ended and not self._exception else "failed"
        return End(**self._clock.now(), step=self._step_timer.step, outcome=outcome, exception=self._exception)

    def _write_interval(self, *, last: bool = False) -> None:
        counters, clock = self._step_timer.totals.take_interval(last=last), self._step_timer.ledger
        ledger, now = clock.read_parts(), self._clock.now()
        before, self._parts_before = self._parts_before, ledger.parts
        spent = {name: s - before.get(name, 0.0) for name, s in ledger.parts.items() if s > before.get(name, 0.0)}
        for span in clock.take_latest():
            if span.part in _EVENTS:
                ended: _When = {**now, "at": now["at"] - ledger.wall_s + span.end_s}
                self._writer.write(EventLine(**ended, step=span.step or 0, kind=span.part, seconds=span.seconds))
        if not counters.steps:
            return
        line = IntervalLine(
            **now,
            step=self._step_timer.step,
            logger_step=self._logged[1],
            counters=self._kept(counters),
            ledger_s=_rounded(spent),
            metrics=_rounded(self._logged[0]),
        )
        self._writer.write(line)

    def _write_state(self, report: RunReport, *, final: bool = False) -> None:
        self._segments, totals = self._writer.segments, self._step_timer.totals
        state = State(
            **self._clock.now(),
            step=self._step_timer.step,
            report=_slim(report, final=final),
            metrics={name: value for name, value in self._metrics().items() if isfinite(value)},
            counters=self._kept(totals.counters()),
            blocks=tuple(self._kept(block) for _, block in totals.blocks()) if final or self._loop_ended else (),
        )
        self._writer.write(state)

    def _kept(self, counters: StepCounters) -> StepCounters:
        return kept_counters(counters, on_device=self._step_timer.timers.on_device)

    def note(self, kind: str, text: str, seconds: float = 0.0) -> None:
        """Write an event that took so long; for any thread."""
        step = self._step_timer.step
        self._writer.write(EventLine(**self._clock.now(), step=step, kind=kind, text=text, seconds=seconds))


def kept_counters(counters: StepCounters, *, on_device: bool) -> StepCounters:
    """What the record has of counters: the built-in regions, on the host too if that is not the device."""
    return replace(
        counters,
        **{name: _exactly(getattr(counters, name)) for name in _SUMS},
        groups={kind: _kept_group(group) for kind, group in counters.groups.items()},
        between_host_ms=_exactly(counters.between_host_ms) if on_device else 0.0,
        host_groups={kind: _kept_group(group) for kind, group in counters.host_groups.items()} if on_device else {},
    )


def _kept_group(group: StepGroup) -> StepGroup:
    return replace(
        group,
        ms=_exactly(group.ms),
        squares=_exactly(group.squares),
        unsplit_ms=_exactly(group.unsplit_ms),
        regions={name: [*map(_exactly, sums)] for name, sums in group.regions.items() if name in REGIONS},
    )


def _exactly(amount: float) -> float:
    """A sum with ten digits, of which differences of squares leave enough, and nothing below 0 from rounding."""
    return float(f"{max(amount, 0.0):.10g}")


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values with six digits, a third of a float's, since most of a record is numbers. JSON has no infinity or NaN."""
    return {name: float(f"{value:.6g}") for name, value in values.items() if -inf < value < inf}


def _slim(report: RunReport, *, final: bool) -> RunReport:
    """The report without figures of each rank's trace, the run once, and, before the end, without sensors' curves."""
    run, analysis = report.run, report.analysis
    if analysis is not None:
        analysis = replace(analysis, ranks=(), run=None)
    telemetry = run.machine.telemetry
    if telemetry is not None and not final:
        run = replace(run, machine=replace(run.machine, telemetry=replace(telemetry, series=TelemetrySeries())))
    return replace(report, run=run, analysis=analysis)


def _words(exception: BaseException) -> str:
    """Type and message of an exception, cut to a limit."""
    message = ""
    with suppress(Exception):
        message = str(exception)
    name = type(exception).__name__
    return (f"{name}: {message}" if message else name)[:_LONGEST_TEXT]
