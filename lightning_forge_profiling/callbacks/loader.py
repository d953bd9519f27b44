"""The DataLoaders of a Trainer: where a batch comes from, their workers and settings; the settings of its optimizer."""

from collections.abc import Sequence
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.results.run import LoaderSettings, OptimizerSettings


def has_unsized_loader(trainer: Trainer) -> bool:
    """Whether only a fetch finds out that the training loader has no more batches."""
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    return fetcher is not None and fetcher.length is None


def has_exhausted_loader(trainer: Trainer) -> bool:
    """Whether the fetch that is about to end has found that."""
    return has_unsized_loader(trainer) and trainer.fit_loop._data_fetcher.done  # noqa: SLF001


class BatchSource(NamedTuple):
    """The loaders that a training batch comes from."""

    loaders: Sequence[Any]
    """All training loaders, mostly one DataLoader."""
    ends_epoch: bool = False
    """Whether the batch is the last of its epoch."""
    fetched_by_module: bool = False
    """Whether `training_step` fetches by itself from a `dataloader_iter`."""
    one_a_step: bool = True
    """Whether it is all that its step fetched, as always where Lightning does the fetching."""


def batch_source(trainer: Trainer) -> BatchSource:
    """The loaders that the batch that has just ended comes from."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    fetcher = loop._data_fetcher  # noqa: SLF001
    own = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"
    return BatchSource(
        loop._combined_loader.flattened,  # noqa: SLF001
        bool(progress.is_last_batch),
        own,
        not own or fetcher.fetched == progress.current.ready,
    )


def evaluation_source(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> BatchSource:
    """The loaders that a batch of validation, test or prediction comes from."""
    loop = trainer._active_loop  # noqa: SLF001
    loaders, fetcher = loop._combined_loader.flattened, loop._data_fetcher  # noqa: SLF001
    if loop._combined_loader._mode == "sequential":  # noqa: SLF001
        loaders = loaders[dataloader_idx : dataloader_idx + 1]
    own = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"
    one_a_step = not own or fetcher.fetched == loop.batch_progress.current.ready
    return BatchSource(loaders, batch_idx + 1 >= loop.max_batches[dataloader_idx], own, one_a_step)


def training_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders of this fit, mostly one DataLoader; empty before the training loop has set them up."""
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else list(combined.flattened)


def validation_loaders(trainer: Trainer) -> list[Any]:
    """The validation loaders of this fit; empty before the first validation has set them up."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else list(combined.flattened)


def worker_processes(trainer: Trainer) -> list[int]:
    """Process ids of the training loaders' workers that are running."""
    iterators = getattr(getattr(trainer.fit_loop._combined_loader, "_iterator", None), "iterators", ())  # noqa: SLF001
    return [worker.pid for iterator in iterators for worker in getattr(iterator, "_workers", ()) if worker.pid]


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
