"""Where the step time goes on a rank that trains on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


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
