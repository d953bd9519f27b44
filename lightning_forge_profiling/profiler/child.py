"""A trace on its way to the disk: written by the training, then compressed, copied and analysed by a child process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

from msgspec.structs import replace
from torch.profiler.profiler import _KinetoProfile

from lightning_forge_profiling.names import REPORT_HTML, SUMMARY_JSON
from lightning_forge_profiling.processes import kill_group
from lightning_forge_profiling.profiler.config import ProfilingConfig, claim, plugin_path, trace_path, window_folder
from lightning_forge_profiling.safe_files import discard_with_folders, name_for_kineto, open_regular
from lightning_forge_profiling.schema import TraceReport

PATIENCE_S: Final = 4.0
# for the other ranks' last lines: ranks end together, but the disk of another node may show them later, or never
RANKS_S: Final = 2.0


def exit_timeout_s(world_size: int) -> float:
    """Seconds for each wait; 0 with several ranks, since Lightning kills all within 5 s of the first one's end."""
    return PATIENCE_S if world_size == 1 else 0.0


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """Let Ctrl-C end the wait inside and nothing else, also after the first one, when Lightning ignores it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    ignored = in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        if ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def problems_within(limit_s: float, works: Sequence[Callable[[], object]]) -> list[Exception | None]:
    """Do several things at once, a thread each; the exception of each, or TimeoutError if it is not done in time."""
    problems: list[Exception | None] = [TimeoutError(f"not done within {max(limit_s, 0):g} s")] * len(works)
    if limit_s <= 0:
        return problems

    def run(number: int, work: Callable[[], object]) -> None:
        try:
            work()
            problems[number] = None
        except Exception as exc:
            problems[number] = exc

    threads = [threading.Thread(target=run, args=work, daemon=True) for work in enumerate(works)]
    for thread in threads:  # one that does not end in time is left alone; it does not keep the process alive
        thread.start()
    deadline = monotonic() + limit_s
    with ctrl_c_ends():
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0.0))
    return list(problems)


_PROGRAM: Final = "lightning_forge_profiling.finish"  # not imported here: it runs in a process without torch
_SHORTEST_WAIT_S: Final = 0.1  # shorter is too short to learn that the process has ended


class _Process(subprocess.Popen[bytes]):
    """A process that may outlive its object. That is no leak: Python reaps it when it starts the next one."""

    def __del__(self) -> None:
        super().__del__(_warn=lambda *_, **__: None)  # type: ignore[call-arg]


class FinishingChild:
    """A process without torch that compresses a raw trace, copies it for TensorBoard and analyses the trace."""

    def __init__(
        self,
        raw: Path,
        rank: int,
        *,
        ranks: Sequence[int],
        here: Sequence[int] = (),
        tensorboard: bool,
        analyze: bool,
        alone: bool = False,
        now: bool = False,
        record: Path | None = None,
    ) -> None:
        # It finds modules where this process does. The package's own folder comes last, for import hooks that found it.
        path = [*map(os.path.abspath, sys.path), str(Path(__file__).absolute().parents[2])]
        code = f"import sys; sys.path[:] = {path!r}; from {_PROGRAM} import main; sys.exit(main())"
        folder = window_folder(raw)
        command = [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else []), "-c", code]
        command += [str(raw), str(trace_path(folder, rank))]
        command += ["--ranks", *map(str, ranks), "--here", *map(str, here or ranks)]
        command += ["--plugin", str(plugin_path(folder, rank))] if tensorboard else []
        command += ["--analyze"] if analyze else []
        # alone: the training failed; it begins at once, and waits for no other rank
        command += [] if alone else ["--training", str(os.getpid())]
        command += ["--now"] if now else []
        command += [] if record is None else ["--record", str(record)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        # a separate session: Ctrl-C ends the training, not the writing of its trace
        self._process = _Process(command, stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self, timeout_s: float, alone: bool = False) -> str:
        """Tell it that training is over, and wait for its end; what went wrong, or "". Ctrl-C leaves it at its work."""
        try:
            return self._problem(timeout_s, alone)
        except subprocess.TimeoutExpired:
            kill_group(self.pid)  # with the processes that read other ranks' traces for it
            self._process.communicate()
            return f"finishing the trace took longer than {timeout_s:.0f} s"
        except KeyboardInterrupt:
            self._detach()
            raise

    def wait_or_detach(self, timeout_s: float) -> str | None:
        """Wait for a limited time, which Ctrl-C ends; None if it then goes on alone."""
        with ctrl_c_ends(), contextlib.suppress(subprocess.TimeoutExpired):
            return self._problem(max(timeout_s, _SHORTEST_WAIT_S))
        self._detach()
        return None

    def _detach(self) -> None:
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _problem(self, timeout_s: float, alone: bool = False) -> str:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # what it died of is on its stderr
                # closing the pipe is not enough: workers of a DataLoader that were forked meanwhile hold it open
                stdin.write(b"alone" if alone else b"over")
                stdin.flush()
        _, stderr = self._process.communicate(timeout=timeout_s)
        if not self._process.returncode:
            return ""
        return stderr.decode(errors="replace").strip() or f"the process ended with code {self._process.returncode}"


def export_trace(profiler: _KinetoProfile, raw: Path) -> None:
    """Write the trace of a profiler."""
    with name_for_kineto(raw) as name:
        profiler.export_chrome_trace(name)
    with contextlib.suppress(FileNotFoundError), open_regular(raw) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 64, 0))
        if file.read().rstrip().endswith(b"}"):
            return
    raise OSError(f"the trace could not be written whole to {window_folder(raw)} (is the disk full?)")


class TraceOutput:
    """Where the trace of this rank goes, and the child process that finishes it there."""

    def __init__(
        self,
        config: ProfilingConfig,
        folders: Iterable[Path],
        rank: int,
        ranks: Iterable[int],
        find_here: Callable[[Sequence[int]], Sequence[int]],
        *,
        now: bool,
        record: Path | None,
    ) -> None:
        self.rank = rank
        self.here = self._ranks = tuple(ranks)  # those that write to the same folder
        self.child: FinishingChild | None = None
        self.analyzes = config.analyze and rank == self.here[0]
        self._config, self._folders, self._find_here = config, folders, find_here
        self._now, self._record = now, record

    def write(self, profiler: _KinetoProfile, *, alone: bool) -> Path:
        """Write the trace of a profiler and start the child process; returns where the trace will be."""
        self.here = tuple(self._find_here(self._ranks))
        raw = claim(self._folders, self.rank)
        try:
            export_trace(profiler, raw)
            self.child = FinishingChild(
                raw,
                self.rank,
                ranks=self._ranks,
                here=self.here,
                tensorboard=self._config.tensorboard,
                analyze=self._config.analyze,
                alone=alone,
                now=self._now,
                record=self._record,
            )
        except BaseException:
            discard_with_folders(raw)
            raise
        return trace_path(window_folder(raw), self.rank)


def finished(report: TraceReport, problem: str, *, analyzed: bool) -> TraceReport:
    """The report once the child process has ended, with those of its files that exist."""

    def there(path: Path | None) -> Path | None:
        return path if path is not None and path.is_file() else None

    path = there(report.path)
    reports = path.parent if path is not None and analyzed else None
    return replace(
        report,
        status="failed" if path is None else report.status,
        message=problem or (f"{report.path} was removed" if path is None else report.message),
        path=path,
        plugin_path=there(report.plugin_path),  # another rank's child may publish it, or have yet to
        summary_path=there(reports / SUMMARY_JSON) if reports else None,
        report_path=there(reports / REPORT_HTML) if reports else None,
    )
