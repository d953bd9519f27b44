"""Starts and ends the child process that compresses, copies and analyses a trace beside the training."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

from lightning_forge_profiling.profiler.paths import plugin_path, trace_path, window_folder

PATIENCE_S: Final = 4.0
RANKS_S: Final = 2.0
"""For the other ranks' last lines: ranks end together, but the disk of another node may show them later, or never."""


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
    """Do several things at once, each in a thread, and say what became of each.

    A thread that does not end in time is left alone; it does not keep the process alive.

    Example:
        >>> problems_within(60.0, [lambda: 1, lambda: 1 // 0])
        [None, ZeroDivisionError('integer division or modulo by zero')]
    """
    late: list[Exception | None] = [TimeoutError(f"not done within {max(limit_s, 0):g} s")] * len(works)
    if limit_s <= 0:
        return late
    found = list(late)

    def run(place: int, work: Callable[[], object]) -> None:
        try:
            work()
            found[place] = None
        except Exception as exc:
            found[place] = exc

    threads = [threading.Thread(target=run, args=work, daemon=True) for work in enumerate(works)]
    for thread in threads:
        thread.start()
    deadline = monotonic() + limit_s
    with ctrl_c_ends():
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0.0))
    return list(found)


_PACKAGES = ("numpy", "msgspec", __name__.partition(".")[0])
"""What the child process imports besides the standard library."""

_PROGRAM: Final = "lightning_forge_profiling.finish"
"""The program of the child process. Not imported: it runs in a separate process without torch."""

_CODE = (
    "import sys; end = 2 + int(sys.argv[1]); sys.path += sys.argv[2:end]; del sys.argv[1:end]; "
    f"from {_PROGRAM} import main; sys.exit(main())"
)


_LEAST_S = 0.1
"""It takes a look to learn whether a process has ended, and less is too short for that."""


class _Process(subprocess.Popen[bytes]):
    """A process that may outlive its object. That is no leak: Python reaps it when it starts the next one."""

    def __del__(self) -> None:
        super().__del__(_warn=lambda *_, **__: None)  # type: ignore[call-arg]


class FinishingChild:
    """A process without torch that compresses a raw trace, writes the copy for TensorBoard and analyses the trace.

    It starts together with the profiler, so that the end of the window does not wait for its start.
    """

    def __init__(self, raw: Path, rank: int, *, ranks: Sequence[int], tensorboard: bool, analyze: bool) -> None:
        folders = list(dict.fromkeys(_folders(_PACKAGES)))
        # Isolated and without `site`: neither the working directory nor the environment nor site-packages' .pth files
        # put anything before the standard library, and the packages are found where this process found them.
        command = [sys.executable, "-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
        command += ["-c", _CODE, str(len(folders)), *folders]
        folder = window_folder(raw)
        command += [str(raw), str(trace_path(folder, rank)), "--training", str(os.getpid())]
        command += ["--ranks", ",".join(map(str, ranks))]
        if tensorboard:
            command += ["--plugin", str(plugin_path(folder, rank))]
        if analyze and rank == ranks[0]:
            command.append("--analyze")
        # a separate session: Ctrl-C ends the training, not the writing of its trace
        self._process = _Process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def go(self, *, alone: bool = False) -> None:
        """Let it process the raw trace, which is complete."""
        self._tell(b"alone\n" if alone else b"go\n")

    def dismiss(self) -> None:
        """Let it end: there will be no trace."""
        self._tell(b"dismiss\n")

    def wait(self, timeout_s: float) -> str:
        """Tell it that the training is over, and wait until it has ended. Ctrl-C leaves it alone with its work."""
        try:
            return self._problem(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)  # with the processes that read other ranks' traces for it
            self._process.communicate()
            return f"finishing the trace took longer than {timeout_s:.0f} s"
        except KeyboardInterrupt:
            self._let_go()
            raise

    def leave(self, exit_timeout_s: float) -> str | None:
        """Wait for a limited time, which Ctrl-C ends, and then let it continue alone."""
        with ctrl_c_ends(), contextlib.suppress(subprocess.TimeoutExpired):
            return self._problem(max(exit_timeout_s, _LEAST_S))
        self._let_go()
        return None

    def _let_go(self) -> None:
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _problem(self, timeout_s: float) -> str:
        self._tell(b"over\n")
        _, stderr = self._process.communicate(timeout=timeout_s)
        if not self._process.returncode:
            return ""
        return stderr.decode(errors="replace").strip() or f"the process ended with code {self._process.returncode}"

    def _tell(self, word: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # what it died of is on its stderr
                stdin.write(word)
                stdin.flush()


def _folders(packages: Sequence[str]) -> Iterator[str]:
    """The folders, or archives, that this process imported the packages from."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
        # not resolved: a link to a package may lead to a folder with another name
        yield str(Path(spec.submodule_search_locations[0]).absolute().parent)
