"""What the caller asked of `benchmark`: which method, whether to flush the L2 cache, and how long to sample."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Final

from lightning_forge_profiling.errors import ConfigurationError

METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")

HOST_METHODS: Final = ("auto", "cpu", "wall")
"""Those that need no GPU. On a CPU all three are the same."""

_MIN_TIME_S: Final = 0.1
_MAX_TIME_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `benchmark` that do not describe the call, checked.

    Attributes:
        method: one of `METHODS`.
        flush_l2: flush the L2 cache before each call.
        warmup: how many calls before the first sample; None for as many as it takes until their time is steady.
        min_time: sample for at least this many seconds; None for the default.
        max_time: sample for at most this many seconds; None for the default.
        max_noise: between the two, stop once half of the median's 95 % interval is below this fraction of it.

    Example:
        >>> Options(max_time=0.05).min_time_s, Options(min_time=5).max_time_s
        (0.05, 5)
    """

    method: str = "auto"
    flush_l2: bool = True
    warmup: int | None = None
    min_time: float | None = None
    max_time: float | None = None
    max_noise: float = 0.01

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if not isinstance(self.flush_l2, bool):
            raise ConfigurationError(f"flush_l2 must be True or False, got {self.flush_l2!r}.")
        if self.warmup is not None and (type(self.warmup) is not int or self.warmup < 0):
            raise ConfigurationError(
                f"warmup must be a number of calls, 0 or more, got {self.warmup!r}. Leave it out to warm up until the "
                "time of a call is steady."
            )
        for name, value in (("max_time", self.max_time), ("min_time", self.min_time)):
            if value is not None and not (_is_number(value) and 0 <= value < math.inf):
                raise ConfigurationError(f"{name} must be a number of seconds, 0 or more, got {value!r}.")
        if self.min_time_s > self.max_time_s:
            raise ConfigurationError(f"min_time ({self.min_time_s} s) is longer than max_time ({self.max_time_s} s).")
        if not _is_number(self.max_noise) or not self.max_noise > 0:
            raise ConfigurationError(
                f"max_noise must be a number greater than 0, such as 0.01 for 1 %, got {self.max_noise!r}."
            )

    @property
    def min_time_s(self) -> float:
        """`min_time`, by default 0.1 s or `max_time`, whichever is less."""
        default = _MIN_TIME_S if self.max_time is None else min(_MIN_TIME_S, self.max_time)
        return default if self.min_time is None else self.min_time

    @property
    def max_time_s(self) -> float:
        """`max_time`, by default 3 s or `min_time`, whichever is more."""
        default = _MAX_TIME_S if self.min_time is None else max(_MAX_TIME_S, self.min_time)
        return default if self.max_time is None else self.max_time


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
