"""`CUDATimer`: times one interval of GPU work with two events on its stream."""

from types import TracebackType
from typing import Self

import torch

from lightning_forge_profiling.errors import TimerNotStartedError, TimerRunningError
from lightning_forge_profiling.timing.events import EventSource, event_source


class CUDATimer:
    """Times the GPU work between `start()` and `stop()` without waiting for it.

    Both record an event on the current stream and return at once; `elapsed_ms()` waits for the end event only, not
    for the device. Without a GPU the same calls read the host clock, and `on_device` and `repr` say so.

    Args:
        device: the GPU to time; None takes the current one, or the host clock where there is no GPU.
        events: the source of events, instead of `device`; for tests.

    Example:
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
