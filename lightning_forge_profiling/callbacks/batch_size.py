"""Samples in a batch, by its loader's batch size and the batch's own shapes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_forge_profiling.callbacks.lightning_api import BatchSource

_DEPTH: Final = 4
_LOOKED_AT: Final = 64
"""How deep, and at how many parts of each container, sizes are looked for in the first batch."""

_FOLLOWED: Final = 8
"""How many of the sizes found there are read of every batch."""

_FIRST_BATCHES: Final = 8
"""A size that matches the batch size in this many batches by chance is a constant, such as a number of channels."""

_Size = Callable[[Any], int]
"""Reads one size off a batch."""

_LACKING: Final = (AttributeError, IndexError, KeyError, TypeError)
"""Raised by it for a batch that lacks what another has."""


class UnknownBatchSizeError(Exception):
    """The samples of a batch cannot be counted; the message says why."""


class _Known(NamedTuple):
    """The batch size of a loader, and which sizes its batches may have."""

    size: int | None
    """Samples in all of them but the last; None where they differ and the first dimension of every tensor tells."""
    first: int | None
    """Samples in the first: fewer where the whole data set is smaller."""
    streams: bool
    """Whether a short batch may come before the last."""

    def allows(self, size: int, *, ends_epoch: bool) -> bool:
        """Whether a batch may have this many samples."""
        return self.size is None or size == self.size or (size < self.size and (self.streams or ends_epoch))


class BatchSize:
    """Counts the samples of batches.

    The loader's batch size is looked for in the first batch: a tensor's first dimension, or the length of a list of
    samples. The place where it is found is read in every batch, as the last one may be shorter. Nothing is guessed: if
    the loader has no batch size or the batch does not show it, the size is unknown.

    Example:
        >>> import torch
        >>> source = BatchSource([DataLoader(range(20), batch_size=8)])
        >>> count = BatchSize(source.loaders)
        >>> count({"scale": torch.tensor(2.0), "ids": torch.zeros(8, 5)}, source)
        8
        >>> count({"scale": torch.tensor(2.0), "ids": torch.zeros(4, 5)}, source._replace(ends_epoch=True))
        4
        >>> BatchSize(source.loaders)(torch.zeros(3, 224, 224), source)
        Traceback (most recent call last):
        ...
        lightning_forge_profiling.callbacks.batch_size.UnknownBatchSizeError: the DataLoader's batch_size is 8, and ...
    """

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
            self._sizes = _where(batch, known)
        if len(self._sizes) > 1:
            self._sizes = self._agreeing(batch, self._known, ends_epoch=source.ends_epoch)
        size = _read(self._sizes[0], batch) if self._sizes else None
        if size is None or not self._known.allows(size, ends_epoch=source.ends_epoch):
            raise UnknownBatchSizeError(f"batch {self._batches} is not like those before it")
        return size

    def _agreeing(self, batch: Any, known: _Known, *, ends_epoch: bool) -> list[_Size]:
        """Where the sizes of a batch are not all the same, those that are of its samples."""
        read = [(where, size) for where in self._sizes if (size := _read(where, batch)) is not None]
        if len({size for _, size in read}) == 1:
            return [where for where, _ in read]
        if known.size is None or (known.streams and self._batches <= _FIRST_BATCHES):
            return []
        if ends_epoch or known.streams:  # a short batch: what is as large as ever is something else
            read = [(where, size) for where, size in read if size < known.size]
        else:  # a full one: what has changed was the same by chance
            read = [(where, size) for where, size in read if size == known.size]
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
        return _Known(size, size if streams else min(size, _length(loader.sampler) or size), streams)
    raise UnknownBatchSizeError(f"the loader ({type(loader).__name__}) has no batch_size")


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _where(batch: Any, known: _Known) -> list[_Size]:
    """The place in the first batch that has the loader's batch size."""
    found = list(islice(_sizes(batch, known.first, _DEPTH), _LOOKED_AT * _FOLLOWED))
    places = [where for where, size in found if known.first in {None, size}][:_FOLLOWED]
    if places:
        return places
    shown = ", ".join(dict.fromkeys(str(size) for _, size in found[:_FOLLOWED])) or "none"
    knows = " has no batch_size" if known.size is None else f"'s batch_size is {known.size}"
    raise UnknownBatchSizeError(
        f"the DataLoader{knows}, and the first batch has no tensor or list of that length (lengths: {shown})"
    )


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
        for where, found in _sizes(each, size, depth - 1):
            yield partial(_within, get, where), found


def _inside(part: Any) -> Iterable[tuple[Callable[[Any], Any], Any]]:
    """The parts of a container, and how to reach them."""
    if isinstance(part, Mapping):
        return ((itemgetter(key), each) for key, each in part.items())
    if isinstance(part, (list, tuple)):
        return ((itemgetter(number), each) for number, each in enumerate(part))
    # a dataclass, or what a user calls a batch
    return ((attrgetter(name), each) for name, each in getattr(part, "__dict__", {}).items())


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
    except _LACKING:
        return None
