"""A completed interval of a region, and the marks at its ends."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # loads torch, and whoever reads a record has no use for it
    from lightning_forge_profiling.timing.events import Event


class Interval(NamedTuple):
    """One completed start-to-stop of a region."""

    region: str
    tag: int
    """The value of `CUDATimerCollection.tag` at the stop; the callbacks use the step's number."""
    device_ms: float
    """Milliseconds between the two events on the GPU's timeline (on the host clock without a GPU)."""
    host_ms: float
    """Milliseconds on the host between the two calls."""


class Mark:
    """One instant on both timelines: an event and a host time. `CUDATimerCollection.mark()` creates it."""

    __slots__ = ("event", "host_ns", "stream", "users")

    def __init__(self, event: "Event") -> None:
        self.event = event
        self.host_ns = 0
        self.stream = 0
        self.users = 0
