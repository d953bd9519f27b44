"""What a plain loop calls of torch, seen without its help: DataLoader fetches, `backward`, optimizer steps."""

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Final, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_forge_profiling.callbacks.plain_training import PlainTraining, loader_of
from lightning_forge_profiling.guard import Guarded, guarded
from lightning_forge_profiling.run.batches import length_of
from lightning_forge_profiling.run.run import Run

# by module the function by which a loader moves its batch to the device
_MOVES: Final = {
    "lightning.fabric.wrappers": "move_data_to_device",
    "lightning_fabric.wrappers": "move_data_to_device",
    "accelerate.data_loader": "send_to_device",
}

_MOST_LOADERS: Final = 16  # a script may make a new loader for each epoch


class WatchedLoop(Protocol):
    """The loop that is watched."""

    training: PlainTraining
    run: Run
    in_step: bool
    validating: bool  # whether validation was found; not one that the script names

    def enter_validation(self) -> None:
        """Validation begins."""

    def leave_validation(self) -> None:
        """Validation ends."""


class Fetches(Guarded):
    """Tells the fetches of training from those of validation, which no step uses."""

    # A loader is one of training if a step uses its batch: if it is the last to be read before a step, is read inside
    # one, or its iterator is read before each of two steps in a row. Until that is known of a loader while it is known
    # of another, what it is read for is validation, and corrected if its first batch turns out to be a step's.

    called = "Watching the loop's DataLoaders"

    def __init__(self, loop: WatchedLoop) -> None:
        self._loop = loop
        self._known: dict[int, Callable[[], Any]] = {}  # references to the samplers of training loaders, by their ids
        self._of_step: list[Any] = []  # references to the samplers of the loaders of the latest step
        self._read: list[Any] = []  # the iterators that were read since the last step
        self._read_before: list[weakref.ref[Any]] = []  # and before it
        self.batch: Any = None  # the latest of training since the last step
        self._may_be_batch: Any = None  # the first of an iterator of which it is not known yet
        self._before_ns: Mapping[str, int] = {}  # of the ledger, when validation may have begun
        self.seen = 0  # how many such batches there were
        self.ended_ns = 0  # when an iterator was read last

    def trains_on(self, loader: DataLoader[Any]) -> bool:
        """Whether a loader is known to be one of training."""
        return self._is_known(_sampler(loader))

    def _is_known(self, sampler: object) -> bool:
        known = self._known.get(id(sampler))
        return known is not None and known() is sampler

    def _learn(self, iterator: Any) -> None:
        sampler, training = _sampler(iterator), self._loop.training
        if not self._is_known(sampler):
            while len(self._known) >= _MOST_LOADERS:
                del self._known[next(iter(self._known))]
            self._known[id(sampler)] = _reference(sampler)
            self._loop.run.regions.each_fetch |= length_of(iterator) is None
        if all(reference() is not iterator for reference in training.references):
            alive = (reference for reference in training.references if reference() is not None)
            training.references = [*alive, weakref.ref(iterator)]

    @guarded
    def new_iterator(self, loader: DataLoader[Any]) -> None:
        """A loader is about to make an iterator, or to reset the one that it keeps."""
        loop = self._loop
        if self._is_known(_sampler(loader)):
            if loop.validating:
                loop.leave_validation()
            loop.run.regions.enter_loader_start()
        elif self._known and not loop.in_step:
            self._may_validate()

    def _may_validate(self) -> None:
        loop = self._loop
        if loop.validating:  # so that the time since the latest iterator was made can be told from what was before it
            loop.leave_validation()
        self._before_ns = loop.run.ledger.peek()
        loop.enter_validation()
        loop.run.regions.start_validation_loader()

    @guarded
    def begin(self, iterator: Any) -> None:
        """An iterator is about to be read."""
        loop = self._loop
        again = any(reference() is iterator for reference in self._read_before)
        first = not any(iterator is one for one in self._read)
        if loop.in_step or (again and first and not self._is_known(_sampler(iterator))):
            self._learn(iterator)
        if self._is_known(_sampler(iterator)) or not self._known:
            if loop.validating:
                loop.leave_validation()
            loop.run.begin("data")
        else:
            if not loop.validating:
                self._may_validate()
            loop.run.regions.begin_validation_fetch(workers=bool(iterator._num_workers))  # noqa: SLF001
            if first:
                loop.training.validates_on(iterator)
        if first:
            self._read.append(iterator)

    @guarded
    def end(self, iterator: Any, *, batch: Any = None, exhausted: bool = False) -> None:
        """It was read, or has no more batches."""
        loop, known = self._loop, self._is_known(_sampler(iterator))
        if exhausted and known:
            loop.run.regions.loader_ended()
        loop.run.end("data")
        loop.run.regions.end_validation_fetch()
        self._may_be_batch, self.ended_ns = None, perf_counter_ns()
        if exhausted:
            self._read = [one for one in self._read if one is not iterator]
        elif known:
            self.batch = batch
            self.seen += 1
        elif _yielded(iterator) == 1 or not self._known:
            self._may_be_batch = batch

    @guarded
    def step_begins(self) -> None:
        """What was read last is of the step that begins."""
        if self._read and not any(self._is_known(_sampler(one)) for one in self._read):
            new = self._read[-1]
            if self._loop.validating and _yielded(new) == 1:
                self._loop.run.regions.relabel_validation_as_loader_start(self._before_ns)
            self._learn(new)
            self.batch, self.seen = self._may_be_batch, 1
        if self._loop.validating:
            self._loop.leave_validation()

    def step_ended(self) -> tuple[list[Any], bool]:
        """The loaders that the step's batch comes from, and whether it is the last of their epoch."""
        of_step = [one for one in self._read if self._is_known(_sampler(one))]
        training, samplers = self._loop.training, [_sampler(one) for one in of_step]
        if of_step and [reference() for reference in self._of_step] != samplers:
            self._of_step = [_reference(sampler) for sampler in samplers]
            training.of_training = [loader_of(one) for one in of_step]
        ends_epoch = any(_is_at_end(one) for one in of_step)
        self._read_before = [weakref.ref(one) for one in self._read]
        self.forget()
        return training.of_training if of_step else [], ends_epoch

    def forget(self) -> None:
        """Keep no batch and no iterator alive."""
        self._read, self.batch, self._may_be_batch, self.seen = [], None, None, 0


def _sampler(of: Any) -> Any:
    """What a loader and all its iterators have in common."""
    return of._index_sampler  # noqa: SLF001


def _reference(sampler: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(sampler)
    except TypeError:  # a class with slots
        return lambda: sampler


def _yielded(iterator: Any) -> int:
    return int(iterator._num_yielded)  # noqa: SLF001


def _is_at_end(iterator: Any) -> bool:
    length = length_of(iterator)
    return length is not None and _yielded(iterator) >= length


class LoopWatch(Guarded):
    """Watches the thread that creates it, until `release`."""

    called = "Watching the loop's optimizers"

    def __init__(self, loop: WatchedLoop) -> None:
        self.fetches = Fetches(loop)
        self.active = True
        self._thread, self._loop, self._fetching = get_ident(), loop, False
        self._saw_backward = False
        self._replaced = [
            replace_function(_BaseDataLoaderIter, "__next__", self._next),
            replace_function(DataLoader, "__iter__", self._iter),
            replace_function(torch.autograd, "backward", self._backward),
        ]
        self._replaced += [
            replace_function(module, name, self._move)
            for of, name in _MOVES.items()
            if hasattr(module := sys.modules.get(of), name)
        ]
        self._handles = (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        )

    def release(self) -> None:
        """Restore torch's own functions; where somebody has replaced ours since, they do nothing more."""
        self.active = False
        for restore in self._replaced:
            restore()
        for handle in self._handles:
            handle.remove()
        self.fetches.forget()

    def step_begins(self) -> None:
        """A step begins."""
        self._saw_backward = False
        self.fetches.step_begins()

    def _sees(self) -> bool:
        return self.active and get_ident() == self._thread

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        if self._fetching or not self._sees():  # a dataset may read a loader of its own
            return original(iterator)
        self._fetching, exhausted, batch = True, False, None
        self.fetches.begin(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            exhausted = True
            raise
        finally:
            self._fetching = False
            self.fetches.end(iterator, batch=batch, exhausted=exhausted)
        return batch

    def _iter(self, original: Callable[[Any], Any], loader: Any) -> Any:
        if self._fetching or not self._sees():
            return original(loader)
        self.fetches.new_iterator(loader)
        readings = self._loop.run.readings
        if self.fetches.trains_on(loader):
            workers = readings.workers
        elif self._loop.validating:
            workers = readings.validation_workers
        else:
            return original(loader)
        workers.watch()
        try:
            return original(loader)
        finally:
            workers.release()

    def _move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A loader of Fabric or Accelerate moves its batch, before the step that trains on it."""
        if not self._sees():
            return original(*args, **kwargs)
        self._loop.run.begin("transfer")
        try:
            return original(*args, **kwargs)
        finally:
            self._loop.run.end("transfer")

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._sees():
            original(*args, **kwargs)
            return
        self._saw_backward = True
        self._loop.run.regions.enter_backward()
        try:
            original(*args, **kwargs)
        finally:
            self._loop.run.end("backward")

    def _optimizer_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._sees():
            return
        self._note(optimizer)
        if not self._saw_backward and len(args) == 1 and not kwargs:  # without a closure that may run backward
            self._loop.run.regions.forget_forward()
        self._loop.run.begin("optimizer")

    @guarded
    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self._loop.training.module.note(optimizer)

    def _optimizer_ended(self, _optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._sees():
            return
        self._loop.run.end("optimizer")
        self._loop.training.updated()


def replace_function(owner: Any, name: str, ours: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function by one that gets it as its first argument; returns what restores it."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    def restore() -> None:
        if getattr(owner, name) is replaced:
            setattr(owner, name, original)

    setattr(owner, name, replaced)
    return restore
