"""The ranges with which the callbacks mark the built-in regions in a trace."""

from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.host_calls import named
from lightning_forge_profiling.analysis.trace import Spans, Trace

__all__ = ["PREFIX", "marks"]

PREFIX: Final = "forge."
"""What their names begin with; the region's name follows."""


def marks(trace: Trace) -> Spans:
    """The marks, all on one thread: while the main thread waits inside of one, autograd's threads launch."""
    rows = np.flatnonzero(named(trace, trace.annotations, lambda name: name.startswith(PREFIX)))
    found = trace.annotations
    return Spans(
        start=found.start[rows], end=found.end[rows], name=found.name[rows], thread=np.zeros(len(rows), np.int64)
    )
