"""Where the step time goes on a rank that trains on the CPU, and how a run uses the cores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Use of the cores over the counted steps of a run, by the kernel's accounting.

    Attributes:
        cores: cores that this rank may use: its affinity or its container's quota, divided by the ranks on the host.
        used: cores that the training process used, on average.
        idle: of these cores, how many no process used, on average; None if unknown.
        threads: number of threads that one operator may use.
        blocked_pct: by region (`forward`, `backward`), the percentage of its time in which the training thread neither
            computed nor waited for a core, hooks and loggers included. Other threads may have computed then.
        loader_busy_pct: of the time that making batches took, the share in which a core worked on them or was waited
            for, in the loader's workers or else in the training thread. In the rest the loader waits, as for a disk or
            a network. None if unknown.
    """

    cores: float
    used: float
    idle: float | None = None
    threads: int = 1
    loader_busy_pct: float | None = None
    blocked_pct: Mapping[str, float] = field(default_factory=dict)

    @property
    def contended(self) -> bool | None:
        """Whether other processes use these cores too, or the process and its loader use all of them."""
        return None if self.idle is None else self.cores - self.used - self.idle > OTHERS


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
