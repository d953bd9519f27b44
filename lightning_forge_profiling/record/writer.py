"""`RecordWriter`: writes a rank's record from a background thread, so that training waits for no disk."""

from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Final

from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.record.lines import Begin, Line
from lightning_forge_profiling.record.segments import Segments

_log = plain_logger(__name__)

FLUSH_S: Final = 1.0
"""Seconds for which a line may wait in memory. Waking the thread for each line would cost the training thread more."""

MOST_WAITING: Final = 256
"""More lines wait in memory only where the disk has stalled."""


class RecordWriter:
    """Takes lines from the training thread, and encodes and writes them in a daemon thread of its own.

    No method but `close` waits, and none raises. A failure, such as a full disk, is logged once; the thread then ends
    and no further line is taken.

    Args:
        open_files: opens the files, in the thread.
        flush_s: seconds for which a line may wait in memory.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "forge_record"
        >>> begin = Begin(run="a1", rank=0, world_size=1, at=0.0, versions={}, host="", device="cpu", settings={})
        >>> writer = RecordWriter.to(folder, begin)
        >>> writer.close(timeout_s=10)
        True
        >>> [path.name for path in folder.iterdir()]
        ['rank0.jsonl']
    """

    def __init__(self, open_files: Callable[[], Segments], *, flush_s: float = FLUSH_S) -> None:
        self.segments = 0
        """How many segments have begun: each wants a fresh `state`."""
        self._open_files = open_files
        self._flush_s = flush_s
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self._wake = Event()
        self._syncs = self._closes = self._ended = False
        self._thread = Thread(target=self._run, name="forge-record", daemon=True)
        self._thread.start()

    @classmethod
    def to(cls, folder: Path, begin: Begin) -> "RecordWriter":
        """A writer into a folder.

        Args:
            folder: created if missing.
            begin: the first line.
        """
        return cls(lambda: Segments(folder, begin))

    @property
    def takes(self) -> bool:
        """Whether a line would be taken: the record goes on, and few wait to be written."""
        return not self._ended and self._lines.qsize() < MOST_WAITING

    def write(self, line: Line) -> bool:
        """Hand over a line, which must not change any more.

        Returns:
            Whether it was taken.
        """
        if not self.takes:
            return False
        self._lines.put(line)
        if self._lines.qsize() > MOST_WAITING // 2:
            self._wake.set()
        return True

    def sync(self) -> None:
        """Write what was handed over now, and have the disk write it."""
        self._syncs = True
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Write what is left and end the thread.

        Args:
            timeout_s: how long to wait for it; a disk that hangs must not hold up the end of the run.

        Returns:
            Whether it has ended.
        """
        self._closes = self._syncs = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            files = self._open_files()
            try:
                while not self._closes:
                    self._write_waiting(files)
                    self._wake.wait(self._flush_s)
                    self._wake.clear()
                self._write_waiting(files)
            finally:
                files.close()
        except Exception as exc:
            _log.warning("The run's record ends here, and training goes on: %s: %s", type(exc).__name__, exc)
            _log.debug("", exc_info=exc)
        finally:
            self._ended = True

    def _write_waiting(self, files: Segments) -> None:
        syncs, self._syncs = self._syncs, False
        try:
            while True:
                files.append(self._lines.get_nowait())
        except Empty:
            files.check()
        self.segments = files.begun
        if syncs:
            files.sync()
