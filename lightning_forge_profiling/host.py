"""Processor name, usable cores, CPU times and free memory of this machine."""

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")

_STARTED = 19
"""The field of /proc/PID/stat, counted behind the name, with the ticks from boot to the process's start: proc(5)."""

_USED = slice(11, 13)
"""The fields with the ticks of CPU time, in user and in kernel mode."""

_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""For cgroup v2 and v1: the files of the CPU time that is granted, and of the period that it is granted for."""

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


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Number of cores this process may use, which a batch system, `taskset` or a container's quota may limit.

    Args:
        cgroup: mount point of the control group; for tests.

    Example:
        >>> 1 <= usable_cores() <= os.cpu_count()
        True
    """
    cores = len(_affinity()) or os.cpu_count() or 1
    for names in _QUOTAS:
        quota, period = (*" ".join(_text(cgroup / name) for name in names).split(), "", "")[:2]
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()  # not on macOS


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU times since boot or since a process's start, in seconds.

    Attributes:
        at_s: when they were read, by the host clock.
        process_s: of this process, all threads.
        idle_s: for which the cores of this process's affinity were idle; None if unknown.
        thread_s: CPU time of the calling thread, and its waits for a core; None if unknown.
        processes_s: the same of other processes, by process id, as far as they are known.
    """

    at_s: float
    process_s: float
    idle_s: float | None
    thread_s: tuple[float, float] | None
    processes_s: Mapping[int, tuple[float, float]]


def cpu_times(processes: Sequence[int] = (), proc: Path = _PROC) -> CpuTimes:
    """CPU times of this process and thread, of other processes, and of the cores. Takes some 0.1 ms on Linux.

    Args:
        processes: process ids of the others.
        proc: Linux's folder about processes; for tests.

    Example:
        >>> cpu_times().process_s > 0
        True
    """
    cores = _affinity()
    idle = [
        int(line[4]) + int(line[5])  # waiting for a disk is idle too
        for line in (text.split() for text in _text(proc / "stat").splitlines() if re.match(r"cpu\d", text))
        if int(line[0][3:]) in cores and any(ticks != "0" for ticks in line[1:])  # zeros: a sandbox that hides them
    ]
    others = {pid: _scheduled(proc / str(pid)) for pid in processes}
    return CpuTimes(
        at_s=time.perf_counter(),
        process_s=time.process_time(),
        idle_s=sum(idle) / os.sysconf("SC_CLK_TCK") if cores and len(idle) == len(cores) else None,
        thread_s=_scheduled(proc / "thread-self"),
        processes_s={pid: found for pid, found in others.items() if found is not None},
    )


def _scheduled(about: Path) -> tuple[float, float] | None:
    """CPU time of all threads of a process, and the waits of its main thread for a core; of a thread its own."""
    used = _text(about / "stat").rpartition(")")[2].split()[_USED]
    waits = _text(about / "schedstat").split()
    if len(used) < 2 or len(waits) < 2:  # noqa: PLR2004
        return None
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK"), int(waits[1]) / 1e9


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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
