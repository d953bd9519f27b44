"""Samples, tokens and FLOPs of each batch."""

import weakref
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, TypeAlias

import torch

from lightning_forge_profiling.callbacks.batch_size import BatchSize, UnknownBatchSizeError
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, Trainer, batch_source
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.timing.rates import StepWork

_log = plain_logger(__name__)

FlopsPerBatch: TypeAlias = float | Callable[[Any], float] | None

_SAMPLES = "samples"
_MODULE_ATTRIBUTE = "flops_per_batch"


class WorkCounter:
    """Counts the samples, tokens and FLOPs of each batch, with the user's functions; a failing one is logged.

    Args:
        batch_size_fn: samples in a batch; None finds them by what the loaders know.
        tokens_fn: tokens in a batch; None counts none.
        flops_per_batch: FLOPs of a batch; None takes the module's `flops_per_batch`, if it has one.
        module: the module that is trained.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        flops_per_batch: FlopsPerBatch,
        module: LightningModule,
    ) -> None:
        self._batch_size_fn = batch_size_fn
        self._batch_size: BatchSize | None = None
        self._tokens_fn = tokens_fn
        self._flops_name, self._flops_fn = _flops_function(flops_per_batch, module)
        self._module, self._began = weakref.ref(module), False
        self._problems: dict[str, tuple[str, int]] = {}
        self._batches = 0

    @property
    def counts_flops(self) -> bool:
        """Whether the FLOPs of a batch are given."""
        return self._flops_fn is not None

    @property
    def flops_problem(self) -> str:
        """Why the FLOPs of the first batch without a usable number are unknown; "" if there is no such batch."""
        problem, batches = self._problems.get(self._flops_name, ("", 0))
        return f"{problem} (for {batches} of {self._batches} batches)" if problem else ""

    def count(self, batch: Any, trainer: Trainer, *, optimizer_steps: int, ends_cycle: bool) -> StepWork:
        """Samples, tokens and FLOPs of one step.

        Args:
            batch: its batch, as `on_train_batch_end` gets it.
            trainer: of the fit.
            optimizer_steps: 1 if the weights changed in it, else 0.
            ends_cycle: whether it is the last of an accumulation cycle.
        """
        if not self._began:
            self._began = True
            if self._flops_fn is None:  # the module may have learnt it since the callbacks' hooks came
                self._flops_name, self._flops_fn = _flops_function(None, self._module())
        self._batches += 1
        return StepWork(
            samples=self._samples(batch, trainer),
            tokens=None if self._tokens_fn is None else self._count("tokens_fn", self._tokens_fn, batch),
            optimizer_steps=optimizer_steps,
            flops=None if self._flops_fn is None else self._count(self._flops_name, self._flops_fn, batch),
            ends_cycle=ends_cycle,
        )

    def _samples(self, batch: Any, trainer: Trainer) -> float | None:
        if self._batch_size_fn is not None:
            return self._count("batch_size_fn", self._batch_size_fn, batch)
        if _SAMPLES in self._problems:
            return None
        source, counter = batch_source(trainer), self._batch_size
        if counter is None or source.loaders != counter.loaders:
            counter = self._batch_size = BatchSize(source.loaders)
        return self._count(_SAMPLES, partial(counter, source=source), batch)

    def _count(self, name: str, function: Callable[[Any], float | None], batch: Any) -> float | None:
        """The result of `function` for the batch; None, with a warning the first time, if it is not a usable number."""
        if batch is None:
            return 0.0
        problem = ""
        try:
            counted = function(batch)
            if isinstance(counted, torch.Tensor) and counted.device.type != "cpu":
                problem = f"{name} returned a tensor on the GPU; reading it would stall training every step"
            elif counted is None:
                problem = f"{name} returned None"
            elif callable(counted):
                problem = f"{name} is a method: make it a property or a number"
            elif not isfinite(number := float(counted)) or number < 0:
                problem = f"{name} returned {counted!r}"
            else:
                return number
        except UnknownBatchSizeError as exc:
            problem = f"The number of samples in a batch is unknown: {exc}. Give ThroughputCallback a batch_size_fn"
        except Exception as exc:
            problem = f"{name} raised {type(exc).__name__}: {exc}"
        first, batches = self._problems.get(name, (problem, 0))  # a message may differ each step
        if not batches:
            _log.warning("%s. That rate is not logged; steps per second are.", problem)
        self._problems[name] = first, batches + 1
        return None


def _flops_function(
    given: FlopsPerBatch, module: LightningModule | None
) -> tuple[str, Callable[[Any], float | None] | None]:
    """The function that gives the FLOPs of a batch, and its name."""
    if callable(given):
        return "flops_per_batch", given
    if given is not None:
        return "flops_per_batch", lambda _batch: given
    if _MODULE_ATTRIBUTE in dir(module):  # hasattr would run a property, which may not be ready yet
        # read each time, as Lightning's ThroughputMonitor does: a property may follow the batch
        held: Callable[[], Any] = weakref.ref(module)
        return f"{type(module).__name__}.flops_per_batch", lambda _batch: held().flops_per_batch
    return "", None
