"""Processor name, usable cores, CPU times and free memory of this machine."""

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lightning_forge_profiling.safe_files import open_regular, read_regular

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


class CpuTimes(NamedTuple):
    """CPU times in seconds; pairs are CPU time and the time that was waited for a core. None if unknown."""

    at_s: float
    process_s: float
    idle_s: float | None
    """For which the cores of this process's affinity were idle, in sum."""
    thread_s: tuple[float, float] | None = None
    processes_s: Mapping[int, tuple[float, float]] = MappingProxyType({})
    group_s: float | None = None
    """Of all processes in this one's control group."""


def free_cores(before: CpuTimes, after: CpuTimes) -> float:
    """How many cores were idle between two readings, within the control group's quota; 0 if unknown.

    Example:
        >>> free_cores(CpuTimes(at_s=0.0, process_s=0.0, idle_s=10.0), CpuTimes(at_s=2.0, process_s=0.0, idle_s=13.0))
        1.5
    """
    seconds = after.at_s - before.at_s
    if before.idle_s is None or after.idle_s is None or seconds <= 0:
        return 0.0
    idle = (after.idle_s - before.idle_s) / seconds
    if (usable := usable_cores()) >= len(_affinity()):
        return idle
    if before.group_s is None or after.group_s is None:
        return 0.0
    return min(idle, usable - (after.group_s - before.group_s) / seconds)


def cpu_times(processes: Sequence[int] = (), proc: Path = _PROC) -> CpuTimes:
    """CPU times of this process and thread, of other processes, and of the cores. Takes 0.1 to 0.2 ms on Linux.

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
    idle_s = sum(idle) / os.sysconf("SC_CLK_TCK") if cores and len(idle) == len(cores) else None
    others = {pid: used for pid in processes if (used := _scheduled(proc / str(pid))) is not None}
    return CpuTimes(
        time.perf_counter(), time.process_time(), idle_s, _scheduled(proc / "thread-self"), others, _group_s()
    )


def _group_s(cgroup: Path = _CGROUP) -> float | None:
    used = re.search(r"^usage_usec (\d+)$", _text(cgroup / "cpu.stat"), re.MULTILINE)
    if used is not None:
        return int(used[1]) / 1e6
    nanoseconds = _text(cgroup / "cpuacct" / "cpuacct.usage").strip()
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else None


def _scheduled(about: Path) -> tuple[float, float] | None:
    """CPU time of all threads of a process, and the waits of its main thread for a core; of a thread its own."""
    used = _text(about / "stat").rpartition(")")[2].split()[_USED]
    waits = _text(about / "schedstat").split()
    return (sum(map(int, used)) / os.sysconf("SC_CLK_TCK"), int(waits[1]) / 1e9) if used and len(waits) > 1 else None


class CoreWait:
    """How long the thread that creates this has waited for a core, read in under a microsecond.

    Raises:
        OSError: the system does not say.

    Example:
        >>> waited = CoreWait()
        >>> waited.ns() >= 0
        True
        >>> waited.close()
    """

    def __init__(self, proc: Path = _PROC) -> None:
        self._file = open_regular(proc / "thread-self" / "schedstat")  # the file stays that of this thread

    def ns(self) -> int:
        """Nanoseconds since the thread began."""
        return int(os.pread(self._file.fileno(), 64, 0).split()[1])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
