"""What a run's rate of arithmetic is compared with."""

import torch

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.hardware.peaks import find_peak
from lightning_forge_profiling.hardware.precision import fp32_runs_as_tf32
from lightning_forge_profiling.timing.utilization import Peak

__all__ = ["run_peak"]

_TF32_SINCE = (8, 0)  # the first compute capability with TF32: Ampere


def run_peak(trainer: Trainer, given: float | None) -> Peak:
    """What this process's device could do in the type that the run computes in.

    Args:
        trainer: a Trainer whose strategy has set the model up.
        given: what the user says it could do, operations a second.
    """
    device = trainer.strategy.root_device
    dtype = lightning_api.compute_dtype(trainer)
    if device.type != "cuda":
        source = "given" if given is not None else f"no table has the peak of a device of type {device.type}"
        return Peak(given, dtype, str(device), source)
    properties = torch.cuda.get_device_properties(device)
    has_tf32 = (properties.major, properties.minor) >= _TF32_SINCE
    if dtype == "fp32" and has_tf32 and fp32_runs_as_tf32(trainer.strategy.model):
        dtype = "tf32"
    if given is not None:
        return Peak(given, dtype, properties.name, "given")
    found = find_peak(
        torch.cuda.get_device_name(device),
        memory_bytes=properties.total_memory,
        sms=properties.multi_processor_count,
    )
    if found is None:
        return Peak(None, dtype, properties.name, f"{properties.name} is not in the table of peaks")
    if dtype not in found.flops:
        return Peak(None, dtype, found.device, f"the table of peaks has none for {dtype} on {found.device}")
    return Peak(found.flops[dtype], dtype, found.device, found.source)
