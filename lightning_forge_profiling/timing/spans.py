"""Times of the long parts of a run, in a list that does not grow with the run."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_MOST: Final = 128
"""Most spans of one name. A timeline of the run is about ten times as many pixels wide."""
_MOST_NAMES: Final = 32
_FINEST_NS: Final = 1_000_000
_LATEST: Final = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A span of the run, or several near each other merged into one.

    Attributes:
        part: the part of the ledger, or `epoch` or `window`.
        start_s: start, in seconds since the run began.
        end_s: end, of a merged span that of the last.
        seconds: time in it; of a merged span less than `end_s - start_s`.
        count: number of spans merged into it.
        step: the step under way at its end; None before the first.
    """

    part: str
    start_s: float
    end_s: float
    seconds: float
    count: int = 1
    step: int | None = None


@dataclass(slots=True)
class _Stretch:
    began_ns: int
    ended_ns: int
    inside_ns: int
    count: int
    step: int | None


class SpanLog:
    """Keeps spans by name. If a name has too many, spans near each other are merged.

    Example:
        >>> log = SpanLog(most=5)
        >>> for second in range(6):
        ...     log.add("validation", second * 10**9, second * 10**9 + 10**8)
        >>> [(span.start_s, span.end_s, span.seconds, span.count) for span in log.read(0)]
        [(0.0, 3.1, 0.4, 4), (4.0, 5.1, 0.2, 2)]
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._stretches: dict[str, list[_Stretch]] = {}
        self._resolution_ns: dict[str, int] = {}
        self._latest: deque[tuple[str, _Stretch]] = deque(maxlen=_LATEST)

    def add(self, part: str, began_ns: int, ended_ns: int, step: int | None = None) -> None:
        """Add a span that has ended."""
        stretches = self._stretches.get(part)
        if stretches is None:
            if len(self._stretches) >= _MOST_NAMES:
                return
            stretches = self._stretches[part] = []
        stretches.append(_stretch(began_ns, ended_ns, step))
        self._latest.append((part, _stretch(began_ns, ended_ns, step)))
        if len(stretches) > self._most:
            resolution_ns = self._resolution_ns.get(part, _FINEST_NS)
            stretches[:] = _merged(stretches, resolution_ns)
            while len(stretches) > self._most // 2:
                resolution_ns *= 2
                stretches[:] = _merged(stretches, resolution_ns)
            self._resolution_ns[part] = resolution_ns

    def take_latest(self, origin_ns: int) -> tuple[Span, ...]:
        """The spans added since the last call, at most the latest 256."""
        latest = tuple(_span(part, one, origin_ns) for part, one in self._latest)
        self._latest.clear()
        return latest

    def read(self, origin_ns: int, still_open: Iterable[tuple[str, int, int, int | None]] = ()) -> tuple[Span, ...]:
        """All spans, ordered by start."""
        ended = ((part, one) for part, stretches in self._stretches.items() for one in stretches)
        opened = ((part, _stretch(began_ns, now_ns, step)) for part, began_ns, now_ns, step in still_open)
        found = (_span(part, one, origin_ns) for part, one in (*ended, *opened))
        return tuple(sorted(found, key=lambda span: (span.start_s, -span.end_s)))


def _span(part: str, one: _Stretch, origin_ns: int) -> Span:
    return Span(
        part,
        (one.began_ns - origin_ns) / 1e9,
        (one.ended_ns - origin_ns) / 1e9,
        one.inside_ns / 1e9,
        one.count,
        one.step,
    )


def _stretch(began_ns: int, ended_ns: int, step: int | None) -> _Stretch:
    return _Stretch(began_ns, ended_ns, ended_ns - began_ns, 1, step)


def _merged(stretches: list[_Stretch], resolution_ns: int) -> list[_Stretch]:
    merged: list[_Stretch] = []
    for one in stretches:
        last = merged[-1] if merged else None
        if last is not None and one.ended_ns - last.began_ns <= resolution_ns:
            last.ended_ns, last.step = one.ended_ns, one.step
            last.inside_ns += one.inside_ns
            last.count += one.count
        else:
            merged.append(one)
    return merged
