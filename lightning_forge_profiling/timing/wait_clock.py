"""The clock of this rank's waits for others: by events inside of steps, by the host's clock outside of them."""

from typing import Final

from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.names import DATA_LOADER, LOADER_START, WAIT_PREFIX, hook_region
from lightning_forge_profiling.timing.region_clock import PARTS, RegionClock
from lightning_forge_profiling.timing.steps import HOST_BEHIND

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
