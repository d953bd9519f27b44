"""A trace as columns: one table for each kind of event, times as integer nanoseconds from the file's base time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.results.loader_settings import LoaderSettings

__all__ = [
    "ACTIVITIES",
    "Allocations",
    "Calls",
    "CollectiveCall",
    "Cut",
    "GpuWork",
    "Ints",
    "Operators",
    "Signature",
    "Spans",
    "Trace",
]

Ints: TypeAlias = NDArray[np.int64]

ACTIVITIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")
"""What is GPU time, and nothing else is. `GpuWork.activity` is the position in here."""


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Stretches of time on a thread, in order of their start.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        name: position in `Trace.names`.
        thread: position in `Trace.threads`.
    """

    start: Ints = field(default_factory=_none)
    end: Ints = field(default_factory=_none)
    name: Ints = field(default_factory=_none)
    thread: Ints = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(Spans):
    """Calls of the CUDA or HIP runtime and driver.

    Attributes:
        correlation: what the GPU work that they launch carries too; -1 without.
        external: the operator's `External id`; -1 without.
    """

    correlation: Ints = field(default_factory=_none)
    external: Ints = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Spans):
    """PyTorch operators.

    Attributes:
        external: their `External id`; -1 without.
        sequence: autograd's number for those it recorded, and for their backward; -1 without.
        signature: position in `Trace.signatures`.
    """

    external: Ints = field(default_factory=_none)
    sequence: Ints = field(default_factory=_none)
    signature: Ints = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """Kernels, copies and sets on the GPU, in order of their start.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        name: position in `Trace.names`.
        activity: position in `ACTIVITIES`.
        lane: position in `Trace.lanes`.
        correlation: what the call that launched it carries too; -1 without.
        external: the operator's `External id`; -1 without.
        size: bytes copied or set.
        collective: position in `Trace.collectives`; -1 for what is no collective or does not say.
    """

    start: Ints = field(default_factory=_none)
    end: Ints = field(default_factory=_none)
    name: Ints = field(default_factory=_none)
    activity: Ints = field(default_factory=_none)
    lane: Ints = field(default_factory=_none)
    correlation: Ints = field(default_factory=_none)
    external: Ints = field(default_factory=_none)
    size: Ints = field(default_factory=_none)
    collective: Ints = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a communication kernel says of its collective.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: the process group's name.
        elements: of one rank's input.
        dtype: as PyTorch spells it.
    """

    name: str
    group: str
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operator was called with, as JSON text; empty where it was not recorded."""

    dims: bytes = b""
    types: bytes = b""
    concrete: bytes = b""
    strides: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """What PyTorch's allocator did on a device, in order of time.

    Attributes:
        time: nanoseconds.
        thread: position in `Trace.threads`.
        size: bytes, negative when they were freed.
        allocated: bytes in use afterwards.
        reserved: bytes held afterwards.
    """

    time: Ints = field(default_factory=_none)
    thread: Ints = field(default_factory=_none)
    size: Ints = field(default_factory=_none)
    allocated: Ints = field(default_factory=_none)
    reserved: Ints = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a file ends too early: at the last event of it that was read.

    Attributes:
        table: which of the trace's tables that event is in.
        thread: its process and thread; of GPU work the device and stream.
        time: when it began, nanoseconds.
        in_order: whether all events stand in order of time, those of the GPU among them, so that only later ones are
            missing. The profiler itself writes one thread's after another's, and the GPU's after those.
    """

    table: str
    thread: tuple[str, str]
    time: int
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one file holds.

    Attributes:
        file: its name.
        rank: the global rank it was recorded on, None where it does not say.
        device: the name of the GPU its work ran on, "" where it does not say.
        memory_bytes: that GPU's memory, None likewise.
        multiprocessors: that GPU's number of them, None likewise.
        intra_op_threads: how many threads an operator may use on the CPU, None likewise.
        usable_cores: how many cores the process may use, None likewise, or where it is one of several ranks.
        names: what events are called.
        threads: process and thread.
        lanes: device and stream.
        signatures: what operators were called with.
        collectives: what collectives were of.
        gpu: GPU work.
        calls: runtime and driver calls.
        operators: operators.
        annotations: `record_function` ranges: steps, regions, optimizers, data loaders.
        frames: Python functions, where stacks were recorded.
        allocations: the allocator's calls, where memory was recorded.
        loader: the settings of the loader that was trained from, None where it does not say.
        begins: when each recording in the file began; one, but for files put together.
        cuts: for each recording where its file is cut off; None where all of its events were read.
        warnings: what could not be read.
    """

    file: str
    rank: int | None = None
    device: str = ""
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    intra_op_threads: int | None = None
    usable_cores: int | None = None
    names: Sequence[str] = ()
    threads: Sequence[tuple[str, str]] = ()
    lanes: Sequence[tuple[str, str]] = ()
    signatures: Sequence[Signature] = ()
    collectives: Sequence[CollectiveCall] = ()
    gpu: GpuWork = field(default_factory=GpuWork)
    calls: Calls = field(default_factory=Calls)
    operators: Operators = field(default_factory=Operators)
    annotations: Spans = field(default_factory=Spans)
    frames: Spans = field(default_factory=Spans)
    allocations: Allocations = field(default_factory=Allocations)
    loader: LoaderSettings | None = None
    begins: tuple[int, ...] = (0,)
    cuts: tuple[Cut | None, ...] = (None,)
    warnings: tuple[str, ...] = ()
