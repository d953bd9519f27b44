"""How to time a function: the method, cold or hot, and when to stop."""

from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.bench.sampling import Limits
from lightning_forge_profiling.errors import ConfigurationError

__all__ = ["METHODS", "ON_CPU", "Plan"]

METHODS: Final = ("auto", "cpu", "wall", "events", "saturated", "graph", "kernels")

ON_CPU: Final = ("auto", "cpu", "wall")
"""Those that need no GPU; on a CPU they are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to time.

    Attributes:
        name: of the result.
        method: one of `METHODS`.
        flush_l2: empty the L2 before each call.
        warmup: how many calls; None until steady.
        limits: when to stop.
    """

    name: str
    method: str
    flush_l2: bool
    warmup: int | None
    limits: Limits

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method={self.method!r} is not known: choose one of {', '.join(METHODS)}.")
        if not isinstance(self.flush_l2, bool):
            raise ConfigurationError(f"flush_l2 ({self.flush_l2!r}) is neither True nor False.")
        if self.warmup is not None and (type(self.warmup) is not int or self.warmup < 0):
            raise ConfigurationError(
                f"warmup ({self.warmup!r}) is no number of calls: give one such as 3, or leave it out to go on until "
                "calls take the same time."
            )
