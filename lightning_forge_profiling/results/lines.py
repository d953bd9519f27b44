"""Where the training thread was, by samples of its stack: lines of the user's code."""

from dataclasses import dataclass
from typing import Final

WORKER_LINES: Final = "data/worker"
"""The part of the step that a loader worker's lines are listed under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLine:
    """A line of the user's code, with its share of the samples of one part of the step.

    Attributes:
        file: its file, relative to the working directory if it is below it.
        line: number of the line.
        function: name of the function.
        pct: share of the sampled time of that part in which this was the innermost line of the user's code.
        waiting_pct: share of this line's time in which the thread used no core.
    """

    file: str
    line: int
    function: str
    pct: float
    waiting_pct: float | None = None
