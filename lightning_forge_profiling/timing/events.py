"""Sources of timestamps: events on the GPU's timeline, or the host clock with the same interface."""

import ctypes
import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final, Protocol, cast
from weakref import WeakSet

import torch

# ruff: noqa: D102  (the protocols say what the methods do)


class Event(Protocol):
    """One timestamp, as `torch.Event` has it."""

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

    on_device: bool  # True if events are on the GPU's timeline, False if they read the host clock

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
        self.ns = self._clock_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: Event, /) -> float:
        return (cast("HostEvent", end_event).ns - self.ns) / 1e6


class HostEventSource:
    """Host-clock events, for machines without a GPU and for tests."""

    on_device = False

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns = clock_ns

    def new_event(self) -> Event:
        return HostEvent(self._clock_ns)

    capturing = staticmethod(bool)  # False, and 0: calls of C, which take less than functions
    stream = staticmethod(int)


class DeviceEventSource:
    """Events on one GPU's timeline."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        of_kind = getattr(torch, device.type)
        self._index = of_kind.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, self._index)
        self.capturing: Callable[[], bool] = getattr(of_kind, "is_current_stream_capturing", bool)
        # as compiled code does; torch.cuda.current_stream() creates an object and costs more than the record
        name = f"_{device.type}_getCurrentRawStream"
        self._stream: Callable[[int], int] | None = getattr(torch._C, name, None)  # noqa: SLF001

    def new_event(self) -> Event:
        # torch.cuda.Event records the same CUDA event in four times the host time (docs/measured.md)
        event = torch.Event(self._device, enable_timing=True)
        _alive.add(event)
        return cast("Event", event)

    def stream(self) -> int:
        if self._stream is None:
            raise RuntimeError(f"PyTorch is built without {self._device.type}")
        return self._stream(self._index)


# A forked process has no CUDA, and a `torch.Event` that is destroyed there ends it (torch 2.11: "terminate called after
# throwing an instance of 'c10::AcceleratorError'"). A loader's worker would, as soon as it collects garbage that has an
# event, such as a Trainer of an earlier fit with its callbacks. So events that exist at a fork outlive the new process.
_alive: "Final[WeakSet[torch.Event]]" = WeakSet()
_held: Final[list[torch.Event]] = []


def _keep_for_ever() -> None:
    for event in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _held.extend(_alive), after_in_parent=_held.clear, after_in_child=_keep_for_ever)


def event_source(device: torch.device | str | int | None = None) -> EventSource:
    """The event source of a device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type not in _HAVE_EVENTS or not getattr(torch, resolved.type).is_available():
        return HostEventSource()
    tells = resolved.type == "cuda" or _tells_times(resolved)
    return DeviceEventSource(resolved) if tells else HostEventSource()


# ROCm's devices have CUDA's name. Not "mps": reading an event there commits and waits for the default stream's work
# (`MPSEventPool::elapsedTime` in PyTorch's aten/src/ATen/mps/MPSEvent.mm), so a region's time would cost what it tells.
_HAVE_EVENTS: Final = ("cuda", "xpu")


def _tells_times(device: torch.device) -> bool:
    """Whether events tell times: on Intel's GPUs that is up to the driver (pytorch/pytorch pull request 134666)."""
    try:
        source = DeviceEventSource(device)
        first, last = source.new_event(), source.new_event()
        source.stream()
        first.record()
        last.record()
        last.synchronize()
        first.elapsed_time(last)
    except (AttributeError, RuntimeError):
        return False
    return True


class Mark:
    """One instant on both timelines: an event and a host time. `CUDATimerCollection.mark()` creates it."""

    __slots__ = ("event", "host_ns", "stream", "users")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.host_ns = 0
        self.stream = 0
        self.users = 0
