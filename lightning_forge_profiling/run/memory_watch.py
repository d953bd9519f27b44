"""Watches what fills a rank's GPU while it trains: PyTorch's allocator between steps, and what the model keeps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.machine_rules import ACTIVATIONS, CACHE, memory_layers
from lightning_forge_profiling.gpu.memory import (
    AllocatorReading,
    Growth,
    GrowthWatch,
    Reading,
    read_allocator,
    read_limit,
)
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import (
    GIB,
    MIB,
    Category,
    Holder,
    MemoryCurve,
    MemoryGrowth,
    ModelMemory,
    RunMemory,
)

_log = plain_logger(__name__)

# a reading takes the allocator 0.1 ms, and growth is known after twelve of them
_PERIOD_NS: Final = 10**8
_PERIOD_STEPS: Final = 5
_MOST_POINTS: Final = 128
_COUNTING: Final = 5e-4  # the largest share of the time that counting the model takes
_MORE: Final = 1.01  # by which factor the memory has to rise for the model to be counted again
_MOST_COUNTS: Final = 64
_MODEL: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer", "buffers")


class _Point(NamedTuple):
    at_ns: int
    step: int
    kept: int
    peak: int
    reserved: int


class _Count(NamedTuple):
    step: int
    kept: int
    model: ModelMemory


class _Curve:
    """Points over a run, evenly spread and few."""

    def __init__(self) -> None:
        self.points: list[_Point] = []
        self._every = self._taken = 0

    def add(self, point: _Point) -> None:
        if self._taken % 2**self._every == 0:
            self.points.append(point)
        self._taken += 1
        if len(self.points) > _MOST_POINTS:
            del self.points[1::2]
            self._every += 1


class _ModelCounts:
    """What the model keeps, counted no more often than that may cost."""

    def __init__(self, count: Callable[[], ModelMemory], clock_ns: Callable[[], int]) -> None:
        self.all: list[_Count] = []
        self._count, self._clock_ns = count, clock_ns
        self._due_ns = 0

    def due(self, kept: int, now_ns: int) -> bool:
        """Whether to count: for the first time, or once more is kept."""
        return not self.all or (kept > _MORE * self.all[-1].kept and now_ns >= self._due_ns)

    def add(self, step: int, kept: int) -> _Count:
        began_ns = self._clock_ns()
        self.all.append(_Count(step, kept, self._count()))
        ended_ns = self._clock_ns()
        self._due_ns = ended_ns + int((ended_ns - began_ns) / _COUNTING)
        if len(self.all) > _MOST_COUNTS:
            del self.all[1]
        return self.all[-1]


class MemoryWatch:
    """Reads the allocator every few steps.

    Args:
        read: reads the allocator.
        count_model: counts what the model keeps.
        read_limit: tells what PyTorch may use of the GPU's memory, in bytes, given what its allocator holds.
        began_ns: when the run began, by `time.perf_counter_ns`.
        say: gets each growth when it is first seen.
        find_holder: tells which container keeps tensors that take so many bytes more in each step.
    """

    def __init__(
        self,
        read: Callable[[], AllocatorReading],
        count_model: Callable[[], ModelMemory],
        read_limit: Callable[[int], int],
        *,
        began_ns: int,
        say: Callable[[MemoryGrowth], None],
        find_holder: Callable[[float], Holder | None] = lambda _: None,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._read, self._read_limit = read, read_limit
        self._began_ns, self._say, self._find_holder = began_ns, say, find_holder
        self._before: AllocatorReading | None = read()
        self._limit = self._peak = 0
        self._activations: int | None = None  # None while the process had a higher peak before, which hides the steps'
        self._counts = _ModelCounts(count_model, clock_ns)
        self._growths = GrowthWatch()
        self._growth: MemoryGrowth | None = None
        self._curve = _Curve()
        self._next_step = 0
        self._latest: _Point | None = None
        self.due_ns: float = 0  # when the next reading is due, by `time.perf_counter_ns`

    def end_step(self, step: int, now_ns: int) -> None:
        """Read what is due after a step, once the optimizer has stepped."""
        if step < self._next_step:
            return
        self._next_step, self.due_ns = step + _PERIOD_STEPS, now_ns + _PERIOD_NS
        try:
            self._take(step, now_ns)
        except Exception as exc:  # an allocator or a tensor of a kind that is not known here
            _log.info("What fills the GPU's memory is unknown from step %d on: %s: %s", step, type(exc).__name__, exc)
            _log.debug("", exc_info=exc)
            self.due_ns = inf

    def pause(self) -> None:
        """Leave out what follows, as validation, whose peak is not the steps'."""
        if self._before is not None and self._counts.all and self.due_ns < inf:
            self._read_peak()
            self._before = None

    def resume(self) -> None:
        """The steps go on."""
        if self._before is None:
            self._before = self._read()

    def _read_peak(self) -> AllocatorReading:
        """Read the allocator, and the highest peak of a step so far."""
        now, before = self._read(), self._before
        self._before = now
        if before is not None and now.peak_bytes > before.peak_bytes:  # the allocator has one peak, of all the process
            self._peak = max(self._peak, now.peak_bytes)
            self._activations = max(self._activations or 0, now.peak_bytes - now.allocated_bytes)
        least = now.allocated_bytes + (self._activations or 0 if now.peak_bytes > self._peak else 0)
        self._peak = max(self._peak, least)
        return now

    def _take(self, step: int, now_ns: int) -> None:
        now = self._read_peak()
        kept = now.allocated_bytes
        if not self._limit or self._peak > self._limit:  # another process may have ended
            self._limit = self._read_limit(now.reserved_bytes)
        if self._counts.due(kept, now_ns):
            self._counts.add(step, kept)
        self._latest = _Point(now_ns, step, kept, self._peak, now.reserved_bytes)
        self._curve.add(self._latest)
        grows = self._growths.add(Reading(step, kept, self._peak), self._limit)
        if grows is not None:
            self._note_growth(grows, step, kept)

    def _note_growth(self, grows: Growth, step: int, kept: int) -> None:
        before = self._growing()
        goes_on = before is not None and (before.category == "activations") == (grows.what == "peak")
        category = before.category if before is not None and goes_on else self._category(grows, step, kept)
        holder = None if before is None else before.holder
        if not goes_on:
            holder = self._find_holder(grows.bytes_per_step) if category == "other tensors" else None
        self._growth = MemoryGrowth(
            category=category,
            bytes_per_step=grows.bytes_per_step,
            from_step=grows.from_step,
            to_step=step,
            full_step=step + max(int((self._limit - self._peak) / grows.bytes_per_step), 0),
            holder=holder,
        )
        if not goes_on:
            self._say(self._growth)

    def _category(self, grows: Growth, step: int, kept: int) -> Category:
        """What grows: the part of the model that takes at least half of it, or what belongs to none."""
        if grows.what == "peak":
            return "activations"
        now, counts = self._counts.add(step, kept), self._counts.all
        before = next((one for one in reversed(counts[:-1]) if one.step <= grows.from_step), counts[0])
        more = {part: _bytes(now.model, part) - _bytes(before.model, part) for part in _MODEL}
        most = max(_MODEL, key=more.__getitem__)
        return most if more[most] > 0 and 2 * more[most] >= now.kept - before.kept else "other tensors"

    def _growing(self) -> MemoryGrowth | None:
        """The growth, unless it has ended since, as that of a cache that is full."""
        growth, latest = self._growth, self._latest
        if growth is None or latest is None or latest.step - growth.to_step > growth.to_step - growth.from_step:
            return None
        return growth

    def metrics(self) -> dict[str, float]:
        """The latest reading by what takes the memory, in GiB; {} before any."""
        if self._latest is None:
            return {}
        memory = self._of([self._latest])
        layers = {name: gib[0] for name, gib in memory_layers(memory, least_gib=0.0).items()}
        named = {"other_tensors": "other tensors", "activations": ACTIVATIONS, "cache": CACHE}
        metrics = {"memory/model_gib": memory.model.bytes / GIB}
        metrics |= {f"memory/{name}_gib": layers[layer] for name, layer in named.items() if layer in layers}
        if memory.growth is not None:
            metrics["memory/grows_mib_per_step"] = memory.growth.bytes_per_step / MIB
        return metrics

    def memory(
        self, *, samples_per_step: float | None = None, tokens_per_step: float | None = None
    ) -> RunMemory | None:
        """What was found so far; None before the first reading."""
        if self._latest is None:
            return None
        points = self._curve.points
        points = points if points[-1] is self._latest else [*points, self._latest]
        return replace(self._of(points), samples_per_step=samples_per_step, tokens_per_step=tokens_per_step)

    def _of(self, points: Sequence[_Point]) -> RunMemory:
        return RunMemory(
            model=self._counts.all[-1].model,
            limit_gib=self._limit / GIB,
            curve=MemoryCurve(
                seconds=tuple(round((point.at_ns - self._began_ns) / 1e9, 3) for point in points),
                steps=tuple(point.step for point in points),
                kept_gib=tuple(round(point.kept / GIB, 4) for point in points),
                peak_gib=tuple(round(point.peak / GIB, 4) for point in points),
                reserved_gib=tuple(round(point.reserved / GIB, 4) for point in points),
            ),
            growth=self._growing(),
            peak_known=self._activations is not None,
        )


def _bytes(model: ModelMemory, part: Category) -> int:
    return int(getattr(model, f"{part}_bytes"))


def memory_watch(
    training: Training,
    *,
    began_ns: int,
    say: Callable[[MemoryGrowth], None],
    find_holder: Callable[[float], Holder | None],
) -> MemoryWatch | None:
    """The watch of the GPU that a fit trains on; None without one that PyTorch's CUDA allocator serves."""
    device, module = training.facts.device, training.module
    if device.type != "cuda":
        return None
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        return MemoryWatch(
            partial(read_allocator, index),
            lambda: model_memory(module, training.optimizers, device.type),
            partial(read_limit, index),
            began_ns=began_ns,
            say=say,
            find_holder=find_holder,
        )
    except Exception as exc:  # an allocator that keeps no such statistics
        _log.debug("", exc_info=exc)
        return None


def model_memory(module: torch.nn.Module, optimizers: Iterable[Any], device: str) -> ModelMemory:
    """Bytes of each kind on a kind of device. A storage counts once, to the first kind that has it.

    Args:
        module: the model.
        optimizers: its optimizers, after a step, in which they make their state.
        device: type of the device, such as `cuda`.
    """
    counted: set[tuple[torch.device, int]] = set()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in chain.from_iterable(map(_plain, tensors)):
            if tensor.device.type != device or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr()
            if storage.nbytes() and key not in counted:
                counted.add(key)
                total += storage.nbytes()
        return total

    parameters = list(module.parameters())
    return ModelMemory(
        parameters_bytes=size(parameters),
        gradients_bytes=size(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_bytes=size(tensor for optimizer in optimizers for tensor in _tensors(optimizer.state)),
        buffers_bytes=size(module.buffers()),
    )


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage that one consists of: of a DTensor this rank's part, of a quantized one all parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
