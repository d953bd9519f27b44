"""Whether memory grows steadily, by readings between steps: early enough to say so, and not for batches that vary."""

from collections import deque
from itertools import pairwise
from statistics import fmean
from typing import Final, Literal, NamedTuple

# Growth is looked for in twelve points: single readings, then pairs of them, pairs of pairs, ... By chance, readings
# that vary without a trend lie in four ascending quarters in 1 of 369,600 cases.
POINTS: Final = 12
_QUARTER: Final = POINTS // 4
_LEVELS: Final = 20
_MOST_RISES: Final = POINTS - 2  # of eleven. Batches that vary raise the peak seldom, the longer they do the more so.
_MOST_EVEN: Final = 2.0  # the growth of one half over that of the other
_FORESIGHT: Final = 20.0  # what grew in so many steps may be said of so many times as many


class Reading(NamedTuple):
    """The allocator between two steps, in bytes."""

    step: int
    kept: float  # by tensors that are kept from one step to the next; of several readings the least
    peak: float  # the most so far


class Growth(NamedTuple):
    """Bytes that come on top in each step, and the steps by which this is known."""

    what: Literal["kept", "peak"]
    bytes_per_step: float
    from_step: int
    to_step: int


class GrowthWatch:
    """Finds steady growth towards a limit.

    Examples:
        >>> watch, leak = GrowthWatch(), 5
        >>> found = [watch.add(Reading(step, 100 + leak * step, 300 + leak * step), 2000) for step in range(0, 60, 5)]
        >>> found[-1]
        Growth(what='kept', bytes_per_step=5.0, from_step=0, to_step=55)
    """

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(_LEVELS)]
        self._count = 0

    def add(self, reading: Reading, limit_bytes: float) -> Growth | None:
        """Take a reading, and return the growth towards the limit that it shows; None if nothing grows."""
        self._count += 1
        found = None
        for number, level in enumerate(self._levels):
            level.add(reading)
            found = level.growth(limit_bytes - reading.peak) or found  # by later levels, which have seen more
            if self._count % 2 ** (number + 1):
                break
            reading = level.latest_pair()
        return found


class _Level:
    """The latest points, each of one reading or of several."""

    def __init__(self) -> None:
        self._points: deque[Reading] = deque(maxlen=POINTS)
        # of the points before these: that at which most was kept, the least since then, and the point before the latest
        # deep fall
        self._most = self._ridge = Reading(0, 0.0, 0.0)
        self._least = self._fell = 0.0

    def add(self, point: Reading) -> None:
        if len(self._points) == POINTS:
            self._leave(self._points[0])
        self._points.append(point)

    def _leave(self, point: Reading) -> None:
        if point.kept > self._most.kept:
            self._most, self._least = point, point.kept
            return
        self._least = min(self._least, point.kept)
        fell = self._most.kept - self._least
        if 2 * fell >= self._fell:
            self._ridge, self._fell = self._most, fell

    def latest_pair(self) -> Reading:
        earlier, later = self._points[-2], self._points[-1]
        return Reading(later.step, min(earlier.kept, later.kept), later.peak)

    def growth(self, free: float) -> Growth | None:
        """What grows so fast that it takes what is free in at most 20 times the steps of these points."""
        if len(self._points) < POINTS:
            return None
        steps, kept, peak = (list(column) for column in zip(*self._points, strict=True))
        first, last = int(steps[0]), int(steps[-1])
        what: Literal["kept", "peak"]
        if _ascends(kept) and min(kept[-_QUARTER:]) > self._most.kept:
            what, each = "kept", _per_step(steps, kept)
            if self._fell >= kept[-1] - kept[0]:  # as at the end of each epoch: only what is more than before it grows
                each = min(each, (kept[-1] - self._ridge.kept) / (last - self._ridge.step))
        elif _ascends(peak) and sum(later > earlier for earlier, later in pairwise(peak)) >= _MOST_RISES:
            what, each = "peak", _per_step(steps, peak)
            if peak[-1] - peak[0] < 2 * (max(kept) - min(kept)):  # it was what is kept that grew
                return None
        else:
            return None
        return Growth(what, each, first, last) if _FORESIGHT * each * (last - first) >= free else None


def _ascends(values: list[float]) -> bool:
    """Whether values go up all along, and about as fast in both halves."""
    quarters = [values[at : at + _QUARTER] for at in range(0, POINTS, _QUARTER)]
    if any(max(lower) >= min(higher) for lower, higher in pairwise(quarters)):
        return False
    low, *middle, high = map(fmean, quarters)
    first, second = fmean(middle) - low, high - fmean(middle)
    return 0 < max(first, second) <= _MOST_EVEN * min(first, second)


def _per_step(steps: list[float], values: list[float]) -> float:
    """The slope between the means of the first and of the last quarter."""
    apart = fmean(steps[-_QUARTER:]) - fmean(steps[:_QUARTER])
    return (fmean(values[-_QUARTER:]) - fmean(values[:_QUARTER])) / apart
