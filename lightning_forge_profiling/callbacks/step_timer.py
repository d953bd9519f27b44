"""Turns the boundaries of a fit (a fetch begins, backward ends) into region times, steps and the run's totals."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from time import perf_counter_ns
from typing import Any, Final

from lightning_forge_profiling.callbacks.completed_steps import CompletedSteps, EndedStep
from lightning_forge_profiling.callbacks.plain_steps import PlainSteps
from lightning_forge_profiling.callbacks.standstills import Standstills
from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.names import (
    DATA_LOADER,
    EXCLUDED,
    FIRST_STEP,
    LOADER_END,
    LOADER_START,
    MARK_PREFIX,
    PROFILER,
    REGIONS,
    RESERVED,
    WAIT_PREFIX,
    WHOLE,
    hook_region,
)
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.schema import RunSummary
from lightning_forge_profiling.timing.budget import TimingBudget
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.events import HostEvent, Mark
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import StepTiming, StepWork
from lightning_forge_profiling.timing.run_totals import LeftOut, RunTotals
from lightning_forge_profiling.timing.steps import HOST_BEHIND

_log = plain_logger(__name__)

# regions of the user's beyond these are not timed, so that names made up in a loop cannot grow without end
MAX_USER_REGIONS: Final = 64

# reading completed steps some at a time asks the GPU less often and runs the same few lines while they are warm
_DELIVER_EVERY: Final = 64

# and at least once a second, for who watches
_DELIVER_NS: Final = 10**9

# so many intervals are read at once at the most: a region in each layer of a large model makes hundreds a step
_DELIVER_ABOVE: Final = 1024

# between the fetch and the transfer, before a closure's forward and between forward and backward are a few lines of
# Python: below this limit they count to what follows, which saves three of a step's ten events
_ABSORBS: Final = {"transfer": "other", "forward": "optimizer", "backward": "optimizer"}
_ABSORBED_BELOW_NS: Final = 100_000

# regions that are parts of the ledger, by the ledger's names
_PARTS: Final = {**{name: name for name in EXCLUDED}, LOADER_START: DATA_LOADER, LOADER_END: DATA_LOADER}

# parts that are no part of a step, in which ranks wait for each other
_MAY_WAIT: Final = frozenset({"validation", "checkpoint"})

# where nearly all GPU work is launched. Only where each of them ends with a mark does a step's last mark lie behind all
# of its work, and tell how far the GPU is.
_LAUNCHING: Final = ("forward", "backward", "optimizer")


class StepTimer(Guarded):
    """Attributes every instant of a fit to the innermost built-in region; the user's regions overlap them."""

    # Each change records one event that ends one region and begins another, so that the regions tile the step and an
    # outer one (`optimizer`, around a closure) has its self time only.

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
        self.timers = timers
        self.ledger = LedgerClock(clock_ns(), clock_ns=clock_ns) if ledger is None else ledger
        self.warmup_steps = warmup_steps
        # begins a range in the trace that is being recorded; None while none is
        self.mark: Callable[[str], AbstractContextManager[Any]] | None = None
        self._nsight, self._step_range = nsight, None if nsight is None else nsight("step 0")
        self.step = 0  # the step under way
        self.standstills = Standstills(self.ledger)
        self.on_standstill: Callable[[], object] = bool  # called once that is known
        self.saw_training_step = False  # whether its training step was announced
        # called when the current step is split and the one before it was not, or the other way round
        self.on_split_change: Callable[..., object] = lambda **_: None
        # called with the name of a region that ends in a split step
        self.region_ends: Callable[[str], object] | None = None
        # whether to time `data` in every step, because any fetch may be the one that finds the loader's end
        self.each_fetch = False
        timed = {*regions, *EXCLUDED, "other"}
        self._queries_gpu = timers.on_device and timed.issuperset(_LAUNCHING)
        self._labels: dict[str, str] = {name: name if name in timed else "other" for name in (*REGIONS, *EXCLUDED)}
        self._labels[LOADER_START] = LOADER_START
        self._budget = budget or TimingBudget(None)
        self.is_split = True  # whether the current step is split into regions
        self._chosen = True
        self._own_ns = self._stepped_ns = self._before_fetch_ns = 0
        self._charged_ns = 0  # of `_own_ns`, what the ledger has already
        # whether the GPU had work left at the end of the last split step, as far as is known
        self.host_is_ahead = False
        self._clock_ns = clock_ns
        self._began_ns = self._started_ns = self._ended_ns = clock_ns()
        self.active = False  # whether a fit's training loop is running and being timed
        self.began = False  # whether a training loop has been timed
        self._validating = False
        self._label = "other"
        self._since = Mark(HostEvent())  # start() puts the first in its place
        self._update: Mark | None = None
        self._stack: list[tuple[str, AbstractContextManager[Any] | None]] = []
        self._open_parts: list[str] = []
        self._depth: dict[str, int] = {}
        self._said_announced = False
        self._wait = ""  # the interval under way in which this rank waits for others
        self._wait_began = self._wait_ended = self._since  # on the GPU
        self._waits_on_gpu = False
        self.waits_outside_ns: dict[str, int] = {}  # likewise outside of steps, by part and by the host's clock
        self._waits_outside: tuple[str, int] | None = None
        self._loader_starts = False  # whether `loader start` goes on after it
        self._untimed: str | None = None  # the region under way in a step that is timed as a whole
        self._user_regions = Lock()  # autograd has a thread for each device
        self.totals = RunTotals(tuple(name for name in REGIONS if name in timed), bucket)
        self._completed = CompletedSteps(self.totals)
        self._plain = PlainSteps(self._completed, self._budget, self.ledger)
        self._deliver_at, self._deliver_ns = _DELIVER_EVERY, 0
        self._dropped = 0
        for region in (*REGIONS, *EXCLUDED, LOADER_START, LOADER_END, WHOLE):
            timers.add_region(region)

    @guarded
    def start(self) -> None:
        """The training loop begins: step 0 starts now."""
        self.ledger.turn_to(FIRST_STEP)
        self.ledger.begin_step(0, last_counts=False)
        self.active = self.began = True
        self._started_ns = self._clock_ns()
        if self._step_range is not None:
            self._step_range.__enter__()
        self._since = self.timers.mark()
        self._deliver_ns = self._since.host_ns + _DELIVER_NS
        self._stepped_ns = self._since.host_ns
        self.timers.start("other", at=self._since)

    @property
    def _base(self) -> str:
        """The name of the current step's time outside of all regions."""
        return "other" if self.is_split else WHOLE

    def split(self) -> None:
        """Time the regions of the current step although the budget did not choose it, and let it count for no other."""
        self._chosen = False
        if self.active and not self.is_split:
            self.is_split = True
            self.on_split_change(split=True)
            if self._label == WHOLE:
                self.timers.relabel(WHOLE, "other")
                self._be_in("other")

    def _be_in(self, label: str) -> None:
        """The current region is another one, which may be a part of the ledger too."""
        before, self._label = self._label, label
        if self._waits_on_gpu:
            self._host_goes_on()
        if self.region_ends is not None:
            self.region_ends(before)
        if label not in _PARTS and before not in _PARTS:
            return
        part, parts = _PARTS.get(label), self._open_parts
        if part is not None and part not in parts:
            parts.append(part)
            self.ledger.enter(part, counts=not self._loader_starts)
        while parts and parts[-1] != part:
            self.ledger.exit(parts.pop())

    def enter(self, name: str) -> None:
        """A built-in region begins, inside the current one."""
        self.saw_training_step |= name == "forward"
        if not self.active or not (self.is_split or name in EXCLUDED or (name == "data" and self.each_fetch)):
            self._untimed = name
            return
        began_ns = self._clock_ns()
        if self._validating and self._is_of_validation(name):
            return
        before = self._since
        if self._label == LOADER_START:  # Lightning does not announce its end
            if name == "data":  # it includes the wait for the first batch, for which a worker has to be up
                self._before_fetch_ns = began_ns - before.host_ns
                self._stack[-1] = name, self._stack[-1][1]
                return
            self.exit(LOADER_START)
        try:
            self._stack.append((name, self._shown(MARK_PREFIX + ("data" if name == LOADER_START else name))))
            label = self._labels[name]
            if _ABSORBS.get(label) == self._label and began_ns - self._since.host_ns < _ABSORBED_BELOW_NS:
                self.timers.relabel(self._label, label)
                self._be_in(label)
            elif label != self._label:
                self._since = self.timers.switch(self._label, label)
                if name == "data" and not self._before_fetch_ns:
                    self._before_fetch_ns = self._since.host_ns - before.host_ns
                self._be_in(label)
            self._count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def _shown(self, name: str) -> AbstractContextManager[Any] | None:
        """Begin a range on the timeline of what records this process; None if nothing does."""
        if self._nsight is None:
            return None if self.mark is None else self.mark(name)
        span = self._nsight(name)
        span.__enter__()
        return span

    def _next_range(self, step: int) -> None:
        if self._nsight is not None and self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = self._nsight(f"step {step}")
            self._step_range.__enter__()

    def _is_of_validation(self, name: str) -> bool:
        """Whether a region belongs to validation, which is timed as one region."""
        if name in {"data", LOADER_START}:  # training only: validation ended without saying so (nothing to validate)
            self.exit_validation()
        return self._validating and name != "checkpoint"

    def exit(self, name: str) -> None:
        """End a built-in region, and any region still open inside it."""
        stack, self._untimed = self._stack, None
        if not self.active or not stack:
            return
        if stack[-1][0] != name and not any(entered == name for entered, _ in stack):
            return
        began_ns = self._clock_ns()
        try:
            while self._pop() != name:
                pass
            label = self._labels[stack[-1][0]] if stack else self._base
            if label != self._label:
                if self._label == "optimizer":
                    self._update = self._since
                self._since = self.timers.switch(self._label, label)
                self._be_in(label)
            self._count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def _count_own(self, began_ns: int) -> None:
        """Add the time since `began_ns` to what timing takes of the steps, unless the ledger has it in another part."""
        if self.ledger.changed_ns <= began_ns:
            self._own_ns += self._clock_ns() - began_ns

    def enter_loader_start(self) -> None:
        """Enter `loader start`: the loop creates its loader or its iterator, until the first batch is there."""
        if self.active and self._label != LOADER_START:
            self.split()
            self.enter(LOADER_START)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Around log entries and lines of the record: the time counts to the profiler, and to no step."""
        if not self.active:
            with self.ledger.inside(PROFILER):
                yield
            return
        began_ns = self._clock_ns()
        self.enter(PROFILER)
        try:
            yield
        finally:
            self.exit(PROFILER)
            self.totals.add_log_time((self._clock_ns() - began_ns) / 1e3)

    @guarded
    def loader_ended(self) -> None:
        """Count the fetch under way as `loader end`: it also looked for a batch that there was not."""
        if self.active and self._label == "data":
            self.timers.relabel("data", LOADER_END)
            self._label = LOADER_END
            self.ledger.charge(self._clock_ns() - self._since.host_ns, DATA_LOADER)

    def enter_validation(self) -> None:
        """Enter validation at its first announced action."""
        if not self.active or self._validating:
            return
        self.split()
        self.enter("validation")
        self._validating = True

    def exit_validation(self) -> None:
        """Leave validation."""
        self._validating = False
        self.exit("validation")

    @guarded
    def forward_in_closure(self) -> None:
        """Count the time since a manual optimizer step began as `forward`: its closure is about to run backward."""
        self._count_as("optimizer", "forward")

    def _count_as(self, region: str, other: str) -> None:
        """Count the region under way as another one, if it is `region`."""
        old, new = self._labels[region], self._labels[other]
        if self.active and self._label == old != new:
            self.timers.relabel(old, new)
            self._be_in(new)

    @guarded
    def enter_backward(self) -> None:
        """Enter `backward` where nothing announces `forward`: that is what comes before it in a step."""
        if self._stack and self._stack[-1][0] == "forward":
            self.exit("forward")
        elif not self._validating:
            self._count_as("optimizer", "forward")
            self._count_as("other", "forward")
        self.enter("backward")

    @guarded
    def forget_forward(self) -> None:
        """Count `forward` as `other`: no backward has followed it."""
        if self._stack and self._stack[-1][0] == "forward":
            self._count_as("forward", "other")

    @guarded
    def was_loader_start(self) -> None:
        """Count the validation under way as `loader start`: a new loader's first batch was one of training."""
        if self.active and self._validating and self._label == "validation":
            self.timers.relabel("validation", LOADER_START)
            self._label = LOADER_START
            took_ns = self._clock_ns() - self._since.host_ns
            self.exit_validation()
            self.ledger.move(took_ns, "validation", DATA_LOADER)

    def enter_wait(self, leaf: str = "") -> None:
        """This rank waits for others, or for what they exchange, until `exit_wait`; by default in the current leaf.

        Autograd calls it in a thread of its own, while the training thread waits for it.
        """
        outside = "validation" if self._validating else self._label
        if outside in _MAY_WAIT:
            self._waits_outside = self._waits_outside or (outside, self._clock_ns())
            return
        if self._waits_on_gpu:  # no boundary has followed
            self.exit_wait()
        if not self.active or not self.is_split or self._wait:
            return
        began_ns, part = self._clock_ns(), self.ledger.innermost()
        leaf = leaf or (part if hook_region(part) else self._label)
        if leaf in _PARTS:  # no part of the step
            return
        self._loader_starts = (
            self._label == LOADER_START
        )  # as at the begin of an epoch, for ranks that end theirs later
        if self._loader_starts:
            self.exit(LOADER_START)
        try:
            name = WAIT_PREFIX + leaf
            self.timers.add_region(name)
            self._wait_began = self.timers.mark()
            self.timers.start(name, at=self._wait_began)
            self._wait = name
            self._count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def exit_wait(self, *, host_waits: bool = True) -> None:
        """The wait is over. If only the GPU has waited (not `host_waits`), the host has more for it from now on."""
        if self._waits_outside is not None:
            (part, since_ns), self._waits_outside = self._waits_outside, None
            self.waits_outside_ns[part] = self.waits_outside_ns.get(part, 0) + self._clock_ns() - since_ns
        if self._wait:
            began_ns, name = self._clock_ns(), self._wait
            self._wait = ""
            try:
                if not host_waits:
                    name = self._without_host(name)
                self.timers.stop(name, at=self._wait_ended if self._waits_on_gpu else None)
                self._waits_on_gpu = False
                self._count_own(began_ns)
            except Exception as exc:
                self.note_failure(exc)
            if self._loader_starts:
                self.enter(LOADER_START)
                self._loader_starts = False

    @guarded
    def wait_on_gpu(self) -> None:
        """The wait ends here on the GPU. The host does not wait: until it has more for the GPU, nothing is held up."""
        if self._wait:
            began_ns = self._clock_ns()
            self._wait_ended, self._waits_on_gpu = self.timers.mark(), True
            self._count_own(began_ns)

    def _host_goes_on(self) -> None:
        """End the wait on the GPU at a boundary, behind which the host has more for the GPU."""
        name, self._wait, self._waits_on_gpu = self._wait, "", False
        self._wait_ended.host_ns = self._since.host_ns
        self.timers.stop(self._without_host(name), at=self._wait_ended)

    def _without_host(self, name: str) -> str:
        """Rename the wait, for the host's time to be taken from it, if the GPU waits for the host as well."""
        if not self.timers.passed(self._wait_began):
            return name
        self.timers.add_region(HOST_BEHIND + name)
        self.timers.relabel(name, HOST_BEHIND + name)
        return HOST_BEHIND + name

    def region_under_way(self) -> str | None:
        """The built-in region under way, timed or not, also for another thread; None if unknown."""
        return self._label if self._label in REGIONS else self._untimed

    def end_plain_step(self, work: StepWork, began_ns: int) -> bool:
        """End a step in a few lines, if only its end is timed and the next one's too; returns whether it has ended."""
        step, timers, ledger = self.step, self.timers, self.ledger
        if (
            step >= self._plain.until
            or self._stack
            or self._wait
            or not self.active
            or self._label != WHOLE
            or began_ns >= self._deliver_ns
            or began_ns - self._stepped_ns >= _DELIVER_NS  # training may have stood still
            or ledger.noted
            or ledger.collected
        ):
            return False
        self._since = timers.switch(WHOLE, WHOLE)
        complete, self._dropped = timers.dropped == self._dropped, timers.dropped
        self._plain.ended.append((step, work, began_ns - self._stepped_ns, self._own_ns, began_ns, complete))
        self._stepped_ns = self._since.host_ns
        self.step = timers.tag = ledger.step = step + 1
        self._own_ns = self._clock_ns() - began_ns
        return True

    def end_step(
        self,
        work: StepWork,
        *,
        recorded: bool = False,
        ends_epoch: bool = False,
        saw_all: bool = True,
        began_ns: int | None = None,
    ) -> None:
        """End the current step; the next one begins at the same instant."""
        if not self.active:
            return
        began_ns = self._clock_ns() if began_ns is None else began_ns
        try:
            self._settle()
            while self._stack:  # an exception that the user's code caught may have left something open
                self._pop()
            if self._wait or self._step_range is not None:
                self.exit_wait()
                self._next_range(self.step + 1)
            timers, split, chosen, following = self.timers, self.is_split, self._chosen, self.step + 1
            left_out: LeftOut | None = "recorded" if recorded else "warm-up" if following <= self.warmup_steps else None
            left_out = "stood" if self.stood_still(began_ns) else left_out
            self.is_split = following < self.warmup_steps or ends_epoch or self._budget.splits(following)
            self._chosen = not ends_epoch
            base, drained = "other" if self.is_split else WHOLE, None
            if split:
                drained = self._end_split_step(base, began_ns, saw_all=saw_all)
            else:
                self._since = timers.switch(self._label, base)
            if self._label != base:
                self._be_in(base)
            if self.is_split is not split:
                self.on_split_change(split=self.is_split)
            timing = StepTiming(drained, chosen, self._own_ns / 1e3, self._before_fetch_ns / 1e6, saw_all, began_ns)
            self._completed.expect(EndedStep(self.step, work, left_out, timing, timers.dropped == self._dropped))
            self._dropped = timers.dropped
            if not recorded and left_out != "stood":
                # ahead of the GPU the host's time costs the run nothing, and recording an event may wait for room in
                # the GPU's queue, which is not overhead of timing
                own_ns = 0 if self.host_is_ahead else self._own_ns
                self._budget.add(step_ns=began_ns - self._stepped_ns, own_ns=own_ns, split=split, chosen=chosen)
            self._stepped_ns = self._since.host_ns
            # the first step is a part of its own, which ends here
            charged_ns = self._clock_ns() - began_ns if following == 1 else 0
            own_ns = self._own_ns - self._charged_ns + charged_ns
            self.ledger.begin_step(following, own_ns=own_ns, last_counts=left_out is None)
            self._charged_ns = charged_ns
            self._own_ns = self._before_fetch_ns = 0
            self.step = timers.tag = following
            if (
                following >= self._deliver_at
                or began_ns >= self._deliver_ns
                or (split and timers.backlog > _DELIVER_ABOVE)
            ):
                self.deliver()
            self._plain.plan(following, following if self.is_split or recorded else self._deliver_at - 1)
            self._own_ns += self._clock_ns() - began_ns
        except Exception as exc:
            self.note_failure(exc)

    def stood_still(self, ended_ns: int, *, ends: bool = True) -> bool:
        """Whether training stood still in the step that ends, or cannot end; the ledger gets that time as `hang`."""
        took_s = (ended_ns - self._stepped_ns) / 1e9
        found = self.standstills.take(self.step, ends=ends) if took_s >= 1 else None
        if found is not None:
            self.ledger.stand(min(found.seconds, took_s), found.parts)
            self.totals.stood.append(f"step {self.step} took {took_s:.1f} s: {found.why}")
            self.on_standstill()
        return found is not None

    def _settle(self) -> None:
        self._plain.settle(own_counts=not self.host_is_ahead)

    def _end_split_step(self, base: str, began_ns: int, *, saw_all: bool) -> bool | None:
        """End the last region of a step; returns whether the GPU waits for the host, if that is known."""
        drained = None
        if self._queries_gpu and saw_all:
            # The event of this instant is never complete yet: the end of the last region is asked, some 50 us ago, or
            # the beginning of the update, whose few large kernels outlast their launches also on a GPU that waits.
            drained = self.timers.passed(self._update or self._since)
            if drained is not None:
                self.host_is_ahead = not drained
        self._update = None
        if self._label != "other" or began_ns - self._since.host_ns >= _ABSORBED_BELOW_NS:
            self._since = self.timers.switch(self._label, base)
        else:
            self.timers.relabel("other", base)
        return drained

    @guarded
    def finish(self, *, wait: bool) -> None:
        """The training loop has ended."""
        if not self.active:
            return
        while self._stack:
            self._pop()
        self.exit_wait()
        self.active = False
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
        self.timers.stop(self._label)
        if wait:
            self.timers.elapsed_all()
        self._ended_ns = self._clock_ns()
        self.deliver()
        self._completed.flush(self.step)

    def summary(self) -> RunSummary:
        """The run's totals so far."""
        end_ns = self._clock_ns() if self.active else self._ended_ns
        return self.totals.summary(
            steps=self.step,
            before_first_s=(self._started_ns - self._began_ns) / 1e9,
            wall_s=(end_ns - self._began_ns) / 1e9,
        )

    def open_region(self, name: str) -> object | None:
        """Begin a region of the user's (see `timing.region`)."""
        if name in RESERVED:
            self._say_announced(name)
            return None
        if not self.active or self._validating or not self.is_split:
            return None
        try:
            with self._user_regions:
                depth = self._depth.get(name, 0)
                if not depth:
                    if name not in self._depth and len(self._depth) >= MAX_USER_REGIONS:
                        return None
                    self.timers.add_region(name)
                    self.timers.start(name)
                self._depth[name] = depth + 1
            return self._shown(name) or self
        except Exception as exc:
            self.note_failure(exc)
            return None

    def _say_announced(self, name: str) -> None:
        if not self._said_announced:
            self._said_announced = True
            _log.warning("region(%r) is not timed in a Trainer's fit: Lightning announces the built-in regions.", name)

    def close_region(self, name: str, token: object) -> None:
        """End a region of the user's."""
        try:
            if isinstance(token, AbstractContextManager):
                token.__exit__(None, None, None)
            with self._user_regions:
                self._depth[name] -= 1
                if not self._depth[name] and self.active:
                    self.timers.stop(name)
        except Exception as exc:
            self.note_failure(exc)

    def _pop(self) -> str:
        name, span = self._stack.pop()
        if span is not None:
            span.__exit__(None, None, None)
        return name

    def deliver(self) -> None:
        """Enter the steps that the GPU has completed into the totals. Never waits."""
        self._settle()
        self._deliver_at, self._deliver_ns = self.step + _DELIVER_EVERY, self._clock_ns() + _DELIVER_NS
        self._completed.deliver(self.timers)

    def note_failure(self, exc: Exception) -> None:
        """Switch timing off for the rest of this run, and log why."""
        self.active, self.mark = False, None
        _log.warning("Profiling is switched off for the rest of this run: %s: %s", type(exc).__name__, exc)
        _log.debug("", exc_info=exc)
