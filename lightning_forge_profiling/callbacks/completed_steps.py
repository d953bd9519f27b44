"""Steps that have ended on the host, until the GPU has completed them and their times enter the run's totals."""

from collections import deque
from typing import NamedTuple

from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.rates import StepTiming, StepWork
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import StepAssembler, StepTimes


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    step: int  # its number, which is the tag of its intervals
    work: StepWork
    left_out: LeftOut | None
    timing: StepTiming
    complete: bool  # whether every event in it could be recorded


class CompletedSteps:
    """Assembles the intervals that the GPU has completed into steps."""

    def __init__(self, totals: RunTotals) -> None:
        self._totals = totals
        self._assembler = StepAssembler()
        self._ended: deque[EndedStep] = deque(maxlen=4096)
        self._unread = 0

    def expect(self, ended: EndedStep) -> None:
        """Add a step that has ended on the host, and whose times will follow."""
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
        """Enter what is left at the end of the run."""
        last = self._assembler.flush()
        if last is not None:
            self._enter(last)
            if last.step == unfinished:
                self._totals.add_excluded(last)

    def _enter(self, times: StepTimes) -> None:
        while self._ended and self._ended[0].step <= times.step:
            ended = self._ended.popleft()
            if ended.step == times.step and ended.complete:
                shown = times if ended.timing.saw_all else times.whole()
                self._totals.add(shown, ended.work, ended.left_out, ended.timing)
            else:
                self._totals.skip(ended.work)
