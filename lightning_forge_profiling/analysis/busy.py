"""What the GPU did with its busy time."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.kernel_kinds import CATEGORY_OF, KINDS
from lightning_forge_profiling.analysis.rank_summary import CATEGORIES
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.trace import Ints

__all__ = ["BusyTime", "busy_time"]

_CLAIM_ORDER: Final = ("matmul", "other", "memory", "comm")
"""Where work overlaps, which category an instant counts to: what computes, before what could be hidden behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class BusyTime:
    """Nanoseconds in each step's window; every array has one entry a step.

    Attributes:
        union: when the GPU did anything.
        busy: its length.
        kinds: the same split by kind; where work overlaps, an instant counts to the first in the order of
            matmul, other, memory, comm. The kinds sum to `busy`.
        categories: the same, by category.
        comm: when communication ran.
        comm_exposed: when nothing else ran meanwhile.
    """

    union: Intervals
    busy: Ints
    kinds: dict[str, Ints]
    categories: dict[str, Ints]
    comm: Ints
    comm_exposed: Ints


def busy_time(recording: Recording) -> BusyTime:
    """Split the busy time of each step by what ran."""
    gpu, steps = recording.trace.gpu, recording.steps
    present = sorted(
        (KINDS[number] for number in np.unique(recording.kind)),
        key=lambda kind: _CLAIM_ORDER.index(CATEGORY_OF[kind]),
    )
    claimed = Intervals.of([], [])
    kinds: dict[str, Ints] = {}
    before_comm = claimed
    measured = np.zeros(len(steps), np.int64)
    for kind in present:
        rows = recording.kind == KINDS.index(kind)
        claimed |= Intervals.of(gpu.start[rows], gpu.end[rows])
        if CATEGORY_OF[kind] != "comm":
            before_comm = claimed
        now = steps.measure(claimed)
        kinds[kind], measured = now - measured, now
    comm = np.isin(recording.kind, [KINDS.index(kind) for kind in present if CATEGORY_OF[kind] == "comm"])
    return BusyTime(
        union=claimed,
        busy=measured,
        kinds=kinds,
        categories={
            category: sum(
                (spent for kind, spent in kinds.items() if CATEGORY_OF[kind] == category),
                np.zeros(len(steps), np.int64),
            )
            for category in CATEGORIES
        },
        comm=steps.measure(Intervals.of(gpu.start[comm], gpu.end[comm])),
        comm_exposed=measured - steps.measure(before_comm),
    )
