"""Names of host calls, as patterns: launches, synchronizations, allocations, copies, data loading."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals, Nesting, take
from lightning_forge_profiling.kineto.trace import Calls, GpuWork, Ints, Operators, Spans, Trace

_NO_EXTERNAL: Final = (0, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Launches of GPU work. Arrays have one entry per row of `Trace.gpu`, `call_operator` per row of `Trace.calls`."""

    call: Ints  # row of the runtime or driver call that launched it; -1 if the trace has none
    operator: Ints  # row of the innermost operator around the launch; -1 without one
    time: Ints  # time of the launch on the host, nanoseconds; of the operator if the call is missing; -1 if unlinked
    thread: Ints  # host thread of the launch; -1 if unlinked
    call_operator: Ints  # row of the innermost operator around each call; -1 without one

    @property
    def linked(self) -> NDArray[np.bool_]:
        """Mask of the work whose launch is known."""
        return self.time >= 0


def link(trace: Trace, nesting: Nesting) -> Links:
    """Join GPU work to its launch: by correlation over runtime and driver calls, then by `External id`."""
    gpu, calls, operators = trace.gpu, trace.calls, trace.operators
    call = _match(gpu.correlation, calls.correlation, none=(-1, 0))
    call_operator = _operator_of_calls(calls, operators, nesting)
    by_external = _match(gpu.external, operators.external, none=_NO_EXTERNAL)
    has_call = call >= 0
    operator = np.where(has_call, take(call_operator, call), by_external)
    time = np.where(has_call, take(calls.start, call), take(operators.start, by_external))
    thread = np.where(has_call, take(calls.thread, call), take(operators.thread, by_external))
    return Links(call, operator, time, thread, call_operator)


def launched_before(trace: Trace, links: Links) -> NDArray[np.bool_]:
    """Mask of the GPU work launched before the recording began, such as that of the profiler's warm-up step.

    Its calls are not in the trace, and its correlation id is lower than those of all recorded calls.
    """
    gpu, begins = trace.gpu, np.array(trace.begins)
    lowest = np.full(len(begins), np.iinfo(np.int64).max)
    calls = trace.calls.correlation > 0
    recording = np.searchsorted(begins, trace.calls.start[calls], side="right") - 1
    np.minimum.at(lowest, recording, trace.calls.correlation[calls])
    before = lowest[np.searchsorted(begins, gpu.start, side="right") - 1]
    return ~links.linked & (gpu.correlation > 0) & (gpu.correlation < before)


def _operator_of_calls(calls: Calls, operators: Operators, nesting: Nesting) -> Ints:
    """The operator with a call's `External id` if it encloses the call, else the innermost operator around it.

    In some traces the `External id` of a call is its own correlation id, which by chance may be that of an operator.
    """
    operator = _match(calls.external, operators.external, none=_NO_EXTERNAL)
    around = (
        (take(operators.thread, operator) == calls.thread)
        & (take(operators.start, operator) <= calls.start)
        & (calls.start <= take(operators.end, operator))
    )
    operator[~around] = nesting.enclosing(calls.start[~around], calls.thread[~around])
    return operator


def _match(keys: Ints, table: Ints, *, none: tuple[int, ...]) -> Ints:
    """The first row of the table with each key; -1 without one."""
    if not len(table):
        return np.full(len(keys), -1)
    order = np.argsort(table, kind="stable")
    at = np.minimum(np.searchsorted(table[order], keys), len(table) - 1)
    row = order[at]
    return np.where((table[row] == keys) & ~np.isin(keys, none), row, -1)


# Launches of kernels and of CUDA graphs.
LAUNCHES: Final = re.compile(
    r"(?:cuda|hip|cu|musa)(?:Ext|ExtModule|Module)?Launch(?:(?:Cooperative|Multi)?Kernel\w*|_\w+)?"
    r"|(?:cuda|hip|cu)GraphLaunch(?:_\w+)?|hip(?:Hcc|Ext)ModuleLaunchKernel|zeCommandListAppendLaunchKernel"
)
# Launches of CUDA graphs, whose host time grows with the number of kernels.
GRAPH_LAUNCHES: Final = re.compile(r"(?:cuda|hip|cu)GraphLaunch(?:_\w+)?")
# Calls that block the host until the GPU has completed work.
WAITS: Final = re.compile(
    r"(?:cuda|hip)(?:Device|Stream|Event|Thread)Synchronize(?:_\w+)?|cu(?:Ctx|Stream|Event)Synchronize(?:_\w+)?"
    r"|(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol)?(?:_ptds|_v\d+)?|hipMemcpyWithStream"
    r"|cuMemcpy(?:HtoD|DtoH|DtoD)?(?:_v\d+)?"
)
ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)Malloc(?:Async|Managed|Pitch|FromPoolAsync)?(?:_\w+)?|cuMem(?:Create|Alloc)(?:_v\d+)?"
)
FREES: Final = re.compile(r"(?:cuda|hip)Free(?:Async)?(?:_\w+)?|cuMem(?:Release|Free|Unmap)(?:_v\d+)?")
HOST_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)(?:HostAlloc|MallocHost|HostMalloc|FreeHost|HostFree|HostRegister|HostUnregister)(?:_\w+)?"
)
COPIES: Final = re.compile(r"(?:cuda|hip|cu)Memcpy\w*")

# Ranges in which a training loop fetches a batch: by the callbacks, PyTorch or Lightning, and usual custom names.
LOADS_DATA: Final = re.compile(
    r"forge\.data|enumerate\(DataLoader\)#.*|(?:\[pl\]\[(?:profile|module)\])?\[_\w+Loop\]\.train(?:_dataloader)?_next"
    r"|(?:dataloader|data_loader|get_batch|fetch_batch|next_batch|data_loading|load_data)(?:_next)?"
)


def named(trace: Trace, spans: Spans, pattern: re.Pattern[str] | Callable[[str], object]) -> NDArray[np.bool_]:
    """Mask of the ranges whose whole name matches."""
    match = pattern.fullmatch if isinstance(pattern, re.Pattern) else pattern
    if not len(spans):
        return np.zeros(0, bool)
    used = np.flatnonzero(np.bincount(spans.name))
    matches = np.zeros(len(trace.names), bool)
    matches[[name for name in used.tolist() if match(trace.names[name])]] = True
    return matches[spans.name]


def spans_of(spans: Spans | GpuWork, rows: NDArray[np.bool_]) -> Intervals:
    """The union of some ranges."""
    return Intervals.of(spans.start[rows], spans.end[rows])
