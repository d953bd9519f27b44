"""Where the step time goes on a rank that trains on the CPU, and how a run uses the cores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lightning_forge_profiling.results.interval import ShareInterval

OTHERS: Final = 0.2
"""Cores that the rest of a system uses without being busy, and the resolution of the accounting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """Step time on the CPU in four parts, which sum to the step.

    Attributes:
        data_ms_per_step: in the data loader.
        optimizer_ms_per_step: in the optimizer's update, with clipping and `zero_grad` if the callbacks marked them.
        operators_ms_per_step: in other PyTorch operators, on training threads.
        python_ms_per_step: the rest: Python between operators, the training loop, callbacks.
        costliest_ms_per_step: self time of the top operators outside data loader and optimizer, at most three, by name.
        optimizer: class of the optimizer; "" if unknown.
        update: implementation of its update: operators for each parameter (`loop`), for lists of them (`foreach`), or
            one for all (`fused`); "" if unknown.
        update_calls_per_step: operator calls in the update.
        item_calls_per_step: values of tensors read in Python outside data loader and optimizer, as by `.item()`.
        item_ms_per_step: time in these operators.
        operator_threads: number of threads that called operators, without the intra-op threads.
        intra_op_threads: number of threads that one operator may use; None if unknown.
        usable_cores: number of cores that the process may use; None if unknown or shared with other ranks.
    """

    data_ms_per_step: float
    optimizer_ms_per_step: float
    operators_ms_per_step: float
    python_ms_per_step: float
    costliest_ms_per_step: Mapping[str, float]
    optimizer: str
    update: Literal["", "loop", "foreach", "fused"]
    update_calls_per_step: float
    operator_threads: int
    intra_op_threads: int | None
    usable_cores: int | None
    item_calls_per_step: float = 0.0
    item_ms_per_step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCpu:
    """What the training thread did in a region of the steps that were split, hooks and loggers included.

    Attributes:
        used_pct: percentage of the region's host time in which it was on a core.
        waits_pct: in which it could run and waited for a core.
        blocked_pct: the rest, in which it waited for something else. Other threads may have computed then.
    """

    used_pct: float
    waits_pct: float
    blocked_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Use of the cores over the counted steps of a run, by the kernel's accounting.

    Attributes:
        cores: cores that this rank may use: its affinity or its container's quota, divided by the ranks on the host.
        used: cores that the training process used, on average.
        idle: of these cores, how many no process used, on average; None if unknown.
        threads: number of threads that one operator may use.
        loader_busy_pct: of the time that making batches took, the share in which a core worked on them or was waited
            for, in the loader's workers or else in the training thread. In the rest the loader waits, as for a disk or
            a network. None if unknown.
        workers: cores that the loader's workers used or waited for, on average.
        waits_pct: share of the counted time in which a thread that carries the step waited for a core: the training
            thread, autograd's, or a helper of operators, whichever waited longest; None if unknown.
        waits: its interval; None for fewer than five readings.
        throttled_pct: share of the time in which a CPU quota stopped the control group, summed over its cores, at most
            100.
        throttled_periods: in how many periods of the quota it did.
        stolen_pct: share of the cores' time that the hypervisor gave to other machines.
        pressure_pct: share of the time in which some process of the system waited for a core.
        switches_per_s: how often per second the training thread had to leave its core.
        missing: sources of these figures that the system does not have.
        regions: what the training thread did, by built-in region.
        gil: share of the counted time in which training waited for the interpreter lock; None if unknown.
        gil_thread: name of the Python thread that used most CPU time meanwhile; "" if unknown.
    """

    cores: float
    used: float
    idle: float | None = None
    threads: int = 1
    loader_busy_pct: float | None = None
    workers: float = 0.0
    waits_pct: float | None = None
    waits: ShareInterval | None = None
    throttled_pct: float = 0.0
    throttled_periods: int = 0
    stolen_pct: float = 0.0
    pressure_pct: float = 0.0
    switches_per_s: float = 0.0
    missing: tuple[str, ...] = ()
    regions: Mapping[str, RegionCpu] = field(default_factory=dict)
    gil: ShareInterval | None = None
    gil_thread: str = ""

    @property
    def contended(self) -> bool | None:
        """Whether other processes use these cores too, or the process and its loader use all of them."""
        return None if self.idle is None else self.cores - self.used - self.idle > OTHERS

    def blocked_pct(self, region: str) -> float:
        """Share of a region's time in which the training thread neither computed nor waited for a core."""
        return self.regions[region].blocked_pct if region in self.regions else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The first optimizer of a fit.

    Attributes:
        kind: its class, such as `AdamW`.
        fused: whether it was created with `fused=True`.
        tensors: number of parameter tensors that it updates.
        elements: number of elements of all of them.
        median_elements: median number of elements of a tensor.
    """

    kind: str
    fused: bool
    tensors: int
    elements: int
    median_elements: int
