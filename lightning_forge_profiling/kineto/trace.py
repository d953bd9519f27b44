"""A trace as columns: one table for each kind of event, times as integer nanoseconds from the file's base time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.results.run import LoaderSettings

Ints: TypeAlias = NDArray[np.int64]

ACTIVITIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories that count as GPU time, and no others. `GpuWork.activity` is the position in this tuple."""


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Ranges on host threads, in order of their start.

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
        correlation: correlation id, shared with the GPU work that the call launches; -1 without.
        external: `External id` of the operator; -1 without.
    """

    correlation: Ints = field(default_factory=_none)
    external: Ints = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Spans):
    """PyTorch operators.

    Attributes:
        external: `External id`; -1 without.
        sequence: autograd's sequence number, shared by a forward operator and its backward node; -1 without.
        signature: position in `Trace.signatures`.
    """

    external: Ints = field(default_factory=_none)
    sequence: Ints = field(default_factory=_none)
    signature: Ints = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """Kernels, copies and fills on the GPU, in order of their start.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        name: position in `Trace.names`.
        activity: position in `ACTIVITIES`.
        lane: position in `Trace.lanes`.
        correlation: correlation id, shared with the call that launched it; -1 without.
        external: `External id` of the operator; -1 without.
        size: bytes copied or filled.
        collective: position in `Trace.collectives`; -1 without a `Collective name`.
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
    """A collective as its communication kernel describes it.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: name of the process group.
        elements: number of elements in one rank's input.
        dtype: its data type, as PyTorch spells it.
    """

    name: str
    group: str
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Signature:
    """Shapes, types, scalar values and strides of an operator's inputs as JSON text; empty if not recorded."""

    dims: bytes = b""
    types: bytes = b""
    concrete: bytes = b""
    strides: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """Device allocations and frees of PyTorch's caching allocator, in order of time.

    Attributes:
        time: nanoseconds.
        thread: position in `Trace.threads`.
        size: bytes; negative for a free.
        allocated: bytes allocated afterwards.
        reserved: bytes reserved afterwards.
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
    """The last event that was read from a file that is cut off.

    Attributes:
        table: the table of `Trace` that it is in.
        thread: its process and thread; for GPU work device and stream.
        time: its start, nanoseconds.
        in_order: whether all events, GPU work included, are in order of time, so that only later ones are missing. The
            profiler itself writes one thread after another, and the GPU last.
    """

    table: str
    thread: tuple[str, str]
    time: int
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One trace file, or several windows of one rank joined.

    Attributes:
        file: name of the file.
        rank: global rank; None if unknown.
        device: name of the GPU; "" if unknown.
        memory_bytes: memory of that GPU; None if unknown.
        multiprocessors: number of its multiprocessors; None if unknown.
        intra_op_threads: number of threads that an operator may use on the CPU; None if unknown.
        usable_cores: number of cores that the process may use; None if unknown or shared with other ranks.
        names: names of events.
        threads: process and thread.
        lanes: device and stream.
        signatures: inputs of operators.
        collectives: collectives of communication kernels.
        gpu: GPU work.
        calls: runtime and driver calls.
        operators: PyTorch operators.
        annotations: `record_function` ranges: steps, regions, optimizers, data loaders.
        frames: Python functions, if stacks were recorded.
        allocations: device allocations, if memory was recorded.
        loader: settings of the DataLoader; None if unknown.
        libraries: names of packages that were installed and imported, if stacks were recorded and the trace names them.
        begins: start of each recording; more than one for joined files.
        cuts: for each recording the last event read if its file is cut off; None for a complete file.
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
    libraries: frozenset[str] = frozenset()
    begins: tuple[int, ...] = (0,)
    cuts: tuple[Cut | None, ...] = (None,)
    warnings: tuple[str, ...] = ()

    @property
    def extent(self) -> tuple[int, int]:
        """Start of the first and end of the last event, nanoseconds; zeros without events."""
        tables = [table for table in (self.gpu, self.calls, self.operators, self.annotations) if len(table)]
        if not tables:
            return 0, 0
        return min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables)
