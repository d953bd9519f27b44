"""What watches a training asks about it. The adapters of Lightning and of plain loops answer."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from lightning_forge_profiling.diagnosis.ranks import Waits
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.schema import RunTiming
from lightning_forge_profiling.timing.ledger import LedgerClock

UNKNOWN: Final = "unknown type"
"""The type that a plain loop computes in: its `torch.autocast` is not visible."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not change while a fit trains."""

    rank: int
    world_size: int
    ranks_on_host: int
    replicas: int  # data-parallel ones; tensor-parallel ranks share one
    device: torch.device
    folder: str  # for what no logger has a folder for
    is_trial: bool = False  # such as `fast_dev_run`, of which nothing is recorded
    trainer: Literal["lightning", "transformers", "loop"] = "lightning"

    @property
    def is_zero(self) -> bool:
        """Whether this is rank 0, which prints and logs."""
        return self.rank == 0

    @property
    def devices_per_batch(self) -> int:
        """How many ranks share a batch, as tensor-parallel ones do."""
        return max(self.world_size // self.replicas, 1)

    @property
    def device_name(self) -> str:
        """The device, in words."""
        device = self.device
        return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)

    @property
    def gpu_uuid(self) -> str:
        """UUID of the GPU; "" without one."""
        cuda = self.device.type == "cuda"
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")) if cuda else ""


class BatchesAhead(NamedTuple):
    """What a fit has before it when its training loop begins."""

    of_fit: int | None  # batches until `max_steps` or `max_epochs`; None if unlimited or unknown
    of_epoch: int | None  # batches of an epoch; None for a loader without a length
    epoch: int  # number of the epoch that it begins in
    batch: int  # number of the batch of that epoch that it begins with


class StepProgress(NamedTuple):
    """The loop's own progress counters; they keep counting with it."""

    # its `is_last_batch` tells whether the batch that has just ended is the epoch's last, its `total.ready` is the
    # number of the batch under way, which counts on over epochs and also where a batch is skipped
    batches: Any
    updates: Any  # its `completed` is the number of optimizer steps, as `trainer.global_step`


class BatchSource(NamedTuple):
    """The loaders that a training batch comes from."""

    loaders: Sequence[Any]  # all training loaders, mostly one DataLoader
    one_a_step: bool = True  # whether it is all that its step fetched, as always where Lightning does the fetching
    samples: float | None = None  # in the batch, if the loop says so
    same: bool = False  # whether it is the source of all batches of an epoch


class Watching(Protocol):
    """What was put around a training's own methods."""

    def release(self) -> None:
        """Restore them."""


class Boundaries:
    """Where the boundaries of steps and regions are announced: here by a loop, which calls the step timer itself."""

    def __init__(self, step_timer: StepTimer) -> None:
        self._step_timer = step_timer

    def follow(self) -> None:
        """Stay there, also if the user has replaced what announces them."""

    def validation_ends(self) -> None:
        """Validation is over, and its region too unless that is announced."""
        self._step_timer.regions.exit_validation()

    def saw_step(self, *, trained: bool) -> bool:
        """Whether all boundaries of the step that has just ended were seen."""
        self._step_timer.regions.now.saw_training_step = False
        return True

    def release(self) -> None:
        """Leave."""


class Ending:
    """What is timed before and after the training loop: nothing, in a plain loop."""

    failure_over: Callable[[], object] = staticmethod(lambda: None)

    def install(self) -> None:
        """Stay there, also if the user has replaced what announces hooks."""

    def follow_failure(self, over: Callable[[], object]) -> None:
        """Call `over` when a failing fit has done all that it does."""
        self.failure_over = over

    def release(self) -> None:
        """Leave."""


class WatchedWaits(Protocol):
    """Where waits for other ranks are measured."""

    def measured(self, timing: RunTiming) -> Waits:
        """The waits per step, as far as they are measured."""

    def close(self) -> None:
        """Restore what was wrapped."""


class Parts(Protocol):
    """Enters parts of the ledger, on the training's thread."""

    def inside(self, part: str, around: tuple[str, ...] = (), *, counts: bool = True) -> AbstractContextManager[None]:
        """A part, but inside of a hook only where `around` names its kind: else the time is the hook's."""

    def outside_hook(self, hook: str) -> AbstractContextManager[None]:
        """What a hook of the module lets the training do as if without that hook."""


class Training(ABC):
    """A Trainer's fit or a plain loop; what is not overridden is what a plain loop does not show."""

    facts: Facts
    module: Any  # the user's

    @property
    def model(self) -> nn.Module:
        """The module as it is trained, which a strategy may have wrapped."""
        model: nn.Module = self.module
        return model

    @property
    def model_name(self) -> str:
        """The class of the module; "" if unknown."""
        return ""

    @property
    def automatic(self) -> bool:
        """Whether the training itself calls backward and the optimizer."""
        return False

    def objects(self) -> Iterator[tuple[str, Any]]:
        """The user's objects that live as long as it, and the script, by what the code calls them."""
        yield "", sys.modules["__main__"]

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Any]:
        """The optimizers."""

    @property
    def loggers(self) -> Sequence[Any]:
        """The user's loggers."""
        return ()

    @property
    def checkpoint(self) -> str:
        """Path of the checkpoint that it continues from; "" without one."""
        return ""

    @property
    @abstractmethod
    def updates(self) -> int:
        """How often the weights were updated, in earlier fits of a checkpoint too."""

    @property
    def accumulated(self) -> int:
        """Batches to an update; it may change while the fit trains."""
        return 1

    @abstractmethod
    def described(self) -> Mapping[str, Any]:
        """The settings that the record names."""

    def dtype(self) -> str:
        """The type that matrix products compute in."""
        return UNKNOWN

    def profiler_taken(self) -> bool:
        """Whether the user's own profiler is `torch.profiler`, of which there is one at a time."""
        return False

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """The value of rank 0: a collective."""

    # -- loaders -------------------------------------------------------------------------------------------------

    @abstractmethod
    def loaders(self, *, validation: bool = False) -> Sequence[Any]:
        """The loaders for training or validation, mostly one DataLoader; empty before they are there."""

    @abstractmethod
    def iterators(self) -> Sequence[Any]:
        """The iterators of the training loaders that live."""

    def validation_batches(self) -> float:
        """Batches of a validation run; infinite if unknown."""
        return inf

    def worker_processes(self) -> list[int]:
        """Process ids of the training loaders' workers that are running."""
        return [worker.pid for each in self.iterators() for worker in getattr(each, "_workers", ()) if worker.pid]

    @abstractmethod
    def batch_source(self) -> BatchSource:
        """The loaders that the batch that has just ended comes from."""

    def has_unsized_loader(self) -> bool:
        """Whether only a fetch finds out that the training loader has no more batches."""
        return False

    # -- steps ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def progress(self) -> StepProgress:
        """The counters of the training loop."""

    def ahead(self) -> BatchesAhead:
        """The batches that it will train, as far as that is known when it begins."""
        return BatchesAhead(None, None, 0, 0)

    def pauses(self) -> Callable[[int], bool]:
        """Whether validation, the end of an epoch or a checkpoint comes before a step, as far as settings tell."""
        return lambda _step: False

    def may_be_last(self) -> bool:
        """Whether the batch that has just ended may have been the fit's last."""
        return False

    def logs_now(self, every_n_steps: int | None) -> bool:
        """Whether metrics are logged at the end of this batch: by the user's interval, or every so many steps."""
        interval = self.log_interval(every_n_steps)
        return bool(interval) and (self.logger_step() + 1) % interval == 0

    def log_interval(self, every_n_steps: int | None) -> int:
        """How many logged steps there are from one entry to the next."""
        return 1 if every_n_steps is None else every_n_steps

    @abstractmethod
    def logger_step(self) -> int:
        """The loggers' x-axis during a batch."""

    def show(self, metrics: Mapping[str, float]) -> None:  # noqa: B027
        """Add metrics to the progress bar."""

    # -- what is put around it -----------------------------------------------------------------------------------

    def watch(
        self,
        failed: Callable[[BaseException], object],
        validation: Callable[[], AbstractContextManager[None]],
    ) -> Sequence[Watching]:
        """Call `failed` when an exception ends the training loop, and enter `validation` around a validation run."""
        return ()

    def time_set_up(self, ledger: LedgerClock, failed: Callable[[], object]) -> Watching:
        """Enter the hooks before the training loop into the ledger; call `failed` if one raises."""
        return Ending()

    def time_calls(self, parts: Parts) -> Sequence[Watching]:
        """Enter what no hook announces into the ledger, while it trains."""
        return ()

    def time_steps(self, step_timer: StepTimer) -> Boundaries:
        """Announce the boundaries of regions to the step timer."""
        return Boundaries(step_timer)

    def time_waits(self, step_timer: StepTimer) -> WatchedWaits | None:
        """Measure waits for other ranks; None for a single one."""
        return None

    def time_ending(self, ledger: LedgerClock, over: Callable[[], object]) -> Ending:
        """Enter what follows the training loop into the ledger; call `over` when all is done."""
        return Ending()


def last_logger_step(training: Training) -> int:
    """The loggers' x-axis in the last training batch, once the training loop has ended."""
    return max(training.logger_step() - 1, 0)
