"""One operator and one kernel of a rank's tables, as means per counted step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One PyTorch operator.

    Attributes:
        name: its name.
        calls_per_step: calls per step.
        host_ms_per_step: total host time, child operators included.
        self_host_ms_per_step: host time without child operators.
        device_ms_per_step: time of the GPU work launched in it, child operators included.
        self_device_ms_per_step: time of the GPU work it launched itself; sums over operators without double counting.
        allocated_bytes_per_step: device memory allocated less freed, child operators included; None if memory was not
            recorded.
        input_shapes: input shapes, most expensive first; empty if not recorded.
    """

    name: str
    calls_per_step: float
    host_ms_per_step: float
    self_host_ms_per_step: float
    device_ms_per_step: float
    self_device_ms_per_step: float
    allocated_bytes_per_step: float | None
    input_shapes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel.

    Attributes:
        name: its name as in the trace.
        kind: the kind of its work, as in `RankSummary.kinds`.
        category: its category, one of `CATEGORIES`.
        calls_per_step: launches per step.
        ms_per_step: sum of its durations.
        mean_us: mean duration of one launch.
        pct: share of the step.
    """

    name: str
    kind: str
    category: str
    calls_per_step: float
    ms_per_step: float
    mean_us: float
    pct: float
