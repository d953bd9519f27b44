"""The peak that a run's MFU is relative to."""

import torch

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.flops.peaks import find_peak, power_may_tell
from lightning_forge_profiling.flops.precision import fp32_runs_as_tf32, has_tf32
from lightning_forge_profiling.gpu.nvml import find_device, open_nvml
from lightning_forge_profiling.timing.utilization import Peak


def run_peak(trainer: Trainer, given: float | None, *, asks_power: bool = True) -> Peak:
    """The peak FLOP/s of this process's device, in the type that the run computes in."""
    device = trainer.strategy.root_device
    dtype = lightning_api.compute_dtype(trainer)
    if device.type != "cuda":
        source = "given" if given is not None else f"no peak known for {device.type}"
        return Peak(given, dtype, str(device), source)
    properties = torch.cuda.get_device_properties(device)
    if dtype == "fp32" and has_tf32(device) and fp32_runs_as_tf32(trainer.strategy.model):
        dtype = "tf32"
    if given is not None:
        return Peak(given, dtype, properties.name, "given")
    name, memory, sms = torch.cuda.get_device_name(device), properties.total_memory, properties.multi_processor_count
    found = find_peak(name, memory_bytes=memory, sms=sms)
    if found is None and asks_power and power_may_tell(name, memory_bytes=memory, sms=sms):
        found = find_peak(name, memory_bytes=memory, sms=sms, power_w=_power_limit_w(device, str(properties.uuid)))
    if found is None:
        return Peak(None, dtype, properties.name, f"{properties.name} is not in the peak table")
    if dtype not in found.flops:
        return Peak(None, dtype, found.device, no_rate_for(dtype, found.device), in_table=True)
    return Peak(found.flops[dtype], dtype, found.device, found.source_of(dtype), in_table=True)


def no_rate_for(dtype: str, device: str) -> str:
    """Why there is no peak for a device of the table: the table lacks the type."""
    return f"the peak table has no {dtype} rate for {device}"


def _power_limit_w(device: torch.device, uuid: str) -> float | None:
    try:
        nvml = open_nvml()
    except LookupError:
        return None
    try:
        board = find_device(nvml, device.index or 0, uuid=uuid).board
        return nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3
    except (LookupError, nvml.NVMLError):
        return None
    finally:
        nvml.nvmlShutdown()
