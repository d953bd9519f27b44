"""`CUDATimerCollection`: times named regions of a training loop on the GPU without ever waiting for it."""

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import TracebackType
from typing import Final, Self

import torch

from lightning_forge_profiling.errors import TimerNotStartedError, TimerRunningError, UnknownRegionError
from lightning_forge_profiling.timing.events import EventSource, HostEvent, Mark, event_source
from lightning_forge_profiling.timing.steps import Interval

_interval: Final = Interval._make  # half the time of calling `Interval`
# what mark() returns while no event may be recorded; compared by identity, its event is never read
_UNTIMED: Final = Mark(HostEvent())


class CUDATimerCollection:
    """Times named regions of a training loop with a bounded pool of events.

    `start` and `stop` record an event on the current stream and return. `harvest()` returns the intervals that the GPU
    has completed and never waits; `elapsed_ms()` and `elapsed_all()` wait for the regions that they report. Several
    intervals of one region add up until `reset()`. Without a GPU the same calls read the host clock.

    Args:
        regions: names of the regions.
        enabled: if False, every method does nothing, also for unknown names.
        device: the GPU to time; None takes the current one, or the host clock where there is no GPU.
        max_events: size of the pool. While all events are in flight, further intervals are not timed but counted in
            `dropped`; the training loop never waits.
        events: the source of events, instead of `device`; for tests.
        clock_ns: the host clock, in nanoseconds; for tests.

    Examples:
        >>> timers = CUDATimerCollection(["forward", "backward"], device="cpu")
        >>> for step in range(3):
        ...     with timers.region("forward"):
        ...         total = sum(range(1000))
        >>> [interval.region for interval in timers.harvest()]
        ['forward', 'forward', 'forward']
        >>> timers.counts
        {'forward': 3, 'backward': 0}
        >>> timers.elapsed_all()["backward"]
        0.0
    """

    def __init__(
        self,
        regions: Iterable[str],
        enabled: bool = True,
        *,
        device: torch.device | str | int | None = None,
        max_events: int = 4096,
        events: EventSource | None = None,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.tag = 0
        """Any integer, such as the step's number. An interval carries the value at its stop."""
        self._enabled = enabled
        self._max_events = max_events
        self._clock_ns = clock_ns
        self._totals = dict.fromkeys(regions, 0.0)
        self._counts = dict.fromkeys(self._totals, 0)
        self._open: dict[str, Mark] = {}
        self._pending: deque[tuple[str, int, Mark, Mark]] = deque()
        self._done: deque[Interval] = deque(maxlen=max_events)
        self._free: list[Mark] = []
        self._made = 0
        self.dropped = 0
        """Number of intervals that were not timed: all events were in flight, or a CUDA graph was being captured."""
        self._unread = 0
        self._source = (events if events is not None else event_source(device)) if enabled else None

    @property
    def enabled(self) -> bool:
        """Whether regions are timed."""
        return self._enabled

    @property
    def on_device(self) -> bool:
        """True if times are of the GPU's timeline, False if of the host clock."""
        return self._source is not None and self._source.on_device

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return tuple(self._totals)

    @property
    def counts(self) -> dict[str, int]:
        """Completed and read intervals per region since the last reset."""
        return dict(self._counts)

    @property
    def unread(self) -> int:
        """Number of completed intervals that were dropped before a harvest; they are in the sums only."""
        return self._unread

    @property
    def backlog(self) -> int:
        """Number of intervals that are not harvested yet, completed or not."""
        return len(self._pending) + len(self._done)

    def add_region(self, region: str) -> None:
        """Add a region; does nothing if it exists."""
        self._totals.setdefault(region, 0.0)
        self._counts.setdefault(region, 0)

    def mark(self) -> Mark:
        """Record one event now, for several `start` and `stop` calls at the same instant.

        Returns:
            A mark. Use it at least once, in this step: its event returns to the pool once its last interval is read.
        """
        source = self._source
        if source is None or source.capturing():
            return _UNTIMED
        if self._free:
            mark = self._free.pop()
        elif self._made < self._max_events:
            self._made += 1
            mark = Mark(source.new_event())
        else:
            self._collect()
            if not self._free:
                return _UNTIMED
            mark = self._free.pop()
        mark.stream = source.stream()
        mark.event.record()
        mark.host_ns = self._clock_ns()
        return mark

    def passed(self, mark: Mark) -> bool | None:
        """Whether the GPU has passed a mark. Never waits; None without a GPU and during a CUDA graph's capture."""
        source = self._source
        return None if source is None or not source.on_device or source.capturing() else mark.event.query()

    def start(self, region: str, at: Mark | None = None) -> None:
        """Start a region on the current stream.

        Args:
            region: name of the region.
            at: the mark at which it starts; None records an event now.

        Raises:
            UnknownRegionError: the collection has no such region.
            TimerRunningError: the region is running.
        """
        if not self._enabled:
            return
        if region not in self._totals:
            raise self._unknown(region)
        if region in self._open:
            raise TimerRunningError(f"start({region!r}) while it is running: call stop({region!r}) first.")
        mark = self.mark() if at is None else at
        mark.users += 1
        self._open[region] = mark

    def stop(self, region: str, at: Mark | None = None) -> None:
        """Stop a region on the current stream.

        Args:
            region: name of the region.
            at: the mark at which it stops; None records an event now.

        Raises:
            UnknownRegionError: the collection has no such region.
            TimerNotStartedError: the region is not running.
        """
        if not self._enabled:
            return
        start = self._open.pop(region, None)
        if start is None:
            if region not in self._totals:
                raise self._unknown(region)
            raise TimerNotStartedError(f"stop({region!r}) without start: call start({region!r}) before the work.")
        end = self.mark() if at is None else at
        end.users += 1
        if start is _UNTIMED or end is _UNTIMED:
            self.dropped += 1
            self._release(start)
            self._release(end)
            return
        self._pending.append((region, self.tag, start, end))

    def switch(self, old: str, new: str) -> Mark:
        """Stop one region and start another at the same instant, with one event.

        Args:
            old: the region to stop.
            new: the region to start; may be the same.

        Returns:
            The mark at that instant.

        Raises:
            TimerError: as from `stop` and `start`.
        """
        source = self._source
        if self._free and source is not None and not source.capturing():
            mark = self._free.pop()  # mark() without the call: this runs seven times a step
            mark.stream = source.stream()
            mark.event.record()
            mark.host_ns = self._clock_ns()
        else:
            mark = self.mark()
        start = self._open.get(old)
        if start is None or start is _UNTIMED or mark is _UNTIMED or new not in self._totals:
            mark.users += 1  # else `stop` may free what `start` is about to use
            self.stop(old, at=mark)
            self.start(new, at=mark)
            self._release(mark)
            return mark
        del self._open[old]
        if new in self._open:
            raise TimerRunningError(f"switch({old!r}, {new!r}): {new!r} is running already.")
        mark.users = 2
        self._pending.append((old, self.tag, start, mark))
        self._open[new] = mark
        return mark

    def relabel(self, old: str, new: str) -> None:
        """Rename the running interval of `old` to `new`, from its start on; does nothing if `old` is not running."""
        if old in self._open:
            if new not in self._totals:
                raise self._unknown(new)
            self._open[new] = self._open.pop(old)

    def region(self, name: str) -> "_RegionContext":
        """A context manager that starts and stops `name`."""
        return _RegionContext(self, name)

    def harvest(self) -> tuple[Interval, ...]:
        """Return the intervals completed since the last harvest, in the order of their stops. Never waits for the GPU.

        Between two harvests the newest `max_events` intervals are kept; `unread` counts the others.
        """
        if not self._pending and not self._done:
            return ()
        self._collect()
        done = tuple(self._done)
        self._done.clear()
        return done

    def elapsed_ms(self, region: str) -> float:
        """Total milliseconds of a region since the last reset; waits until the GPU has passed its last stop.

        Raises:
            UnknownRegionError: the collection has no such region.
        """
        if not self._enabled:
            return 0.0
        if region not in self._totals:
            raise self._unknown(region)
        last = max((i for i, pending in enumerate(self._pending) if pending[0] == region), default=-1)
        self._drain(last + 1)
        return self._totals[region]

    def elapsed_all(self, reset: bool = False) -> dict[str, float]:
        """Total milliseconds of every region since the last reset, 0.0 for what never completed.

        Waits until the GPU has passed the last stop. In a training loop use `harvest()`.

        Args:
            reset: start new sums afterwards.
        """
        self._drain(len(self._pending))
        totals = dict(self._totals)
        if reset:
            self.reset()
        return totals

    def reset(self) -> None:
        """Drop all completed intervals. A running region keeps running, and its whole interval counts."""
        for _, _, start, end in self._pending:
            self._release(start)
            self._release(end)
        self._pending.clear()
        self._done.clear()
        self._totals = dict.fromkeys(self._totals, 0.0)
        self._counts = dict.fromkeys(self._counts, 0)

    def _unknown(self, region: str) -> UnknownRegionError:
        return UnknownRegionError(f"Unknown region {region!r}. Known regions: {', '.join(self._totals) or 'none'}.")

    def _collect(self) -> None:
        # query() during a capture would invalidate the graph (cudaErrorStreamCaptureUnsupported)
        if self._source is None or self._source.capturing():
            return
        pending = self._pending
        # Events of one stream complete in order: query one far ahead and, while it has not completed, one half as far.
        ahead = len(pending)
        while ahead:
            probe = pending[ahead - 1][3]
            if probe.event.query():
                for _ in range(ahead):
                    end = pending[0][3]
                    if end.stream != probe.stream and not end.event.query():
                        return
                    self._read(pending.popleft())
                return
            ahead //= 2

    def _drain(self, count: int) -> None:
        for _ in range(count):
            pending = self._pending.popleft()
            pending[3].event.synchronize()
            self._read(pending)

    def _read(self, pending: tuple[str, int, Mark, Mark]) -> None:
        region, tag, start, end = pending
        device_ms = start.event.elapsed_time(end.event)
        self._totals[region] += device_ms
        self._counts[region] += 1
        done = self._done
        if len(done) == self._max_events:
            self._unread += 1  # the oldest falls out
        done.append(_interval((region, tag, device_ms, (end.host_ns - start.host_ns) / 1e6)))
        self._release(start)
        self._release(end)

    def _release(self, mark: Mark) -> None:
        mark.users -= 1
        if not mark.users and mark is not _UNTIMED:
            self._free.append(mark)

    def __repr__(self) -> str:
        clock = "device events" if self.on_device else "host clock"
        return f"CUDATimerCollection({', '.join(self._totals)}; {clock if self._enabled else 'disabled'})"


class _RegionContext:
    __slots__ = ("_name", "_timers")

    def __init__(self, timers: CUDATimerCollection, name: str) -> None:
        self._timers = timers
        self._name = name

    def __enter__(self) -> None:
        self._timers.start(self._name)

    def __exit__(self, *_: object) -> None:
        self._timers.stop(self._name)


class CUDATimer:
    """Times the GPU work between `start()` and `stop()` without waiting for it.

    Both record an event on the current stream and return at once; `elapsed_ms()` waits for the end event only, not
    for the device. Without a GPU the same calls read the host clock, and `on_device` and `repr` say so.

    Args:
        device: the GPU to time; None takes the current one, or the host clock where there is no GPU.
        events: the source of events, instead of `device`; for tests.

    Examples:
        >>> timer = CUDATimer(device="cpu")
        >>> with timer:
        ...     total = sum(range(1000))
        >>> timer.elapsed_ms() > 0
        True
        >>> timer
        CUDATimer(host clock, stopped)
    """

    def __init__(self, device: torch.device | str | int | None = None, *, events: EventSource | None = None) -> None:
        source = events if events is not None else event_source(device)
        self._on_device = source.on_device
        self._start = source.new_event()
        self._end = source.new_event()
        self._state = "not started"

    @property
    def on_device(self) -> bool:
        """True if times are of the GPU's timeline, False if of the host clock."""
        return self._on_device

    def start(self) -> None:
        """Record the start on the current stream.

        Raises:
            TimerRunningError: the timer is running.
        """
        if self._state == "running":
            raise TimerRunningError("CUDATimer.start() while it is running: call stop() first.")
        self._start.record()
        self._state = "running"

    def stop(self) -> None:
        """Record the end on the current stream.

        Raises:
            TimerNotStartedError: the timer is not running.
        """
        if self._state != "running":
            raise TimerNotStartedError("CUDATimer.stop() without start(): call start() before the work to time.")
        self._end.record()
        self._state = "stopped"

    def ready(self) -> bool:
        """Whether `elapsed_ms()` would return without waiting."""
        return self._state == "stopped" and self._end.query()

    def elapsed_ms(self) -> float:
        """Milliseconds between start and stop; waits until the GPU has passed the end event.

        Raises:
            TimerNotStartedError: nothing has been timed.
            TimerRunningError: the timer is still running.
        """
        if self._state == "not started":
            raise TimerNotStartedError("CUDATimer.elapsed_ms() before start(): there is nothing to read.")
        if self._state == "running":
            raise TimerRunningError("CUDATimer.elapsed_ms() before stop(): call stop() after the work to time.")
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"CUDATimer({'device events' if self._on_device else 'host clock'}, {self._state})"
