"""The slowest steps of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Final

_MOST: Final = 5


@dataclass(frozen=True, slots=True, order=True)
class TimedStep:
    """A step and its time.

    Attributes:
        ms: device time; host time without a GPU.
        step: its number.
        ended_ns: its end by the host's clock; 0 if unknown.
        device_ms: its time by region, for the regions that were timed.
    """

    ms: float
    step: int
    ended_ns: int
    device_ms: Mapping[str, float] = field(default_factory=dict, compare=False)


class SlowestSteps:
    """Keeps the five slowest steps.

    Example:
        >>> slowest = SlowestSteps()
        >>> for step in range(100):
        ...     if step % 7 > slowest.least_ms:
        ...         slowest.add(TimedStep(step % 7, step, 0))
        >>> [(slow.step, slow.ms) for slow in slowest.read()]
        [(6, 6), (13, 6), (20, 6), (27, 6), (34, 6)]
    """

    def __init__(self) -> None:
        self.least_ms = 0.0
        """A step that took no longer than this need not be added."""
        self._heap: list[TimedStep] = []

    def add(self, slow: TimedStep) -> None:
        """Add a step that took longer than `least_ms`."""
        if len(self._heap) < _MOST:
            heappush(self._heap, slow)
        else:
            heapreplace(self._heap, slow)
        if len(self._heap) == _MOST:
            self.least_ms = self._heap[0].ms

    def read(self) -> tuple[TimedStep, ...]:
        """The steps, slowest first."""
        return tuple(sorted(self._heap, key=lambda slow: (-slow.ms, slow.step)))
