"""The settings of the loader that a fit trains from, and the cores there are for it."""

from dataclasses import dataclass

__all__ = ["LoaderSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The loader that a fit trains from, and what the machine has for it.

    Attributes:
        kind: its class, as `DataLoader`.
        loaders: how many loaders there are; the settings are then of all together.
        num_workers: its worker processes; None where it is no `torch.utils.data.DataLoader`.
        persistent_workers: whether they stay from epoch to epoch.
        pin_memory: whether batches are copied to pinned memory.
        prefetch_factor: batches that each worker makes ahead; None without workers.
        batch_size: samples in a batch; None where a batch sampler or the dataset decides.
        sampler: the class that chooses the samples.
        iterable: whether the dataset is an `IterableDataset`.
        cores: cores that this rank's process may use.
        ranks_on_host: ranks that share them.
        accumulate_grad_batches: batches to one optimizer step.
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

    @property
    def most_workers(self) -> int:
        """How many workers this rank's loader can have without competing for cores; PyTorch warns of more."""
        return max(self.cores // max(self.ranks_on_host, 1), 1)
