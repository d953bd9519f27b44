"""Every exception the package raises on purpose, as one tree.

```text
ForgeProfilingError
├── ConfigurationError (ValueError)   an argument that cannot work, refused before the first batch
├── ClocksUnavailableError (RuntimeError)  a GPU's clocks cannot be read or locked
├── TraceError (ValueError)           a file that is not a trace, or not enough of one
└── TimerError (RuntimeError)         a timer used out of order
    ├── TimerNotStartedError          stop() without start()
    ├── TimerRunningError             start() while it is running, or elapsed before stop()
    └── UnknownRegionError            a region the collection was not built with
```
"""

from collections.abc import Sequence
from typing import Self

__all__ = [
    "ClocksUnavailableError",
    "ConfigurationError",
    "ForgeProfilingError",
    "TimerError",
    "TimerNotStartedError",
    "TimerRunningError",
    "TraceError",
    "UnknownRegionError",
]


class ForgeProfilingError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigurationError(ForgeProfilingError, ValueError):
    """An argument that cannot work. Raised where it is given or before the first batch, never later."""


class ClocksUnavailableError(ForgeProfilingError, RuntimeError):
    """The clocks cannot be read or locked: there is no NVML, or it takes a permission that we lack."""


class TraceError(ForgeProfilingError, ValueError):
    """A file that is not a trace, or holds too little of one. The message names the file and the place."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> Self:
        """One error for several files: its message is the first problem, its notes are the others.

        Args:
            problems: at least one.
        """
        error = cls(problems[0])
        for problem in problems[1:]:
            error.add_note(problem)
        return error


class TimerError(ForgeProfilingError, RuntimeError):
    """A timer was used out of order."""


class TimerNotStartedError(TimerError):
    """`stop()` without a `start()`, or an elapsed time before anything was timed."""


class TimerRunningError(TimerError):
    """`start()` on a running timer, or an elapsed time asked for before `stop()`."""


class UnknownRegionError(TimerError):
    """A region name the collection was not built with."""
