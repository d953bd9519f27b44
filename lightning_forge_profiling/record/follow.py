"""Reads a record while it is being written: each look reads only new lines, and keeps the newest."""

from pathlib import Path
from typing import Final

from lightning_forge_profiling.names import record_part
from lightning_forge_profiling.record.reader import KEPT, RankLines, RunRecord, rank_files, run_of

_INTERVALS: Final = 400
"""As many as a sparkline shows on a wide terminal."""


class Follower:
    """Tails the record of a run. Each `look` reads only what was written since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[Path, RankLines] = {}

    def look(self) -> RunRecord:
        """The run so far: each rank's newest intervals and events, latest totals and end."""
        for path in rank_files(self._folder):
            if path not in self._ranks:
                self._ranks[path] = RankLines(path, KEPT if self._ranks else _INTERVALS)
        ranks = sorted(self._ranks.values(), key=lambda lines: record_part(lines.path.name) or ())
        return run_of(self._folder, ranks, at_rest=False)
