"""The windows of a fit on one rank: the recordings, the memory snapshot, and the folders that their files go to."""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Final, Literal

from msgspec import structs
from torch import nn
from torch.profiler import supported_activities

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.memory import MemorySnapshot
from lightning_forge_profiling.guard import Guarded, guarded, guarded_end
from lightning_forge_profiling.names import PROFILER, WINDOW, memory_path
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import exit_timeout_s
from lightning_forge_profiling.profiler.collector import nsight_ranges
from lightning_forge_profiling.profiler.config import (
    ACTIVITIES,
    NAMED_STEPS,
    ProfilingConfig,
    StepWindow,
    steady_window,
    writable_folder_problem,
)
from lightning_forge_profiling.profiler.module_marks import ModuleMarks
from lightning_forge_profiling.profiler.session import TraceSession
from lightning_forge_profiling.run import folders
from lightning_forge_profiling.run.fit_settings import RecordingSettings
from lightning_forge_profiling.run.run_settings import loader_settings
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import MOST_TEXT, TraceReport, WindowAnswer, WindowPlan

_log = plain_logger(__name__)


MOST_WINDOWS: Final = 20
_MOST_BYTES: Final = 4 * 2**30  # of a rank's traces
_MOST_NAMED: Final = 16
# until then DistributedDataParallel waits for events, to time itself (`should_collect_runtime_stats` of reducer.cpp)
_DDP_TIMES_ITSELF: Final = 11


@dataclass(frozen=True, eq=False, slots=True)
class _Planned:
    """A window of steps to come, and why they are recorded: by the settings, every so many steps, or when asked."""

    window: StepWindow
    why: Literal["settings", "every", "asked"]
    ranks: Sequence[int]  # those that record it
    session: TraceSession | None = None  # one that waits, since another window was asked for meanwhile


@dataclass(slots=True)
class _Recorded:
    """A window of this fit."""

    session: TraceSession
    folder: folders.Folder
    copied_to: str = ""  # the remote folder that has its files

    def report(self) -> TraceReport:
        return structs.replace(self.session.report, url=self.copied_to)

    @property
    def bytes(self) -> int:
        path = self.session.report.path
        return path.stat().st_size if path is not None and path.is_file() else 0


class FitWindow(Guarded):
    """Records the windows of a fit on this rank: starts and stops the profiler between steps, waits for its reports.

    One is recorded by the settings, others every so many steps, and those that the ranks have agreed on (`arm`).
    """

    called = "ForgeProfilerCallback"

    def __init__(self, training: Training, settings: RecordingSettings, step_timer: StepTimer) -> None:
        self._training, self._settings, self._step_timer = training, settings, step_timer
        self._deferred = False
        self._windows: list[_Recorded] = []
        self._session: TraceSession | None = None  # of the latest of them
        self._planned: list[_Planned] = []  # another thread adds to it, too
        self._unkept = ""  # why the latest one was not recorded
        self._memory: MemorySnapshot | None = None
        self._skipped: TraceReport | None = None
        self._ended_steps = 0
        self._folders: folders.WindowFolders | None = None
        # called right before the profiler starts, with whether it records stacks, and after it has ended
        self.before_start: Callable[..., object] = lambda **_: None
        self.after_end: Callable[[], object] = lambda: None
        self.record: Path | None = None  # the folder of the run's record, once it is written
        self._first = settings.window  # of this fit
        if training.facts.is_trial:
            self._skip("fast_dev_run is a trial run")
        else:
            self._prepare(_taken(training))

    def _prepare(self, taken: str) -> None:
        """Agree on the folder with the other ranks, also where another profiler has taken this one's place."""
        training, settings, config = self._training, self._settings, self._settings.config
        run = folders.run_folder(training)
        root = run / config.trace_dir if settings.default_dir else folders.folder_of(config.trace_dir)
        # a collective: the name and the verdict are rank 0's, so that all ranks write into one folder or raise together
        now = datetime.now().astimezone()
        name = f"{now:%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
        problem = _unrecordable(config) or _folder_problem(root) if training.facts.is_zero else ""
        root, name, problem = training.broadcast((root, name, problem))
        self._folders = folders.WindowFolders(root, name, training.facts.rank)
        if taken or (problem and settings.injected_by_cli):
            self._skip(taken or problem)
            return
        if problem:
            raise ConfigurationError(problem)
        if training.facts.world_size > 1:
            self._folders.sign()
        if self._records and settings.memory_snapshot is not None:
            if self._no_memory:
                _log.warning("No memory snapshot: %s.", self._no_memory)
                return
            path = memory_path(self._folders.of(settings.window).path, training.facts.rank)
            self._memory = MemorySnapshot(settings.memory_snapshot, path)
            self._memory.start()

    @property
    def _expected(self) -> list[int]:
        """The ranks that record the window of the settings."""
        ranks, every = self._settings.ranks, range(self._training.facts.world_size)
        return list(every) if ranks == "all" else sorted(rank for rank in ranks if rank in every)

    @property
    def _records(self) -> bool:
        return not self._settings.on_demand and self._training.facts.rank in self._expected

    @property
    def folder(self) -> Path:
        """The folder of the windows' folders."""
        return Path() if self._folders is None else self._folders.root.path

    def _begin(
        self,
        window: StepWindow,
        ranks: Sequence[int],
        *,
        named: StepWindow | None,
        first_step: int = 0,
        now: bool = False,
    ) -> None:
        assert self._folders is not None  # noqa: S101
        facts, folder = self._training.facts, self._folders.of(named)
        device = facts.device.type
        can_be_recorded = device != "cpu" and device in ACTIVITIES  # an Apple GPU, for one, cannot
        if self._session is not None and self._session.report.status == "waiting":
            waiting = self._session
            self._planned.append(_Planned(waiting.window, "settings", self._expected, waiting))
        self._session = session = TraceSession(
            self._settings.config,
            [folder.path],
            rank=facts.rank,
            world_size=facts.world_size,
            expected_ranks=ranks,
            here=self._folders.ranks_here,
            accelerator=device if can_be_recorded else None,
            window=window,
            first_step=first_step,
            now=now,
            record=self.record,
        )
        loader = loader_settings(self._training)
        session.about = {} if loader is None else {"loader": structs.asdict(loader)}
        if isinstance(self._training.module, nn.Module):
            session.modules = ModuleMarks(self._training.module)
        self._windows.append(_Recorded(session, folder))
        self._advance(session, start=True)

    def named_steps(self) -> int:
        """How many steps with operators follow the light ones: each kind of a cycle of accumulation."""
        config = self._settings.config
        both = config.activities is None or {"cpu", "cuda"} <= set(config.activities)
        if self._training.facts.device.type != "cuda" or not both or config.with_stack:
            return 0
        return min(max(NAMED_STEPS, self._training.accumulated), _MOST_NAMED)

    def choose(self) -> None:
        """Choose the steps of a steady run, as rank 0 sees it: a collective, of each rank whatever it records."""
        if self._training.facts.is_trial or self._settings.on_demand or self._first is not None:
            return
        window = None
        try:
            window = self._steady_window()
        except Exception as exc:
            _log.debug("", exc_info=exc)
        self._first = self._training.broadcast(window) if self._training.facts.world_size > 1 else window

    def _steady_window(self) -> StepWindow:
        """When the run is likely to be steady, as this rank sees it."""
        loader = loader_settings(self._training)
        workers = 0 if loader is None else loader.num_workers or 0
        prefetched = 0 if loader is None else workers * (loader.prefetch_factor or 0)
        ahead, several = self._training.ahead(), self._training.facts.world_size > 1
        return steady_window(
            ahead.of_fit,
            of_epoch=ahead.of_epoch,
            batch=ahead.batch,
            warmup_steps=max(self._step_timer.warmup_steps, _DDP_TIMES_ITSELF if several else 0),
            workers=workers,
            prefetched=prefetched,
            named=self.named_steps(),
        )

    @property
    def _no_memory(self) -> str:
        """Why there is no memory snapshot although one was asked for."""
        device = self._training.facts.device.type
        if self._settings.memory_snapshot is None or device == "cuda":
            return ""
        return f"PyTorch records allocations on CUDA devices, and this is a {device}"

    @property
    def running(self) -> bool:
        """Whether the profiler runs in the current step, its warm-up included."""
        return self._session is not None and self._session.running

    def report(self) -> TraceReport | None:
        """What became of the window on this rank: of several the first that was recorded; None if it records none."""
        reports = [window.report() for window in self._windows]
        if not reports:
            unused = TraceReport("not reached", "the run ended before its first step") if self._records else None
            return self._skipped or unused
        report = next((each for each in reports if each.status == "written"), reports[-1])
        if self._memory is None:
            return structs.replace(report, memory_message=self._no_memory)
        return structs.replace(report, memory_path=self._memory.written, memory_message=self._memory.problem)

    def latest(self) -> TraceReport | None:
        """What became of the latest window."""
        return self._windows[-1].report() if self._windows else self.report()

    # -- windows that are asked for ------------------------------------------------------------------------------

    @property
    def can_be_asked(self) -> bool:
        """Whether this fit may record further windows."""
        return self._folders is not None and self._skipped is None

    @property
    def when_slow(self) -> bool:
        """Whether it records what becomes slow."""
        return self._settings.when == "slow"

    def refusal(self) -> str:
        """Why no further window can be recorded; "" if one can. For any thread."""
        if self.running or any(each.why == "asked" for each in list(self._planned)):
            return "another window is planned or being recorded"
        if len(self._windows) >= MOST_WINDOWS:
            return f"this run has recorded {len(self._windows)} windows, the most"
        if sum(window.bytes for window in self._windows) >= _MOST_BYTES:
            return f"the traces of this run have {_MOST_BYTES // 2**30} GiB, the most"
        return ""

    def folder_of(self, plan: WindowPlan) -> Path:
        """The folder of the traces of a plan."""
        assert self._folders is not None  # noqa: S101
        return self._folders.of(_window_of(plan)).path

    @property
    def analyzes(self) -> bool:
        """Whether traces are analysed."""
        return self._settings.config.analyze

    def arm(self, plan: WindowPlan) -> None:
        """Record the steps of a plan. For any thread."""
        self._unkept = ""
        self._planned.append(_Planned(_window_of(plan), "asked", plan.ranks or range(self._training.facts.world_size)))

    def answer_to(self, plan: WindowPlan, answer: WindowAnswer) -> WindowAnswer:
        """The answer to a plan, with what went wrong with its window on this rank. For any thread."""
        said = [
            window.session.report.message
            for window in list(self._windows)
            if window.session.window.start_step == plan.start and window.session.report.status in {"skipped", "failed"}
        ]
        text = (self._unkept or "".join(said[:1]))[:MOST_TEXT]
        return WindowAnswer(number=answer.number, text=text) if text else answer

    def _plan_after(self, window: StepWindow) -> None:
        if self._settings.every is not None:
            self._planned.append(_Planned(window.later(self._settings.every), "every", self._expected))

    def _take(self, why: Literal["settings", "every", "asked"]) -> _Planned | None:
        """Take the planned window of this kind that may begin now: whose profiler warms up in the step that follows."""
        for planned in self._planned:
            starts = not self.running if planned.session else self._ended_steps >= planned.window.start_step - 1
            if planned.why == why and starts:
                self._planned.remove(planned)
                return planned
        return None

    def _begin_next(self) -> None:
        """Begin a planned window, if one is due."""
        step = self._ended_steps
        if (planned := self._take("settings")) and planned.session and step < planned.window.end_step:
            self._session = planned.session
            planned.session.continue_at(step)
            self._advance(planned.session)
        if planned := self._take("asked"):
            window = planned.window
            if self.running or step > window.start_step - 1:
                self._unkept = f"step {step} had begun"
            elif self._training.may_be_last():
                self._unkept = "the run was about to end"
            else:
                self._begin(window, planned.ranks, named=window, first_step=step, now=True)
        elif planned := self._take("every"):
            window = planned.window
            self._plan_after(window)
            if not self.refusal() and not self._training.may_be_last():
                self._begin(window, planned.ranks, named=window, first_step=step)

    # -- steps ---------------------------------------------------------------------------------------------------

    @guarded
    def begin(self) -> None:
        """Step 0 begins."""
        settings = self._settings
        if self._folders is None or not self.can_be_asked:
            return
        self._folders.ranks_here(())  # a rank that ends takes its sign away
        if self._first is None or not self._records:
            return
        self._plan_after(self._first)
        self._begin(self._first, self._expected, named=settings.window)

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
    def end_step(self) -> None:
        """Start, annotate or stop the recording."""
        session, memory, step = self._session, self._memory, self._ended_steps
        self._ended_steps += 1
        if memory is not None and memory.when in {step, step + 1}:
            with self._as_profiler():
                memory.end_step(step)
        if session is not None:
            if session.will_act() and self._training.may_be_last():
                session.end_step()  # do not announce a step that will not come
                self._deferred = True
            else:
                self._advance(session)
        if self._planned:
            self._begin_next()

    @guarded_end
    def failing(self, exception: BaseException) -> None:
        """Write the memory snapshot of an out-of-memory error, before anything else frees or allocates memory."""
        if self._memory is not None:
            self._memory.on_exception(exception)

    @guarded_end
    def end(self, *, interrupted: bool) -> None:
        """Write what an unfinished window has recorded."""
        self._planned.clear()
        if self._memory is not None:
            self._memory.close()
        self._step_timer.regions.followers.mark = None
        if self._session is not None:
            began_ns = perf_counter_ns()
            self._session.stop(interrupted=interrupted)
            self._mark(self._session, began_ns)
            self.after_end()

    @guarded_end
    def finish(self, *, interrupted: bool) -> None:
        """Wait for the child processes."""
        if self._memory is not None:
            self._memory.close()
        for place, window in enumerate(self._windows):  # a rank that has not come is not waited for again
            alone = any(before.session.lacks_ranks for before in self._windows[:place])
            window.session.finish(interrupted=interrupted, alone=alone)
        if self._folders is not None:
            self._folders.leave(made=self._settings.default_dir)

    @guarded_end
    def copy_files(self, *, interrupted: bool) -> None:
        """Copy this rank's files of the windows, and on the lowest rank the reports, if the folder is remote."""
        for window in self._windows:
            self._copy(window, interrupted=interrupted)

    def _copy(self, window: _Recorded, *, interrupted: bool) -> None:
        folder, session, facts = window.folder, window.session, self._training.facts
        if not folder.url or not folder.path.is_dir():
            return
        files = folders.finished_files(folder.path, facts.rank, others=facts.rank == session.lowest_rank)
        if session.report.pending:
            what = "The run failed before its trace was complete, so that it is not in %s but in %s"
            _log.warning(what, folder.url, folder.path)
        elif files:
            limit_s = exit_timeout_s(facts.world_size) if interrupted else folders.UPLOAD_S
            window.copied_to = folder.url if folders.upload(folder.path, folder.url, files, limit_s=limit_s) else ""

    def _advance(self, session: TraceSession, *, start: bool = False) -> None:
        if not session.will_act():
            session.step()
            return
        self._step_timer.regions.followers.mark = None
        if not session.running:
            self.before_start(stacks=self._settings.config.with_stack)
        began_ns = perf_counter_ns()
        with self._as_profiler():
            if start:
                session.start()
            else:
                session.step()
        self._step_timer.regions.followers.mark = session.marks.begin if session.recording else None
        self._mark(session, began_ns)
        if not session.running:
            self.after_end()
        else:
            self._step_timer.regions.split()  # a trace shows the regions of each of its steps

    @contextmanager
    def _as_profiler(self) -> Iterator[None]:
        self._step_timer.regions.enter(PROFILER)
        try:
            yield
        finally:
            self._step_timer.regions.exit(PROFILER)

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


def _taken(training: Training) -> str:
    """Why this process is recorded by somebody else; "" if it is not."""
    if training.profiler_taken():
        return 'Trainer(profiler="pytorch") already records, and PyTorch has room for one profiler at a time'
    if nsight_ranges(os.environ) is not None:
        return "Nsight Systems records this process, and the GPU's events go to one profiler at a time"
    return ""


def _unrecordable(config: ProfilingConfig) -> str:
    """Why none of the requested activities can be recorded here; "" if one can."""
    asked, here = config.activities, {kind.name.lower() for kind in supported_activities()}  # type: ignore[no-untyped-call]
    if asked is None or not here.isdisjoint(asked):
        return ""
    return (
        f"activities={list(asked)!r}: on this machine PyTorch can record {', '.join(sorted(here))}. Name one of "
        "these, or give None for the CPU and the accelerator that the Trainer uses."
    )


def _window_of(plan: WindowPlan) -> StepWindow:
    return StepWindow(plan.start, plan.start + plan.steps, light=min(plan.light, plan.steps - 1))


def _folder_problem(folder: folders.Folder) -> str:
    return (folder.url and folders.remote_problem(folder.url)) or writable_folder_problem(folder.path)
