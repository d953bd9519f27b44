"""When a run becomes slower than it was: what `ForgeProfilerCallback(when="slow")` records."""

from collections import deque
from statistics import median
from typing import Final

from lightning_forge_profiling.schema import LateRank

_FEWEST: Final = 20  # looks before which nothing is called slow
_KEPT: Final = 120  # looks that the usual pace is taken of
_LASTING: Final = 10  # looks over which a drift lasts
_DRIFT: Final = 1.1
_OUTLIER: Final = 3.0
_PAUSE_S: Final = 60.0  # between two that are noticed


class Slowness:
    """Compares the steps since the last look, about a second ago, with those before."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_KEPT)  # mean milliseconds per step, by look
        self._latest: deque[float] = deque(maxlen=_LASTING)
        self._before: tuple[float, int, float] | None = None
        self._slowest = 0.0
        self._late: tuple[int, str] | None = None
        self._quiet_until = 0.0

    def look(self, at_s: float, step: int, paused_s: float, slowest: tuple[int, float], late: LateRank | None) -> str:
        """What has become slow since the last look; "" for nothing.

        Args:
            at_s: the time, by any clock.
            step: number of steps that ended.
            paused_s: time so far that is no part of a step, such as validation.
            slowest: number and milliseconds of the slowest step so far.
            late: the rank that the others wait for.
        """
        before = self._before
        if before is not None and step <= before[1]:
            return ""
        self._before = at_s, step, paused_s
        if before is None:
            return ""
        self._latest.append(1e3 * (at_s - before[0] - (paused_s - before[2])) / (step - before[1]))
        said = ""
        if at_s >= self._quiet_until:  # what lasts is still to be seen when the pause is over
            said = self._said(step, slowest, late) if len(self._usual) >= _FEWEST else ""
            if len(self._latest) == _LASTING:  # so that a drift is not taken for usual before it is noticed
                self._usual.append(self._latest[0])
        self._slowest = max(self._slowest, slowest[1])
        if said:
            self._quiet_until = at_s + _PAUSE_S
        return said

    def _said(self, step: int, slowest: tuple[int, float], late: LateRank | None) -> str:
        usual, lasting = median(self._usual), min(self._latest)
        found = None if late is None else (late.rank, late.cause)
        if found is not None and found != self._late:
            self._late = found
            return f"rank {found[0]} has become late: {found[1]}"
        if len(self._latest) == _LASTING and lasting > _DRIFT * usual:
            self._usual.clear()  # what it is now is usual from here on
            self._usual.extend([median(self._latest)] * _FEWEST)
            return f"steps before {step} took {median(self._latest):.3g} ms, earlier ones {usual:.3g} ms"
        if slowest[1] > max(_OUTLIER * max(usual, self._latest[-1]), self._slowest):  # longer than those about it, too
            return f"step {slowest[0]} took {slowest[1]:.3g} ms, the usual one {usual:.3g} ms"
        return ""
