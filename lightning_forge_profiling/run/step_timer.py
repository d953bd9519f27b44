"""What drives the clocks of a fit: steps begin and end, are split or not, stand still, and enter the run's totals."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from threading import Event, get_native_id
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.host import thread_counts
from lightning_forge_profiling.names import FIRST_STEP, PROFILER, REGIONS, WHOLE
from lightning_forge_profiling.ranks.stalls import patient_part
from lightning_forge_profiling.schema import RunTiming
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.completed_steps import (
    DELIVER_ABOVE,
    DELIVER_NS,
    CompletedSteps,
    EndedStep,
    TimingBudget,
)
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.region import UserRegions
from lightning_forge_profiling.timing.region_clock import RegionClock, WaitClock
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import StepTiming, StepWork

# where nearly all GPU work is launched. Only where each of them ends with a mark does a step's last mark lie behind all
# of its work, and tell how far the GPU is.
_LAUNCHING: Final = ("forward", "backward", "optimizer")


_LEAST_S: Final = 2.0  # twice as long as the thread that watches sleeps
_OF_POLLS: Final = 0.25  # a thread that waits for the interpreter lock polls it once a switch interval


class Standstill(NamedTuple):
    """A time in which training stood still."""

    seconds: float  # at most
    parts: Mapping[str, int]  # nanoseconds by part of the ledger before it
    why: str
    step: int | None = None  # that of a hang
    began_ns: int = 0  # of a stop, to take it once
    certain: bool = True  # or only if the step never ends


class Standstills:
    """Entered by the thread that watches training, and taken by the training thread at the end of a long step."""

    def __init__(self, ledger: LedgerClock) -> None:
        self._ledger = ledger
        self._sleep: tuple[int, int, float, int, Mapping[str, int]] | None = None
        self._latest: Standstill | None = None
        self._taken_ns = -1

    def sleep(self, wake: Event, seconds: float) -> None:
        """Sleep in the thread that watches training, which a stop of the process makes longer."""
        thread = get_native_id()
        if counts := thread_counts(os.getpid(), thread):
            self._sleep = perf_counter_ns(), thread, counts.used_s, counts.times, self._ledger.peek()
        wake.wait(seconds)
        self._see_stop()
        self._sleep = None

    def _see_stop(self) -> None:
        """For either thread: after a stop, the training thread may be the first to run."""
        if (sleep := self._sleep) is None or (slept_s := (perf_counter_ns() - sleep[0]) / 1e9) < _LEAST_S:
            return
        began_ns, thread, used_s, times, parts = sleep
        counts, most_polls = thread_counts(os.getpid(), thread), _OF_POLLS * slept_s / sys.getswitchinterval()
        # else it waited for a core, or for the interpreter lock, which a call in C held
        if counts and counts.used_s - used_s < slept_s / 4 and counts.times - times < most_polls:
            self._latest = Standstill(slept_s, parts, "the process was stopped", began_ns=began_ns)

    def hang(self, step: int, seconds: float, why: str, *, others_end: bool = False, certain: bool = True) -> None:
        """Training has been stalled in a step for so many seconds, and may be until the next look."""
        known = self._latest
        if not certain and known is not None and known.step is None:  # a stop is known for sure
            return
        if known is None or known.step != step:
            known = Standstill(seconds, self._ledger.peek(), why, step)
        # all of a step's part is a hang, but a validation run may have gone on for long before
        most_s = seconds + _LEAST_S if patient_part(self._ledger.open_parts()) else inf
        # what was said before ranks ended tells why, as of a hang that Ctrl-C ends on one rank after the other
        self._latest = Standstill(most_s, known.parts, known.why if others_end else why, step, certain=certain)

    def take(self, step: int, *, ends: bool) -> Standstill | None:
        """That of a step which took a second or more, and ends or does not, since the fit ends."""
        self._see_stop()
        found, self._latest = self._latest, None
        if (
            found is None
            or (ends and not found.certain)
            or found.step not in {None, step}
            or found.began_ns == self._taken_ns
        ):
            return None
        self._taken_ns = found.began_ns or self._taken_ns
        return found


@dataclass(slots=True)
class _Loop:
    """When the training loop ran, by the host's clock in nanoseconds."""

    began_ns: int  # the fit
    started_ns: int
    ended_ns: int
    began: bool = False  # whether a training loop has been timed


class StepTimer(Guarded):
    """Ends and begins the steps of a fit, in which `regions`, `waits` and `user_regions` are timed."""

    def __init__(
        self,
        timers: CUDATimerCollection,
        *,
        regions: Collection[str] = REGIONS,
        warmup_steps: int = 0,
        budget: TimingBudget | None = None,
        ledger: LedgerClock | None = None,
        bucket: Callable[[float], int] | None = None,
        clock_ns: Callable[[], int] = perf_counter_ns,
        nsight: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        began_ns = clock_ns()
        ledger = LedgerClock(began_ns, clock_ns=clock_ns) if ledger is None else ledger
        self.regions = RegionClock(timers, ledger, regions, clock_ns, nsight)
        self.waits, self.user_regions = WaitClock(self.regions), UserRegions(self.regions)
        self.warmup_steps = warmup_steps
        self.step = 0  # the step under way
        self.standstills = Standstills(ledger)
        labels = self.regions.labels
        self.totals = RunTotals(
            tuple(name for name in REGIONS if labels[name] == name), bucket, on_device=timers.on_device
        )
        # whether the GPU had work left at the end of the last split step, as far as is known
        self.host_is_ahead = False
        self._queries_gpu = timers.on_device and all(labels[name] == name for name in _LAUNCHING)
        self._budget = budget or TimingBudget(None)
        self._completed = CompletedSteps(timers, self.totals, self._budget)
        self._loop = _Loop(began_ns, began_ns, began_ns)
        self._stepped_ns = 0  # when the step under way began

    @property
    def timers(self) -> CUDATimerCollection:
        """The events."""
        return self.regions.timers

    @property
    def ledger(self) -> LedgerClock:
        """The run's wall time."""
        return self.regions.ledger

    @property
    def began(self) -> bool:
        """Whether a training loop has been timed."""
        return self._loop.began

    @guarded
    def start(self) -> None:
        """The training loop begins: step 0 starts now."""
        regions = self.regions
        regions.ledger.turn_to(FIRST_STEP)
        regions.ledger.begin_step(0, last_counts=False)
        self._loop.began, self._loop.started_ns = True, regions.clock_ns()
        regions.begin()
        self._stepped_ns = regions.since.host_ns
        self._completed.due_ns = self._stepped_ns + DELIVER_NS

    @contextmanager
    def profiler_overhead(self) -> Iterator[None]:
        """Around log entries and lines of the record: the time counts to the profiler, and to no step."""
        regions = self.regions
        if not regions.active:
            with regions.ledger.inside(PROFILER):
                yield
            return
        began_ns = regions.clock_ns()
        regions.enter(PROFILER)
        try:
            yield
        finally:
            regions.exit(PROFILER)
            self.totals.add_log_time((regions.clock_ns() - began_ns) / 1e3)

    def end_plain_step(self, work: StepWork, began_ns: int) -> bool:
        """End a step in a few lines, if only its end is timed and the next one's too; returns whether it has ended."""
        step, regions, completed = self.step, self.regions, self._completed
        ledger = regions.ledger
        if (
            step >= completed.plain_until
            or regions.stack
            or self.waits.name
            or not regions.active
            or regions.label != WHOLE
            or began_ns >= completed.due_ns
            or began_ns - self._stepped_ns >= DELIVER_NS  # training may have stood still
            or ledger.noted
            or ledger.collected
        ):
            return False
        timers, now = regions.timers, regions.now
        regions.since = since = timers.switch(WHOLE, WHOLE)
        complete, completed.dropped = timers.dropped == completed.dropped, timers.dropped
        completed.plain.append((step, work, began_ns - self._stepped_ns, now.own_ns, began_ns, complete))
        self._stepped_ns = since.host_ns
        self.step = timers.tag = ledger.step = step + 1
        now.own_ns = regions.clock_ns() - began_ns
        return True

    def end_step(
        self,
        work: StepWork,
        *,
        recorded: bool = False,
        ends_epoch: bool = False,
        all_boundaries_seen: bool = True,
        began_ns: int | None = None,
    ) -> None:
        """End the current step; the next one begins at the same instant."""
        regions = self.regions
        if not regions.active:
            return
        clock_ns = regions.clock_ns
        began_ns = clock_ns() if began_ns is None else began_ns
        try:
            self._settle()
            while regions.stack:  # an exception that the user's code caught may have left something open
                regions.pop()
            following = self.step + 1
            if self.waits.name or regions.followers.step_range is not None:
                self.waits.exit()
                regions.followers.show_step(following)
            timers, now, completed = regions.timers, regions.now, self._completed
            split, chosen = regions.is_split, now.chosen
            left_out: LeftOut | None = "recorded" if recorded else "warm-up" if following <= self.warmup_steps else None
            left_out = "stalled" if self.stood_still(began_ns) else left_out
            now.chosen = not ends_epoch
            drained = self._drained() if split and self._queries_gpu and all_boundaries_seen else None
            splits = following < self.warmup_steps or ends_epoch or self._budget.splits(following)
            now.update = None
            regions.end_step(began_ns, split_next=splits)
            timing = StepTiming(
                drained, chosen, now.own_ns / 1e3, now.before_fetch_ns / 1e6, all_boundaries_seen, began_ns
            )
            completed.expect(EndedStep(self.step, work, left_out, timing, timers.dropped == completed.dropped))
            completed.dropped = timers.dropped
            if not recorded and left_out != "stalled":
                # ahead of the GPU the host's time costs the run nothing, and recording an event may wait for room in
                # the GPU's queue, which is not overhead of timing
                own_ns = 0 if self.host_is_ahead else now.own_ns
                self._budget.add(step_ns=began_ns - self._stepped_ns, own_ns=own_ns, split=split, chosen=chosen)
            self._stepped_ns = regions.since.host_ns
            # the first step is a part of its own, which ends here
            charged_ns = clock_ns() - began_ns if following == 1 else 0
            own_ns = now.own_ns - now.charged_ns + charged_ns
            regions.ledger.begin_step(following, own_ns=own_ns, last_counts=left_out is None)
            now.charged_ns = charged_ns
            now.own_ns = now.before_fetch_ns = 0
            self.step = timers.tag = following
            if (
                following >= completed.due_step
                or began_ns >= completed.due_ns
                or (split and timers.backlog > DELIVER_ABOVE)
            ):
                self.deliver()
            completed.plan(following, regions.ledger, plain=not (splits or recorded))
            now.own_ns += clock_ns() - began_ns
        except Exception as exc:
            self.note_failure(exc)

    def _drained(self) -> bool | None:
        """Whether the GPU waits for the host, which ends a step."""
        # The event of this instant is never complete yet: the end of the last region is asked, some 50 us ago, or
        # the beginning of the update, whose few large kernels outlast their launches also on a GPU that waits.
        regions = self.regions
        drained = regions.timers.passed(regions.now.update or regions.since)
        if drained is not None:
            self.host_is_ahead = not drained
        return drained

    def stood_still(self, ended_ns: int, *, ends: bool = True) -> bool:
        """Whether training stood still in the step that ends, or cannot end; the ledger gets that time as `hang`."""
        took_s = (ended_ns - self._stepped_ns) / 1e9
        found = self.standstills.take(self.step, ends=ends) if took_s >= 1 else None
        if found is not None:
            self.ledger.stand(min(found.seconds, took_s), found.parts)
            self.totals.stalls.append(f"step {self.step} took {took_s:.1f} s: {found.why}")
            self.regions.followers.stood_still()
        return found is not None

    @guarded
    def finish(self, *, wait: bool) -> None:
        """The training loop has ended."""
        regions = self.regions
        if not regions.active:
            return
        while regions.stack:
            regions.pop()
        self.waits.exit()
        regions.active = False
        regions.followers.show_step(None)
        regions.timers.stop(regions.label)
        if wait:
            regions.timers.elapsed_all()
        self._loop.ended_ns = regions.clock_ns()
        self.deliver()
        self._completed.flush(self.step)

    def timing(self, workers: int = 0) -> RunTiming:
        """The run's steps so far; each new iterator of the loader starts so many workers."""
        loop, regions = self._loop, self.regions
        end_ns = regions.clock_ns() if regions.active else loop.ended_ns
        return self.totals.timing(
            steps=self.step,
            before_first_s=(loop.started_ns - loop.began_ns) / 1e9,
            wall_s=(end_ns - loop.began_ns) / 1e9,
            workers=workers,
            ledger=regions.ledger,
        )

    def _settle(self) -> None:
        self._completed.settle(self.regions.ledger, own_counts=not self.host_is_ahead)

    def deliver(self) -> None:
        """Enter the steps that the GPU has completed into the totals. Never waits."""
        self._settle()
        self._completed.deliver(self.step, self.regions.clock_ns())

    def note_failure(self, exc: Exception) -> None:
        """Switch timing off."""
        self.regions.note_failure(exc)
