"""Copies between host and devices, and device memory."""

import re
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Intervals
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import ACTIVITIES
from lightning_forge_profiling.results.rank import Copies, Memory

TO_DEVICE: Final = "HtoD"

# "Memcpy HtoD (Pageable -> Device)" on NVIDIA, "CopyHostToDevice" and "Memcpy HtoD (Host -> Device)" on AMD
_DIRECTIONS: Final = (
    (re.compile(r"HtoD|HostToDevice", re.IGNORECASE), TO_DEVICE),
    (re.compile(r"DtoH|DeviceToHost", re.IGNORECASE), "DtoH"),
    (re.compile(r"PtoP|PeerToPeer|DtoP", re.IGNORECASE), "PtoP"),
    (re.compile(r"DtoD|DeviceToDevice", re.IGNORECASE), "DtoD"),
    (re.compile(r"HtoH|HostToHost", re.IGNORECASE), "HtoH"),
)
_OTHER: Final = "other"


def copies(recording: Recording) -> tuple[Copies, ...]:
    """Copies by direction and memory, longest first."""
    gpu, steps = recording.trace.gpu, recording.steps
    is_copy = (gpu.activity == ACTIVITIES.index("gpu_memcpy")) & (recording.step >= 0)
    groups: dict[tuple[str, str], list[int]] = {}
    for name in np.unique(gpu.name[is_copy]).tolist():
        groups.setdefault(_direction_and_memory(recording.trace.names[name]), []).append(name)
    everything = int(steps.measure(Intervals.of(gpu.start, gpu.end)).sum())
    found = []
    for (direction, memory_kind), names in groups.items():
        rows = is_copy & np.isin(gpu.name, names)
        others = int(steps.measure(Intervals.of(gpu.start[~rows], gpu.end[~rows])).sum())
        spent, size = int((gpu.end - gpu.start)[rows].sum()), int(np.maximum(gpu.size[rows], 0).sum())
        found.append(
            Copies(
                direction=direction,
                memory=memory_kind,
                calls_per_step=int(rows.sum()) / len(steps),
                ms_per_step=spent / len(steps) / 1e6,
                bytes_per_step=size / len(steps),
                gb_per_s=size / spent if spent else 0.0,
                exposed_ms_per_step=(everything - others) / len(steps) / 1e6,
            )
        )
    return tuple(sorted(found, key=lambda copy: -copy.ms_per_step))


def memory(recording: Recording) -> Memory | None:
    """Device memory of PyTorch's caching allocator during the recorded steps; None if not recorded."""
    allocations, steps = recording.trace.allocations, recording.steps
    rows = steps.of_host(allocations.time) >= 0
    if not rows.any():
        return None
    # before a free, more was allocated
    before_or_after = allocations.allocated + np.maximum(-allocations.size, 0)
    return Memory(
        peak_allocated_bytes=int(before_or_after[rows].max()),
        peak_reserved_bytes=int(allocations.reserved[rows].max()),
        allocations_per_step=int((allocations.size[rows] > 0).sum()) / len(steps),
        frees_per_step=int((allocations.size[rows] < 0).sum()) / len(steps),
    )


def _direction_and_memory(name: str) -> tuple[str, str]:
    direction = next((direction for pattern, direction in _DIRECTIONS if pattern.search(name)), _OTHER)
    host_side = {TO_DEVICE: name.partition("->")[0], "DtoH": name.partition("->")[2]}.get(direction, "")
    return direction, next((kind for kind in ("pageable", "pinned") if kind in host_side.lower()), "")
