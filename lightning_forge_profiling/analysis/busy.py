"""Busy time of the GPU, split by kind of work, with exposed communication."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.kernel_kinds import CATEGORY_OF, KINDS
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Ints
from lightning_forge_profiling.results.rank import CATEGORIES

_CLAIM_ORDER: Final = ("matmul", "other", "memory", "comm")
"""Overlapping work counts to the first of these: computation before the communication that it hides."""


@dataclass(frozen=True, slots=True, eq=False)
class BusyTime:
    """Busy time in nanoseconds; every array has one entry per step.

    Attributes:
        union: when any GPU work runs.
        busy: its length in each step's window.
        kinds: busy time by kind. Overlapping work counts once, to the first of matmul, other, memory, comm. The kinds
            sum to `busy`.
        categories: the same by category.
        comm: time in which communication runs.
        comm_exposed: time in which it runs without another kernel; a copy beside it hides nothing.
    """

    union: Intervals
    busy: Ints
    kinds: dict[str, Ints]
    categories: dict[str, Ints]
    comm: Ints
    comm_exposed: Ints


def busy_time(recording: Recording) -> BusyTime:
    """Split the busy time of each step by kind of work."""
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
