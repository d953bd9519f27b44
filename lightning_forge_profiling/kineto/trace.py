"""A trace as columns: one table for each kind of event, times as integer nanoseconds from the file's base time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.schema import CollectiveCall, LoaderSettings

Ints: TypeAlias = NDArray[np.int64]

# The categories that count as GPU time, and no others.
ACTIVITIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of events, in order of their start."""

    start: Ints = field(default_factory=_none)  # nanoseconds

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, Ints]:
        """The columns by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def at(self, rows: NDArray[Any]) -> Self:
        """Some of the rows, by number or mask."""
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans(Table):
    """Ranges on host threads."""

    end: Ints = field(default_factory=_none)  # nanoseconds
    name: Ints = field(default_factory=_none)  # position in `Trace.names`
    thread: Ints = field(default_factory=_none)  # position in `Trace.threads`


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(Spans):
    """Calls of the CUDA or HIP runtime and driver."""

    correlation: Ints = field(default_factory=_none)  # shared with the GPU work that the call launches; -1 without
    external: Ints = field(default_factory=_none)  # `External id` of the operator; -1 without


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Spans):
    """PyTorch operators."""

    external: Ints = field(default_factory=_none)  # `External id`; -1 without
    sequence: Ints = field(default_factory=_none)  # autograd's, shared by an operator and its backward node; -1 without
    signature: Ints = field(default_factory=_none)  # position in `Trace.signatures`


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork(Table):
    """Kernels, copies and fills on the GPU."""

    end: Ints = field(default_factory=_none)  # nanoseconds
    name: Ints = field(default_factory=_none)  # position in `Trace.names`
    activity: Ints = field(default_factory=_none)  # position in `ACTIVITIES`
    lane: Ints = field(default_factory=_none)  # position in `Trace.lanes`
    correlation: Ints = field(default_factory=_none)  # shared with the call that launched it; -1 without
    external: Ints = field(default_factory=_none)  # `External id` of the operator; -1 without
    size: Ints = field(default_factory=_none)  # bytes copied or filled
    collective: Ints = field(default_factory=_none)  # position in `Trace.collectives`; -1 without a `Collective name`


@dataclass(frozen=True, slots=True)
class Signature:
    """Shapes, types, scalar values and strides of an operator's inputs as JSON text; empty if not recorded."""

    dims: bytes = b""
    types: bytes = b""
    concrete: bytes = b""
    strides: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations(Table):
    """Device allocations and frees of PyTorch's caching allocator."""

    thread: Ints = field(default_factory=_none)  # position in `Trace.threads`
    size: Ints = field(default_factory=_none)  # bytes; negative for a free
    allocated: Ints = field(default_factory=_none)  # bytes allocated afterwards
    reserved: Ints = field(default_factory=_none)  # bytes reserved afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The last event that was read from a file that is cut off."""

    table: str  # the table of `Trace` that it is in
    thread: tuple[str, str]  # its process and thread; for GPU work device and stream
    time: int  # its start, nanoseconds
    # whether all events, GPU work included, are in order of time, so that only later ones are missing. The profiler
    # itself writes one thread after another, and the GPU last.
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One trace file, or several windows of one rank joined."""

    file: str  # name of the file
    rank: int | None = None  # global rank; None if unknown
    world_size: int | None = None  # number of ranks of the run; None if unknown
    base_ns: int | None = None  # Unix time of the file's base time, nanoseconds; None if unknown, and for joined files
    device: str = ""  # name of the GPU; "" if unknown
    memory_bytes: int | None = None  # memory of that GPU; None if unknown
    multiprocessors: int | None = None  # number of its multiprocessors; None if unknown
    intra_op_threads: int | None = None  # number of threads that an operator may use on the CPU; None if unknown
    usable_cores: int | None = None  # that the process may use; None if unknown or shared with other ranks
    names: Sequence[str] = ()  # names of events
    threads: Sequence[tuple[str, str]] = ()  # process and thread
    lanes: Sequence[tuple[str, str]] = ()  # device and stream
    signatures: Sequence[Signature] = ()  # inputs of operators
    collectives: Sequence[CollectiveCall] = ()  # collectives of communication kernels
    gpu: GpuWork = field(default_factory=GpuWork)  # GPU work
    calls: Calls = field(default_factory=Calls)  # runtime and driver calls
    operators: Operators = field(default_factory=Operators)  # PyTorch operators
    annotations: Spans = field(default_factory=Spans)  # `record_function`: steps, regions, optimizers, data loaders
    frames: Spans = field(default_factory=Spans)  # Python functions, if stacks were recorded
    allocations: Allocations = field(default_factory=Allocations)  # device allocations, if memory was recorded
    loader: LoaderSettings | None = None  # settings of the DataLoader; None if unknown
    light_steps: tuple[int, ...] = ()  # numbers of the steps recorded without operators
    libraries: frozenset[str] = frozenset()  # installed and imported packages, if stacks were recorded
    begins: tuple[int, ...] = (0,)  # start of each recording; more than one for joined files
    cuts: tuple[Cut | None, ...] = (None,)  # of each recording; None for a complete file
    warnings: tuple[str, ...] = ()  # what could not be read

    @property
    def extent(self) -> tuple[int, int]:
        """Start of the first and end of the last event, nanoseconds; zeros without events."""
        tables = [table for table in (self.gpu, self.calls, self.operators, self.annotations) if len(table)]
        if not tables:
            return 0, 0
        return min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables)
