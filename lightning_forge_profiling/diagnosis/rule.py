"""What a rule is, and what it looks at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.results.rank import RankSummary

__all__ = [
    "MATH",
    "NAMED_FROM_PCT",
    "NO_BANDWIDTH",
    "Evidence",
    "Rule",
    "Seen",
    "Told",
    "in_ms",
]

NAMED_FROM_PCT: Final = 5.0
"""What costs less of a step is not named: run-to-run variation is of that size."""

MATH: Final = frozenset({"matmul", "convolution", "attention"})
"""Kinds of kernels that multiply matrices, in one way or another."""
NO_BANDWIDTH: Final = MATH | {"comm", "memcpy", "memset", "other"}
"""What is not limited by how fast memory can be read and written, or cannot be told."""

Evidence = dict[str, float | str]
Told = tuple[str, Evidence, str]
"""A title, the evidence, and what to do."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rule looks at.

    Attributes:
        rank: one rank's figures.
        wait_ms: how long it waits for other ranks in collectives, per step; None where none could be matched.
    """

    rank: RankSummary
    wait_ms: float | None = None

    @property
    def exposed_wait_ms(self) -> float:
        """Waiting for other ranks while nothing else ran: as much of all waiting as of all communication."""
        comm = self.rank.comm
        if not self.wait_ms or not comm.ms_per_step:
            return 0.0
        return min(self.wait_ms / comm.ms_per_step, 1.0) * comm.exposed_ms_per_step

    def pct(self, ms_per_step: float) -> float:
        """A time per step as a share of the step."""
        return 100 * ms_per_step / self.rank.step_ms.mean if self.rank.step_ms.mean else 0.0

    @property
    def step(self) -> str:
        """The mean step."""
        return in_ms(self.rank.step_ms.mean)

    @property
    def math_ms(self) -> float:
        """Kernels that multiply matrices, in one way or another."""
        return sum(kind.ms_per_step for name, kind in self.rank.kinds.items() if name in MATH)

    @property
    def bandwidth_ms(self) -> float:
        """Kernels that read and write memory and compute little: element-wise, copies, normalization, ..."""
        return sum(kind.ms_per_step for name, kind in self.rank.kinds.items() if name not in NO_BANDWIDTH)

    @property
    def host_idle_ms(self) -> float:
        """Idle time for which the host is the cause, the data loader apart: none is left once it runs ahead."""
        return sum(share.ms_per_step for cause, share in self.rank.idle.items() if cause not in {"data", "gpu"})

    @property
    def compute_ms(self) -> float:
        """Busy time without copies and exposed communication."""
        return sum(self.rank.categories[category].ms_per_step for category in ("matmul", "other"))


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of lost time.

    Attributes:
        code: the finding's code.
        cost_ms: what it costs a step, in milliseconds; 0 where it is not the case.
        describe: a title, the evidence, and what to do.
        saves_ms: what the fix saves of a step, in milliseconds; None where there is no fix, or nothing bounds it.
        at_most: whether that is a bound, and not the expected value; always by default.
    """

    code: str
    cost_ms: Callable[[Seen], float]
    describe: Callable[[Seen], Told]
    saves_ms: Callable[[Seen], float | None] | None = None
    at_most: Callable[[Seen], bool] = lambda _: True


def in_ms(value: float) -> str:
    """A time in words: three digits or so."""
    return f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
