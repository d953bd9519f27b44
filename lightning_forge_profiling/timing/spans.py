"""The long parts of a run: when they took place, as a bounded list of spans, and in which steps."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappush, heapreplace
from itertools import chain
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.schema import Span

_MAX_SPANS: Final = 128  # most spans of one name. A timeline of the run is about ten times as many pixels wide.
_MAX_SPAN_NAMES: Final = 32
_FINEST_S: Final = 1e-3
_LATEST: Final = 256
_NEARLY: Final = 0.9  # from this share on, the steps in which a part takes long explain its time
# number of steps that keep their long parts. The slowest are known only once the GPU has completed them.
_CANDIDATES: Final = 32


class SpanLog:
    """Keeps spans by name. If a name has too many, spans near each other are merged."""

    def __init__(self) -> None:
        self.opened: dict[str, int] = {}  # when those began that are not over, in nanoseconds
        self._spans: dict[str, list[Span]] = {}
        self._resolution_s: dict[str, float] = {}
        self._latest: deque[Span] = deque(maxlen=_LATEST)

    def add(self, span: Span) -> None:
        """Add a span that has ended."""
        if span.part not in self._spans and len(self._spans) >= _MAX_SPAN_NAMES:
            return
        spans = self._spans.setdefault(span.part, [])
        spans.append(span)
        self._latest.append(span)
        if len(spans) > _MAX_SPANS:
            resolution_s = self._resolution_s.get(span.part, _FINEST_S)
            spans[:] = _merged(spans, resolution_s)
            while len(spans) > _MAX_SPANS // 2:
                resolution_s *= 2
                spans[:] = _merged(spans, resolution_s)
            self._resolution_s[span.part] = resolution_s

    def take_latest(self) -> tuple[Span, ...]:
        """The spans added since the last call, at most the latest 256."""
        latest = tuple(self._latest)
        self._latest.clear()
        return latest

    def read(self, still_open: Iterable[Span] = ()) -> tuple[Span, ...]:
        """All spans, ordered by start."""
        spans = (*chain(*self._spans.values()), *still_open)
        return tuple(sorted(spans, key=lambda span: (span.start_s, -span.end_s)))


def _merged(spans: list[Span], resolution_s: float) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and span.end_s - last.start_s <= resolution_s:
            seconds, count = last.seconds + span.seconds, last.count + span.count
            merged[-1] = replace(last, end_s=span.end_s, seconds=seconds, count=count, step=span.step)
        else:
            merged.append(span)
    return merged


class LongParts:
    """The parts that took long inside of steps."""

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()
        self._ns: Counter[str] = Counter()
        self._longest: list[tuple[int, int, dict[str, int]]] = []  # a heap: how long, number of the step, parts

    def add(self, step: int, parts: Mapping[str, int]) -> None:
        """Add nanoseconds by part of a step, which are kept if it is one of those with most time in them."""
        self._steps.update(parts.keys())
        self._ns.update(parts)
        total_ns, heap = sum(parts.values()), self._longest
        if len(heap) < _CANDIDATES:
            heappush(heap, (total_ns, step, dict(parts)))
        elif total_ns > heap[0][0]:
            heapreplace(heap, (total_ns, step, dict(parts)))

    def of_steps(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Numbers of steps, and nanoseconds by part in each."""
        return ((step, parts) for _, step, parts in self._longest)

    def explained(self, counted_ns: Mapping[str, int]) -> dict[str, int]:
        """In how many steps a part took long, for the parts whose time these steps explain."""
        return {part: steps for part, steps in self._steps.items() if self._ns[part] > _NEARLY * counted_ns[part]}
