"""Where a time stamp comes from: an event on the GPU's own timeline, or the host clock.

Timers never ask which of the two they hold. Both kinds of event have `record()`, `query()`, `synchronize()` and
`elapsed_time(later)`, and both come out of an `EventSource`, which tests replace by a fake one.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol, cast

import torch

__all__ = ["DeviceEventSource", "Event", "EventSource", "HostEvent", "HostEventSource", "event_source"]


class Event(Protocol):
    """One time stamp."""

    def record(self) -> None:
        """Stamp now: on the host at once, on a GPU when its current stream gets here."""

    def query(self) -> bool:
        """Whether the stamp has been made. Never waits."""

    def synchronize(self) -> None:
        """Wait on the host until the stamp has been made."""

    def elapsed_time(self, end_event: "Event", /) -> float:
        """Milliseconds from this stamp to `end_event`; both must have been made."""


class EventSource(Protocol):
    """Makes events for one device."""

    on_device: bool
    """True where events stamp the GPU's timeline, False where they read the host clock."""

    def new_event(self) -> Event:
        """An event that has not been recorded."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream, when no event may be touched."""

    def stream(self) -> int:
        """Which stream an event recorded now goes to. Events of one stream are made in the order of their records."""


class HostEvent:
    """The host clock behind the interface of a device event."""

    __slots__ = ("_clock_ns", "ns")

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self.ns = 0

    def record(self) -> None:
        """Stamp now."""
        self.ns = self._clock_ns()

    def query(self) -> bool:
        """Always True: a host stamp is made when it is recorded."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds from this stamp to `end_event`."""
        return (cast("HostEvent", end_event).ns - self.ns) / 1e6


class HostEventSource:
    """Host-clock events, for machines without an accelerator and for tests.

    Args:
        clock_ns: the clock, in nanoseconds.
    """

    on_device = False

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns = clock_ns

    def new_event(self) -> Event:
        """An event that reads the host clock."""
        return HostEvent(self._clock_ns)

    def capturing(self) -> bool:
        """Always False: the host captures nothing."""
        return False

    def stream(self) -> int:
        """Always 0: the host's time is one."""
        return 0


class DeviceEventSource:
    """Events on one GPU's timeline.

    Args:
        device: the GPU; without an index, the current one. Events are recorded on this device's current stream.
    """

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, self._index)
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing

    def new_event(self) -> Event:
        """A timing event of this device.

        `torch.Event` rather than `torch.cuda.Event`: the same CUDA event behind it, recorded in a quarter of the
        host time (docs/benchmarks.md has the figures).
        """
        return cast("Event", torch.Event(self._device, enable_timing=True))

    def stream(self) -> int:
        """The current stream's handle."""
        # as compiled code asks for it; torch.cuda.current_stream() makes an object and costs more than the record
        return torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001


def event_source(device: torch.device | str | int | None = None) -> EventSource:
    """The event source of a device.

    Args:
        device: a CUDA (or ROCm, which PyTorch calls CUDA as well) device for device events; anything else, such as
            `"cpu"`, for the host clock. None takes the current CUDA device where there is one.

    Returns:
        A source whose `on_device` says which of the two it is.

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
