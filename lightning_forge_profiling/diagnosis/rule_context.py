"""The figures of one rank that the rules of traces read, and the user's function that holds a finding's time."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.results.analysis import Finding, RunEvidence
from lightning_forge_profiling.results.python_functions import SpentIn
from lightning_forge_profiling.results.rank import RankSummary

_MATH: Final = frozenset({"matmul", "convolution", "attention"})
"""Kinds of kernels that multiply matrices, in one way or another."""
NO_BANDWIDTH: Final = _MATH | {"comm", "memcpy", "memset", "other"}
"""Kinds that memory bandwidth does not limit, or of which that is unknown."""

RECORD_STACKS: Final = "forge-profiling run --stacks, or ForgeProfilerCallback(with_stack=True),"
"""What to do where Python functions were not recorded."""

_SPENT: Final = MappingProxyType(
    {
        "python-bound": "python",
        "input-bound": "data",
        "launch-bound": "launching",
        "blocked-forward": "forward",
        "blocked-backward": "backward",
    }
)
"""By code the kind of its time in `PythonFunctions.spent`."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The figures of one rank.

    Attributes:
        rank: the rank.
        wait_ms: how long it waits for other ranks in collectives, per step; None where none could be matched.
        least_exposed_ms: the least exposed communication of any rank, which is that of the rank that waits least.
        live: whether its CPU times are upper bounds for an unrecorded step, and not those of the recorded steps.
        run: evidence of the whole run; None for a trace alone.
    """

    rank: RankSummary
    wait_ms: float | None = None
    least_exposed_ms: float | None = None
    live: bool = False
    run: RunEvidence | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded."""
        return self.rank.gpu.busy_ms_per_step > 0

    @property
    def exposed_wait_ms(self) -> float:
        """Waiting for other ranks while nothing else ran.

        It is what this rank has more exposed communication than the rank with least. If ranks wait by turns, each has
        it: then it is as much of all waiting as of all communication.
        """
        comm = self.rank.comm
        if not self.wait_ms or not comm.ms_per_step:
            return 0.0
        in_turns_ms = min(self.wait_ms / comm.ms_per_step, 1.0) * comm.exposed_ms_per_step
        least_ms = comm.exposed_ms_per_step if self.least_exposed_ms is None else self.least_exposed_ms
        return max(in_turns_ms, min(comm.exposed_ms_per_step - least_ms, self.wait_ms))

    @property
    def has_stacks(self) -> bool:
        """Whether Python functions were recorded."""
        return self.rank.python is not None

    def pct(self, ms_per_step: float) -> float:
        """A time per step as a share of the step."""
        return 100 * ms_per_step / self.rank.step_ms.mean if self.rank.step_ms.mean else 0.0

    def of_step(self, ms_per_step: float, *, bound: bool = False) -> str:
        """A time per step beside the mean step, as `2.70 ms of each 3.25 ms step`."""
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


def in_function(rank: RankSummary | None, code: str) -> SpentIn | None:
    """The user's function that holds most of a finding's time; None if it is unknown, as without stacks."""
    python = None if rank is None else rank.python
    return None if python is None else python.spent.get(_SPENT.get(code, ""))


def located(found: Finding, rank: RankSummary | None) -> Finding:
    """The finding with the user's function that holds most of its time, if stacks show it and samples do not."""
    held = in_function(rank, found.code)
    if held is None or {"where", "line"} & found.evidence.keys():
        return found
    ms, of = in_ms(held.ms_per_step), in_ms(held.of_ms_per_step)
    return replace(
        found,
        title=f"{found.title}; recorded with stacks, {ms} of {of} are in {held.where}",
        evidence={**found.evidence, "where": held.where, "recorded_there_ms_per_step": held.ms_per_step},
    )
