"""The record of a fit and what its ranks tell each other, from the claim of the folder to the copy of the files."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from socket import gethostname
from time import perf_counter

from lightning_forge_profiling.guard import Guarded, guarded_end
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import RANKS_S, exit_timeout_s
from lightning_forge_profiling.ranks.hangs import HangWatch
from lightning_forge_profiling.record.reader import RecordError, read_works
from lightning_forge_profiling.report.run_page import write_run_page
from lightning_forge_profiling.run.fit_window import FitWindow
from lightning_forge_profiling.run.folders import UPLOAD_S, finished_files, upload
from lightning_forge_profiling.run.rank_watch import RankWatch, WindowAgreement
from lightning_forge_profiling.run.rank_work import LiveWork
from lightning_forge_profiling.run.run_record import RunRecorder, claim_record_folder
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Training, WatchedWaits
from lightning_forge_profiling.schema import CpuUse, RanksStatus, RankWork, RunReport, TraceReport

_log = plain_logger(__name__)


@dataclass(frozen=True, slots=True)
class Live:
    """What other ranks, and who asks for a window, learn from while a fit trains."""

    waits: WatchedWaits | None
    cpu: Callable[[int], CpuUse | None]  # the use of the cores, on which there are so many ranks
    window: FitWindow | None


class FitRecord(Guarded):
    """Keeps the record of one fit, if it has one."""

    called = "ThroughputCallback"

    def __init__(self, training: Training, step_timer: StepTimer, *, keeps: bool) -> None:
        self._training, self._step_timer = training, step_timer
        self._recorder: RunRecorder | None = None
        self._ranks: RankWatch | None = None
        self._ended_by_exception = False
        self._folder = claim_record_folder(training) if keeps else None  # a collective
        self._hangs: HangWatch | None = None
        if self._folder is not None:
            self._hangs = HangWatch(self._folder.path, self._folder.run, training.facts.rank, training.facts.world_size)

    @property
    def path(self) -> Path | None:
        """The folder of the record until it is closed; None without one."""
        return None if self._folder is None or self._recorder is None else self._folder.path

    @property
    def status(self) -> RanksStatus | None:
        """All ranks as they are now, on rank 0."""
        return None if self._ranks is None else self._ranks.status

    def begin(
        self,
        live: Live,
        *,
        report: Callable[[], RunReport],
        metrics: Callable[[], Mapping[str, float]],
        sensors: Callable[[], Mapping[str, float]],
    ) -> None:
        """Training begins."""
        folder, hangs = self._folder, self._hangs
        if folder is None or hangs is None:
            return
        timer, facts = self._step_timer, self._training.facts
        try:
            self._recorder = record = RunRecorder(self._training, folder, timer, report=report, metrics=metrics)
            who = {"rank": facts.rank, "world_size": facts.world_size}
            windows = None
            if live.window is not None and live.window.can_be_asked:
                windows = WindowAgreement(
                    folder.path,
                    folder.run,
                    training=self._training,
                    window=live.window,
                    step_timer=timer,
                    note=record.note,
                )
            cpu = partial(live.cpu, facts.ranks_on_host)
            self._ranks = RankWatch(
                folder.path,
                folder.run,
                **who,
                step_timer=timer,
                work=LiveWork(timer, facts.rank, gethostname(), waits=live.waits, cpu=cpu, sensors=sensors),
                sensors=sensors,
                note=record.note,
                hangs=hangs,
                windows=windows,
            )
            self._ranks.start()
        except Exception as exc:
            _log.warning("This run will have no record: %s: %s", type(exc).__name__, exc)
            _log.debug("", exc_info=exc)

    def note(self, kind: str, text: str, seconds: float = 0.0) -> None:
        """Write an event."""
        if self._recorder is not None:
            self._recorder.note(kind, text, seconds)

    @property
    def due_s(self) -> float:
        """When the totals are due, by `time.perf_counter`."""
        return inf if self._recorder is None else self._recorder.state_due_s

    def state(self) -> None:
        """Write the totals if they are due."""
        if self._recorder is not None and perf_counter() >= self._recorder.state_due_s:
            self._recorder.state()

    def log_entry(self, metrics: Mapping[str, float], step: int) -> None:
        """The loggers have got an entry."""
        if self._recorder is not None:
            self._recorder.log_entry(metrics, step)

    def window_changed(self, trace: TraceReport | None) -> None:
        """The profiler may have started or stopped."""
        if self._recorder is not None:
            self._recorder.window(trace)

    def failing(self, exception: BaseException) -> None:
        """Put the exception on record."""
        self._ended_by_exception = True
        if self._recorder is not None:
            self._recorder.failing(exception)

    def loop_ended(self) -> None:
        """Training has ended."""
        if self._recorder is not None:
            self._recorder.loop_ended()

    @guarded_end
    def close_ranks(self) -> None:
        """Tell the other ranks, and watch for hangs no longer."""
        ranks, self._ranks = self._ranks, None
        try:
            if ranks is not None:
                ranks.close("failed" if self._ended_by_exception else "finished")
        finally:
            if self._hangs is not None:
                self._hangs.close()

    def other_ranks(self, mine: RankWork, *, interrupted: bool) -> tuple[RankWork, ...]:
        """The work of the other ranks on rank 0, from their records: of those that soon write what they end with."""
        folder, facts = self._folder, self._training.facts
        if folder is None or self._recorder is None or not facts.is_zero:
            return ()
        timeout_s = 0.0 if interrupted else RANKS_S
        return read_works(folder.path, mine, facts.world_size, folder.run, self._step_timer.step, timeout_s=timeout_s)

    @guarded_end
    def write_page(self, report: RunReport) -> None:
        """Add the run to the page of its recorded window."""
        if self._recorder is not None and self._folder is not None:
            try:
                write_run_page(self._folder.path, report, self._recorder.end_line())
            except (RecordError, OSError, ValueError) as exc:  # others can write to these files
                _log.warning("The page of the recorded steps does not show the run: %s", exc)

    @guarded_end
    def close(self, report: RunReport | None, *, interrupted: bool) -> None:
        """Close the record, and copy it to a remote folder; one that never began leaves no folder."""
        record, self._recorder = self._recorder, None
        folder, self._folder = self._folder, None
        if record is not None:
            record.close(report)
            if folder is not None and folder.url:
                facts = self._training.facts
                files = finished_files(folder.path, facts.rank, others=False)
                limit_s = exit_timeout_s(facts.world_size) if interrupted else UPLOAD_S
                upload(folder.path, folder.url, files, limit_s=limit_s)
        elif folder is not None:
            with suppress(OSError):
                folder.path.rmdir()
