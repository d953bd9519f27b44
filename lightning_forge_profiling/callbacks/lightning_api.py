"""Everything the callbacks need of Lightning beyond its documented interface, in one place."""

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from lightning_forge_profiling.hardware.precision import dtype_name, parameter_dtype

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    # `lightning.pytorch` and `pytorch_lightning` are two packages with the same contents, and each one's Trainer and
    # command line accept its own callbacks only. Which one the user will import is not known here, so ours descend
    # from both where both are installed.
    _homes = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
    _classes = [import_module("lightning.pytorch" if name == "lightning" else name).Callback for name in _homes]
    Callback = _classes[0] if len(_classes) == 1 else type("Callback", tuple(_classes), {})
    LightningModule = Any

# Any: the Trainer's class does not declare most of its attributes, and there are two such classes
Trainer: TypeAlias = Any

__all__ = [
    "Callback",
    "LightningModule",
    "Trainer",
    "action_regions",
    "compute_dtype",
    "device_name",
    "devices_per_batch",
    "ends_epoch",
    "is_accumulating",
    "is_trial_run",
    "log_folder",
    "logger_folder",
    "logger_step",
    "logs_now",
    "may_be_last",
    "optimizer_steps",
    "replicas",
    "uses_pytorch_profiler",
    "validation_begins",
]


def action_regions(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Which of the action names that Lightning hands to `trainer.profiler` delimit which region."""
    strategy = type(trainer.strategy).__name__
    return {
        "[_TrainingEpochLoop].train_dataloader_next": "data",
        f"[Strategy]{strategy}.batch_to_device": "transfer",
        f"[Strategy]{strategy}.training_step": "forward",
        f"[Strategy]{strategy}.backward": "backward",
        f"[LightningModule]{type(module).__name__}.optimizer_step": "optimizer",
        "optimizer_step": "optimizer",  # manual optimization
        "save_checkpoint": "checkpoint",
    }


def validation_begins(module: LightningModule) -> str:
    """The action name that Lightning announces before it sets the validation loop up."""
    return f"[LightningModule]{type(module).__name__}.on_validation_model_zero_grad"


def is_accumulating(trainer: Trainer) -> bool:
    """Whether gradients go on being accumulated after this batch."""
    return bool(trainer.fit_loop._should_accumulate())  # noqa: SLF001


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the batch that has just ended is its epoch's last."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)  # `trainer.is_last_batch`, in fewer calls


def optimizer_steps(trainer: Trainer) -> int:
    """How often an optimizer has stepped: `trainer.global_step`, in fewer calls."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return int(loop.automatic_optimization.optim_progress.optimizer.step.total.completed)
    return int(loop.manual_optimization.optim_step_progress.total.completed)


def logger_step(trainer: Trainer) -> int:
    """The x-axis of `self.log` during a training batch."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001


def logs_now(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether Lightning would log at the end of this batch, at its own interval or at `every_n_steps`."""
    interval = trainer.log_every_n_steps if every_n_steps is None else every_n_steps
    return bool(interval) and not (logger_step(trainer) + 1) % interval and not is_accumulating(trainer)


def may_be_last(trainer: Trainer) -> bool:
    """Whether the batch that has just ended may have been the fit's last."""
    if (
        trainer.should_stop
        or trainer.received_sigterm
        or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps)
    ):
        return True
    last_epoch = trainer.max_epochs not in {None, -1} and trainer.current_epoch + 1 >= trainer.max_epochs
    return bool(trainer.is_last_batch and last_epoch)


def replicas(trainer: Trainer) -> int:
    """How many data-parallel replicas work on batches of their own; tensor-parallel ranks share one."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return max(int(sampler.get("num_replicas", 1)), 1) if sampler else 1


def devices_per_batch(trainer: Trainer) -> int:
    """How many ranks share a batch, as tensor-parallel ones do."""
    return max(int(trainer.world_size) // replicas(trainer), 1)


def compute_dtype(trainer: Trainer) -> str:
    """What this run's matrix products compute in, once its strategy has set the model up.

    Autocast decides where there is one, then what FSDP casts parameters to, then what the parameters are. A module's
    own `torch.autocast` is not seen.

    Returns:
        As `hardware.peaks` names it; `fp32` also where a GPU runs that as TF32.
    """
    plugin = trainer.precision_plugin
    precision = str(plugin.precision)
    if precision.startswith("transformer-engine"):
        return "fp8"
    if precision in _MIXED:
        return _MIXED[precision]
    model = trainer.strategy.model
    if (sharded := _sharded_dtype(model)) is not None:
        return sharded
    if precision in _TRUE:
        return _TRUE[precision]
    if isinstance(dtype := getattr(plugin, "dtype", None), torch.dtype):  # bitsandbytes: what it dequantizes to
        return dtype_name(dtype) or "fp32"
    return parameter_dtype(model)  # at "32-true" Lightning leaves them as the module made them


_MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_TRUE = {"bf16-true": "bf16", "16-true": "fp16", "64-true": "fp64"}


def _sharded_dtype(model: nn.Module) -> str | None:
    """What FSDP, of either version, casts the parameters of most of its units to; None where it casts none."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415  (slow to import)

    units: Counter[torch.dtype] = Counter()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            policy = part._get_fsdp_state()._mp_policy  # noqa: SLF001
        elif isinstance(part, FullyShardedDataParallel):
            policy = part.mixed_precision
        else:
            continue
        if policy.param_dtype is not None:
            units[policy.param_dtype] += 1
    return dtype_name(units.most_common(1)[0][0]) if units else None


def uses_pytorch_profiler(trainer: Trainer) -> bool:
    """Whether the Trainer's own profiler is `torch.profiler` already."""
    return any(base.__name__ == "PyTorchProfiler" for base in type(trainer.profiler).__mro__)


def is_trial_run(trainer: Trainer) -> bool:
    """Whether this fit is not the real one: `fast_dev_run`."""
    return bool(trainer.fast_dev_run)


def device_name(trainer: Trainer) -> str:
    """What the run trains on, in words."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def log_folder(trainer: Trainer) -> Path:
    """The folder that TensorBoard's logger, else the Trainer's first one, writes into, or its default one.

    A collective: call it on every rank.
    """
    boards = (logger.log_dir for logger in trainer.loggers if _is_tensorboard(logger))
    board = next(boards, None)
    if board is not None:
        return Path(trainer.strategy.broadcast(board))
    return Path(trainer.log_dir or trainer.default_root_dir)


def logger_folder(trainer: Trainer) -> Path | None:
    """Where TensorBoard's logger writes, else the first with files, None without one. For rank 0; no collective."""
    loggers = sorted(trainer.loggers, key=_is_tensorboard, reverse=True)  # stable: the others stay in their order
    folders = (getattr(logger, "log_dir", None) or logger.save_dir for logger in loggers)
    return next((Path(folder).absolute() for folder in folders if folder), None)


def _is_tensorboard(logger: Any) -> bool:
    return any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__)
