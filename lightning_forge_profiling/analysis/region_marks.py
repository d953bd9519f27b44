"""The ranges with which the callbacks mark the built-in regions in a trace."""

import numpy as np

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.kineto.trace import Spans, Trace
from lightning_forge_profiling.names import MARK_PREFIX

__all__ = ["marks"]


def marks(trace: Trace) -> Spans:
    """The marks, all on one thread: while the main thread waits inside of one, autograd's threads launch."""
    rows = np.flatnonzero(named(trace, trace.annotations, lambda name: name.startswith(MARK_PREFIX)))
    found = trace.annotations
    return Spans(
        start=found.start[rows], end=found.end[rows], name=found.name[rows], thread=np.zeros(len(rows), np.int64)
    )
