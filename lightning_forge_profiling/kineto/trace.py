"""A trace as columns: one table for each kind of event, times as integer nanoseconds from the file's base time."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
class Events:
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

    def in_order(self) -> Self:
        """The rows in order of their start, and of those that begin together the longest first."""
        return self.at(np.lexsort((-self.columns().get("end", self.start), self.start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans(Events):
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
class GpuWork(Events):
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
class Allocations(Events):
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
    modules: Spans = field(default_factory=Spans)  # calls of modules of the model, as `profiler` marks them
    frames: Spans = field(default_factory=Spans)  # Python functions, if stacks were recorded
    allocations: Allocations = field(default_factory=Allocations)  # device allocations, if memory was recorded
    loader: LoaderSettings | None = None  # settings of the DataLoader; None if unknown
    light_steps: tuple[int, ...] = ()  # numbers of the steps recorded without operators
    libraries: frozenset[str] = frozenset()  # installed and imported packages, if stacks were recorded
    foreign: Mapping[str, int] = field(default_factory=dict)  # by device how many events are not analysed
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


_APART_NS: Final = 10**9
_TABLES: Final = ("gpu", "calls", "operators", "annotations", "modules", "frames", "allocations")
_INDEX_OF: Final = {
    "name": "names", "thread": "threads", "lane": "lanes", "signature": "signatures", "collective": "collectives",
}  # fmt: skip
_IDS: Final = ("correlation", "external")
_LARGEST_ID: Final = 2**60  # larger than any profiler's; ids beyond it may collide, but must not overflow


def join_traces(traces: Sequence[Trace]) -> Trace:
    """Join windows of one rank, one after the other.

    The time between them is not kept: it belongs to no step, and the files may not share a clock.
    """
    first, *others = traces
    if not others:
        return first
    lists = {name: {value: row for row, value in enumerate(getattr(first, name))} for name in _INDEX_OF.values()}
    largest = {column: max(_largest(first, column), 0) for column in _IDS}
    pieces: dict[str, list[dict[str, Ints]]] = {name: [getattr(first, name).columns()] for name in _TABLES}
    begins, (_, end) = [*first.begins], first.extent
    cuts = [*first.cuts]
    for trace in others:
        began, ended = trace.extent
        shift = end - began + _APART_NS
        begins.append(began + shift)
        cuts += [cut and replace(cut, time=cut.time + shift) for cut in trace.cuts]
        end = ended + shift
        position = {column: _merged(lists[name], getattr(trace, name)) for column, name in _INDEX_OF.items()}
        for name in _TABLES:
            pieces[name].append(_moved(getattr(trace, name), shift, position, largest))
        for column in _IDS:
            largest[column] = (largest[column] + 1 + max(_largest(trace, column), 0)) % _LARGEST_ID
    joined: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    for name, parts in pieces.items():
        columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        joined[name] = type(getattr(first, name))(**columns)
    return replace(
        first,
        file=f"{first.file} and more",
        base_ns=None,
        begins=tuple(begins),
        cuts=tuple(cuts),
        light_steps=tuple({step for trace in traces for step in trace.light_steps}),
        warnings=tuple(warning for trace in traces for warning in trace.warnings),
        **joined,
    )


def _moved(table: Events, shift: int, position: Mapping[str, Ints], largest: Mapping[str, int]) -> dict[str, Ints]:
    """The columns of a later trace, with times, positions and ids moved behind those of the earlier ones."""
    columns = table.columns()
    for name, values in columns.items():
        if name in {"start", "end"}:
            columns[name] = values + shift
        elif name in position:
            columns[name] = position[name][values]
        elif name in largest:
            columns[name] = np.where(values > 0, values + largest[name] + 1, values)
    return columns


def _merged(position: dict[Hashable, int], values: Sequence[Hashable]) -> Ints:
    """Add new values; returns the position of each value, followed by -1 so that -1 maps to itself."""
    return np.array([*(position.setdefault(value, len(position)) for value in values), -1], np.int64)


def _largest(trace: Trace, column: str) -> int:
    tables: tuple[Any, ...] = (trace.gpu, trace.calls, trace.operators)
    return max((int(getattr(table, column).max(initial=0)) for table in tables if hasattr(table, column)), default=0)
