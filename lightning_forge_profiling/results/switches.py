"""Switches that slow a run down, as they were in its first step."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Settings of PyTorch and of the process on rank 0, looked up once, after the first step.

    Attributes:
        anomaly_detection: whether autograd checks each gradient and keeps a stack for each operator.
        launch_blocking: whether `CUDA_LAUNCH_BLOCKING` makes the host wait for each kernel; False without a GPU.
        tracer: what the training thread calls for each line or call: a debugger, a coverage tool, a profiler; "" for
            nothing.
        profiler: whether a torch profiler other than this package's was running.
        deterministic: `algorithms` for `torch.use_deterministic_algorithms`, `cudnn` for cuDNN's alone, "" for neither.
        distributed_debug: `TORCH_DISTRIBUTED_DEBUG` if the run has several processes: `INFO` or `DETAIL`; "" if off.
        float64_pct: share of the trainable parameters that are float64.
        tf32_off: whether matrix products are float32 on a GPU that has TF32, and do not use it.
        pin_memory_unused: whether the DataLoader is asked to pin memory where there is no GPU.
    """

    anomaly_detection: bool = False
    launch_blocking: bool = False
    tracer: str = ""
    profiler: bool = False
    deterministic: Literal["", "algorithms", "cudnn"] = ""
    distributed_debug: str = ""
    float64_pct: float = 0.0
    tf32_off: bool = False
    pin_memory_unused: bool = False
