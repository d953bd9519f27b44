"""The process that finishes a trace beside the training."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_forge_profiling.tracing.folders import plugin_path, trace_path, window_folder

__all__ = ["FinishingChild"]

# The package is found the way this process found it, whatever the working directory and PYTHONPATH are by now.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from lightning_forge_profiling.cli.finish import main; sys.exit(main())"
)


class FinishingChild:
    """A process without torch that compresses a raw trace, writes the copy for TensorBoard and analyses the trace.

    It is started with the profiler and waits, so that the end of the window need not wait for its start.

    Args:
        raw: the file the trace will be exported to.
        rank: this process's global rank.
        ranks: the ranks that record the window, in order. TensorBoard's copies are published together, and the first
            rank's process analyses the traces of all.
        tensorboard: whether to write the copy.
        analyze: whether the traces are to be analysed.
    """

    def __init__(self, raw: Path, rank: int, *, ranks: Sequence[int], tensorboard: bool, analyze: bool) -> None:
        command = [sys.executable, "-c", _CODE, str(Path(__file__).resolve().parents[2])]
        folder = window_folder(raw)
        command += [str(raw), str(trace_path(folder, rank)), "--ranks", ",".join(map(str, ranks))]
        if tensorboard:
            command += ["--plugin", str(plugin_path(folder, rank))]
        if analyze and rank == ranks[0]:
            command.append("--analyze")
        # a session of its own: Ctrl-C ends the training, not the writing of its trace
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def go(self, *, alone: bool = False) -> None:
        """The raw trace is there.

        Args:
            alone: do not wait for what other ranks write, which may not come.
        """
        self._tell(b"alone\n" if alone else b"go\n")

    def dismiss(self) -> None:
        """There will be none."""
        self._tell(b"")

    def wait(self, timeout_s: float) -> str:
        """Wait until it is done.

        Args:
            timeout_s: after this many seconds it is killed.

        Returns:
            What went wrong, "" when nothing did.
        """
        try:
            _, stderr = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"finishing the trace took longer than {timeout_s:.0f} s"
        if not self._process.returncode:
            return ""
        return stderr.decode(errors="replace").strip() or f"the process ended with code {self._process.returncode}"

    def _tell(self, word: bytes) -> None:
        stdin, self._process.stdin = self._process.stdin, None
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it died of is on its stderr
                stdin.write(word)
                stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
