"""The machine that PyTorch runs on: its processor's name, the usable cores, the free memory."""

import os
import platform
import re
import time
from pathlib import Path

__all__ = ["free_memory_bytes", "process_age_s", "processor_name", "usable_cores"]

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

_STARTED = 19
"""The field of /proc/PID/stat, counted behind the name, with the ticks from boot to the process's start: proc(5)."""

_ACCOUNTS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of control groups of version 2 and 1: the files of limit, use and details, and among these the reclaimable pages."""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name as its vendor has it, or else its architecture.

    Args:
        cpuinfo: Linux's description of it; for tests.
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
    """How many cores this process may run on: a batch system or `taskset` may have left it fewer than there are.

    Example:
        >>> 1 <= usable_cores() <= os.cpu_count()
        True
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """How much memory a process can still take: what Linux has available, and what the container's limit leaves.

    The limit leaves what its working set does not take: the memory in use without the file pages that nobody used
    lately, which the kernel gives up first. Beyond it the kernel kills the process.

    Source: the kubelet's reckoning, kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction.

    Args:
        meminfo: Linux's account of it; for tests.
        cgroup: where the control group is mounted; for tests.

    Returns:
        Bytes; None where the system does not say.
    """
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(meminfo), re.MULTILINE)
    if available is None:
        return None
    free = int(available[1]) * 1024
    for limit, use, details, reclaimable in _ACCOUNTS:
        most, used = (_text(cgroup / name).strip() for name in (limit, use))
        if most.isdecimal():
            idle = re.search(rf"^{reclaimable} (\d+)$", _text(cgroup / details), re.MULTILINE)
            working_set = max(int(used or 0) - int(idle[1] if idle else 0), 0)
            free = min(free, max(int(most) - working_set, 0))
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
