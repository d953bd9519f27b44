"""`ForgeProfilerCallback`: records a window of steps with `torch.profiler`."""

import secrets
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from os import PathLike
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal

from torch.profiler import supported_activities

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.folders import (
    UPLOAD_S,
    Folder,
    finished_files,
    folder_of,
    remote_problem,
    upload,
)
from lightning_forge_profiling.callbacks.guard import guarded
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory_snapshot import MemorySnapshot, refuse_unless_moment
from lightning_forge_profiling.names import REGIONS, WINDOW, memory_path
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.config import ACTIVITIES, ProfilingConfig
from lightning_forge_profiling.profiler.paths import writable_folder_problem
from lightning_forge_profiling.profiler.session import TraceSession
from lightning_forge_profiling.profiler.timeouts import patience_s
from lightning_forge_profiling.results.trace_report import TraceReport
from lightning_forge_profiling.timing.ledger import LedgerClock

_log = plain_logger(__name__)


class ForgeProfilerCallback(TimedCallback):
    """Records training batches `[start_step, end_step)` of a fit with `torch.profiler`, analyses them, times all steps.

    Batches are counted from 0 at the start of this fit, also after resuming from a checkpoint. The step before the
    window is the profiler's warm-up and is not recorded. Each rank writes `rankN.trace.json.gz` into one folder per
    window, for Perfetto and HTA, and a copy in `tensorboard/` for TensorBoard's profiler tab. A process beside the
    training analyses the traces of all ranks and writes `summary.json`, `summary.md` and `report.html` into the folder.
    At the end of fit rank 0 prints the verdict of trace and run together, and where the time of a step goes, over the
    steps after the first ten (`ThroughputCallback` may set another number).

    Args:
        start_step: the first recorded step. 0 records without a warm-up step.
        end_step: the first step after the window.
        trace_dir: the folder of the windows' folders; None for `profiler_traces` in the logger's folder (TensorBoard's,
            if there are several), or in `default_root_dir` without a logger.
        enabled: False makes the callback do nothing.
        regions: which of `data`, `transfer`, `forward`, `backward` and `optimizer` to time; the others' time goes to
            `other`, which is always there.
        activities: what to record, of `"cpu"`, `"cuda"`, `"xpu"`, `"mtia"`; None for the CPU and the accelerator that
            the Trainer uses.
        record_shapes: record the input shapes of operators, from which FLOPs are counted.
        profile_memory: record allocations.
        with_stack: record Python stacks; slows the recorded steps.
        with_flops: let PyTorch estimate FLOPs for its own tables. The exported trace does not contain them; the reports
            count FLOPs from the shapes.
        tensorboard: also write the copy for TensorBoard's profiler plugin.
        analyze: also analyse the traces and write the reports.
        ranks: the global ranks that record, or `"all"`. Every rank needs the callback nonetheless.
        memory_snapshot: also write PyTorch's memory snapshot, `rankN.memory.pickle` for https://pytorch.org/memory_viz:
            a step number for that step, `"oom"` for when the fit runs out of memory; the latter records allocations
            throughout.

    Raises:
        ConfigurationError: an empty or negative window, an unknown region or activity, a `trace_dir` that is no path,
            or bad `ranks` or `memory_snapshot`; in `setup`, a second callback of this class, a `trace_dir` that cannot
            be written, or no activity that can be recorded on this machine.

    Example:
        >>> callback = ForgeProfilerCallback(start_step=5, end_step=8)
        >>> ForgeProfilerCallback(start_step=8, end_step=8)
        Traceback (most recent call last):
        ...
        lightning_forge_profiling.errors.ConfigurationError: end_step must be greater than start_step: ...
    """

    _session: TraceSession | None = None
    _memory: MemorySnapshot | None = None
    _report: TraceReport | None = None
    """What became of the window, once there is no session any more."""

    def __init__(
        self,
        start_step: int = 5,
        end_step: int = 8,
        *,
        trace_dir: str | PathLike[str] | None = None,
        enabled: bool = True,
        regions: Collection[str] = REGIONS,
        activities: Sequence[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = False,
        tensorboard: bool = True,
        analyze: bool = True,
        ranks: Literal["all"] | Sequence[int] = "all",
        memory_snapshot: Literal["oom"] | int | None = None,
    ) -> None:
        super().__init__()
        if enabled:
            _refuse_unless_list("regions must be a list of names", regions)
            if ranks != "all":
                _refuse_unless_list('ranks must be "all" or a list of global ranks', ranks)
            if memory_snapshot is not None:
                refuse_unless_moment(memory_snapshot)
        self.enabled = enabled
        self.memory_snapshot = memory_snapshot
        self.regions = tuple(regions) if enabled else REGIONS
        self.ranks: Literal["all"] | tuple[int, ...] = "all" if ranks == "all" or not enabled else tuple(ranks)
        self.config = ProfilingConfig(
            enable=enabled,
            start_step=start_step,
            end_step=end_step,
            trace_dir="profiler_traces" if trace_dir is None else trace_dir,
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            tensorboard=tensorboard,
            analyze=analyze,
        )
        self._default_dir = trace_dir is None
        if enabled:
            unknown = [region for region in self.regions if region not in REGIONS]
            if unknown:
                raise ConfigurationError(
                    f"Unknown regions {unknown}; known are {', '.join(REGIONS)}. "
                    'Custom regions need no list: write `with region("name"):` in the module.'
                )
            if self.ranks != "all" and not (self.ranks and all(type(rank) is int and rank >= 0 for rank in self.ranks)):
                raise ConfigurationError(f'ranks must be "all" or global ranks from 0 on, got {list(self.ranks)!r}.')

    @property
    def records_step(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self._session is not None and self._session.running

    def trace_report(self) -> TraceReport | None:
        """The report on this rank's window; None before a fit.

        Returns:
            Its status, the recorded steps, the paths, and how long training was blocked.
        """
        if self._session is None:
            return self._report
        report = replace(self._session.report, url=self._copied_to)
        if self._memory is None:
            return replace(report, memory_message=self._no_memory)
        return replace(report, memory_path=self._memory.written, memory_message=self._memory.problem)

    def _let_go(self) -> None:
        super()._let_go()
        self._report = self.trace_report()
        self._session, self._deferred = None, False
        self._memory, self._no_memory, self._ended_steps = None, "", 0
        self._folder: Folder | None = None
        self._copied_to = ""

    def prepare(self, trainer: Trainer) -> None:
        """Agree on a folder with the other ranks and refuse one that cannot be written."""
        self._report = None
        if lightning_api.is_trial_run(trainer):
            self._skip("fast_dev_run is a trial run")
            return
        if lightning_api.uses_pytorch_profiler(trainer):
            self._skip('Trainer(profiler="pytorch") already records, and PyTorch has room for one profiler at a time')
            return
        run = lightning_api.run_folder(trainer)
        root = run / self.config.trace_dir if self._default_dir else folder_of(self.config.trace_dir)
        # the name and the verdict are rank 0's, so that all ranks write into one folder or raise together
        now = datetime.now().astimezone()
        name = f"{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}_{str(self.config.window).replace(' ', '_')}"
        problem = self._unrecordable() or _folder_problem(root) if trainer.is_global_zero else ""
        root, name, problem = trainer.strategy.broadcast((root, name, problem))
        self._folder = folder = root / name
        if problem and self.added:
            self._skip(problem)
            return
        if problem:
            raise ConfigurationError(problem)
        expected = range(trainer.world_size) if self.ranks == "all" else self.ranks
        if trainer.global_rank not in expected:
            return
        device = trainer.strategy.root_device.type
        can_be_recorded = device != "cpu" and device in ACTIVITIES  # an Apple GPU, for one, cannot
        self._session = TraceSession(
            self.config,
            [folder.path],
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            expected_ranks=sorted(rank for rank in expected if rank < trainer.world_size),
            accelerator=device if can_be_recorded else None,
        )
        self._memory = self._memory_of(device, memory_path(folder.path, trainer.global_rank))
        if self._memory is not None:
            self._memory.start()

    def begin(self, trainer: Trainer) -> None:
        """Step 0 begins."""
        if self._session is not None:
            loader = loader_settings(trainer)
            self._session.about = {} if loader is None else {"loader": asdict(loader)}
            self._advance(self._session, start=True)

    def after_step(self, trainer: Trainer) -> None:
        """Start, annotate or stop the recording."""
        if self._memory is not None:
            self._end_step_of(self._memory)
        session = self._session
        if session is None:
            return
        if session.will_act() and lightning_api.may_be_last(trainer):
            session.end_step()  # do not announce a step that will not come
            self._deferred = True
        else:
            self._advance(session)
        lightning_api.set_hook(self, "on_train_batch_start", on=self._deferred or session.running)

    def idle_steps(self, trainer: Trainer) -> int:
        """Every step until the recording or the snapshot begins, and every step after them."""
        memory = self._memory is not None and self._memory.when != "oom" and self._memory.when >= self._ended_steps
        return 0 if memory else sys.maxsize if self._session is None else self._session.idle_steps()

    def skip_steps(self, steps: int) -> None:
        """Count the steps that have passed."""
        self._ended_steps += steps
        if self._session is not None:
            self._session.skip(steps)

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that the batch is trained on and not skipped."""
        if self._session is None:
            return
        if self._deferred:
            self._deferred = False
            self._advance(self._session)
        self._session.begun()

    def end(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Write what an unfinished window has recorded."""
        if self._memory is not None:
            self._memory.close()
        if self._step_timer is not None:
            self._step_timer.tracing = False
        if self._session is not None:
            began_ns = perf_counter_ns()
            self._session.stop(interrupted=interrupted)
            if self._step_timer is not None and self._step_timer.ledger is not None:
                _mark_window(self._step_timer.ledger, self._session, began_ns)

    def failing(self, exception: BaseException) -> None:
        """Write the memory snapshot of an out-of-memory error, before anything else frees or allocates memory."""
        if self._memory is not None:
            self._memory.on_exception(exception)

    def finish(self, *, interrupted: bool) -> None:
        """Wait for the child process."""
        if self._memory is not None:
            self._memory.close()
        if self._session is not None:
            self._session.stop()  # again, for a fit that had nothing to train
            self._session.finish(interrupted=interrupted)

    def copy_files(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Copy this rank's files of the window, and on the lowest rank the reports, if the folder is remote."""
        session, folder = self._session, self._folder
        if session is None or folder is None or not folder.url or not folder.path.is_dir():
            return
        lowest = 0 if self.ranks == "all" else min(self.ranks)
        files = finished_files(folder.path, trainer.global_rank, others=trainer.global_rank == lowest)
        if session.report.pending:
            what = "The run failed before its trace was complete, so that it is not in %s but in %s"
            _log.warning(what, folder.url, folder.path)
        elif files:
            limit_s = patience_s(trainer.world_size) if interrupted else UPLOAD_S
            self._copied_to = folder.url if upload(folder.path, folder.url, files, limit_s=limit_s) else ""

    def _memory_of(self, device: str, path: Path) -> MemorySnapshot | None:
        if self.memory_snapshot is None:
            return None
        if device != "cuda":
            self._no_memory = f"PyTorch records allocations on CUDA devices, and this is a {device}"
            _log.warning("No memory snapshot: %s.", self._no_memory)
            return None
        return MemorySnapshot(self.memory_snapshot, path)

    def _unrecordable(self) -> str:
        """Why none of the requested activities can be recorded here; "" if one can."""
        asked, here = self.config.activities, {kind.name.lower() for kind in supported_activities()}  # type: ignore[no-untyped-call]
        if asked is None or not here.isdisjoint(asked):
            return ""
        return (
            f"activities={list(asked)!r}: on this machine PyTorch can record {', '.join(sorted(here))}. Name one of "
            "these, or give None for the CPU and the accelerator that the Trainer uses."
        )

    def _end_step_of(self, memory: MemorySnapshot) -> None:
        step, self._ended_steps = self._ended_steps, self._ended_steps + 1
        if memory.when not in {step, step + 1}:
            return
        if self._step_timer is not None:
            self._step_timer.enter("profiler")
        memory.end_step(step)
        if self._step_timer is not None:
            self._step_timer.exit("profiler")

    def _advance(self, session: TraceSession, *, start: bool = False) -> None:
        step_timer = self._step_timer
        if step_timer is None or not session.will_act():
            session.step()
            return
        step_timer.tracing = False
        began_ns = perf_counter_ns()
        step_timer.enter("profiler")
        if start:
            session.start()
        else:
            session.step()
        step_timer.exit("profiler")
        step_timer.tracing = session.recording
        if step_timer.ledger is not None:
            _mark_window(step_timer.ledger, session, began_ns)
        if session.running:
            step_timer.split()  # a trace shows the regions of each of its steps

    def _skip(self, reason: str) -> None:
        no_memory = "" if self.memory_snapshot is None else reason
        self._report = TraceReport("skipped", reason, memory_message=no_memory)
        what = "trace" if self.memory_snapshot is None else "trace and no memory snapshot"
        _log.warning("No %s will be recorded: %s.", what, reason)


def _mark_window(ledger: LedgerClock, session: TraceSession, began_ns: int) -> None:
    """Enter into the ledger when the window was recorded, without the time that stopping takes."""
    if session.recording:
        ledger.open_span(WINDOW)
    else:
        ledger.close_span(WINDOW, began_ns)


def _folder_problem(folder: Folder) -> str:
    return (folder.url and remote_problem(folder.url)) or writable_folder_problem(folder.path)


def _refuse_unless_list(what: str, value: object) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{what}, got {value!r}.")
