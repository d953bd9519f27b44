"""A simulated GPU: a queue of work and events, a clock that only moves when told, and a count of who waited."""

from collections import deque
from typing import Any


class FakeEvent:
    def __init__(self, device):
        self._device = device
        self.ms = None
        self.records = 0

    def record(self):
        """As in CUDA, a second record supersedes the first, made or not."""
        self._device.calls += 1
        self._device.host_ns += self._device.record_ns
        self.ms = None
        self.records += 1
        self._device.queue.append((self, self.records))

    def query(self):
        self._device.calls += 1
        self._device.run(ms=0)
        return self.ms is not None

    def synchronize(self):
        self._device.calls += 1
        self._device.waits += 1
        while self.ms is None:
            self._device.run(ms=self._device.remaining_ms())  # up to the next event, no further

    def elapsed_time(self, later):
        self._device.calls += 1
        assert self.ms is not None
        assert later.ms is not None
        return later.ms - self.ms


class FakeDevice:
    """An event source. Work is queued with `enqueue` and executed by `run`; idle time passes at the front."""

    on_device = True

    def __init__(self):
        self.queue: deque[Any] = deque()
        self.now_ms = 0.0
        self.host_ns = 0
        self.record_ns = 0  # host time that each record takes
        self.calls = self.waits = self.events_made = 0
        self.is_capturing = False

    def new_event(self):
        self.events_made += 1
        return FakeEvent(self)

    def capturing(self):
        return self.is_capturing

    def stream(self):
        return 0

    def enqueue(self, ms):
        self.queue.append(float(ms))

    def remaining_ms(self):
        """Time until the next event in the queue is made."""
        total = 0.0
        for entry in self.queue:
            if isinstance(entry, tuple):
                return total
            total += entry
        return total

    def run(self, ms):
        """Let `ms` of device time pass, working where there is work."""
        end = self.now_ms + ms
        while self.queue:
            entry = self.queue[0]
            if isinstance(entry, tuple):
                event, record = self.queue.popleft()
                if record == event.records:
                    event.ms = self.now_ms
            elif self.now_ms + entry <= end:
                self.now_ms += entry
                self.queue.popleft()
            else:
                self.queue[0] = entry - (end - self.now_ms)
                break
        self.now_ms = end

    def host_clock_ns(self):
        return self.host_ns

    def pass_host_time(self, ms):
        self.host_ns += int(ms * 1e6)
