"""What the GPU did with its busy time."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.kernel_kinds import CATEGORY_OF, KINDS
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Ints
from lightning_forge_profiling.results.rank import CATEGORIES

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
        comm_exposed: when no other kernel ran meanwhile; a copy beside it hides nothing.
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
    measured = np.zeros(len(steps), np.int64)
    for kind in present:
        rows = recording.kind == KINDS.index(kind)
        claimed |= Intervals.of(gpu.start[rows], gpu.end[rows])
        now = steps.measure(claimed)
        kinds[kind], measured = now - measured, now
    comm = np.isin(recording.kind, [KINDS.index(kind) for kind in present if CATEGORY_OF[kind] == "comm"])
    communication = Intervals.of(gpu.start[comm], gpu.end[comm])
    other = ~comm & (gpu.activity == ACTIVITIES.index("kernel"))
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
        comm=steps.measure(communication),
        comm_exposed=steps.measure(communication - Intervals.of(gpu.start[other], gpu.end[other])),
    )
