"""Splits the wall time of a run into parts that sum to it, with one stack and one clock."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from heapq import heappush, heapreplace
from itertools import chain
from operator import itemgetter
from time import perf_counter_ns
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.names import (
    COMPILE,
    DATA_LOADER,
    EPOCH_METRICS,
    EXCLUDED,
    FIRST_STEP,
    GC_FULL,
    GC_YOUNG,
    GOODPUT,
    HANG,
    LOGGED_KINDS,
    PROFILER,
    STEPS,
    VALIDATION,
    hook_region,
    part_kind,
    part_pct,
    whole_part,
)
from lightning_forge_profiling.schema import RunLedger, RunRegion, RunTiming, Span
from lightning_forge_profiling.timing.counters import Marks
from lightning_forge_profiling.timing.garbage import FULL, GarbageTimer

_LONG_NS: Final = 100_000  # shorter parts do not explain a slow step
_SPAN_NS: Final = 1_000_000  # shorter parts have no span


class CountedTime:
    """Nanoseconds by part in the steps that count, and what they were before some of these steps."""

    def __init__(self) -> None:
        self.since: dict[str, int] | None = None  # the parts when the steps began to count; None while they do not
        self.marks: Marks[Mapping[str, int]] = Marks()  # of the parts inside a step
        self._before: Counter[str] = Counter()

    def turn(self, now: Mapping[str, int], *, on: bool) -> None:
        """Whether the steps from here on count, given nanoseconds by part."""
        if on and self.since is None:
            self.since = dict(now)
        elif not on:
            self._before, self.since = self.until(now), None

    def until(self, now: Mapping[str, int]) -> Counter[str]:
        """The time so far."""
        counted = Counter(self._before)
        if self.since is not None:
            for part, ns in now.items():
                counted[part] += ns - self.since.get(part, 0)
        return counted

    def inside(self, now: Mapping[str, int]) -> dict[str, int]:
        """The same of the parts inside a step."""
        return {part: ns for part, ns in self.until(now).items() if ns and _is_inside(part)}


# -- long parts: when they took place, as a bounded list of spans, and in which steps ----------------------------------

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
        # steps, and their time, by part and by how long it took: an octave each, the bits of its nanoseconds
        self._steps: Counter[tuple[str, int]] = Counter()
        self._ns: Counter[tuple[str, int]] = Counter()
        self._longest: list[tuple[int, int, dict[str, int]]] = []  # a heap: how long, number of the step, parts

    def add(self, step: int, parts: Mapping[str, int]) -> None:
        """Add nanoseconds by part of a step, which are kept if it is one of those with most time in them."""
        for part, ns in parts.items():
            self._steps[part, ns.bit_length()] += 1
            self._ns[part, ns.bit_length()] += ns
        total_ns, heap = sum(parts.values()), self._longest
        if len(heap) < _CANDIDATES:
            heappush(heap, (total_ns, step, dict(parts)))
        elif total_ns > heap[0][0]:
            heapreplace(heap, (total_ns, step, dict(parts)))

    def of_steps(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Numbers of steps, and nanoseconds by part in each."""
        return ((step, parts) for _, step, parts in self._longest)

    def explained(self, counted_ns: Mapping[str, int]) -> dict[str, int]:
        """In how few steps nearly all of a part's time is, for the parts whose time the noted steps explain."""
        steps, ns = Counter[str](), Counter[str]()
        for part, octave in sorted(self._steps, key=itemgetter(1), reverse=True):
            if ns[part] <= _NEARLY * counted_ns[part]:
                steps[part] += self._steps[part, octave]
                ns[part] += self._ns[part, octave]
        return {part: of_part for part, of_part in steps.items() if ns[part] > _NEARLY * counted_ns[part]}


# -- the clock ---------------------------------------------------------------------------------------------------------


class LedgerClock:
    """Keeps the stack of parts that a run is in, and adds the time between two changes to the innermost one."""

    def __init__(self, began_ns: int, part: str = "", clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.began_ns = self._since_ns = began_ns
        self._clock_ns = clock_ns
        self._ns: defaultdict[str, int] = defaultdict(int)
        self._counts: Counter[str] = Counter([part] if part else [])
        self._first_ns: dict[str, int] = {}
        self.counted = CountedTime()
        self._long = LongParts()
        self._stack = [part] if part else []
        self._entered_ns = [began_ns] if part else []
        self._spans = SpanLog()
        self.step: int | None = None  # the number of the current step; None before the first
        self.noted: defaultdict[str, int] = defaultdict(int)  # long parts of the current step, in nanoseconds by part
        self._garbage: GarbageTimer | None = None
        self.collected: Collection[object] = ()  # not empty if garbage was collected since the last change

    def enter(self, part: str, *, counts: bool = True) -> None:
        """Enter a part, inside the current one."""
        now_ns, stack = self._clock_ns(), self._stack
        if self.collected:
            now_ns = self._take_garbage()
        if stack:
            took_ns = now_ns - self._since_ns
            self._ns[stack[-1]] += took_ns
            if took_ns >= _LONG_NS and len(stack) > 1:
                self._note(stack[-1], took_ns)
        self._since_ns = now_ns
        stack.append(part)
        self._entered_ns.append(now_ns)
        self._counts[part] += counts

    def exit(self, part: str, at_ns: int | None = None) -> None:
        """Exit a part, and any part still open inside it. Does nothing if the part is not open."""
        stack = self._stack
        if part in stack:
            now_ns = self._clock_ns() if at_ns is None else at_ns
            if self.collected:
                now_ns = self._take_garbage(at_ns)
            took_ns = now_ns - self._since_ns
            self._ns[stack[-1]] += took_ns
            self._since_ns = now_ns
            if stack[-1] == part and now_ns - self._entered_ns[-1] < _LONG_NS:
                stack.pop()
                self._entered_ns.pop()
            else:
                self._end_long(part, now_ns, took_ns)
            if part not in self._first_ns and whole_part(part) not in stack:
                for inside in [name for name in self._ns if name == part or whole_part(name) == part]:
                    self._first_ns.setdefault(inside, self._ns[inside])

    def goes_on(self, part: str) -> None:
        """Count the latest entry of a part as no other one: it was left for something in between."""
        self._counts[part] -= 1

    @contextmanager
    def inside(self, part: str, *, counts: bool = True) -> Iterator[None]:
        """Enter a part, and exit it at the end of the context."""
        self.enter(part, counts=counts)
        try:
            yield
        finally:
            self.exit(part)

    def innermost(self) -> str:
        """The innermost part, also for another thread; "" outside of all."""
        return next(reversed(self._stack), "")

    def peek(self) -> dict[str, int]:
        """Nanoseconds so far by part, without the current one's latest; for any thread."""
        return self._ns.copy()

    def open_parts(self) -> tuple[str, ...]:
        """The parts that are open, outermost first, also for another thread."""
        return tuple(self._stack)

    @property
    def changed_ns(self) -> int:
        """When the part changed last, by `clock_ns`."""
        return self._since_ns

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Leave a part for the one around it, and return at the end of the context. Does nothing inside another."""
        if self.innermost() != part:
            yield
            return
        self.exit(part)
        try:
            yield
        finally:
            self.enter(part, counts=False)

    def turn_to(self, part: str, at_ns: int | None = None) -> None:
        """Exit all parts and enter another at the same instant, so that no time falls between them."""
        if self._stack:
            self.exit(self._stack[0], at_ns)
        else:
            self._since_ns = self._clock_ns()
        self._stack.append(part)
        self._entered_ns.append(self._since_ns)
        self._counts[part] += 1

    def charge(self, ns: int, part: str, of: str = "") -> None:
        """Count the latest time of the steps, or of another part, to a part inside."""
        self._ns[of or self._stack[0]] -= ns
        self._ns[part] += ns
        self._counts[part] += 1

    def move(self, whole: str, other: str, before: Mapping[str, int]) -> None:
        """Count a part and those inside it to another one, from when `peek` was as in `before`."""
        for part in [part for part in self._ns if whole_part(part) == whole]:
            self._ns[other] += self._ns[part] - before.get(part, 0)
            self._ns[part] = before.get(part, 0)
        self._counts[whole] -= 1
        self._counts[other] += 1

    def _end_long(self, part: str, now_ns: int, took_ns: int) -> None:
        if took_ns >= _LONG_NS and len(self._stack) > 1:
            self._note(self._stack[-1], took_ns)
        ended = ""
        while ended != part:
            ended, entered_ns = self._stack.pop(), self._entered_ns.pop()
            # a validation has those parts for each batch, and is one span
            if now_ns - entered_ns >= _SPAN_NS and not ended.startswith(f"{VALIDATION}/"):
                self._spans.add(self._span(ended, entered_ns, now_ns))

    def _note(self, part: str, took_ns: int) -> None:
        """Note the time of a part as one that may explain a slow step."""
        if _OUTSIDE_STEPS.isdisjoint(self._stack):
            self.noted[part] += took_ns

    def note_garbage(self, garbage: GarbageTimer) -> None:
        """Count garbage collections from here on, each at the next change of the part."""
        self._garbage, self.collected = garbage, garbage.pending

    def _take_garbage(self, until_ns: int | None = None) -> int:
        """Take the collections since the last change out of the current part, and return until when that lasts: now."""
        # those in the profiler's own work are the profiler's, and those after that part are time of the next one
        now_ns = self._clock_ns() if until_ns is None else until_ns
        while self.collected and self._garbage is not None:
            collections = self._garbage.take()
            for generation, began_ns, ended_ns in () if PROFILER in self._stack else collections:
                if until_ns is not None and ended_ns > until_ns:
                    continue
                part, took_ns = GC_FULL if generation == FULL else GC_YOUNG, ended_ns - began_ns
                self._ns[part] += took_ns
                self._counts[part] += 1
                self._first_ns.setdefault(part, took_ns)
                self._since_ns += took_ns
                if took_ns >= _LONG_NS and LOOP.intersection(self._stack[:1]):
                    self._note(part, took_ns)
                if took_ns >= _SPAN_NS:
                    self._spans.add(self._span(part, began_ns, ended_ns))
            now_ns = self._clock_ns() if until_ns is None else until_ns
        return now_ns

    def stand(self, seconds: float, before: Mapping[str, int]) -> None:
        """Count a standstill as `hang`, and not to the part that has grown most since `peek` was as in `before`."""
        self.enter(HANG, counts=False)
        self.exit(HANG)
        grown_ns = {part: ns - before.get(part, 0) for part, ns in self._ns.items()}
        part = max(grown_ns, key=grown_ns.__getitem__)
        self.charge(min(int(1e9 * seconds), grown_ns[part]), HANG, of=part)
        self._first_ns[part] = min(self._first_ns.get(part, self._ns[part]), self._ns[part])

    def begin_step(self, step: int, *, own_ns: int = 0, last_counts: bool = True) -> None:
        """Begin a step, which ends the previous one."""
        if self.collected:
            self._take_garbage()
        self.move_own(own_ns)
        if step == 1 and self._stack[:1] == [FIRST_STEP]:
            self.turn_to(STEPS)
        self.step = step
        if last_counts and not step % self.counted.marks.every:
            self.counted.marks.add(step, self.counted.inside(self._ns))
        if self.noted:
            if last_counts:
                self._long.add(step - 1, self.noted)
            self.noted.clear()

    def marks_at(self, step: int) -> bool:
        """Whether the time so far is kept when this step begins."""
        return not step % self.counted.marks.every

    def move_own(self, ns: int) -> None:
        """Count the latest time of the steps to the profiler."""
        if ns:
            self._ns[self._stack[0]] -= ns
            self._ns[PROFILER] += ns

    def count_steps(self, *, on: bool) -> None:
        """Whether the steps from here on count."""
        self.counted.turn(self._ns, on=on)

    def marks(self) -> Marks[Mapping[str, int]]:
        """The time of the parts in the steps that count, up to some steps and up to now."""
        return self.counted.marks.until((self.step or 0) + 1, self.counted.inside(self._ns))

    def open_span(self, name: str) -> None:
        """Begin a span that is not a part, such as an epoch or the recorded window. Does nothing if it is open."""
        self._spans.opened.setdefault(name, self._clock_ns())

    def close_span(self, name: str, at_ns: int | None = None) -> None:
        """End such a span. Does nothing if it is not open."""
        opened_ns = self._spans.opened.pop(name, None)
        if opened_ns is not None:
            self._spans.add(self._span(name, opened_ns, self._clock_ns() if at_ns is None else at_ns))

    def _span(self, part: str, began_ns: int, ended_ns: int) -> Span:
        start_s, end_s = ((at_ns - self.began_ns) / 1e9 for at_ns in (began_ns, ended_ns))
        return Span(part, start_s, end_s, (ended_ns - began_ns) / 1e9, step=self.step)

    def take_latest(self) -> tuple[Span, ...]:
        """The spans that ended since the last call, at most the latest 256."""
        return self._spans.take_latest()

    def long_parts(self) -> dict[int, dict[str, float]]:
        """Seconds of the long parts in a step, largest first, by its number; of the counted steps with most of them."""
        return {step: {part: ns / 1e9 for part, ns in _largest_first(parts)} for step, parts in self._long.of_steps()}

    def read_parts(self) -> RunLedger:
        """The ledger with its parts alone, for log entries: a tenth of the work of `read`."""
        return self._parts(self._take_garbage())

    def _parts(self, now_ns: int) -> RunLedger:
        parts, wall_ns = dict(self._ns), now_ns - self.began_ns
        if self._stack:
            parts[self._stack[-1]] = parts.get(self._stack[-1], 0) + now_ns - self._since_ns
        return RunLedger(
            wall_s=wall_ns / 1e9,
            parts={part: ns / 1e9 for part, ns in _largest_first(parts)},
            unexplained_s=(wall_ns - sum(parts.values())) / 1e9,
            counts={},
        )

    def read(self) -> RunLedger:
        """The ledger so far; the clock runs on."""
        now_ns = self._take_garbage()
        opened = (*zip(self._stack, self._entered_ns, strict=True), *self._spans.opened.items())
        return replace(
            self._parts(now_ns),
            counts=dict(self._counts),
            first_s={part: ns / 1e9 for part, ns in self._first_ns.items()},
            counted_s={part: ns / 1e9 for part, ns in self._counted_ns().items()},
            long_steps=self._long.explained(self.counted.until(self._ns)),
            spans=self._spans.read(
                self._span(part, began_ns, now_ns) for part, began_ns in opened if now_ns - began_ns >= _SPAN_NS
            ),
        )

    def _counted_ns(self) -> dict[str, int]:
        """Nanoseconds by part in the steps that count: what ends an epoch is in the step after it, if there is one."""
        counted = self.counted.inside(self._ns)
        for part in counted.keys() & self.noted.keys() if self.counted.since is not None else ():
            if part == EPOCH_METRICS or part.endswith(_EPOCH_END):
                counted[part] -= self.noted[part]
        return counted


_EPOCH_END: Final = "on_train_epoch_end"
_OUTSIDE_STEPS: Final = frozenset(EXCLUDED)
# the parts that are the training loop, without what is in parts of its own
LOOP: Final = frozenset((FIRST_STEP, STEPS))

_NO_TIME: Final = RunRegion(device_ms=0.0, host_ms=0.0)


@cache
def _is_inside(part: str) -> bool:
    """Whether a part is inside a region of the step."""
    return part in {DATA_LOADER, GC_FULL, GC_YOUNG, COMPILE} or bool(hook_region(part))


def _largest_first(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def goodput(ledger: RunLedger, timing: RunTiming) -> float:
    """Productive step time as a fraction of the fit, less this package's own time; `timing` is of the counted steps."""
    # the ledger's part `steps` is productive: every training batch but the first, warm-up included, without hooks,
    # loggers and other parts. On a GPU, training goes on while a hook waits for queued work or runs beside it. So where
    # a region's host time exceeds its device time, its hooks are productive up to that excess.
    if ledger.fit_s <= 0:
        return 0.0
    productive_s = ledger.parts.get(STEPS, 0.0)
    if timing.on_device:
        hooks_s: defaultdict[str, float] = defaultdict(float)
        for part, seconds in ledger.parts.items():
            if region := hook_region(part):
                hooks_s[region] += seconds
        for region, seconds in hooks_s.items():
            times = timing.regions.get(region, _NO_TIME)
            productive_s += min(seconds, max(times.host_ms - times.device_ms, 0.0) * timing.steps / 1e3)
    return productive_s / ledger.fit_s


def ledger_metrics(ledger: RunLedger, timing: RunTiming) -> dict[str, float]:
    """`run/goodput`, a fraction, and `run/KIND_pct` for each kind of part, which sum to 100."""
    if ledger.wall_s <= 0:
        return {}
    seconds = dict.fromkeys(LOGGED_KINDS, 0.0)
    for part, took_s in ledger.parts.items():
        kind = part_kind(part)
        seconds["startup" if kind == "sanity_check" else kind if kind in seconds else "other"] += took_s
    seconds["other"] += ledger.unexplained_s
    shares = {part_pct(kind): 100 * took_s / ledger.wall_s for kind, took_s in seconds.items()}
    return {GOODPUT: goodput(ledger, timing), **shares}
