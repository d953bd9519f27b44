"""The clock of the built-in regions, to the innermost of which each instant of a training loop counts, and of waits."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Final

from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.names import (
    DATA_LOADER,
    EXCLUDED,
    LOADER_END,
    LOADER_START,
    MARK_PREFIX,
    REGIONS,
    VALIDATION,
    VALIDATION_DATA,
    VALIDATION_LOADER,
    VALIDATION_STEP,
    VALIDATION_TRANSFER,
    WAIT_PREFIX,
    WHOLE,
    hook_region,
)
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.timing.collection import CUDATimerCollection
from lightning_forge_profiling.timing.events import HostEvent, Mark
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.steps import HOST_BEHIND

_log = plain_logger(__name__)

# between the fetch and the transfer, before a closure's forward and between forward and backward are a few lines of
# Python: below this limit they count to what follows, which saves three of a step's ten events
_MERGE_SHORT_GAPS: Final = {"transfer": "other", "forward": "optimizer", "backward": "optimizer"}
ABSORBED_BELOW_NS: Final = 100_000

# regions that are parts of the ledger, by the ledger's names
PARTS: Final = {**{name: name for name in EXCLUDED}, LOADER_START: DATA_LOADER, LOADER_END: DATA_LOADER}


# what is announced in validation as in a step, and is a part of the ledger inside it
_OF_VALIDATION: Final = {"transfer": VALIDATION_TRANSFER, VALIDATION_STEP: VALIDATION_STEP}


@dataclass(slots=True)
class CurrentStep:
    """What is known of the step under way."""

    own_ns: int = 0  # host time that timing takes of it
    charged_ns: int = 0  # of that, what the ledger has already
    before_fetch_ns: int = 0  # host time from its beginning to its fetch
    update: Mark | None = None  # where the optimizer's update begins
    chosen: bool = True  # whether it is split by choice, and so can represent others
    saw_training_step: bool = False  # whether its training step was announced


@dataclass(slots=True)
class Followers:
    """Who is called at the boundaries of regions and steps."""

    nsight: Callable[[str], AbstractContextManager[Any]] | None = None  # makes a range of a name, for `nsys`
    mark: Callable[[str], AbstractContextManager[Any]] | None = None  # begins a range in the trace that is recorded
    step_range: AbstractContextManager[Any] | None = None  # that of the current step for `nsys`
    region_ends: Callable[[str], object] | None = None  # with the name of a region that ends in a split step
    boundary: Callable[[], object] | None = None  # at the next boundary
    # the current step is split and the one before it was not, or the other way round
    split_changes: Callable[..., object] = lambda **_: None
    stood_still: Callable[[], object] = lambda: None  # training stood still in the step that ends
    loader_starts: Callable[[], object] = lambda: None  # the loop creates its loader's iterator, and thus its workers
    loader_started: Callable[[], object] = lambda: None

    def show(self, name: str) -> AbstractContextManager[Any] | None:
        """Begin a range on the timeline of what records this process; None if nothing does."""
        if self.nsight is None:
            return None if self.mark is None else self.mark(name)
        span = self.nsight(name)
        span.__enter__()
        return span

    def show_step(self, step: int | None) -> None:
        """End the range of a step, and begin the next one's, if there is one."""
        if self.step_range is not None:
            self.step_range.__exit__(None, None, None)
        self.step_range = None if step is None or self.nsight is None else self.nsight(f"step {step}")
        if self.step_range is not None:
            self.step_range.__enter__()


class RegionClock(Guarded):
    """Attributes every instant of a fit to the innermost built-in region."""

    # Each change records one event that ends one region and begins another, so that the regions tile the step and an
    # outer one (`optimizer`, around a closure) has its self time only.

    def __init__(
        self,
        timers: CUDATimerCollection,
        ledger: LedgerClock,
        regions: Collection[str] = REGIONS,
        clock_ns: Callable[[], int] = perf_counter_ns,
        nsight: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.timers, self.ledger, self.clock_ns = timers, ledger, clock_ns
        self.followers, self.now = Followers(nsight), CurrentStep()
        self.active = False  # whether a fit's training loop is running and being timed
        self.is_split = True  # whether the current step is split into regions
        # whether to time `data` in every step, because any fetch may be the one that finds the loader's end
        self.each_fetch = False
        timed = {*regions, *EXCLUDED, "other"}
        self.labels: dict[str, str] = {name: name if name in timed else "other" for name in (*REGIONS, *EXCLUDED)}
        self.labels |= {LOADER_START: LOADER_START, VALIDATION_STEP: "other"}
        self.label = "other"
        self.since = Mark(HostEvent())  # begin() puts the first in its place
        self.stack: list[tuple[str, AbstractContextManager[Any] | None]] = []
        self.validating = False
        self._parts: list[str] = []  # of the ledger, that are open
        self._untimed: str | None = None  # the region under way in a step that is timed as a whole
        for region in (*REGIONS, *EXCLUDED, LOADER_START, LOADER_END, WHOLE):
            timers.add_region(region)

    # -- regions -------------------------------------------------------------------------------------------------

    def enter(self, name: str) -> None:
        """A built-in region begins, inside the current one."""
        if name == "forward":
            self.now.saw_training_step = True
        if not self.active or not (self.is_split or name in EXCLUDED or (name == "data" and self.each_fetch)):
            self._untimed = name
            return
        began_ns = self.clock_ns()
        if self.validating and self._is_of_validation(name):
            return
        if self.label == LOADER_START and self._is_of_loader_start(name, began_ns):
            return
        before, now = self.since, self.now
        try:
            followers, shown = self.followers, None
            if followers.mark is not None or followers.nsight is not None:
                shown = followers.show(MARK_PREFIX + ("data" if name == LOADER_START else name))
            self.stack.append((name, shown))
            label = self.labels[name]
            if _MERGE_SHORT_GAPS.get(label) == self.label and began_ns - self.since.host_ns < ABSORBED_BELOW_NS:
                self.timers.relabel(self.label, label)
                self._set_region(label)
            elif label != self.label:
                self.since = self.timers.switch(self.label, label)
                if name == "data" and not now.before_fetch_ns:
                    now.before_fetch_ns = self.since.host_ns - before.host_ns
                self._set_region(label)
            self.count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def exit(self, name: str) -> None:
        """End a built-in region, and any region still open inside it."""
        stack, self._untimed = self.stack, None
        if not self.active or not stack:
            return
        if self.validating and name in _OF_VALIDATION:
            self.ledger.exit(_OF_VALIDATION[name])
            return
        if stack[-1][0] != name and not any(entered == name for entered, _ in stack):
            return
        began_ns = self.clock_ns()
        try:
            while self.pop() != name:
                pass
            label = self.labels[stack[-1][0]] if stack else "other" if self.is_split else WHOLE
            if label != self.label:
                if self.label == "optimizer":
                    self.now.update = self.since
                self.since = self.timers.switch(self.label, label)
                self._set_region(label)
            self.count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def pop(self) -> str:
        """Take the innermost region from the stack."""
        name, span = self.stack.pop()
        if span is not None:
            span.__exit__(None, None, None)
        return name

    def _set_region(self, label: str) -> None:
        """The current region is another one, which may be a part of the ledger too."""
        before, self.label = self.label, label
        followers = self.followers
        if followers.boundary is not None:
            followers.boundary()
        if followers.region_ends is not None:
            followers.region_ends(before)
        if label not in PARTS and before not in PARTS:
            return
        part, parts = PARTS.get(label), self._parts
        if part is not None and part not in parts:
            parts.append(part)
            self.ledger.enter(part)
        while parts and parts[-1] != part:
            self.ledger.exit(parts.pop())

    def count_own(self, began_ns: int) -> None:
        """Add the time since `began_ns` to what timing takes of the steps, unless the ledger has it in another part."""
        if self.ledger.changed_ns <= began_ns:
            self.now.own_ns += self.clock_ns() - began_ns

    def under_way(self) -> str | None:
        """The built-in region under way, timed or not, also for another thread; None if unknown."""
        return self.label if self.label in REGIONS else self._untimed

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The training loop begins, and with it a step."""
        self.active = True
        self.followers.show_step(0)
        self.since = self.timers.mark()
        self.timers.start("other", at=self.since)

    def end_step(self, began_ns: int, *, split_next: bool) -> None:
        """End the last region of a step; the next step begins at the same instant, outside of all regions."""
        split, self.is_split = self.is_split, split_next
        base = "other" if split_next else WHOLE
        if split and self.label == "other" and began_ns - self.since.host_ns < ABSORBED_BELOW_NS:
            self.timers.relabel("other", base)
        else:
            self.since = self.timers.switch(self.label, base)
        if self.label != base:
            self._set_region(base)
        if split_next is not split:
            self.followers.split_changes(split=split_next)

    def split(self) -> None:
        """Time the regions of the current step although the budget did not choose it, and let it count for no other."""
        self.now.chosen = False
        if self.active and not self.is_split:
            self.is_split = True
            self.followers.split_changes(split=True)
            if self.label == WHOLE:
                self.timers.relabel(WHOLE, "other")
                self._set_region("other")

    # -- what Lightning announces otherwise ------------------------------------------------------------------------

    def enter_loader_start(self) -> None:
        """Enter `loader start`: the loop creates its loader or its iterator, until the first batch is there."""
        if self.active and self.label != LOADER_START:
            self.split()
            self.enter(LOADER_START)
            if self.label == LOADER_START:
                self.followers.loader_starts()

    def exit_loader_start(self) -> None:
        """Leave `loader start`, if it is entered."""
        self.followers.loader_started()
        self.exit(LOADER_START)

    def _is_of_loader_start(self, name: str, began_ns: int) -> bool:
        """Whether a region belongs to `loader start`, whose end Lightning does not announce."""
        if name == "data":  # it includes the wait for the first batch, for which a worker has to be up
            self.followers.loader_started()
            self.now.before_fetch_ns = began_ns - self.since.host_ns
            self.stack[-1] = name, self.stack[-1][1]
            return True
        self.exit_loader_start()
        return False

    @guarded
    def loader_ended(self) -> None:
        """Count the fetch under way as `loader end`: it also looked for a batch that there was not."""
        if self.active and self.label == "data":
            self.timers.relabel("data", LOADER_END)
            self.label = LOADER_END
            self.ledger.charge(self.clock_ns() - self.since.host_ns, DATA_LOADER)

    def enter_validation(self) -> None:
        """Enter validation at its first announced action."""
        if not self.active or self.validating:
            return
        self.split()
        self.enter("validation")
        self.validating = True

    def start_validation_loader(self) -> None:
        """The loader that is validated on creates its iterator, until the first fetch."""
        if self.validating:
            self.ledger.enter(VALIDATION_LOADER)

    def begin_validation_fetch(self, *, workers: bool, ends: bool = False) -> None:
        """Fetch a batch to validate on: of workers that may start, or end as there is none left."""
        if self.validating and not (workers and self.ledger.innermost() == VALIDATION_LOADER):
            self.ledger.exit(VALIDATION_LOADER)
            self.ledger.enter(VALIDATION_LOADER if workers and ends else VALIDATION_DATA, counts=not ends)
            if self.followers.region_ends is not None:
                self.followers.region_ends(VALIDATION)

    def end_validation_fetch(self) -> None:
        """The batch is there."""
        if self.validating:
            if self.followers.region_ends is not None:
                self.followers.region_ends(VALIDATION_DATA)
            self.ledger.exit(VALIDATION_DATA)
            self.ledger.exit(VALIDATION_LOADER)

    def exit_validation(self) -> None:
        """Leave validation."""
        self.validating = False
        self.exit("validation")

    def _is_of_validation(self, name: str) -> bool:
        """Whether a region belongs to validation, which is one region; what is in it are parts of the ledger alone."""
        if name in {"data", LOADER_START}:  # training only: validation ended without saying so (nothing to validate)
            self.exit_validation()
        elif name in _OF_VALIDATION:
            self.ledger.exit(VALIDATION_LOADER)  # a module with a `dataloader_iter` fetches in its step
            self.ledger.enter(_OF_VALIDATION[name])
        return self.validating and name != "checkpoint"

    @guarded
    def relabel_validation_as_loader_start(self, before: Mapping[str, int]) -> None:
        """Count the validation under way as `loader start`: a new loader's first batch was one of training.

        Args:
            before: nanoseconds by part of the ledger when it began.
        """
        if self.active and self.validating and self.label == "validation":
            self.timers.relabel("validation", LOADER_START)
            self.label = LOADER_START
            self.exit_validation()
            self.ledger.move(VALIDATION, DATA_LOADER, before)

    @guarded
    def forward_in_closure(self) -> None:
        """Count the time since a manual optimizer step began as `forward`: its closure is about to run backward."""
        self._count_as("optimizer", "forward")

    @guarded
    def enter_backward(self) -> None:
        """Enter `backward` where nothing announces `forward`: that is what comes before it in a step."""
        if self.stack and self.stack[-1][0] == "forward":
            self.exit("forward")
        elif not self.validating:
            self._count_as("optimizer", "forward")
            self._count_as("other", "forward")
        self.enter("backward")

    @guarded
    def forget_forward(self) -> None:
        """Count `forward` as `other`: no backward has followed it."""
        if self.stack and self.stack[-1][0] == "forward":
            self._count_as("forward", "other")

    def _count_as(self, region: str, other: str) -> None:
        """Count the region under way as another one, if it is `region`."""
        old, new = self.labels[region], self.labels[other]
        if self.active and self.label == old != new:
            self.timers.relabel(old, new)
            self._set_region(new)

    def note_failure(self, exc: Exception) -> None:
        """Switch timing off for the rest of this run, and log why."""
        self.active, self.followers.mark = False, None
        _log.warning("Profiling is switched off for the rest of this run: %s: %s", type(exc).__name__, exc)
        _log.debug("", exc_info=exc)


# parts that are no part of a step, in which ranks wait for each other
_MAY_WAIT: Final = frozenset({"validation", "checkpoint"})


class WaitClock(Guarded):
    """Times in which this rank waits for others, or for what they exchange; they lie over the regions."""

    def __init__(self, regions: RegionClock) -> None:
        self._regions = regions
        self.name = ""  # the interval under way
        self._began = self._ended = regions.since  # on the GPU
        self._loader_starts = False  # whether `loader start` goes on after it
        self.outside_ns: dict[str, int] = {}  # outside of steps, by part and by the host's clock
        self._outside: tuple[str, int] | None = None

    def enter(self, leaf: str = "") -> None:
        """This rank waits for others, or for what they exchange, until `exit`; by default in the current leaf.

        Autograd calls it in a thread of its own, while the training thread waits for it.
        """
        regions = self._regions
        outside = "validation" if regions.validating else regions.label
        if outside in _MAY_WAIT:
            self._outside = self._outside or (outside, regions.clock_ns())
            return
        if regions.followers.boundary is not None:  # none has followed
            self.exit()
        if not regions.active or not regions.is_split or self.name:
            return
        began_ns, part = regions.clock_ns(), regions.ledger.innermost()
        leaf = leaf or (part if hook_region(part) else regions.label)
        if leaf in PARTS:  # no part of the step
            return
        # as at the begin of an epoch, for ranks that end theirs later
        self._loader_starts = regions.label == LOADER_START
        if self._loader_starts:
            regions.exit(LOADER_START)
        try:
            name = WAIT_PREFIX + leaf
            regions.timers.add_region(name)
            self._began = regions.timers.mark()
            regions.timers.start(name, at=self._began)
            self.name = name
            regions.count_own(began_ns)
        except Exception as exc:
            self.note_failure(exc)

    def exit(self, *, host_waits: bool = True) -> None:
        """The wait is over. If only the GPU has waited (not `host_waits`), the host has more for it from now on."""
        regions = self._regions
        if self._outside is not None:
            (part, since_ns), self._outside = self._outside, None
            self.outside_ns[part] = self.outside_ns.get(part, 0) + regions.clock_ns() - since_ns
        if self.name:
            began_ns, name = regions.clock_ns(), self.name
            self.name = ""
            try:
                if not host_waits:
                    name = self._without_host(name)
                regions.timers.stop(name, at=None if regions.followers.boundary is None else self._ended)
                regions.followers.boundary = None
                regions.count_own(began_ns)
            except Exception as exc:
                self.note_failure(exc)
            if self._loader_starts:
                self._loader_starts = False
                regions.enter(LOADER_START)
                if regions.label == LOADER_START:
                    regions.ledger.goes_on(DATA_LOADER)

    @guarded
    def end_on_gpu(self) -> None:
        """The wait ends here on the GPU. The host does not wait: until it has more for the GPU, nothing is held up."""
        if self.name:
            regions = self._regions
            began_ns = regions.clock_ns()
            self._ended, regions.followers.boundary = regions.timers.mark(), self._host_goes_on
            regions.count_own(began_ns)

    def _host_goes_on(self) -> None:
        """End the wait on the GPU at a boundary, behind which the host has more for the GPU."""
        regions, name = self._regions, self.name
        self.name, regions.followers.boundary = "", None
        self._ended.host_ns = regions.since.host_ns
        regions.timers.stop(self._without_host(name), at=self._ended)

    def _without_host(self, name: str) -> str:
        """Rename the wait, for the host's time to be taken from it, if the GPU waits for the host as well."""
        timers = self._regions.timers
        if not timers.passed(self._began):
            return name
        timers.add_region(HOST_BEHIND + name)
        timers.relabel(name, HOST_BEHIND + name)
        return HOST_BEHIND + name

    def note_failure(self, exc: Exception) -> None:
        """Switch timing off."""
        self._regions.note_failure(exc)
