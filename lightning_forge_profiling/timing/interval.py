"""One completed stretch of a region, and the instants it lies between."""

from typing import NamedTuple

from lightning_forge_profiling.timing.events import Event

__all__ = ["Interval", "Mark"]


class Interval(NamedTuple):
    """One completed start-to-stop of a region."""

    region: str
    tag: int
    """What `CUDATimerCollection.tag` was when the region stopped; the callbacks keep the step's number there."""
    device_ms: float
    """Milliseconds between the two events on the GPU's timeline (host clock where there is no GPU)."""
    host_ms: float
    """Milliseconds on the host between the two calls."""


class Mark:
    """One instant, on both timelines: an event and a host time. Made by `CUDATimerCollection.mark()`."""

    __slots__ = ("event", "host_ns", "stream", "users")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.host_ns = 0
        self.stream = 0
        self.users = 0
