"""Settings of a fit's DataLoader, and the cores it may use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of the DataLoader that a fit trains from or validates on, and the cores it may use.

    Attributes:
        kind: its class, such as `DataLoader`.
        loaders: number of loaders; if several, the settings are of all of them together.
        num_workers: number of worker processes; None if it is not a `torch.utils.data.DataLoader`.
        persistent_workers: whether the workers are kept between epochs.
        pin_memory: whether batches are copied to pinned memory.
        prefetch_factor: batches that each worker prefetches; None without workers.
        batch_size: samples per batch; None if a batch sampler or the dataset decides.
        sampler: class of the sampler.
        iterable: whether the dataset is an `IterableDataset`.
        cores: cores that this rank's process may use.
        ranks_on_host: ranks that share these cores.
        accumulate_grad_batches: batches per optimizer step.
        batches: batches of a validation; None if unknown, and of the loader that the fit trains from.
    """

    kind: str = ""
    loaders: int = 1
    num_workers: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    batch_size: int | None = None
    sampler: str = ""
    iterable: bool = False
    cores: int = 1
    ranks_on_host: int = 1
    accumulate_grad_batches: int = 1
    batches: int | None = None

    @property
    def most_workers(self) -> int:
        """Number of workers that this rank's share of the cores allows; PyTorch warns of more."""
        return max(self.cores // max(self.ranks_on_host, 1), 1)
