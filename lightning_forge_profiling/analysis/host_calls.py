"""Names of host calls, as patterns: launches, synchronizations, allocations, copies, data loading."""

import re
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.kineto.trace import Spans, Trace

LAUNCHES: Final = re.compile(
    r"(?:cuda|hip|cu|musa)(?:Ext|ExtModule|Module)?Launch(?:(?:Cooperative|Multi)?Kernel\w*|_\w+)?"
    r"|(?:cuda|hip|cu)GraphLaunch(?:_\w+)?|hip(?:Hcc|Ext)ModuleLaunchKernel|zeCommandListAppendLaunchKernel"
)
"""Launches of kernels and of CUDA graphs."""

GRAPH_LAUNCHES: Final = re.compile(r"(?:cuda|hip|cu)GraphLaunch(?:_\w+)?")
"""Launches of CUDA graphs, whose host time grows with the number of kernels."""

WAITS: Final = re.compile(
    r"(?:cuda|hip)(?:Device|Stream|Event|Thread)Synchronize(?:_\w+)?|cu(?:Ctx|Stream|Event)Synchronize(?:_\w+)?"
    r"|(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol)?(?:_ptds|_v\d+)?|hipMemcpyWithStream"
    r"|cuMemcpy(?:HtoD|DtoH|DtoD)?(?:_v\d+)?"
)
"""Calls that block the host until the GPU has completed work."""

ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)Malloc(?:Async|Managed|Pitch|FromPoolAsync)?(?:_\w+)?|cuMem(?:Create|Alloc)(?:_v\d+)?"
)
FREES: Final = re.compile(r"(?:cuda|hip)Free(?:Async)?(?:_\w+)?|cuMem(?:Release|Free|Unmap)(?:_v\d+)?")
HOST_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip)(?:HostAlloc|MallocHost|HostMalloc|FreeHost|HostFree|HostRegister|HostUnregister)(?:_\w+)?"
)
COPIES: Final = re.compile(r"(?:cuda|hip|cu)Memcpy\w*")

LOADS_DATA: Final = re.compile(
    r"forge\.data|enumerate\(DataLoader\)#.*|(?:\[pl\]\[(?:profile|module)\])?\[_\w+Loop\]\.train(?:_dataloader)?_next"
    r"|(?:dataloader|data_loader|get_batch|fetch_batch|next_batch|data_loading|load_data)(?:_next)?"
)
"""Ranges in which a training loop fetches a batch: by the callbacks, PyTorch or Lightning, and usual custom names."""


def named(trace: Trace, spans: Spans, pattern: re.Pattern[str] | Callable[[str], object]) -> NDArray[np.bool_]:
    """Mask of the ranges whose whole name matches."""
    match = pattern.fullmatch if isinstance(pattern, re.Pattern) else pattern
    if not len(spans):
        return np.zeros(0, bool)
    used = np.flatnonzero(np.bincount(spans.name))
    matches = np.zeros(len(trace.names), bool)
    matches[[name for name in used.tolist() if match(trace.names[name])]] = True
    return matches[spans.name]


def spans_of(spans: Spans, rows: NDArray[np.bool_]) -> Intervals:
    """The union of some ranges."""
    return Intervals.of(spans.start[rows], spans.end[rows])
