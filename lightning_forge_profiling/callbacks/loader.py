"""The settings of a fit's DataLoaders and of its optimizer, and the cores there are for them."""

from math import isfinite
from statistics import median
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_forge_profiling.callbacks.lightning_api import Trainer, training_loaders, validation_loaders
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.results.run import LoaderSettings, OptimizerSettings


def restarted_workers(trainer: Trainer) -> int:
    """How many worker processes the training loaders stop and start between epochs."""
    loaders = [each for each in training_loaders(trainer) if isinstance(each, DataLoader)]
    return sum(loader.num_workers for loader in loaders if not loader.persistent_workers)


def optimizer_settings(trainer: Trainer) -> OptimizerSettings | None:
    """The first optimizer of a fit; None without one."""
    optimizer = next((getattr(each, "optimizer", each) for each in trainer.optimizers), None)
    groups = getattr(optimizer, "param_groups", ())
    sizes = [tensor.numel() for group in groups for tensor in group["params"]]
    if not sizes:
        return None
    return OptimizerSettings(
        kind=type(optimizer).__name__,
        fused=all(bool(group.get("fused")) for group in groups),
        tensors=len(sizes),
        elements=sum(sizes),
        median_elements=int(median(sizes)),
    )


def loader_settings(trainer: Trainer, *, validation: bool = False) -> LoaderSettings | None:
    """The settings of the training loaders as Lightning set them up, with this rank's sampler."""
    loaders = (validation_loaders if validation else training_loaders)(trainer)
    if not loaders:
        return None
    of_fit: dict[str, Any] = {
        "kind": type(loaders[0]).__name__,
        "loaders": len(loaders),
        "cores": usable_cores(),
        "ranks_on_host": max(int(trainer.num_devices), 1),
        "accumulate_grad_batches": int(trainer.accumulate_grad_batches),
        "batches": _validation_batches(trainer) if validation else None,
    }
    known = [each for each in loaders if isinstance(each, DataLoader)]
    if len(known) < len(loaders):
        return LoaderSettings(**of_fit)
    first, with_workers = known[0], [each for each in known if each.num_workers]
    return LoaderSettings(
        **of_fit,
        num_workers=sum(int(each.num_workers) for each in known),  # which may be NumPy's
        persistent_workers=bool(with_workers) and all(each.persistent_workers for each in with_workers),
        pin_memory=all(each.pin_memory for each in known),
        prefetch_factor=min((int(each.prefetch_factor or 0) for each in with_workers), default=None),
        batch_size=_batch_size(first),
        sampler=_sampler(first),
        iterable=any(isinstance(each.dataset, IterableDataset) for each in known),
    )


def _validation_batches(trainer: Trainer) -> int | None:
    """Batches of a validation, as limited by the Trainer; None if unknown."""
    number = sum(trainer.num_val_batches)
    return int(number) if isfinite(number) else None


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _sampler(loader: DataLoader[Any]) -> str:
    """The class that chooses the samples: the user's own batch sampler, else the loader's sampler."""
    own = loader.batch_sampler is not None and not isinstance(loader.batch_sampler, BatchSampler)
    return type(loader.batch_sampler if own else loader.sampler).__name__
