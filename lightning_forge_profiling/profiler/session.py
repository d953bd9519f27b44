"""`TraceSession`: records one window of steps with `torch.profiler` and has its trace written; `build_profiler`."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from types import ModuleType, TracebackType
from typing import Final, Self

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from lightning_forge_profiling.guard import OWNED
from lightning_forge_profiling.names import METADATA_KEY
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import TraceOutput, exit_timeout_s, finished
from lightning_forge_profiling.profiler.collector import (
    RECORDING,
    Marks,
    active_profiler,
    detached_at_stop,
    forks_exit_at_once,
    let_gpu_settle,
    no_warning_of_later_cycles,
    scheduled_profiler,
)
from lightning_forge_profiling.profiler.config import (
    Phase,
    ProfilingConfig,
    StepWindow,
    numbered_folders,
    plugin_path,
    required_local_folder,
    trace_path,
)
from lightning_forge_profiling.profiler.module_marks import ModuleMarks
from lightning_forge_profiling.schema import TraceReport

KINETO_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
"""Environment variable that Kineto reads when the first profiler of a process starts."""
_QUIET: Final = "6"  # above its notes on start and stop, and its warnings of a machine without a GPU


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Let Kineto write nothing to standard error, unless the user has set its level or it has started before."""
    if KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[KINETO_LOG_LEVEL] = _QUIET
    try:
        yield
    finally:
        os.environ.pop(KINETO_LOG_LEVEL, None)


_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]", re.DOTALL)


def installed_packages() -> list[str]:
    """Names of the imported packages that are installed, to distinguish their functions from the user's in stacks."""
    files = {
        name: vars(module).get("__file__")
        for name, module in list(sys.modules.items())
        if name.isidentifier() and not name.startswith("__") and isinstance(module, ModuleType)
    }
    return sorted(name for name, file in files.items() if isinstance(file, str) and _INSTALLED.match(file))


def trace_metadata(
    rank: int, world_size: int, window: StepWindow, steps: Sequence[int], more: Mapping[str, object]
) -> dict[str, str]:
    """The metadata to add to a trace."""
    about = {
        "rank": rank,
        "world_size": world_size,
        "intra_op_threads": torch.get_num_threads(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "start_step": window.start_step,
        "end_step": window.end_step,
        "recorded_steps": list(steps),
        "light_steps": [step for step in steps if window.is_light(step)],
        **more,
    }
    metadata = {METADATA_KEY: json.dumps(about)}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        # PyTorch writes it for distributed runs only. json.dumps puts the space that HTA's '"rank": N' needs.
        metadata["distributedInfo"] = json.dumps({"backend": "none", "rank": rank, "world_size": world_size})
    return metadata


_log = plain_logger(__name__)


class TraceSession:
    """Records one window of steps with `torch.profiler`; `build_profiler` and `ForgeProfilerCallback` create it.

    It is a context manager with `step()`. At the end of the window the loop waits for the collector's stop and the
    export of the raw file; a child process without torch compresses it, writes the copy for TensorBoard and analyses
    it. Leaving the context waits for that child. After an exception, the steps recorded so far are written too.

    Args:
        config: what to record.
        folders: folders to write to, in order of preference; the first without a trace of this rank is taken.
        rank: this process's global rank.
        world_size: number of processes.
        expected_ranks: the ranks that record this window, in order: TensorBoard's copies are published together, and
            the first rank analyses the traces of all.
        here: which of some ranks write to the same folder: no other one is waited for.
        accelerator: `"cuda"` or another to record too if `config.activities` is None; None for the CPU only.
        window: the steps to record; None for those of `config`.
        first_step: the step that `start` begins.
        now: whether somebody waits for the trace: it is finished at once, also where no core is free.
        record: the folder of the run's record, whose measurements so far enter the reports; None to leave them out.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        folders: Iterable[Path],
        *,
        rank: int = 0,
        world_size: int = 1,
        expected_ranks: Iterable[int] = (0,),
        here: Callable[[Sequence[int]], Sequence[int]] = tuple,
        accelerator: str | None = None,
        window: StepWindow | None = None,
        first_step: int = 0,
        now: bool = False,
        record: Path | None = None,
    ) -> None:
        self._config = config
        self.window = window or config.window
        self._output = TraceOutput(config, folders, rank, expected_ranks, here, now=now, record=record)
        self._world_size = world_size
        self._activities = config.activities or (("cpu", accelerator) if accelerator else ("cpu",))
        self._on_device = accelerator is not None
        self._next_step = first_step
        self._phase = Phase.WAIT
        self._profiler: _KinetoProfile | None = None
        self._has_lock = self._begun = False
        self._annotation: record_function | None = None
        self.marks, self.modules = Marks(), ModuleMarks()
        self._report = TraceReport()
        self.about: Mapping[str, object] = {}  # what else the trace says of itself, as JSON
        OWNED.add(self)

    def leave(self) -> None:
        """This is a forked process: the recording is none of its own."""
        if self.running and self.recording:
            self.marks.leave_operators_out()
        self.modules.end()
        self._release()
        self._output.child, self._report = None, TraceReport("skipped")

    @property
    def report(self) -> TraceReport:
        """The report on the window so far."""
        return self._report

    @property
    def recording(self) -> bool:
        """Whether the current step is recorded."""
        return self._phase is Phase.RECORD

    @property
    def running(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up step included."""
        return self._profiler is not None

    def will_act(self) -> bool:
        """Whether the next `step()` starts, stops or annotates anything, and so may block the loop."""
        return self._phase is Phase.RECORD or self.window.phase(self._next_step) is not self._phase

    @property
    def lowest_rank(self) -> int:
        """The lowest of the ranks that write to this folder, which publishes the copies of all."""
        return self._output.here[0]

    @property
    def lacks_ranks(self) -> bool:
        """Whether ranks that write to this folder have left no trace, in the time in which they were waited for."""
        path = self._report.path
        return path is not None and not all(trace_path(path.parent, rank).exists() for rank in self._output.here)

    def start(self) -> Self:
        """Begin the first step."""
        if self.window.start_step == 0:
            _log.info("The window starts at step 0: recording starts without a warm-up step.")
        self.step()
        return self

    def continue_at(self, step: int) -> None:
        """The next step to begin is a later one."""
        self._next_step = step

    def begun(self) -> None:
        """Count the current step as recorded even if it never ends, since some of it has run."""
        self._begun = True

    def end_step(self) -> None:
        """End the current step, which may be the last; a later `step()` begins the next one."""
        self._begun = True
        self._close_annotation()

    def step(self) -> None:
        """End the current step and begin the next one."""
        self._begun = False
        step, self._next_step = self._next_step, self._next_step + 1
        phase, before = self.window.phase(step), self._phase
        self._phase = phase
        if phase is before is not Phase.RECORD or self._report.status in {"skipped", "failed"}:
            return
        try:
            if phase is Phase.DONE:
                self._end_window()
            elif phase is Phase.WARMUP or self._profiler is None:
                self._start_profiler(recording=phase is Phase.RECORD)
            elif before is Phase.WARMUP:
                # a profiler created since the warm-up began would be started on top of this one; checked before
                # recording, because a Python tracer would record the check
                other = scheduled_profiler(until=self.window.end_step - step)
                self._profiler.start_trace()
                if other:  # which attaches CUPTI itself: detaching it now could take its kernels away
                    self._profiler.stop_trace()
                    self._release()
                    self._skip(other)
            if phase is Phase.RECORD and self._profiler is not None:
                self._annotate(step)
        except Exception as exc:
            self._fail(exc)

    def stop(self, *, interrupted: bool = False) -> None:
        """End the run: an open window is closed and its steps are written. May be called again.

        Args:
            interrupted: the run ended by an exception. The collector's stop waits for the GPU, which may then never
                finish (a collective that another rank will not join): in that case the trace is given up.
        """
        try:
            if self._profiler is not None:
                if interrupted and "cuda" in self._activities:
                    let_gpu_settle(self._world_size)
                self._end_window(alone=interrupted)
            elif self._report.status == "waiting":
                steps = max(self._next_step - (0 if self._begun else 1), 0)
                self._report = replace(
                    self._report,
                    status="not reached",
                    message=f"the run ended after {steps} step{'' if steps == 1 else 's'}, before {self.window}",
                )
        except Exception as exc:
            self._fail(exc)
        self._phase = Phase.DONE

    def finish(self, timeout_s: float = 600, *, interrupted: bool = False, alone: bool = False) -> TraceReport:
        """Wait until the trace is compressed, in place and analysed. Ctrl-C leaves that to the child process.

        Args:
            timeout_s: after this many seconds the child process is killed and the raw file stays.
            interrupted: the run ended by an exception: wait a few seconds at most, with several ranks not at all; the
                child process then continues alone.
            alone: wait for no other rank.

        Returns:
            The final report.
        """
        child, self._output.child = self._output.child, None
        if child is None:
            return self._report
        report = self._report
        message = "the run ended before trace and reports were complete: they are still being written"
        self._report = replace(report, pending=True, message=message)  # if Ctrl-C ends the wait
        most_s = exit_timeout_s(self._world_size)
        problem = child.wait_or_detach(most_s) if interrupted else child.wait(timeout_s, alone)
        if problem:
            _log.warning("%s", problem)
        if problem is not None:
            self._report = finished(report, problem, analyzed=self._output.analyzes)
        return self._report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        interrupted = exc_type is not None
        self._begun |= interrupted
        self.stop(interrupted=interrupted)
        report = self.finish(interrupted=interrupted)
        if report.status == "written":
            _log.info("Trace: %s; report: %s", report.path, report.report_path or "none")
        elif report.message:
            _log.warning("No trace: %s", report.message)

    def _start_profiler(self, *, recording: bool) -> None:
        other = active_profiler() or scheduled_profiler(until=self.window.end_step - self._next_step + 1)
        self._has_lock = not other and RECORDING.acquire(blocking=False)
        if not self._has_lock:
            self._skip(other or "another fit in this process records at the same time")
            return
        began = perf_counter()
        forks_exit_at_once()
        config, memory = self._config, self._config.profile_memory
        # not `profile`, which refers to itself: a collection in a later step would free all that it has recorded
        self._profiler = _KinetoProfile(
            activities=[getattr(ProfilerActivity, name.upper()) for name in self._activities],
            record_shapes=config.record_shapes,
            profile_memory=self._on_device and not self.window.light if memory is None else memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        with no_warning_of_later_cycles(), quiet_kineto():
            self._profiler.prepare_trace()
        if recording:
            self._profiler.start_trace()
        self._report = replace(self._report, status="recording", start_stall_ms=(perf_counter() - began) * 1e3)

    def _stop_profiler(self, profiler: _KinetoProfile) -> None:
        with detached_at_stop() if "cuda" in self._activities else nullcontext("") as why_attached:
            profiler.stop_trace()
        self._release()
        self._report = replace(self._report, attached=why_attached)

    def _release(self) -> None:
        self._profiler = None
        if self._has_lock:
            self._has_lock = False
            RECORDING.release()

    def _annotate(self, step: int) -> None:
        self._close_annotation()
        if self.window.is_light(step):
            self.marks.leave_operators_out()
        else:
            self.marks.take_operators_in()
            self.modules.begin()
        self._annotation = self.marks.begin(f"ProfilerStep#{step}")
        self._report = replace(self._report, steps=(*self._report.steps, step))

    def _close_annotation(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _end_window(self, *, alone: bool = False) -> None:
        began = perf_counter()
        self.marks.take_operators_in()
        self.modules.end()
        profiler, config = self._profiler, self._config
        assert profiler is not None  # noqa: S101
        self._close_annotation()
        if self._phase is Phase.RECORD and not self._begun:  # it was announced, and the run ended there
            self._report = replace(self._report, steps=self._report.steps[:-1])
        if not self._report.steps:  # nothing to write
            if self._phase is Phase.WARMUP:
                profiler.start_trace()
            self._stop_profiler(profiler)
            self._report = replace(
                self._report, status="not reached", message=f"the run ended right before {self.window}"
            )
            return
        more = {**self.about, "libraries": installed_packages()} if config.with_stack else self.about
        about = trace_metadata(self._output.rank, self._world_size, self.window, self._report.steps, more)
        for key, value in about.items():
            profiler.add_metadata_json(key, value)
        self._stop_profiler(profiler)
        path = self._output.write(profiler, alone=alone)
        self._report = replace(
            self._report,
            status="written",
            path=path,
            plugin_path=plugin_path(path.parent, self._output.rank) if config.tensorboard else None,
            stall_ms=(perf_counter() - began) * 1e3,
        )

    def _skip(self, reason: str) -> None:
        self._report = replace(self._report, status="skipped", message=reason)
        _log.warning("No trace will be recorded: %s.", reason.rstrip("."))

    def _fail(self, exc: Exception) -> None:
        self.marks.take_operators_in()
        self.modules.end()
        profiler, self._profiler = self._profiler, None
        if not isinstance(exc, TimeoutError):
            if profiler is not None and self._report.status == "recording":
                with suppress(Exception):  # it may have been what failed
                    self._stop_profiler(profiler)
            self._release()
        self._report = replace(self._report, status="failed", message=f"{type(exc).__name__}: {exc}", path=None)
        _log.warning("Recording failed, training goes on without a trace: %s: %s", type(exc).__name__, exc)


def build_profiler(config: ProfilingConfig, rank: int = 0) -> TraceSession | None:
    """A scheduled profiler for a plain PyTorch or Fabric loop.

    Args:
        config: what to record, and whether at all.
        rank: this process's global rank; every rank that records calls this.

    Returns:
        A context manager with `step()`, to be called at the end of each step; None if `config.enable` is False.

    Raises:
        ConfigurationError: `config.trace_dir` is a file, cannot be written, or is remote.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> config = ProfilingConfig(enable=True, start_step=1, end_step=2, trace_dir=folder.name)
        >>> with build_profiler(config) as profiler:
        ...     for step in range(3):
        ...         profiler.step()
        >>> profiler.report.path.name
        'rank0.trace.json.gz'
        >>> folder.cleanup()
    """
    if not config.enable:
        return None
    root = required_local_folder(config.trace_dir)  # os.chdir() may come before the window
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if distributed else 1
    return TraceSession(
        config,
        numbered_folders(root / str(config.window).replace(" ", "_")),
        rank=rank,
        world_size=world_size,
        expected_ranks=range(world_size),
        accelerator="cuda" if torch.cuda.is_available() else None,
    )
