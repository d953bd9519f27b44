"""Watches what fills a rank's GPU while it trains: PyTorch's allocator between steps, and what the model keeps."""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch

from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.model_memory import model_memory
from lightning_forge_profiling.gpu.memory import AllocatorReading, read_allocator, read_limit
from lightning_forge_profiling.gpu.memory_growth import Growth, GrowthWatch, Reading
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.results.memory import (
    GIB,
    MIB,
    Category,
    MemoryCurve,
    MemoryGrowth,
    ModelMemory,
    RunMemory,
)

# a reading takes the allocator 0.1 ms, and growth is known after twelve of them
_PERIOD_NS: Final = 10**8
_PERIOD_STEPS: Final = 5
_MOST_POINTS: Final = 128
_MODEL: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer", "buffers")

_log = plain_logger(__name__)


class _Point(NamedTuple):
    at_ns: int
    step: int
    kept: int
    peak: int
    reserved: int


class MemoryWatch:
    """Reads the allocator every few steps.

    Args:
        read: reads the allocator.
        read_model: reads what the model keeps.
        read_limit: tells what PyTorch may use of the GPU's memory, in bytes, given what its allocator holds.
        began_ns: when the fit began.
    """

    def __init__(
        self,
        read: Callable[[], AllocatorReading],
        read_model: Callable[[], ModelMemory],
        read_limit: Callable[[int], int],
        *,
        began_ns: int,
    ) -> None:
        self._read, self._read_model, self._read_limit = read, read_model, read_limit
        self._began_ns = began_ns
        self._before = read()
        self._model: ModelMemory | None = None
        self._limit = 0
        self._growths: GrowthWatch | None = None
        self._growth: MemoryGrowth | None = None
        self._points: list[_Point] = []
        self._every = self._count = self._peak = 0
        self._latest: _Point | None = None
        self._next_step = 0
        self.due_ns = 0  # when the next reading is due, by `time.perf_counter_ns`

    def read(self, step: int, now_ns: int) -> MemoryGrowth | None:
        """Read what is due after a step, once the optimizer has stepped. Returns growth once, when it is found."""
        if step < self._next_step:
            return None
        self._next_step, self.due_ns = step + _PERIOD_STEPS, now_ns + _PERIOD_NS
        allocator = self._read()
        self._peak = max(self._peak, allocator.since(self._before).peak_bytes)
        self._before = allocator
        if self._model is None or self._growths is None:
            self._model, self._limit = self._read_model(), self._read_limit(allocator.reserved_bytes)
            self._growths = GrowthWatch(self._limit)
        self._latest = _Point(now_ns, step, allocator.allocated_bytes, self._peak, allocator.reserved_bytes)
        self._keep(self._latest)
        grows = self._growths.add(Reading(step, allocator.allocated_bytes, self._peak))
        if grows is None:
            return None
        before = self._growth
        self._growth = MemoryGrowth(
            category=self._category(grows, self._model) if before is None else before.category,
            bytes_per_step=grows.bytes_per_step,
            from_step=grows.from_step,
            to_step=step,
            full_step=step + max(int((self._limit - self._peak) / grows.bytes_per_step), 0),
        )
        return self._growth if before is None else None

    def _keep(self, point: _Point) -> None:
        if self._count % 2**self._every == 0:
            self._points.append(point)
        self._count += 1
        if len(self._points) > _MOST_POINTS:
            del self._points[1::2]
            self._every += 1

    def _category(self, grows: Growth, first: ModelMemory) -> Category:
        """What grows: the part of the model that takes at least half of it, or what belongs to none."""
        if grows.what == "peak":
            return "activations"
        now, grew = self._read_model(), (self._latest or self._points[-1]).kept - self._points[0].kept
        more = {part: getattr(now, f"{part}_bytes") - getattr(first, f"{part}_bytes") for part in _MODEL}
        most = max(_MODEL, key=more.__getitem__)
        return most if 2 * more[most] >= grew else "other tensors"

    def _growing(self) -> MemoryGrowth | None:
        """The growth, unless it has ended since, as that of a cache that is full."""
        growth, latest = self._growth, self._latest
        if growth is None or latest is None or latest.step - growth.to_step > growth.to_step - growth.from_step:
            return None
        return growth

    def metrics(self) -> dict[str, float]:
        """The latest reading by what takes the memory, in GiB; {} before any."""
        if self._latest is None or self._model is None:
            return {}
        at, model = self._latest, self._model.bytes
        metrics = {
            "memory/model_gib": model / GIB,
            "memory/other_tensors_gib": max(at.kept - model, 0) / GIB,
            "memory/activations_gib": max(at.peak - at.kept, 0) / GIB,
            "memory/cache_gib": max(at.reserved - at.peak, 0) / GIB,
        }
        if (growth := self._growing()) is not None:
            metrics["memory/grows_mib_per_step"] = growth.bytes_per_step / MIB
        return metrics

    def memory(self, samples_per_step: float | None) -> RunMemory | None:
        """What was found so far; None before the first reading."""
        if self._model is None or self._latest is None:
            return None
        points = self._points if self._points[-1] is self._latest else [*self._points, self._latest]
        return RunMemory(
            model=self._model,
            limit_gib=self._limit / GIB,
            curve=MemoryCurve(
                seconds=tuple(round((point.at_ns - self._began_ns) / 1e9, 3) for point in points),
                steps=tuple(point.step for point in points),
                kept_gib=tuple(round(point.kept / GIB, 4) for point in points),
                peak_gib=tuple(round(point.peak / GIB, 4) for point in points),
                reserved_gib=tuple(round(point.reserved / GIB, 4) for point in points),
            ),
            growth=self._growing(),
            samples_per_step=samples_per_step,
        )


def memory_watch(trainer: Trainer, *, began_ns: int) -> MemoryWatch | None:
    """The watch of the GPU that a fit trains on; None without one that PyTorch's CUDA allocator serves."""
    device, module = trainer.strategy.root_device, trainer.lightning_module
    if device.type != "cuda":
        return None
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        return MemoryWatch(
            partial(read_allocator, index),
            lambda: model_memory(module, trainer.optimizers, device.type),
            partial(read_limit, index),
            began_ns=began_ns,
        )
    except Exception as exc:  # a backend or an allocator that keeps no such statistics
        _log.debug("", exc_info=exc)
        return None
