"""The ledger: splits the wall time of a run into parts that sum to it, on one stack and one clock."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

from lightning_forge_profiling.names import STEPS

__all__ = ["Ledger", "LedgerClock"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the wall time of a run went, on one rank.

    Attributes:
        wall_s: the whole run, in seconds.
        parts: seconds by part, the largest first. Each is exclusive: what ran inside it and is a part itself is not in
            it.
        unexplained_s: `wall_s` less the sum of the parts. It may be negative, where an estimated part is too large.
        counts: how often each part was entered; of an estimated part, in the steps that were timed.
    """

    wall_s: float
    parts: Mapping[str, float]
    unexplained_s: float
    counts: Mapping[str, int]


class LedgerClock:
    """Keeps the stack of parts that a run is in, and adds the time between two changes to the innermost one.

    Parts of which only some occurrences are timed, as hooks in the steps that the timing budget has chosen, are
    `sampled`: the ledger estimates the others from them, and takes as much out of `steps`.

    Args:
        began_ns: when the run began, by `clock_ns`.
        part: the part that it began with; "" for none.
        clock_ns: the host clock.

    Example:
        >>> times = iter([10, 30, 60, 100])
        >>> clock = LedgerClock(0, clock_ns=times.__next__)
        >>> clock.enter("steps")
        >>> clock.enter("checkpoint")  # inside of it
        >>> clock.exit("checkpoint")
        >>> ledger = clock.read()
        >>> {part: round(s * 1e9) for part, s in ledger.parts.items()}, round(ledger.unexplained_s * 1e9)
        ({'steps': 60, 'checkpoint': 30}, 10)
    """

    def __init__(self, began_ns: int, part: str = "", clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._began_ns = self._since_ns = began_ns
        self._clock_ns = clock_ns
        self._ns: dict[str, int] = {}
        self._sampled_ns: Counter[str] = Counter()
        self._counts: Counter[str] = Counter([part] if part else [])
        self._stack = [(part, False)] if part else []
        self.steps = 0
        """How many steps have ended in which sampled parts could have been timed."""
        self.sampled_steps = 0
        """In how many of them they were."""

    def enter(self, part: str, *, sampled: bool = False) -> None:
        """Begin a part, inside the current one.

        Args:
            part: its name.
            sampled: whether the part is not timed in every step.
        """
        self._pass()
        self._stack.append((part, sampled))
        self._counts[part] += 1

    def exit(self, part: str) -> None:
        """End a part, and any part still open inside it; does nothing if the part is not open."""
        if self.inside(part):
            self._pass()
            while self._stack.pop()[0] != part:
                pass

    def inside(self, part: str) -> bool:
        """Whether a part is open."""
        return any(open_part == part for open_part, _ in self._stack)

    def _pass(self) -> None:
        """Add the time since the last change to the innermost part."""
        now_ns = self._clock_ns()
        passed, self._since_ns = now_ns - self._since_ns, now_ns
        if self._stack:
            part, sampled = self._stack[-1]
            self._ns[part] = self._ns.get(part, 0) + passed
            if sampled:
                self._sampled_ns[part] += passed

    def read(self) -> Ledger:
        """The ledger up to now; the run goes on."""
        self._pass()
        wall_ns = self._since_ns - self._began_ns
        parts = dict(self._ns)
        if self.sampled_steps:
            untimed = (self.steps - self.sampled_steps) / self.sampled_steps
            for part, ns in self._sampled_ns.items():
                estimated = round(ns * untimed)
                parts[part] += estimated
                parts[STEPS] = parts.get(STEPS, 0) - estimated
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        return Ledger(
            wall_s=wall_ns / 1e9,
            parts={part: ns / 1e9 for part, ns in ordered},
            unexplained_s=(wall_ns - sum(parts.values())) / 1e9,
            counts=dict(self._counts),
        )
