"""Watches the host memory of a training and its loader's workers: whether it grows steadily, and what keeps it."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.gpu.memory import FORESIGHT, Growth, GrowthWatch, Reading
from lightning_forge_profiling.host import free_memory_bytes, kernel_s, private_bytes
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.containers import Containers
from lightning_forge_profiling.schema import MIB, Holder, MemoryGrowth

_log = plain_logger(__name__)

# a reading takes 0.2 ms between two steps, and growth is known after twelve of them
_PERIOD_NS: Final = 2 * 10**8
_PERIOD_STEPS: Final = 5
# less is what an allocator, a cache or a library takes in the beginning
_LEAST_BYTES: Final = 64 * MIB
_LEAST_SHARE: Final = 0.1  # of what the process had at first


class _Reading(NamedTuple):
    step: int
    kernel_s: float
    bytes: int  # of the process
    of_workers: int


class HostMemory:
    """Reads the process's own memory every few steps, and counts at some of the readings what containers hold.

    Args:
        containers: those that may keep it.
        workers: their process ids.
        read: tells a process's own memory in bytes, without files that it maps; None if the system does not.
        read_free: tells how much more it may take; None likewise.
        say: gets a growth when it is first seen, if the memory will be full soon.
    """

    def __init__(
        self,
        containers: Containers,
        say: Callable[[MemoryGrowth], None],
        workers: Callable[[], Sequence[int]] = tuple,
        read: Callable[[int | str], int | None] = private_bytes,
        read_free: Callable[[], int | None] = free_memory_bytes,
    ) -> None:
        self._containers = containers
        self._workers, self._read, self._read_free, self._say = workers, read, read_free, say
        self._growths = GrowthWatch()
        self._first: _Reading | None = None
        self._last: _Reading | None = None
        self._least = self._readings = 0
        self._found: MemoryGrowth | None = None
        self._holder: Holder | None = None
        self._next_step = 0
        self.due_ns: float = 0  # when the next reading is due, by `time.perf_counter_ns`

    def end_step(self, step: int, now_ns: int) -> None:
        """Read what is due after a step."""
        if step < self._next_step:
            return
        self._next_step, self.due_ns = step + _PERIOD_STEPS, now_ns + _PERIOD_NS
        self._try(self._take, step)

    def _try(self, look: Callable[[int], None], step: int) -> None:
        try:
            look(step)
        except Exception as exc:  # an object whose attributes are not to be listed
            _log.info("What fills the host's memory is unknown from step %d on: %s: %s", step, type(exc).__name__, exc)
            _log.debug("", exc_info=exc)
            self.due_ns = inf

    def _take(self, step: int) -> None:
        own, of_workers = self._read("self"), sum(self._read(pid) or 0 for pid in self._workers())
        if own is None:
            self.due_ns = inf
            return
        kept = own + of_workers
        self._last = _Reading(step, kernel_s(), own, of_workers)
        if self._first is None:
            self._first, self._least = self._last, max(_LEAST_BYTES, int(_LEAST_SHARE * kept))
        self._readings += 1
        if not self._readings & (self._readings - 1):  # at 1, 2, 4, 8, ...: of a large model it takes milliseconds
            self._look(step)
        # a limit so far away that what has grown by the least is said
        grows = self._growths.add(Reading(step, kept, kept), kept + FORESIGHT * self._least)
        if grows is not None:
            self._note(grows, self._first, self._last)

    def _look(self, step: int) -> None:
        self._containers.count(step)
        if self._found is not None and self._found.category == "host":  # what an epoch collects may be gone at its end
            self._holder = self._containers.holder(self._found.bytes_per_step) or self._holder

    def _note(self, grows: Growth, begin: _Reading, now: _Reading) -> None:
        first, free, step = self._found is None, self._read_free(), now.step
        full = None if free is None else step + int(free / grows.bytes_per_step)
        self._found = MemoryGrowth(
            category="workers" if now.of_workers - begin.of_workers > now.bytes - begin.bytes else "host",
            bytes_per_step=grows.bytes_per_step,
            from_step=grows.from_step,
            to_step=step,
            full_step=full,
        )
        if first and full is not None and full - step < FORESIGHT * (step - grows.from_step):
            self._say(self._found)

    def end(self, step: int) -> None:
        """Training has ended with a step."""
        if self._last is not None and self.due_ns < inf:
            self.due_ns = inf
            self._try(self._look, step)

    def holder(self, bytes_per_step: float) -> Holder | None:
        """What keeps memory that grows so much in each step, on the host or on a GPU; None if unknown."""
        return self._containers.holder(bytes_per_step)

    def growth(self) -> MemoryGrowth | None:
        """What grows, with what keeps it as far as that is known; None for nothing, or what has ended since."""
        found, first, last = self._found, self._first, self._last
        if found is None or first is None or last is None:
            return None
        if last.step - found.to_step > found.to_step - found.from_step:
            return None
        steps = last.step - first.step
        return replace(
            found,
            holder=self._holder,
            kernel_ms=1e3 * (last.kernel_s - first.kernel_s) / steps if steps else None,
        )
