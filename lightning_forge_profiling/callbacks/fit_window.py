"""The window of a fit on one rank: the recording, the memory snapshot, and the folder that their files go to."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from torch.profiler import supported_activities

from lightning_forge_profiling.callbacks import folders, lightning_api
from lightning_forge_profiling.callbacks.guard import Guarded, guarded, guarded_end
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.run_settings import loader_settings
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import MemorySnapshot
from lightning_forge_profiling.names import PROFILER, WINDOW, memory_path
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import exit_timeout_s
from lightning_forge_profiling.profiler.config import ACTIVITIES, ProfilingConfig, StepWindow, steady_window
from lightning_forge_profiling.profiler.paths import writable_folder_problem
from lightning_forge_profiling.profiler.session import TraceSession
from lightning_forge_profiling.results.trace_report import TraceReport

if TYPE_CHECKING:  # which makes the window
    from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback

_log = plain_logger(__name__)


class FitWindow(Guarded):
    """Records the window, if this rank is to: starts and stops the profiler between steps, waits for its reports."""

    called = "ForgeProfilerCallback"

    def __init__(self, trainer: Trainer, settings: "ForgeProfilerCallback", step_timer: StepTimer) -> None:
        self._settings, self._step_timer = settings, step_timer
        self._deferred = self._records = False
        self._session: TraceSession | None = None
        self._memory: MemorySnapshot | None = None
        self._skipped: TraceReport | None = None
        self._no_memory = self._copied_to = ""
        self._ended_steps = 0
        self._folder: folders.Folder | None = None
        if trainer.fast_dev_run:
            self._skip("fast_dev_run is a trial run")
        elif lightning_api.uses_pytorch_profiler(trainer):
            self._skip('Trainer(profiler="pytorch") already records, and PyTorch has room for one profiler at a time')
        else:
            self._prepare(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        settings, config = self._settings, self._settings.config
        run = folders.run_folder(trainer)
        root = run / config.trace_dir if settings.default_dir else folders.folder_of(config.trace_dir)
        # a collective: the name and the verdict are rank 0's, so that all ranks write into one folder or raise together
        now = datetime.now().astimezone()
        which = "steady" if settings.window is None else str(settings.window).replace(" ", "_")
        name = f"{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}_{which}"
        problem = _unrecordable(config) or _folder_problem(root) if trainer.is_global_zero else ""
        root, name, problem = trainer.strategy.broadcast((root, name, problem))
        self._folder = folder = root / name
        if problem and settings.added:
            self._skip(problem)
            return
        if problem:
            raise ConfigurationError(problem)
        self._records = trainer.global_rank in self._expected(trainer)
        if not self._records:
            return
        device = trainer.strategy.root_device.type
        self._memory = self._memory_of(device, memory_path(folder.path, trainer.global_rank))
        if self._memory is not None:
            self._memory.start()

    def _expected(self, trainer: Trainer) -> list[int]:
        ranks, every = self._settings.ranks, range(trainer.world_size)
        return list(every) if ranks == "all" else sorted(rank for rank in ranks if rank in every)

    def _session_of(self, trainer: Trainer, window: StepWindow, folder: folders.Folder) -> TraceSession:
        device = trainer.strategy.root_device.type
        can_be_recorded = device != "cpu" and device in ACTIVITIES  # an Apple GPU, for one, cannot
        session = TraceSession(
            self._settings.config,
            [folder.path],
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            expected_ranks=self._expected(trainer),
            accelerator=device if can_be_recorded else None,
            window=window,
        )
        loader = loader_settings(trainer)
        session.about = {} if loader is None else {"loader": asdict(loader)}
        return session

    def _steady_window(self, trainer: Trainer) -> StepWindow:
        """When the run is likely to be steady, as rank 0 sees it: a collective."""
        loader = loader_settings(trainer)
        prefetched = 0 if loader is None else (loader.num_workers or 0) * (loader.prefetch_factor or 0)
        ahead = lightning_api.batches_ahead(trainer)
        window = steady_window(
            ahead.of_fit,
            of_epoch=ahead.of_epoch,
            batch=ahead.batch,
            warmup_steps=self._step_timer.warmup_steps,
            prefetched=prefetched,
        )
        chosen: StepWindow = trainer.strategy.broadcast(window) if trainer.world_size > 1 else window
        return chosen

    def _memory_of(self, device: str, path: Path) -> MemorySnapshot | None:
        when = self._settings.memory_snapshot
        if when is None:
            return None
        if device != "cuda":
            self._no_memory = f"PyTorch records allocations on CUDA devices, and this is a {device}"
            _log.warning("No memory snapshot: %s.", self._no_memory)
            return None
        return MemorySnapshot(when, path)

    @property
    def running(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self._session is not None and self._session.running

    def report(self) -> TraceReport | None:
        """What became of the window on this rank; None if it is none of those that record."""
        if self._session is None:
            unused = TraceReport("not reached", "the run ended before its first step") if self._records else None
            return self._skipped or unused
        report = replace(self._session.report, url=self._copied_to)
        if self._memory is None:
            return replace(report, memory_message=self._no_memory)
        return replace(report, memory_path=self._memory.written, memory_message=self._memory.problem)

    @guarded
    def begin(self, trainer: Trainer) -> None:
        """Step 0 begins."""
        if self._folder is None or self._skipped is not None:
            return
        window = self._settings.window or self._steady_window(trainer)
        if self._records:
            self._session = self._session_of(trainer, window, self._folder)
            self._advance(self._session, start=True)

    @guarded
    def begin_step(self) -> None:
        """The batch is trained on, and not skipped."""
        if self._session is None:
            return
        if self._deferred:
            self._deferred = False
            self._advance(self._session)
        self._session.begun()

    @guarded
    def end_step(self, trainer: Trainer) -> None:
        """Start, annotate or stop the recording."""
        session, memory, step = self._session, self._memory, self._ended_steps
        self._ended_steps += 1
        if memory is not None and memory.when in {step, step + 1}:
            with self._as_profiler():
                memory.end_step(step)
        if session is None:
            return
        if session.will_act() and lightning_api.may_be_last(trainer):
            session.end_step()  # do not announce a step that will not come
            self._deferred = True
        else:
            self._advance(session)

    @guarded_end
    def failing(self, exception: BaseException) -> None:
        """Write the memory snapshot of an out-of-memory error, before anything else frees or allocates memory."""
        if self._memory is not None:
            self._memory.on_exception(exception)

    @guarded_end
    def end(self, *, interrupted: bool) -> None:
        """Write what an unfinished window has recorded."""
        if self._memory is not None:
            self._memory.close()
        self._step_timer.tracing = False
        if self._session is not None:
            began_ns = perf_counter_ns()
            self._session.stop(interrupted=interrupted)
            self._mark(self._session, began_ns)

    @guarded_end
    def finish(self, *, interrupted: bool) -> None:
        """Wait for the child process."""
        if self._memory is not None:
            self._memory.close()
        if self._session is not None:
            self._session.stop()  # again, for a fit that had nothing to train
            self._session.finish(interrupted=interrupted)

    @guarded_end
    def copy_files(self, trainer: Trainer, *, interrupted: bool) -> None:
        """Copy this rank's files of the window, and on the lowest rank the reports, if the folder is remote."""
        session, folder, ranks = self._session, self._folder, self._settings.ranks
        if session is None or folder is None or not folder.url or not folder.path.is_dir():
            return
        lowest = 0 if ranks == "all" else min(ranks)
        files = folders.finished_files(folder.path, trainer.global_rank, others=trainer.global_rank == lowest)
        if session.report.pending:
            what = "The run failed before its trace was complete, so that it is not in %s but in %s"
            _log.warning(what, folder.url, folder.path)
        elif files:
            limit_s = exit_timeout_s(trainer.world_size) if interrupted else folders.UPLOAD_S
            self._copied_to = folder.url if folders.upload(folder.path, folder.url, files, limit_s=limit_s) else ""

    def _advance(self, session: TraceSession, *, start: bool = False) -> None:
        if not session.will_act():
            session.step()
            return
        self._step_timer.tracing = False
        began_ns = perf_counter_ns()
        with self._as_profiler():
            if start:
                session.start()
            else:
                session.step()
        self._step_timer.tracing = session.recording
        self._mark(session, began_ns)
        if session.running:
            self._step_timer.split()  # a trace shows the regions of each of its steps

    @contextmanager
    def _as_profiler(self) -> Iterator[None]:
        self._step_timer.enter(PROFILER)
        try:
            yield
        finally:
            self._step_timer.exit(PROFILER)

    def _mark(self, session: TraceSession, began_ns: int) -> None:
        """Enter into the ledger when the window was recorded, without the time that stopping takes."""
        if session.recording:
            self._step_timer.ledger.open_span(WINDOW)
        else:
            self._step_timer.ledger.close_span(WINDOW, began_ns)

    def _skip(self, reason: str) -> None:
        no_memory = "" if self._settings.memory_snapshot is None else reason
        self._skipped = TraceReport("skipped", reason, memory_message=no_memory)
        what = "trace" if self._settings.memory_snapshot is None else "trace and no memory snapshot"
        _log.warning("No %s will be recorded: %s.", what, reason)


def _unrecordable(config: ProfilingConfig) -> str:
    """Why none of the requested activities can be recorded here; "" if one can."""
    asked, here = config.activities, {kind.name.lower() for kind in supported_activities()}  # type: ignore[no-untyped-call]
    if asked is None or not here.isdisjoint(asked):
        return ""
    return (
        f"activities={list(asked)!r}: on this machine PyTorch can record {', '.join(sorted(here))}. Name one of "
        "these, or give None for the CPU and the accelerator that the Trainer uses."
    )


def _folder_problem(folder: folders.Folder) -> str:
    return (folder.url and folders.remote_problem(folder.url)) or writable_folder_problem(folder.path)
