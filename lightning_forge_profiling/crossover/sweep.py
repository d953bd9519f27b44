"""Timing operations over sizes, and ending each curve before a call takes too long.

`measure` runs no operation itself: it is given a function that times one, such as an `OperationTimer`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import Curve, OperationCurves, Point, Way
from lightning_forge_profiling.crossover.operations import Operation

TimeOne: TypeAlias = Callable[[str, int, Way, float | None], Point | str]
"""Times an operation, given its name, size, way and about how many microseconds a call will take (None if unknown).

Returns the point, or why there is none at this size and at larger ones.
"""


def measure(
    operations: Mapping[str, Operation],
    sizes: Sequence[int],
    ways: Sequence[Way],
    time: TimeOne,
    *,
    longest_us: float,
    progress: Callable[[str, int], None] = lambda _name, _size: None,
) -> tuple[OperationCurves, ...]:
    """Time operations over sizes."""
    found = []
    for name, operation in operations.items():
        points: dict[Way, list[Point]] = {way: [] for way in ways}
        ended: dict[Way, str] = {}
        for size in sizes:
            progress(name, size)
            for way in ways:
                if way in ended:
                    continue
                expected_us = predicted_us(points[way], size, operation.exponent)
                most_us = max([longest_us, *(point.us for point in points.get("cpu", ()) if point.size == size)])
                if too_long := _too_long(points[way], size, expected_us, most_us):
                    ended[way] = too_long
                    continue
                timed = time(name, size, way, expected_us)
                if isinstance(timed, str):
                    ended[way] = f"{size}: {timed}"
                else:
                    points[way].append(timed)
        curves = [Curve(way=way, points=tuple(points[way]), ended=ended.get(way, "")) for way in ways]
        found.append(OperationCurves(name=name, meaning=operation.meaning, curves=tuple(curves)))
    return tuple(found)


def _too_long(points: Sequence[Point], size: int, expected_us: float | None, most_us: float) -> str:
    """Why a call of that size takes too long; "" if it does not, or if that is unknown."""
    if points and points[-1].us > most_us:
        return f"a call at {points[-1].size} took {in_unit(points[-1].us)}"
    if expected_us is not None and expected_us > most_us:
        return f"a call at {size} would take about {in_unit(expected_us)}"
    return ""


def predicted_us(points: Sequence[Point], size: int, exponent: int) -> float | None:
    """How long a call of a larger size will take.

    This extrapolates the line through the last two points on logarithmic axes, but no steeper than the work grows:
    noise or the end of a cache between two points makes the line too steep.

    Example:
        >>> times = {256: 10.0, 512: 40.0, 1024: 4000.0}
        >>> points = [Point(size=n, us=us, low_us=us, high_us=us, samples=9) for n, us in times.items()]
        >>> round(predicted_us(points[:2], 1024, exponent=3)), round(predicted_us(points, 2048, exponent=3))
        (160, 32000)
    """
    if len(points) < 2:  # noqa: PLR2004  (points of a line)
        return None
    first, last = points[-2:]
    slope = math.log(last.us / first.us) / math.log(last.size / first.size)
    return last.us * float((size / last.size) ** min(max(slope, 0.0), exponent))
