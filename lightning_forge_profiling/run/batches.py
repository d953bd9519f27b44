"""Samples, tokens and FLOPs of each batch."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from math import isfinite
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lightning_forge_profiling.names import function_part
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.fit_settings import FlopsPerBatch
from lightning_forge_profiling.run.training import BatchSource, Training
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.steps import StepWork

# how deep, and in how many parts of each container, a batch is searched for its first tensor
_DEPTH: Final = 4
_WIDTH: Final = 16

_Path = tuple[Callable[[Any], Any], ...]  # reaches a part of a batch, container by container


class BatchSize:
    """Counts samples: the first dimension of a batch's first tensor, unless it contradicts the loader's batch size."""

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self._named: int | None = None  # the loader's batch size
        self.reads: bool | None = None  # whether batches are read; None before the first
        self._path: _Path = ()

    def __call__(self, batch: Any, *, one_a_step: bool) -> int:
        """The number of samples in a batch."""
        if not one_a_step:
            raise ValueError("training_step does not take exactly one batch a step from its dataloader_iter")
        if self.reads is None:
            self.reads = self._shown_by(batch)
        named = self._named
        if self.reads:
            size = self.at_path(batch)
            size = self._read(batch) if size is None else size
            if size is not None and (named is None or size <= named):
                return size
            self.reads = False  # it was equal by chance, as the length of a sequence may be
        if named is None:
            kind = type(self.loaders[0]).__name__
            raise ValueError(f"the loader ({kind}) has no batch_size, and the batch no tensor")
        return named

    def _shown_by(self, first: Any) -> bool:
        """Whether the first tensor of the first batch has the loader's batch size as its first dimension."""
        if len(self.loaders) != 1:
            raise ValueError(f"it comes from {len(self.loaders)} loaders")
        [loader] = self.loaders
        sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
        self._named = named = next((size for size in sizes if isinstance(size, int) and size > 0), None)
        if named is None:
            return True
        data_set = length_of(getattr(loader, "sampler", None))  # may be smaller than a batch
        return self._read(first) == min(named, data_set or named)

    def at_path(self, batch: Any) -> int | None:
        """The first dimension of the tensor where the first one was in the batch before; None without one there."""
        try:
            for get in self._path:
                batch = get(batch)
            return batch.shape[0]  # type: ignore[no-any-return]
        except Exception:  # whatever a batch of the user's raises
            return None

    def _read(self, batch: Any) -> int | None:
        """The first dimension of the first tensor; None without one."""
        path = _path_to_tensor(batch)
        if path is None:
            return None
        self._path = path
        return self.at_path(batch)


def length_of(sized: Any) -> int | None:
    """How many a sampler or an iterator of a loader has to give; None if only a fetch finds out."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _path_to_tensor(part: Any, depth: int = _DEPTH) -> _Path | None:
    """The way to the first tensor in a part of a batch, depth-first; a scalar is not one."""
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple) and shape:
        return ()
    for get, each in islice(_inside(part), _WIDTH) if depth else ():
        if (path := _path_to_tensor(each, depth - 1)) is not None:
            return get, *path
    return None


def _inside(part: Any) -> Iterable[tuple[Callable[[Any], Any], Any]]:
    """The parts of a container, and how to reach them."""
    if isinstance(part, Mapping):
        return ((itemgetter(key), each) for key, each in part.items())
    if isinstance(part, (list, tuple)):
        return ((itemgetter(number), each) for number, each in enumerate(part))
    # a dataclass, with or without slots, or what a user calls a batch
    declared = [field.name for field in fields(part)] if is_dataclass(part) else ()
    names = dict.fromkeys((*declared, *getattr(part, "__dict__", ())))
    return ((attrgetter(name), getattr(part, name, None)) for name in names)


_log = plain_logger(__name__)

_SAMPLES: Final = "samples"
_REMEDY: Final = "Give ThroughputCallback a batch_size_fn"
_MODULE_ATTRIBUTE: Final = "flops_per_batch"

UNSEEN: Final = object()
"""A batch that a plain loop has neither fetched from a DataLoader nor given to its step."""


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
        self._same = False  # whether the loaders are those of all batches of an epoch

    def samples(self, batch: Any, source: Callable[..., BatchSource], *of: Any) -> float | None:
        """Samples in a batch, whose loaders are `source(*of)`; None if unknown."""
        if self._batch_size_fn is not None:
            return self._count("batch_size_fn", self._batch_size_fn, batch, function_part("batch_size_fn", self._loop))
        if _SAMPLES in self._problems:
            return None
        known, counter = source(*of), self._batch_size
        self._same = known.same
        if known.samples is not None or batch is UNSEEN or not known.loaders:
            return known.samples
        if counter is None or known.loaders != counter.loaders:
            counter = self._batch_size = BatchSize(known.loaders)
        try:  # without the checks of `_count`, which take longer
            return 0.0 if batch is None else counter(batch, one_a_step=known.one_a_step)
        except Exception as exc:
            self._note(_SAMPLES, f"The number of samples in a batch is unknown: {exc}. {_REMEDY}")
            return None

    def tokens(self, batch: Any) -> float | None:
        """Tokens in a batch; None if they are not counted."""
        if self._tokens_fn is None:
            return None
        return self._count("tokens_fn", self._tokens_fn, batch, function_part("tokens_fn", self._loop))

    def _count(self, name: str, function: Callable[[Any], float | None], batch: Any, part: str = "") -> float | None:
        """The result of `function` for the batch; None, with a warning the first time, if it is not a usable number."""
        if batch is None:
            return 0.0
        if batch is UNSEEN:
            self._note(name, f"{name} needs the batch, which no DataLoader gave: pass it, `with step(batch=batch):`")
            return None
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


_LONGEST_CYCLE: Final = 64  # if the module accumulates gradients by itself, its first cycle ends within this many steps


class WorkCounter(BatchCounter):
    """Counts the samples, tokens, FLOPs and weight updates of each training batch."""

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        flops_per_batch: FlopsPerBatch,
        module: nn.Module,
        ledger: LedgerClock | None = None,
        *,
        updates: int = 0,
        automatic: bool = False,
    ) -> None:
        super().__init__(batch_size_fn, tokens_fn, ledger)
        self._automatic = automatic
        self._updates = updates
        self._flops = flops = _flops_function(flops_per_batch, module)
        # whether a function of the user's is called for each batch
        self.calls_user = bool(batch_size_fn or tokens_fn or (flops is not None and flops.part))
        self._module = weakref.ref(module)
        self._batches = 0
        self._latest = StepWork()
        self._quick = False  # whether a batch of as many samples that changes the weights is the work of the latest

    @property
    def counts_flops(self) -> bool:
        """Whether the FLOPs of a batch are given."""
        return self._flops is not None

    @property
    def flops_problem(self) -> str:
        """Why the FLOPs of the first batch without a usable number are unknown; "" if there is no such batch."""
        problem, batches = self._problems.get("" if self._flops is None else self._flops.name, ("", 0))
        return f"{problem} (for {batches} of {self._batches} batches)" if problem else ""

    def count(self, batch: Any, training: Training, step: int, *, updates: int) -> StepWork:
        """The work of one step, after which the weights have been updated so often in all."""
        if self._flops is None and not self._batches:  # the module may have learnt it since the callbacks' hooks came
            self._flops = flops = _flops_function(None, self._module())
            self.calls_user = self.calls_user or (flops is not None and bool(flops.part))
        self._batches += 1
        flops, latest = self._flops, self._latest
        changed, self._updates = updates != self._updates, updates  # with one optimizer or more
        size = self._batch_size if self._quick and changed else None
        if size is not None and size.at_path(batch) == latest.samples:
            return latest
        work = (
            self.samples(batch, training.batch_source),
            None if self._tokens_fn is None else self.tokens(batch),
            int(changed),
            None if flops is None else self._count(flops.name, flops.function, batch, flops.part),
            changed or self._ends_cycle(training, step),
        )
        if work != latest:  # mostly it is that of the step before
            self._latest = latest = StepWork(*work)
        of = self._batch_size
        reads = of is not None and bool(of.reads) and latest.samples is not None
        self._quick = reads and self._same and changed and flops is None and not self.calls_user
        return latest

    def ends_epoch(self) -> None:
        """The next batch may be another loader's."""
        self._quick = False

    def _ends_cycle(self, training: Training, step: int) -> bool:
        """Whether a batch without an update is the last of an accumulation cycle: each is, without accumulation."""
        # a module may step an optimizer that Lightning does not know of
        each_changes = self._automatic and training.accumulated == 1
        return each_changes or (not self._updates and step >= _LONGEST_CYCLE)


class _Flops(NamedTuple):
    """The function that gives the FLOPs of a batch, its name, and its part of the ledger if it is the user's."""

    name: str
    function: Callable[[Any], float | None]
    part: str = ""


def _flops_function(given: FlopsPerBatch, module: nn.Module | None) -> _Flops | None:
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
