"""Stands for Lightning's Trainer in a plain loop: what `FitMonitor` asks of one, as far as torch itself knows it."""

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_forge_profiling.callbacks.lightning_api import UNKNOWN, BatchSource
from lightning_forge_profiling.plain_text import name_of

_AGREED_WITHIN: Final = timedelta(seconds=60)  # ranks begin a loop together; one that does not is not profiled

_runs = count()  # the loops of this process, by which ranks find what rank 0 says of the same one


class PlainLoop:
    """The strategy: device, ranks, and a broadcast through the store of the process group, without a collective."""

    def __init__(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank, self.world_size = 0, 1
        if distributed:
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.root_device = _device()
        self.model = Trained()
        self.distributed_sampler_kwargs = {"num_replicas": self.world_size}
        self.process_group_backend = torch.distributed.get_backend() if distributed else None
        self._run, self._said = next(_runs), 0

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0. Raises if it does not come in time."""
        if self.world_size == 1:
            return value
        store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public way to the group's)
        key = f"forge-profiling/{self._run}.{self._said}"
        self._said += 1
        if self.rank == 0:
            store.set(key, pickle.dumps(value))  # type: ignore[arg-type]
            return value
        store.wait([key], _AGREED_WITHIN)
        return pickle.loads(store.get(key))  # noqa: S301  (of the same job, as `broadcast_object_list`)


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


class Loaders:
    """The loaders of a loop, mostly one, as their iterators show them, and the iterators that live."""

    def __init__(self) -> None:
        self.flattened: list[Any] = []
        self.iterators: list[Any] = []  # weak references

    @property
    def _iterator(self) -> SimpleNamespace:
        alive = (reference() for reference in self.iterators)
        return SimpleNamespace(iterators=[each for each in alive if each is not None])


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
        collate_fn=iterator._collate_fn,  # noqa: SLF001
        batch_sampler=sampler if batches else None,
        sampler=getattr(sampler, "sampler", sampler) if batches else sampler,
        batch_size=sampler.batch_size if batches and isinstance(sampler, BatchSampler) else None,
    )
    return loader


class _Loop:
    """A loop or connector of Lightning's, whose methods the monitor wraps to learn that they are called."""

    batch_source: BatchSource
    _batches_that_stepped: int

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def teardown(self) -> None:
        """The end of a fit that failed."""


class _NoProfiler:
    """A Trainer without a profiler has one too."""

    def describe(self) -> None:
        """The end of a fit."""


def model_name(trainer: Any) -> str:
    """The class of the module that a Trainer fits; "" in a plain loop, which does not show it."""
    return "" if isinstance(trainer, LoopTrainer) else name_of(trainer.lightning_module)


class LoopTrainer:
    """The attributes of a Trainer that the callbacks read, and the counts of the loop's steps."""

    sanity_checking = fast_dev_run = should_stop = received_sigterm = is_last_batch = False
    max_steps, max_epochs, current_epoch, num_training_batches = -1, None, 0, inf
    log_every_n_steps = accumulate_grad_batches = 1
    datamodule = None
    ckpt_path = ""
    loggers = checkpoint_callbacks = ()

    def __init__(self, callbacks: Sequence[Any], folder: str | os.PathLike[str] | None) -> None:
        self.callbacks = callbacks
        self.default_root_dir = os.fspath(folder or Path.cwd())
        self.strategy = PlainLoop()
        self.world_size, self.global_rank = self.strategy.world_size, self.strategy.rank
        self.is_global_zero = self.global_rank == 0
        self.num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.lightning_module: Any = self.strategy.model
        self.accelerator = type(f"{self.strategy.root_device.type.upper()}Accelerator", (), {})()  # as Lightning's
        self.profiler: Any = _NoProfiler()
        self.precision_plugin = SimpleNamespace(precision=UNKNOWN)
        self.state = SimpleNamespace(fn="fit")
        self.loaders, self.validation_loaders = Loaders(), Loaders()
        self.num_val_batches = [inf]
        self.updates = SimpleNamespace(completed=0)
        counts = {"total": SimpleNamespace(ready=0), "current": SimpleNamespace(ready=0)}
        self._progress = SimpleNamespace(is_last_batch=False, **counts)
        self._epoch = _Loop(
            batch_progress=self._progress,
            manual_optimization=SimpleNamespace(optim_step_progress=SimpleNamespace(total=self.updates)),
            val_loop=_Loop(_combined_loader=self.validation_loaders),
            _batches_that_stepped=0,
            _results=_Loop(),
        )
        self.fit_loop = _Loop(
            epoch_loop=self._epoch,
            _combined_loader=self.loaders,
            _data_fetcher=None,
            _should_accumulate=bool,
            batch_source=BatchSource(()),
        )
        self._checkpoint_connector, self._signal_connector = _Loop(), _Loop()
        self._logger_connector = _Loop(_progress_bar_metrics={})

    @property
    def global_step(self) -> int:
        """How often an optimizer has updated weights."""
        return int(self.updates.completed)

    @property
    def optimizers(self) -> list[Any]:
        """The loop's optimizers."""
        return list(self.strategy.model.optimizers.values())

    def validates_on(self, iterator: Any) -> None:
        """Validation reads this iterator of a DataLoader."""
        self.validation_loaders.flattened = [loader_of(iterator)]

    def count_step(self, source: BatchSource, *, ends_epoch: bool) -> None:
        """A step is about to end, whose batch comes from there."""
        self._progress.total.ready += 1
        self._progress.is_last_batch = ends_epoch
        self.fit_loop.batch_source = source

    def step_ended(self) -> None:
        """A step has ended: further log entries are of the next one."""
        self._epoch._batches_that_stepped += 1  # noqa: SLF001

    def failure_is_over(self) -> None:
        """What a fit that failed does last."""
        self._signal_connector.teardown()
