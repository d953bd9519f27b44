"""Looks up the switches of PyTorch and of the process that slow a run down."""

import os
import sys
from typing import Literal

import torch

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.profiler.other_profilers import active_profiler
from lightning_forge_profiling.results.run import Switches


def look_up(trainer: Trainer, *, recording: bool) -> Switches:
    """The switches as they are now. Call it on the training thread."""
    device, loader = trainer.strategy.root_device, loader_settings(trainer)
    return Switches(
        anomaly_detection=torch.is_anomaly_enabled(),
        launch_blocking=device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"},
        tracer="" if recording else _tracer(),
        profiler=not recording and (bool(active_profiler()) or lightning_api.uses_pytorch_profiler(trainer)),
        deterministic=_deterministic(device),
        distributed_debug=_distributed_debug(trainer),
        float64_pct=_float64_pct(trainer),
        tf32_off=_tf32_off(trainer, device),
        pin_memory_unused=loader is not None and loader.pin_memory and not torch.accelerator.is_available(),
    )


def _tracer() -> str:
    """What Python calls on this thread for each line or call; "" for nothing."""
    for tracer in (sys.gettrace(), sys.getprofile()):
        if tracer is not None:
            kind = tracer if hasattr(tracer, "__qualname__") else type(tracer)
            return f"{kind.__module__}.{kind.__qualname__}"
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return next((str(tool) for tool in tools if tool), "")


def _deterministic(device: torch.device) -> Literal["", "algorithms", "cudnn"]:
    if torch.are_deterministic_algorithms_enabled():
        return "algorithms"
    cudnn = torch.backends.cudnn
    return "cudnn" if device.type == "cuda" and cudnn.deterministic and not cudnn.benchmark else ""


def _distributed_debug(trainer: Trainer) -> str:
    if trainer.world_size == 1 or not torch.distributed.is_available():
        return ""
    level = torch.distributed.get_debug_level().name  # type: ignore[attr-defined]
    return "" if level == "OFF" else str(level)


def _float64_pct(trainer: Trainer) -> float:
    trained = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
    doubles = sum(parameter.numel() for parameter in trained if parameter.dtype == torch.float64)
    return 100 * doubles / sum(parameter.numel() for parameter in trained) if doubles else 0.0


def _tf32_off(trainer: Trainer, device: torch.device) -> bool:
    fp32 = has_tf32(device) and lightning_api.compute_dtype(trainer) == "fp32"
    return fp32 and not fp32_runs_as_tf32(trainer.strategy.model)
