"""A loop without a Trainer, for what watches it: what torch itself knows of the ranks, the loaders and the weights."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_forge_profiling.callbacks.lightning_training import RECORDED
from lightning_forge_profiling.diagnosis.ranks import Waits
from lightning_forge_profiling.plain_text import name_of
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import (
    BatchSource,
    Ending,
    Facts,
    StepProgress,
    T,
    Training,
    WatchedWaits,
)
from lightning_forge_profiling.schema import RunTiming
from lightning_forge_profiling.timing.ledger import LedgerClock

_AGREED_WITHIN: Final = timedelta(seconds=60)  # ranks begin a loop together; one that does not is not profiled

_runs = count()  # the loops of this process, by which ranks find what rank 0 says of the same one


def _device() -> torch.device:
    """The accelerator that this process has begun to use, else the CPU."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available() and module.is_initialized():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


class Trained(nn.Module):
    """The module: the parameters that the loop's first optimizers update, as tensors without data."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: dict[str, Any] = {}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what an optimizer updates and how, and neither the optimizer nor its parameters."""
        kind = name_of(optimizer)
        if kind not in self.optimizers:
            groups = [
                {"fused": group.get("fused"), "params": [_without_data(each) for each in group["params"]]}
                for group in optimizer.param_groups
            ]
            self.optimizers[kind] = type(kind, (), {"param_groups": groups})()

    def parameters(self, recurse: bool = True) -> Any:
        """The parameters."""
        return (each for one in self.optimizers.values() for group in one.param_groups for each in group["params"])


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def loader_of(iterator: Any) -> DataLoader[Any]:
    """A DataLoader by its iterator: the first is made before anything of the loop is known."""
    sampler = iterator._index_sampler  # noqa: SLF001
    batches = iterator._auto_collation  # noqa: SLF001
    loader: DataLoader[Any] = DataLoader.__new__(DataLoader)
    vars(loader).update(  # which `__setattr__` would refuse
        dataset=iterator._dataset,  # noqa: SLF001
        num_workers=iterator._num_workers,  # noqa: SLF001
        persistent_workers=getattr(iterator, "_persistent_workers", False),
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        pin_memory=iterator._pin_memory,  # noqa: SLF001
        worker_init_fn=getattr(iterator, "_worker_init_fn", None),
        collate_fn=iterator._collate_fn,  # noqa: SLF001
        batch_sampler=sampler if batches else None,
        sampler=getattr(sampler, "sampler", sampler) if batches else sampler,
        batch_size=sampler.batch_size if batches and isinstance(sampler, BatchSampler) else None,
    )
    return loader


class _Unmeasured:
    """The waits of a plain loop for other ranks."""

    def measured(self, _: RunTiming) -> Waits:
        """Why they are not measured."""
        return Waits(because="the waits of PlainLoop have no events around them")

    def close(self) -> None:
        """Nothing is wrapped."""


class PlainTraining(Training):
    """A loop as its iterators and its optimizers show it, and the counts of its steps."""

    def __init__(
        self, folder: str | os.PathLike[str] | None, trainer: Literal["transformers", "loop"] = "loop"
    ) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if distributed else 1
        self.facts = Facts(
            rank=torch.distributed.get_rank() if distributed else 0,
            world_size=world_size,
            ranks_on_host=max(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), 1),
            replicas=world_size,
            device=_device(),
            folder=os.fspath(folder or Path.cwd()),
            trainer=trainer,
        )
        self.module = Trained()
        self._backend = torch.distributed.get_backend() if distributed else None
        self._run, self._said = next(_runs), 0
        self.of_training: list[Any] = []  # the loaders
        self.of_validation: list[Any] = []
        self.references: list[Any] = []  # weak references to their iterators
        self._source = BatchSource(())
        self._batches = SimpleNamespace(is_last_batch=False, total=SimpleNamespace(ready=0))
        self._updates = SimpleNamespace(completed=0)
        self._steps = 0
        self._ending = Ending()

    @property
    def updates(self) -> int:
        """How often an optimizer has updated weights."""
        return int(self._updates.completed)

    @property
    def optimizers(self) -> list[Any]:
        """The loop's optimizers."""
        return list(self.module.optimizers.values())

    def described(self) -> Mapping[str, Any]:
        """The settings that the record names."""
        return {
            "accelerator": f"{self.facts.device.type.upper()}Accelerator",  # as Lightning's
            "strategy": "PlainLoop",
            "devices": self.facts.ranks_on_host,
            "backend": self._backend,
            **dict.fromkeys(RECORDED),
            "accumulate_grad_batches": 1,
            "max_steps": -1,
            "log_every_n_steps": 1,
            "sync_batchnorm": False,
        }

    def broadcast(self, value: T) -> T:
        """The value of rank 0, through the store of the process group. Raises if it does not come in time."""
        if self.facts.world_size == 1:
            return value
        store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public way to the group's)
        key = f"forge-profiling/{self._run}.{self._said}"
        self._said += 1
        if self.facts.is_zero:
            store.set(key, pickle.dumps(value))  # type: ignore[arg-type]
            return value
        store.wait([key], _AGREED_WITHIN)
        agreed: T = pickle.loads(store.get(key))  # noqa: S301  (of the same job, as `broadcast_object_list`)
        return agreed

    # -- loaders -------------------------------------------------------------------------------------------------

    def loaders(self, *, validation: bool = False) -> Sequence[Any]:
        """The loaders for training or validation."""
        return self.of_validation if validation else self.of_training

    def iterators(self) -> Sequence[Any]:
        """The iterators of the training loaders that live."""
        return [iterator for reference in self.references if (iterator := reference()) is not None]

    def batch_source(self) -> BatchSource:
        """The loaders that the batch that has just ended comes from."""
        return self._source

    # -- steps ---------------------------------------------------------------------------------------------------

    def progress(self) -> StepProgress:
        """The counters of the loop."""
        return StepProgress(self._batches, self._updates)

    def logger_step(self) -> int:
        """How many steps have ended."""
        return self._steps

    def validates_on(self, iterator: Any) -> None:
        """Validation reads this iterator of a DataLoader."""
        self.of_validation = [loader_of(iterator)]

    def count_step(self, source: BatchSource, *, ends_epoch: bool) -> None:
        """A step is about to end, whose batch comes from there."""
        self._batches.total.ready += 1
        self._batches.is_last_batch = ends_epoch
        self._source = source

    def step_ended(self) -> None:
        """A step has ended: further log entries are of the next one."""
        self._steps += 1

    def updated(self) -> None:
        """An optimizer has updated weights."""
        self._updates.completed += 1

    def failure_is_over(self) -> None:
        """What a loop that failed does last."""
        self._ending.failure_over()

    def time_waits(self, step_timer: StepTimer) -> WatchedWaits | None:
        """Waits for other ranks cannot be seen."""
        return _Unmeasured() if self.facts.world_size > 1 else None

    def time_ending(self, ledger: LedgerClock, over: Callable[[], object]) -> Ending:
        """There are no hooks behind the loop."""
        return self._ending
