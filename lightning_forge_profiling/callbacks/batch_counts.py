"""Samples, tokens and FLOPs of each batch."""

import weakref
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_forge_profiling.callbacks.batch_size import BatchSize, UnknownBatchSizeError
from lightning_forge_profiling.callbacks.lightning_api import BatchSource, LightningModule, Trainer, batch_source
from lightning_forge_profiling.names import function_part
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import StepWork

_log = plain_logger(__name__)

FlopsPerBatch: TypeAlias = float | Callable[[Any], float] | None

_SAMPLES = "samples"
_MODULE_ATTRIBUTE = "flops_per_batch"


class BatchCounter:
    """Counts the samples and tokens of each batch, with the user's functions; a failing one is logged."""

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        ledger: LedgerClock | None = None,
        loop: str = "",
    ) -> None:
        self._batch_size_fn = batch_size_fn
        self._batch_size: BatchSize | None = None
        self._tokens_fn = tokens_fn
        self._ledger, self._loop = ledger, loop
        self._problems: dict[str, tuple[str, int]] = {}

    def samples(self, batch: Any, source: Callable[[], BatchSource]) -> float | None:
        """Samples in a batch; None if unknown."""
        if self._batch_size_fn is not None:
            return self._count("batch_size_fn", self._batch_size_fn, batch, function_part("batch_size_fn", self._loop))
        if _SAMPLES in self._problems:
            return None
        known, counter = source(), self._batch_size
        if counter is None or known.loaders != counter.loaders:
            counter = self._batch_size = BatchSize(known.loaders)
        return self._count(_SAMPLES, partial(counter, source=known), batch)

    def tokens(self, batch: Any) -> float | None:
        """Tokens in a batch; None if they are not counted."""
        if self._tokens_fn is None:
            return None
        return self._count("tokens_fn", self._tokens_fn, batch, function_part("tokens_fn", self._loop))

    def _count(self, name: str, function: Callable[[Any], float | None], batch: Any, part: str = "") -> float | None:
        """The result of `function` for the batch; None, with a warning the first time, if it is not a usable number."""
        if batch is None:
            return 0.0
        problem, timed = "", self._ledger if part else None
        if timed is not None:
            timed.enter(part)
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
        finally:
            if timed is not None:
                timed.exit(part)
        self._note(name, problem)
        return None

    def _note(self, name: str, problem: str) -> None:
        first, batches = self._problems.get(name, (problem, 0))  # a message may differ each step
        if not batches:
            of, steps = (f" of {self._loop}", "") if self._loop else ("", "; steps per second are")
            _log.warning("%s. That rate%s is not logged%s.", problem, of, steps)
        self._problems[name] = first, batches + 1


class WorkCounter(BatchCounter):
    """Counts the samples, tokens and FLOPs of each training batch."""

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        flops_per_batch: FlopsPerBatch,
        module: LightningModule,
        ledger: LedgerClock | None = None,
    ) -> None:
        super().__init__(batch_size_fn, tokens_fn, ledger)
        self._flops = _flops_function(flops_per_batch, module)
        self._module, self._began = weakref.ref(module), False
        self._batches = 0

    @property
    def counts_flops(self) -> bool:
        """Whether the FLOPs of a batch are given."""
        return self._flops is not None

    @property
    def calls_user(self) -> bool:
        """Whether a function of the user's is called for each batch."""
        return bool(self._batch_size_fn or self._tokens_fn or (self._flops is not None and self._flops.part))

    @property
    def flops_problem(self) -> str:
        """Why the FLOPs of the first batch without a usable number are unknown; "" if there is no such batch."""
        problem, batches = self._problems.get("" if self._flops is None else self._flops.name, ("", 0))
        return f"{problem} (for {batches} of {self._batches} batches)" if problem else ""

    def count(self, batch: Any, trainer: Trainer, *, optimizer_steps: int, ends_cycle: bool) -> StepWork:
        """Samples, tokens and FLOPs of one step."""
        if not self._began:
            self._began = True
            if self._flops is None:  # the module may have learnt it since the callbacks' hooks came
                self._flops = _flops_function(None, self._module())
        self._batches += 1
        flops = self._flops
        return StepWork(
            samples=self.samples(batch, partial(batch_source, trainer)),
            tokens=self.tokens(batch),
            optimizer_steps=optimizer_steps,
            flops=None if flops is None else self._count(flops.name, flops.function, batch, flops.part),
            ends_cycle=ends_cycle,
        )


class _Flops(NamedTuple):
    """The function that gives the FLOPs of a batch, its name, and its part of the ledger if it is the user's."""

    name: str
    function: Callable[[Any], float | None]
    part: str = ""


def _flops_function(given: FlopsPerBatch, module: LightningModule | None) -> _Flops | None:
    if callable(given):
        return _Flops("flops_per_batch", given, function_part("flops_per_batch"))
    if given is not None:
        return _Flops("flops_per_batch", lambda _batch: given)
    if _MODULE_ATTRIBUTE in dir(module):  # hasattr would run a property, which may not be ready yet
        # read each time, as Lightning's ThroughputMonitor does: a property may follow the batch
        held: Callable[[], Any] = weakref.ref(module)
        computes = isinstance(getattr(type(module), _MODULE_ATTRIBUTE, None), property)
        return _Flops(
            f"{type(module).__name__}.flops_per_batch",
            lambda _batch: held().flops_per_batch,
            f"module/{_MODULE_ATTRIBUTE}" if computes else "",
        )
    return None
