"""The rows of two tables, operators and kernels, as plain data: means per step over the steps that count."""

from dataclasses import dataclass

__all__ = ["Kernel", "Operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One PyTorch operator.

    Attributes:
        name: its name.
        calls_per_step: how often it was called.
        host_ms_per_step: time in it on the host, what it called included.
        self_host_ms_per_step: the same without the operators it called.
        device_ms_per_step: durations of the GPU work launched in it, what it called included.
        self_device_ms_per_step: of what it launched itself; these sum over operators without counting twice.
        allocated_bytes_per_step: what it allocated on the device, net of what it freed; None where memory was not
            recorded.
        input_shapes: the shapes it was called with, the costliest first; empty where they were not recorded.
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
        name: its name, demangled.
        kind: what it computes, one of the kinds of `RankSummary.kinds`.
        category: which of `CATEGORIES` it belongs to.
        calls_per_step: how often it ran.
        ms_per_step: the sum of its durations.
        mean_us: of one call.
        pct: share of the step.
    """

    name: str
    kind: str
    category: str
    calls_per_step: float
    ms_per_step: float
    mean_us: float
    pct: float
