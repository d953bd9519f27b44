"""Steps that have ended on the host, until the GPU has completed them and they can be entered in the ledger."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.rates import StepTiming, StepWork
from lightning_forge_profiling.timing.steps import StepAssembler, StepTimes
from lightning_forge_profiling.timing.throughput import LeftOut, RunLedger

__all__ = ["CompletedSteps", "EndedStep"]


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    step: int
    work: StepWork
    left_out: LeftOut | None
    timing: StepTiming
    complete: bool
    """Whether every event in it could be recorded."""


class CompletedSteps:
    """Puts the intervals that the GPU has completed together to steps.

    Args:
        ledger: where they are entered.
    """

    def __init__(self, ledger: RunLedger) -> None:
        self.listeners: list[Callable[[StepTimes, StepWork, LeftOut | None], None]] = []
        """Called with each step that is entered."""
        self._ledger = ledger
        self._assembler = StepAssembler()
        self._ended: deque[EndedStep] = deque(maxlen=4096)
        self._unread = 0

    def expect(self, ended: EndedStep) -> None:
        """A step has ended on the host; its times will come."""
        self._ended.append(ended)

    def deliver(self, timers: CUDATimerCollection) -> None:
        """Enter what the GPU has completed. Never waits."""
        intervals = timers.harvest()
        if timers.unread != self._unread:  # some fell out: of which of the steps that wait is not known
            self._unread = timers.unread
            self._ended = deque((ended._replace(complete=False) for ended in self._ended), self._ended.maxlen)
        for interval in intervals:
            times = self._assembler.add(interval)
            if times is not None:
                self._enter(times)
        # a step that has ended on the host and has left nothing to wait for is complete without a later one behind it
        if self._ended and self._ended[-1].step == self._assembler.step and not timers.backlog:
            last = self._assembler.flush()
            if last is not None:
                self._enter(last)

    def flush(self, unfinished: int) -> None:
        """The run is over: enter what is left.

        Args:
            unfinished: the step that would have come next. What there is of it is validation or a checkpoint.
        """
        last = self._assembler.flush()
        if last is not None:
            self._enter(last)
            if last.step == unfinished:
                self._ledger.add_excluded(last)

    def _enter(self, times: StepTimes) -> None:
        while self._ended and self._ended[0].step <= times.step:
            step, work, left_out, timing, complete = self._ended.popleft()
            if step == times.step and complete:
                if not timing.saw_all:
                    times = times.whole()
                self._ledger.add(times, work, left_out, timing)
                for listener in self.listeners:
                    listener(times, work, left_out)
            else:
                self._ledger.skip(work)
