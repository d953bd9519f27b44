"""The exceptions of this package, as one tree.

```text
ForgeProfilingError
├── ConfigurationError (ValueError)   an invalid argument, refused before the first batch
├── ClocksUnavailableError (RuntimeError)  a GPU's clocks cannot be read or locked
├── TraceError (ValueError)           a file that is not a trace, or only a part of one
└── TimerError (RuntimeError)         a timer's methods called in the wrong order
    ├── TimerNotStartedError          stop() without start(), or elapsed_ms() before it
    ├── TimerRunningError             start() while running, or elapsed_ms() before stop()
    └── UnknownRegionError            a region that the collection does not have
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
    """Base class of all exceptions of this package."""


class ConfigurationError(ForgeProfilingError, ValueError):
    """An invalid argument. Raised where it is passed or before the first batch, never later."""


class ClocksUnavailableError(ForgeProfilingError, RuntimeError):
    """A GPU's clocks cannot be read or locked: NVML or a permission is missing."""


class TraceError(ForgeProfilingError, ValueError):
    """A file is not a trace, or too little of one. The message names the file and the place."""

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
    """A timer's methods were called in the wrong order."""


class TimerNotStartedError(TimerError):
    """`stop()` without `start()`, or a time was read before anything was timed."""


class TimerRunningError(TimerError):
    """`start()` on a running timer, or a time was read before `stop()`."""


class UnknownRegionError(TimerError):
    """A `CUDATimerCollection` has no region of this name; `add_region` adds one."""
