"""Samples, tokens and FLOPs of each batch."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from math import isfinite
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_forge_profiling.callbacks.lightning_api import (
    BatchSource,
    LightningModule,
    Trainer,
    batch_source,
    combined_loader,
)
from lightning_forge_profiling.names import function_part
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.timing.ledger import LedgerClock
from lightning_forge_profiling.timing.rates import StepWork

# how deep, and at how many parts of each container, sizes are looked for in the first batch
_DEPTH: Final = 4
_LOOKED_AT: Final = 64
_FOLLOWED: Final = 8  # how many of the sizes found there are read of every batch
# a size that matches the batch size in this many batches by chance is a constant, such as a number of channels
_FIRST_BATCHES: Final = 8

_Size = Callable[[Any], int]  # reads one size off a batch


class UnseenBatchError(Exception):
    """A function of the batch has none; the message says what to do."""


class UnknownBatchSizeError(UnseenBatchError):
    """The samples of a batch cannot be counted, for the reason given."""

    def __str__(self) -> str:
        """The reason, and what to do."""
        return f"The number of samples in a batch is unknown: {self.args[0]}. Give ThroughputCallback a batch_size_fn"


class _Known(NamedTuple):
    """The batch size of a loader, and which sizes its batches may have."""

    # samples in all of them but the last; None where they differ and the first dimension of every tensor tells
    size: int | None
    first: int | None  # samples in the first: fewer where the whole data set is smaller
    streams: bool  # whether a short batch may come before the last
    unnamed: str = ""  # class of a loader that names no batch size: then the tensors of a batch have to agree on one

    def allows(self, size: int, *, ends_epoch: bool) -> bool:
        """Whether a batch may have this many samples."""
        return self.size is None or size == self.size or (size < self.size and (self.streams or ends_epoch))


class BatchSize:
    """Counts the samples of batches where the first one shows the loader's batch size, else they are unknown."""

    # that is a tensor's first dimension, or the length of a list of samples; the last batch may be shorter

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self._known: _Known | None = None
        self._sizes: list[_Size] = []
        self._batches = 0

    def __call__(self, batch: Any, source: BatchSource) -> int:
        """The number of samples in a batch."""
        self._batches += 1
        if not source.one_a_step:
            raise UnknownBatchSizeError("training_step does not take exactly one batch a step from its dataloader_iter")
        if self._known is None:
            self._known = known = _known(self.loaders)
            self._sizes = _readers_of_size(batch, known)
        if len(self._sizes) > 1:
            self._sizes = self._agreeing(batch, self._known, ends_epoch=source.ends_epoch)
        size = _read(self._sizes[0], batch) if self._sizes else None
        if size is None or not self._known.allows(size, ends_epoch=source.ends_epoch):
            raise UnknownBatchSizeError(f"batch {self._batches} is not like those before it")
        return size

    def of_full(self, batch: Any) -> int | None:
        """The samples of a batch that has as many as the loader gives in all but its last; None if it has not."""
        known = self._known
        if known is None or known.size is None or known.streams or not self._sizes:
            return None
        if _read(self._sizes[0], batch) != known.size:
            return None
        self._batches += 1
        return known.size

    def _agreeing(self, batch: Any, known: _Known, *, ends_epoch: bool) -> list[_Size]:
        """Where the sizes of a batch are not all the same, those that are of its samples."""
        read = [(where, size) for where in self._sizes if (size := _read(where, batch)) is not None]
        if len({size for _, size in read}) == 1:
            return [where for where, _ in read]
        if known.size is None or (known.streams and self._batches <= _FIRST_BATCHES):
            return []
        # in a short batch what is as large as ever is something else; in a full one what changed was the same by chance
        short = ends_epoch or known.streams
        read = [(where, size) for where, size in read if (size < known.size if short else size == known.size)]
        return [where for where, _ in read] if len({size for _, size in read}) == 1 else []


def _known(loaders: Sequence[Any]) -> _Known:
    if len(loaders) != 1:
        raise UnknownBatchSizeError(f"it comes from {len(loaders)} loaders")
    loader = loaders[0]
    sampler = getattr(loader, "batch_sampler", None)
    streams = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
    size = getattr(loader, "batch_size", None)
    if size is None and isinstance(loader, DataLoader) and sampler is not None and loader.collate_fn is default_collate:
        return _Known(None, None, streams)  # it stacks the samples along a new first dimension
    size = getattr(sampler, "batch_size", None) if size is None else size
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return _Known(size, size if streams else min(size, length_of(loader.sampler) or size), streams)
    return _Known(None, None, streams=True, unnamed=type(loader).__name__)


def length_of(sized: Any) -> int | None:
    """How many a sampler or an iterator of a loader has to give; None if only a fetch finds out."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _readers_of_size(batch: Any, known: _Known) -> list[_Size]:
    """What reads the loader's batch size off the first batch."""
    if known.unnamed and not _agree(batch):
        raise UnknownBatchSizeError(
            f"the loader ({known.unnamed}) has no batch_size, and the first batch has no two tensors of different "
            "shapes with the same first dimension, or others without it"
        )
    sizes = list(islice(_sizes(batch, known.first, _DEPTH), _LOOKED_AT * _FOLLOWED))
    readers = [where for where, size in sizes if known.first in {None, size}][:_FOLLOWED]
    if readers:
        return readers
    shown = ", ".join(dict.fromkeys(str(size) for _, size in sizes[:_FOLLOWED])) or "none"
    knows = " has no batch_size" if known.size is None else f"'s batch_size is {known.size}"
    raise UnknownBatchSizeError(
        f"the DataLoader{knows}, and the first batch has no tensor or list of that length (lengths: {shown})"
    )


def _agree(batch: Any) -> bool:
    """Whether all tensors of a batch have the same first dimension, and not all the same shape, as of one sample."""
    shapes = list(islice(_shapes(batch, _DEPTH), _LOOKED_AT))
    return len(set(shapes)) > 1 and len({shape[:1] for shape in shapes}) == 1


def _shapes(part: Any, depth: int) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors in a part of a batch; () for a list of tensors that may each be one sample."""
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple):
        yield shape
    elif depth:
        parts = [each for _, each in islice(_inside(part), _LOOKED_AT)]
        dimensions = {len(getattr(each, "shape", ())) for each in parts}
        if type(part) in {list, tuple} and len(parts) > 1 and len(dimensions) == 1 and dimensions != {0}:
            yield ()
        for each in parts:
            yield from _shapes(each, depth - 1)


def _sizes(part: Any, size: int | None, depth: int) -> Iterator[tuple[_Size, int]]:
    """First dimensions and lengths in a part of a batch, and how to read them."""
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple):
        if shape:
            yield _first_dimension, shape[0]
        return
    if _holds_samples(part, size):
        yield len, len(part)
        if not all(_leads_with(each, size) for each in part):
            return  # what each sample looks like says nothing of the batch
    for get, each in islice(_inside(part), _LOOKED_AT) if depth else ():
        for where, length in _sizes(each, size, depth - 1):
            yield partial(_within, get, where), length


def _inside(part: Any) -> Iterable[tuple[Callable[[Any], Any], Any]]:
    """The parts of a container, and how to reach them."""
    if isinstance(part, Mapping):
        return ((itemgetter(key), each) for key, each in part.items())
    if isinstance(part, (list, tuple)):
        return ((itemgetter(number), each) for number, each in enumerate(part))
    # a dataclass, with or without slots, or what a user calls a batch
    declared = (field.name for field in fields(part)) if is_dataclass(part) else ()
    names = dict.fromkeys((*declared, *getattr(part, "__dict__", ())))
    return ((attrgetter(name), getattr(part, name, None)) for name in names)


def _holds_samples(part: Any, size: int | None) -> bool:
    """Whether a list may be one of samples: as many as there are in a batch, all of a kind."""
    if type(part) not in {list, tuple} or not part or (size is not None and len(part) != size):
        return False
    kinds = {(type(each), len(getattr(each, "shape", ()))) for each in part[:_LOOKED_AT]}
    return len(kinds) == 1 and (size is not None or isinstance(part[0], (str, bytes)))


def _leads_with(part: Any, size: int | None) -> bool:
    shape = getattr(part, "shape", None)
    return isinstance(shape, tuple) and shape[:1] == (size,)


def _first_dimension(tensor: Any) -> int:
    return int(tensor.shape[0])


def _within(get: Callable[[Any], Any], where: _Size, part: Any) -> int:
    return where(get(part))


def _read(where: _Size, batch: Any) -> int | None:
    try:
        return where(batch)
    except (AttributeError, IndexError, KeyError, TypeError):  # the batch lacks what another has
        return None


_log = plain_logger(__name__)

FlopsPerBatch: TypeAlias = float | Callable[[Any], float] | None

_SAMPLES = "samples"
_MODULE_ATTRIBUTE = "flops_per_batch"

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

    def samples(self, batch: Any, source: Callable[[], BatchSource]) -> float | None:
        """Samples in a batch; None if unknown."""
        if self._batch_size_fn is not None:
            return self._count("batch_size_fn", self._batch_size_fn, batch, function_part("batch_size_fn", self._loop))
        if _SAMPLES in self._problems:
            return None
        known, counter = source(), self._batch_size
        if known.samples is not None or batch is UNSEEN or not known.loaders:
            return known.samples
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
            counted = _call(name, function, batch)
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
        except UnseenBatchError as exc:
            problem = str(exc)
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


def _call(name: str, function: Callable[[Any], float | None], batch: Any) -> float | None:
    if batch is UNSEEN:
        raise UnseenBatchError(f"{name} needs the batch, which no DataLoader gave: pass it, `with step(batch=batch):`")
    return function(batch)


_LONGEST_CYCLE: Final = 64  # if the module accumulates gradients by itself, its first cycle ends within this many steps


class AccumulationCycles:
    """Follows gradient accumulation from batch to batch."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def after_batch(self, updates: int, step: int, *, each_changes: bool) -> tuple[bool, bool]:
        """Whether a batch changed the weights, with one optimizer or more, and whether it was the last of its cycle."""
        changed, self._updates = updates != self._updates, updates
        # a module may step an optimizer that Lightning does not know of
        return changed, changed or each_changes or (not updates and step >= _LONGEST_CYCLE)


class WorkCounter(BatchCounter):
    """Counts the samples, tokens, FLOPs and weight updates of each training batch."""

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None,
        tokens_fn: Callable[[Any], float] | None,
        flops_per_batch: FlopsPerBatch,
        module: LightningModule,
        ledger: LedgerClock | None = None,
        *,
        updates: int = 0,
    ) -> None:
        super().__init__(batch_size_fn, tokens_fn, ledger)
        self._cycles = AccumulationCycles(updates)
        self._flops = _flops_function(flops_per_batch, module)
        self._module, self._began = weakref.ref(module), False
        self._batches = 0
        self._latest = StepWork()
        self._counted_loader: object = None  # of the batches before, as long as there is one in each step
        self.calls_user = self._calls_user()  # whether a function of the user's is called for each batch

    @property
    def counts_flops(self) -> bool:
        """Whether the FLOPs of a batch are given."""
        return self._flops is not None

    def _calls_user(self) -> bool:
        return bool(self._batch_size_fn or self._tokens_fn or (self._flops is not None and self._flops.part))

    @property
    def flops_problem(self) -> str:
        """Why the FLOPs of the first batch without a usable number are unknown; "" if there is no such batch."""
        problem, batches = self._problems.get("" if self._flops is None else self._flops.name, ("", 0))
        return f"{problem} (for {batches} of {self._batches} batches)" if problem else ""

    def count(
        self, batch: Any, trainer: Trainer, step: int, *, updates: int, each_changes: bool, ends_epoch: bool
    ) -> StepWork:
        """The work of one step, after which the weights have been updated so often in all."""
        if not self._began:
            self._began = True
            if self._flops is None:  # the module may have learnt it since the callbacks' hooks came
                self._flops = _flops_function(None, self._module())
                self.calls_user = self._calls_user()
        self._batches += 1
        flops = self._flops
        changed, ends_cycle = self._cycles.after_batch(updates, step, each_changes=each_changes)
        work = (
            self._samples(batch, trainer, ends_epoch=ends_epoch),
            None if self._tokens_fn is None else self.tokens(batch),
            int(changed),
            None if flops is None else self._count(flops.name, flops.function, batch, flops.part),
            ends_cycle,
        )
        if work != self._latest:  # mostly it is that of the step before
            self._latest = StepWork(*work)
        return self._latest

    def _samples(self, batch: Any, trainer: Trainer, *, ends_epoch: bool) -> float | None:
        """Samples in a batch, at a fifth of the cost if it is like the one before it: this runs each step."""
        if _SAMPLES in self._problems:
            return None
        if self._batch_size is not None and not ends_epoch and batch is not None:
            loader = combined_loader(trainer)
            if loader is not None and loader is self._counted_loader:
                samples = self._batch_size.of_full(batch)
                if samples is not None:
                    return samples
            self._counted_loader = loader
        return self.samples(batch, partial(batch_source, trainer))


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
