"""The figures of one rank that the rules of traces read."""

from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.results.analysis import RunEvidence
from lightning_forge_profiling.results.rank import RankSummary

_MATH: Final = frozenset({"matmul", "convolution", "attention"})
"""Kinds of kernels that multiply matrices, in one way or another."""
NO_BANDWIDTH: Final = _MATH | {"comm", "memcpy", "memset", "other"}
"""Kinds that memory bandwidth does not limit, or of which that is unknown."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The figures of one rank.

    Attributes:
        rank: the rank.
        wait_ms: how long it waits for other ranks in collectives, per step; None where none could be matched.
        live: whether its CPU times are upper bounds for an unrecorded step, and not those of the recorded steps.
        run: evidence of the whole run; None for a trace alone.
    """

    rank: RankSummary
    wait_ms: float | None = None
    live: bool = False
    run: RunEvidence | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded."""
        return self.rank.gpu.busy_ms_per_step > 0

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

    def of_step(self, ms_per_step: float, *, bound: bool = False) -> str:
        """A time per step beside the mean step, as `2.70 ms of each 3.25 ms step`.

        Args:
            ms_per_step: the time.
            bound: whether it is an upper bound where the times are those of a live step.
        """
        most = "at most " if bound and self.live else ""
        return f"{most}{in_ms(ms_per_step)} of each {in_ms(self.rank.step_ms.mean)} {'live ' if self.live else ''}step"

    @property
    def math_ms(self) -> float:
        """Kernels that multiply matrices, in one way or another."""
        return sum(kind.ms_per_step for name, kind in self.rank.kinds.items() if name in _MATH)

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
