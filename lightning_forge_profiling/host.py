"""Processor name, usable cores and free memory of this machine."""

import os
import platform
import re
import time
from pathlib import Path

from lightning_forge_profiling.safe_files import read_regular

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

_STARTED = 19
"""The field of /proc/PID/stat, counted behind the name, with the ticks from boot to the process's start: proc(5)."""

_ACCOUNTS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For cgroup v2 and v1: the files of limit, usage and statistics, and the statistic of reclaimable pages."""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The vendor's name of the processor, or its architecture.

    Args:
        cpuinfo: Linux's file about the processor; for tests.
    """
    named = re.search(r"^model name\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def process_age_s() -> float | None:
    """Seconds since this process was started, to a hundredth; None if the system does not tell.

    Example:
        >>> (process_age_s() or 1.0) > 0
        True
    """
    fields = _text(Path("/proc/self/stat")).rpartition(")")[2].split()  # a name may hold anything
    if len(fields) <= _STARTED or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")


def usable_cores() -> int:
    """Number of cores this process may run on, which a batch system or `taskset` may limit.

    Example:
        >>> 1 <= usable_cores() <= os.cpu_count()
        True
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that a process can still allocate: available to Linux, and within the container's limit.

    Within the limit, all but the working set is free: memory in use without inactive file pages, which the kernel
    reclaims first. Beyond it the kernel kills the process. The kubelet computes it the same way:
    kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction.

    Args:
        meminfo: Linux's file about memory; for tests.
        cgroup: mount point of the control group; for tests.

    Returns:
        Bytes; None if unknown.
    """
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(meminfo), re.MULTILINE)
    if available is None:
        return None
    free = int(available[1]) * 1024
    for limit, use, details, reclaimable in _ACCOUNTS:
        most, used = (_text(cgroup / name).strip() for name in (limit, use))
        if most.isdecimal():
            inactive = re.search(rf"^{reclaimable} (\d+)$", _text(cgroup / details), re.MULTILINE)
            working_set = max(int(used or 0) - int(inactive[1] if inactive else 0), 0)
            free = min(free, max(int(most) - working_set, 0))
    return free


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode(errors="replace")
    except OSError:
        return ""
