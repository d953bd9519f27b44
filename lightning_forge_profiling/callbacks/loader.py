"""The settings of a fit's DataLoader, and the cores there are for it."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_forge_profiling.callbacks.lightning_api import Trainer, training_loaders
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.results.loader_settings import LoaderSettings


def restarted_workers(trainer: Trainer) -> int:
    """How many worker processes the training loaders stop and start between epochs."""
    loaders = [each for each in training_loaders(trainer) if isinstance(each, DataLoader)]
    return sum(loader.num_workers for loader in loaders if not loader.persistent_workers)


def loader_settings(trainer: Trainer) -> LoaderSettings | None:
    """The settings of the training loaders as Lightning set them up, with this rank's sampler.

    Args:
        trainer: during or after its training loop.

    Returns:
        For several loaders the sum of their workers, the flags that all of them have, and the rest of the first one.
        None before the training loop has set them up.
    """
    loaders = training_loaders(trainer)
    if not loaders:
        return None
    kind = type(loaders[0]).__name__
    accumulate, ranks = int(trainer.accumulate_grad_batches), max(int(trainer.num_devices), 1)
    known = [each for each in loaders if isinstance(each, DataLoader)]
    if len(known) < len(loaders):
        return LoaderSettings(
            kind=kind,
            loaders=len(loaders),
            cores=usable_cores(),
            ranks_on_host=ranks,
            accumulate_grad_batches=accumulate,
        )
    first, with_workers = known[0], [each for each in known if each.num_workers]
    return LoaderSettings(
        kind=kind,
        loaders=len(loaders),
        num_workers=sum(int(each.num_workers) for each in known),  # which may be NumPy's
        persistent_workers=bool(with_workers) and all(each.persistent_workers for each in with_workers),
        pin_memory=all(each.pin_memory for each in known),
        prefetch_factor=min((int(each.prefetch_factor or 0) for each in with_workers), default=None),
        batch_size=_batch_size(first),
        sampler=_sampler(first),
        iterable=any(isinstance(each.dataset, IterableDataset) for each in known),
        cores=usable_cores(),
        ranks_on_host=ranks,
        accumulate_grad_batches=accumulate,
    )


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _sampler(loader: DataLoader[Any]) -> str:
    """The class that chooses the samples: the user's own batch sampler, else the loader's sampler."""
    own = loader.batch_sampler is not None and not isinstance(loader.batch_sampler, BatchSampler)
    return type(loader.batch_sampler if own else loader.sampler).__name__
