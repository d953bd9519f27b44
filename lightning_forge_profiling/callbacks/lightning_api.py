"""Everything the callbacks need of Lightning beyond its documented interface, in one place."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

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
    "device_name",
    "is_accumulating",
    "is_trial_run",
    "log_folder",
    "logger_folder",
    "logger_step",
    "logs_now",
    "may_be_last",
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
    """The folder of the Trainer's first logger, or its default one. A collective: call it on every rank."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def logger_folder(trainer: Trainer) -> Path | None:
    """Where the first logger with files writes, None without one. For rank 0; no collective."""
    folders = (getattr(logger, "log_dir", None) or logger.save_dir for logger in trainer.loggers)
    return next((Path(folder) for folder in folders if folder), None)
