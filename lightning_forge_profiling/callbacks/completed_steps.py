"""Steps that have ended on the host, until the GPU has completed them and they can be entered in the ledger."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.rates import PlainSteps, StepTiming, StepWork
from lightning_forge_profiling.timing.run_totals import LeftOut, RunLedger
from lightning_forge_profiling.timing.steps import WHOLE, StepAssembler, StepTimes

__all__ = ["CompletedSteps", "EndedStep"]


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    tag: int
    """What its intervals carry: its number, or that of the first of the plain steps before it."""
    step: int
    work: StepWork | None
    """None where it has not come to its end."""
    left_out: LeftOut | None
    timing: StepTiming
    complete: bool
    """Whether every event in it could be recorded."""
    before: PlainSteps | None = None
    """The steps before it that have no event of their own: they are the first part of its one piece."""


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
        if self._ended and self._ended[-1].tag == self._assembler.step and not timers.backlog:
            last = self._assembler.flush()
            if last is not None:
                self._enter(last)

    def flush(self, unfinished: int) -> None:
        """The run is over: enter what is left.

        Args:
            unfinished: what the intervals of the step carry that would have come next. What there is of it is
                validation or a checkpoint, and the plain steps before it.
        """
        last = self._assembler.flush()
        if last is not None:
            self._enter(last)
            if last.step == unfinished:
                self._ledger.add_excluded(last)

    def _enter(self, times: StepTimes) -> None:
        while self._ended and self._ended[0].tag <= times.step:
            ended = self._ended.popleft()
            if ended.tag == times.step and ended.complete:
                self._add(times, ended)
            else:
                works = ended.before.works if ended.before is not None else ()
                for work in (*works, *([ended.work] if ended.work is not None else ())):
                    self._ledger.skip(work)

    def _add(self, times: StepTimes, ended: EndedStep) -> None:
        before = ended.before
        if before is not None:
            took_ms, times = times.divided(before.host_ms)
            self._ledger.add_plain(before, took_ms)
            for listener in self.listeners:
                for step, (ms, host_ms, work) in enumerate(
                    zip(took_ms, before.host_ms, before.works, strict=True), before.first
                ):
                    listener(StepTimes(step, {WHOLE: ms}, {WHOLE: host_ms}, {WHOLE: 1}), work, None)
        if ended.work is None:
            return
        times = times._replace(step=ended.step)
        if not ended.timing.saw_all:
            times = times.whole()
        self._ledger.add(times, ended.work, ended.left_out, ended.timing)
        for listener in self.listeners:
            listener(times, ended.work, ended.left_out)
