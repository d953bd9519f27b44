"""Sources of timestamps: events on the GPU's timeline, or the host clock.

Timers do not depend on which of the two they have: both kinds of event have `record()`, `query()`, `synchronize()` and
`elapsed_time(later)`. Tests pass a fake `EventSource`.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, cast

import torch


class Event(Protocol):
    """One timestamp."""

    def record(self) -> None:
        """Take the timestamp: on the host now, on a GPU when its current stream gets here."""

    def query(self) -> bool:
        """Whether the timestamp is taken. Never waits."""

    def synchronize(self) -> None:
        """Block the host until the timestamp is taken."""

    def elapsed_time(self, end_event: "Event", /) -> float:
        """Milliseconds from this timestamp to `end_event`; both must be taken."""


class EventSource(Protocol):
    """Creates events for one device."""

    on_device: bool
    """True if events are on the GPU's timeline, False if they read the host clock."""

    def new_event(self) -> Event:
        """A new event, not recorded yet."""

    def capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph, during which no event may be recorded or queried."""

    def stream(self) -> int:
        """The current stream. Events of one stream complete in the order in which they are recorded."""


class HostEvent:
    """The host clock with the interface of a device event."""

    __slots__ = ("_clock_ns", "ns")

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self.ns = 0

    def record(self) -> None:
        """Take the timestamp."""
        self.ns = self._clock_ns()

    def query(self) -> bool:
        """Always True: a host timestamp is taken when it is recorded."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds from this timestamp to `end_event`."""
        return (cast("HostEvent", end_event).ns - self.ns) / 1e6


class HostEventSource:
    """Host-clock events, for machines without a GPU and for tests."""

    on_device = False

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns = clock_ns

    def new_event(self) -> Event:
        """A new event of the host clock."""
        return HostEvent(self._clock_ns)

    def capturing(self) -> bool:
        """Always False."""
        return False

    def stream(self) -> int:
        """Always 0: the host has one timeline."""
        return 0


class DeviceEventSource:
    """Events on one GPU's timeline."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, self._index)
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing

    def new_event(self) -> Event:
        """A timing event of this device.

        `torch.Event` rather than `torch.cuda.Event`: it records the same CUDA event in a quarter of the host time
        (measured in docs/benchmarks.md).
        """
        return cast("Event", torch.Event(self._device, enable_timing=True))

    def stream(self) -> int:
        """The current stream's handle."""
        # as compiled code does; torch.cuda.current_stream() creates an object and costs more than the record
        return torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001


def event_source(device: torch.device | str | int | None = None) -> EventSource:
    """The event source of a device.

    Example:
        >>> event_source("cpu").on_device
        False
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type != "cuda" or not torch.cuda.is_available():
        return HostEventSource()
    return DeviceEventSource(resolved)


if TYPE_CHECKING:  # loads torch, and whoever reads a record has no use for it
    from lightning_forge_profiling.timing.events import Event


class Mark:
    """One instant on both timelines: an event and a host time. `CUDATimerCollection.mark()` creates it."""

    __slots__ = ("event", "host_ns", "stream", "users")

    def __init__(self, event: "Event") -> None:
        self.event = event
        self.host_ns = 0
        self.stream = 0
        self.users = 0
