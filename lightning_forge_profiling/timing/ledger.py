"""The ledger: splits the wall time of a run into parts that sum to it, on one stack and one clock."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

from lightning_forge_profiling.notebook import ShownInNotebook

__all__ = ["Ledger", "LedgerClock"]


@dataclass(frozen=True, slots=True)
class Ledger(ShownInNotebook):
    """Where the wall time of a run went, on one rank.

    Attributes:
        wall_s: the whole run, in seconds.
        parts: seconds by part, the largest first. Each is exclusive: what ran inside it and is a part itself is not in
            it.
        unexplained_s: `wall_s` less the sum of the parts.
        counts: how often each part was entered.
    """

    wall_s: float
    parts: Mapping[str, float]
    unexplained_s: float
    counts: Mapping[str, int]


class LedgerClock:
    """Keeps the stack of parts that a run is in, and adds the time between two changes to the innermost one.

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
        self._ns: defaultdict[str, int] = defaultdict(int)
        self._counts: Counter[str] = Counter([part] if part else [])
        self._stack = [part] if part else []

    def enter(self, part: str, *, counts: bool = True) -> None:
        """Begin a part, inside the current one.

        Args:
            part: its name.
            counts: whether to count it.
        """
        now_ns, stack = self._clock_ns(), self._stack
        if stack:
            self._ns[stack[-1]] += now_ns - self._since_ns
        self._since_ns = now_ns
        stack.append(part)
        self._counts[part] += counts

    def exit(self, part: str) -> None:
        """End a part, and any part still open inside it; does nothing if the part is not open."""
        stack = self._stack
        if part in stack:
            now_ns = self._clock_ns()
            self._ns[stack[-1]] += now_ns - self._since_ns
            self._since_ns = now_ns
            while stack.pop() != part:
                pass

    def read(self) -> Ledger:
        """The ledger up to now; the run goes on."""
        now_ns, parts = self._clock_ns(), dict(self._ns)
        if self._stack:
            parts[self._stack[-1]] = parts.get(self._stack[-1], 0) + now_ns - self._since_ns
        wall_ns = now_ns - self._began_ns
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        return Ledger(
            wall_s=wall_ns / 1e9,
            parts={part: ns / 1e9 for part, ns in ordered},
            unexplained_s=(wall_ns - sum(parts.values())) / 1e9,
            counts=dict(self._counts),
        )
