"""What a step without a GPU is made of, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CpuTime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """What the steps of a rank that trains on the CPU are made of. The four parts sum to the step.

    Attributes:
        data_ms_per_step: in the data loader.
        optimizer_ms_per_step: in the optimizer's update, with clipping and `zero_grad` where the callbacks marked them.
        operators_ms_per_step: in PyTorch operators outside of both, on threads that train.
        python_ms_per_step: the rest: Python between operators, the training loop, callbacks.
        costliest_ms_per_step: the operators outside of data loader and optimizer with the most time of their own,
            at most three, by name.
        optimizer: the optimizer's class; "" if unknown.
        update: how its update is computed: operators for each parameter and tensor (`loop`), lists of them (`foreach`),
            or all in one (`fused`); "" if unknown.
        update_calls_per_step: calls of operators in it.
        operator_threads: how many threads ran operators. Threads inside of an operator are not among them.
        intra_op_threads: how many threads an operator may use; None if unknown.
        usable_cores: how many cores the process may use; None if unknown, or where other ranks may use them too.
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
