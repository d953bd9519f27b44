"""Processor name, usable cores, CPU times and free memory of this machine."""

import multiprocessing.process
import os
import platform
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lightning_forge_profiling.safe_files import open_regular, read_regular

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# where the CPU controller's files are below the mount point: cgroup v2, v2 beside v1, and v1 by two names
_HIERARCHIES = ("", "unified", "cpu", "cpu,cpuacct")
# the field of /proc/PID/stat, counted behind the name, with the ticks from boot to the process's start: proc(5)
_STARTED = 19
_FLAGS, _EXITING = 6, 4  # `PF_EXITING` of the kernel
_USED = slice(11, 13)  # the fields with the ticks of CPU time, in user and in kernel mode
_USED_WITH_CHILDREN = slice(11, 15)  # and those of its children that it has waited for
# for cgroup v2 and v1: the files of the CPU time that is granted, and of the period that it is granted for
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
# of system calls and of the disk, which is more where a file is mapped
_IO = ("rchar", "read_bytes", "wchar", "write_bytes")
_TICKS_PER_S, _PAGE = (os.sysconf(name) if hasattr(os, "sysconf") else 1 for name in ("SC_CLK_TCK", "SC_PAGE_SIZE"))
_SCHEDSTAT = "/proc/thread-self/schedstat"
_CPU_STAT = "the cgroup's cpu.stat"
_PRESSURE = "/proc/pressure/cpu"

# for cgroup v2 and v1: the files of limit, usage and statistics, and the statistic of reclaimable pages
_ACCOUNTS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The vendor's name of the processor, or its architecture."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def process_age_s() -> float | None:
    """Seconds since this process was started, to a hundredth; None if the system does not say."""
    own = process_state("self")
    if own is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / _TICKS_PER_S


class ProcessState(NamedTuple):
    """A process as the system sees it: proc(5)."""

    letter: str  # `R` runs, `S` and `D` wait, `T` was stopped, `t` by a debugger, `Z` has ended
    exits: bool  # whether it ends or has ended: its connections close before it is a `Z`
    parent: int
    started: int  # ticks from boot
    used_s: float  # CPU time of all threads, to a tick


def process_state(pid: int | str) -> ProcessState | None:
    """The state of a process; None if there is none, or the system does not say."""
    fields = _text(_PROC / str(pid) / "stat").rpartition(")")[2].split()  # a name may hold anything
    if len(fields) <= _STARTED:
        return None
    used_s = sum(map(int, fields[_USED])) / _TICKS_PER_S
    exits = fields[0] in "ZX" or bool(int(fields[_FLAGS]) & _EXITING)
    return ProcessState(fields[0], exits, int(fields[1]), int(fields[_STARTED]), used_s)


class ThreadCounts(NamedTuple):
    """What a thread has used so far."""

    used_s: float  # CPU time and waits for a core
    times: int  # how often it was given a core


def thread_counts(pid: int, thread: int) -> ThreadCounts | None:
    """What a thread of any process has used; None if unknown."""
    fields = [int(field) for field in _text(_PROC / str(pid) / "task" / str(thread) / "schedstat").split()]
    return ThreadCounts((fields[0] + fields[1]) / 1e9, fields[2]) if len(fields) > 2 else None  # noqa: PLR2004


def moved_bytes(pid: int | str) -> tuple[int, int]:
    """What a process, or `thread-self`, has read and written so far, but for sockets; 0 if unknown."""
    counts = dict(re.findall(r"^(\w+): (\d+)$", _text(_PROC / str(pid) / "io"), re.MULTILINE))
    read, from_disk, written, to_disk = (int(counts.get(name, 0)) for name in _IO)
    return read + from_disk, written + to_disk


def wait_channel(pid: int, thread: int) -> str:
    """The kernel's function that a thread of any process of this user waits in; "0" or "" if in none, or unknown."""
    return _text(_PROC / str(pid) / "task" / str(thread) / "wchan")


def catches(pid: int, signal: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(_signals(pid, "SigCgt") >> (signal - 1) & 1)


def default_signal(signals: Sequence[int]) -> int | None:
    """The first of some signals that this process neither catches, ignores nor blocks, in C either; None if none."""
    if _number(_PROC / "self" / "status", r"SigCgt:\s*([0-9a-f]+)", 16) is None:
        return None
    taken = _signals("self", "SigCgt") | _signals("self", "SigIgn") | _signals("self", "SigBlk")
    return next((signal for signal in signals if not taken >> (signal - 1) & 1), None)


def _signals(pid: int | str, kind: str) -> int:
    return _number(_PROC / str(pid) / "status", rf"{kind}:\s*([0-9a-f]+)", 16) or 0


def is_traced() -> bool:
    """Whether a debugger such as gdb is attached to this process."""
    return bool(_number(_PROC / "self" / "status", r"TracerPid:\s*(\d+)"))


def resident_bytes() -> int | None:
    """Resident memory of this process; None if the system does not say."""
    pages = _text(Path("/proc/self/statm")).split()[1:2]
    return int(pages[0]) * _PAGE if pages else None


def private_bytes(pid: int | str = "self") -> int | None:
    """The same of any process, without the files that it maps and memory that it shares; None likewise. Takes 15 us."""
    pages = [int(field) for field in _text(_PROC / str(pid) / "statm").split()[1:3]]
    return (pages[0] - pages[1]) * _PAGE if pages else None


def kernel_s() -> float:
    """Seconds of this thread in the kernel, such as for memory that it had not used before; 0 if unknown."""
    used = _usage("RUSAGE_THREAD")
    return 0.0 if used is None else used.ru_stime


def _usage(whose: str) -> "resource.struct_rusage | None":
    """What the system has counted; None where it does not: Windows nothing, macOS not of a thread."""
    return resource.getrusage(getattr(resource, whose)) if hasattr(resource, whose) else None


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Number of cores this process may use, which a batch system, `taskset` or a container's quota may limit."""
    cores = len(_affinity()) or os.cpu_count() or 1
    for group in _groups(cgroup, _PROC):
        for names in _QUOTAS:
            quota, period = (*" ".join(_text(group / name) for name in names).split(), "", "")[:2]
            if quota.isdecimal() and period.isdecimal() and int(period):
                cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()  # not on macOS


@cache
def _groups(cgroup: Path, proc: Path) -> list[Path]:
    """The CPU control groups of this process, each with those that contain it: any of them may have a quota."""
    paths = {"."}
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers or "cpu" in controllers.split(","):
            inner = Path(path.strip("/"))
            paths |= {str(each) for each in (inner, *inner.parents)}
    groups = (cgroup / kind / path for kind in _HIERARCHIES for path in sorted(paths))
    files = ("cpu.stat", "cpu.max", _QUOTAS[1][0])
    return [group for group in groups if any((group / name).exists() for name in files)]


class Throttling(NamedTuple):
    """How a CPU quota has stopped a control group so far."""

    seconds: float  # summed over the cores on which it had to wait
    periods: int  # of the quota, in which it was stopped


class CpuTimes(NamedTuple):
    """CPU times in seconds; pairs are CPU time and the time that was waited for a core. None if unknown."""

    at_s: float
    process_s: float
    idle_s: float | None  # for which the cores of this process's affinity were idle, in sum
    thread_s: tuple[float, float] | None = None
    processes_s: Mapping[int, tuple[float, float]] = MappingProxyType({})
    children_s: float = 0.0  # of the processes that this one started, ended ones and their ended ones included
    group_s: float | None = None  # of all processes in this one's control group
    threads_s: Mapping[int, tuple[float, float]] = MappingProxyType({})  # of this process's other ones, by native id
    stolen_s: float | None = None  # for which the hypervisor ran something else on the cores of the affinity, in sum
    throttled: Throttling | None = None
    pressure_s: float | None = None  # for which some process of the system waited for a core
    switches: int | None = None  # how often this thread had to leave its core

    @property
    def missing(self) -> tuple[str, ...]:
        """The sources that this system does not have."""
        known = {_SCHEDSTAT: self.thread_s, _CPU_STAT: self.throttled, _PRESSURE: self.pressure_s}
        return tuple(name for name, value in known.items() if value is None)


def free_cores(before: CpuTimes, after: CpuTimes) -> float:
    """How many cores were idle between two readings, within the control group's quota; 0 if unknown."""
    seconds = after.at_s - before.at_s
    if before.idle_s is None or after.idle_s is None or seconds <= 0:
        return 0.0
    idle = (after.idle_s - before.idle_s) / seconds
    if (usable := usable_cores()) >= len(_affinity()):
        return idle
    if before.group_s is None or after.group_s is None:
        return 0.0
    return min(idle, usable - (after.group_s - before.group_s) / seconds)


def cpu_times(
    processes: Sequence[int] = (), proc: Path = _PROC, cgroup: Path = _CGROUP, *, threads: str | None = None
) -> CpuTimes:
    """CPU times of this process and thread, of other processes, and of the cores.

    Takes 0.2 to 0.4 ms on Linux, and some 0.1 ms more for each process that this one has started.
    """
    cores = _affinity()
    lines = [
        [int(number) for number in line[1:9]]
        for line in (text.split() for text in _text(proc / "stat").splitlines() if re.match(r"cpu\d", text))
        if int(line[0][3:]) in cores and any(number != "0" for number in line[1:])  # zeros: a sandbox that hides them
    ]
    pressure_us = _number(proc / "pressure" / "cpu", r"some .*total=(\d+)")
    known = bool(cores) and len(lines) == len(cores)
    others = {pid: used for pid in processes if (used := _scheduled(proc / str(pid))) is not None}
    return CpuTimes(
        time.perf_counter(),
        time.process_time(),
        # waiting for a disk is idle too
        idle_s=sum(line[3] + line[4] for line in lines) / _TICKS_PER_S if known else None,
        thread_s=_on_core(proc / "thread-self"),
        processes_s=others,
        children_s=_children_s(proc, processes),
        group_s=_group_s(cgroup),
        threads_s={} if threads is None else _threads(proc / "self" / "task", threads),
        stolen_s=sum(line[7] for line in lines if len(line) > 7) / _TICKS_PER_S if known else None,  # noqa: PLR2004
        throttled=_throttled(cgroup, proc),
        pressure_s=None if pressure_us is None else pressure_us / 1e6,
        switches=None if (of_thread := _usage("RUSAGE_THREAD")) is None else of_thread.ru_nivcsw,
    )


def waited_s(before: CpuTimes, after: CpuTimes) -> float:
    """How long this thread's work waited for a core: as long as the thread that waited longest, as they may overlap."""
    if after.thread_s is None or before.thread_s is None:
        return 0.0
    # besides this one, those that Python does not know: autograd's, and the helpers of operators
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]  # noqa: SLF001
    both = after.threads_s.keys() & before.threads_s.keys() - {thread.native_id for thread in threads}
    waits = (after.threads_s[tid][1] - before.threads_s[tid][1] for tid in both)
    return max([after.thread_s[1] - before.thread_s[1], *waits])


def waited_pct(before: CpuTimes, after: CpuTimes) -> float:
    """The share of the time between two readings in which this thread's work waited for a core."""
    return 100 * waited_s(before, after) / max(after.at_s - before.at_s, 1e-9)


def _children_s(proc: Path, known: Sequence[int]) -> float:
    """CPU time of the processes that this one started, and of theirs that ended: of those that run, then of others."""
    # active_children() would wait for those that ended
    started = {*known, *(child.pid for child in list(multiprocessing.process._children))}  # type: ignore[attr-defined]  # noqa: SLF001
    with suppress(OSError):
        for task in (proc / "self" / "task").iterdir():  # where the kernel lists them (CONFIG_PROC_CHILDREN)
            started.update(map(int, _text(task / "children").split()))
    ticks = [
        int(field)
        for about in (proc / str(pid) for pid in started)
        if not _is_other_rank(about)
        for field in _text(about / "stat").rpartition(")")[2].split()[_USED_WITH_CHILDREN]
    ]
    ended = _usage("RUSAGE_CHILDREN")
    return sum(ticks) / _TICKS_PER_S + (0.0 if ended is None else ended.ru_utime + ended.ru_stime)


@cache
def _is_other_rank(about: Path) -> bool:
    """Whether a process was started as another rank, as Lightning's launcher does."""
    ranks = [
        re.search(rb"(?:^|\0)LOCAL_RANK=(\d+)", _bytes(each / "environ")) for each in (about, about.parent / "self")
    ]
    theirs, own = (None if rank is None else rank[1] for rank in ranks)
    return theirs is not None and theirs != own


def _group_s(cgroup: Path) -> float | None:
    if (microseconds := _number(cgroup / "cpu.stat", r"usage_usec (\d+)")) is not None:
        return microseconds / 1e6
    nanoseconds = _number(cgroup / "cpuacct" / "cpuacct.usage", r"(\d+)")
    return None if nanoseconds is None else nanoseconds / 1e9


def _throttled(cgroup: Path, proc: Path) -> Throttling | None:
    """Of the group that was throttled longest: this process's own, or one that contains it."""
    throttlings = []
    for group in _groups(cgroup, proc):
        counts = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "cpu.stat"), re.MULTILINE))
        for name, per_s in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if name in counts:
                throttlings.append(Throttling(int(counts[name]) / per_s, int(counts.get("nr_throttled", 0))))
    return max(throttlings, default=None)


def _threads(tasks: Path, named: str) -> dict[int, tuple[float, float]]:
    """Of each thread but this one: those that carry a step are autograd's and the operators' helpers too."""
    own = threading.get_native_id()
    try:
        ids = [int(task.name) for task in tasks.iterdir()]
    except OSError:
        return {}
    chosen = [tid for tid in ids if tid != own and _named(tasks, tid).startswith(named)]
    return {tid: used for tid in chosen if (used := _on_core(tasks / str(tid))) is not None}


@cache
def _named(tasks: Path, tid: int) -> str:
    return _text(tasks / str(tid) / "comm").strip()


def python_threads_s(but: int) -> dict[str, float]:
    """CPU time of the threads that Python has started, by name."""
    skipped = {but, threading.get_native_id()}
    threads = [thread for thread in threading.enumerate() if thread.native_id not in skipped]
    used = {thread.name: _on_core(_PROC / "self" / "task" / str(thread.native_id)) for thread in threads}
    return {name: on_core[0] for name, on_core in used.items() if on_core is not None}


def _scheduled(about: Path) -> tuple[float, float] | None:
    """CPU time of all threads of a process, and the waits of its main thread for a core."""
    used, of_thread = _text(about / "stat").rpartition(")")[2].split()[_USED], _on_core(about)
    return (sum(map(int, used)) / _TICKS_PER_S, of_thread[1]) if used and of_thread is not None else None


def _on_core(about: Path) -> tuple[float, float] | None:
    """CPU time of one thread, and how long it waited for a core while it could run."""
    fields = _text(about / "schedstat").split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) > 1 else None


class ThreadClock:
    """CPU time and waits for a core of the thread that creates this, read in about a microsecond from any thread."""

    def __init__(self) -> None:
        self._file = open_regular(_PROC / "thread-self" / "schedstat")  # the file stays that of this thread

    def ns(self) -> tuple[int, int]:
        """Nanoseconds since the thread began: on a core, up to the last tick if it is on one; waiting for one."""
        on_core, waited, _ = os.pread(self._file.fileno(), 64, 0).split()
        return int(on_core), int(waited)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that a process can still allocate: available to Linux, and within the container's limit."""
    # Within the limit, all but the working set is free: memory in use without inactive file pages, which the kernel
    # reclaims first. The kubelet does the same: kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction
    available = _number(meminfo, r"MemAvailable:\s*(\d+) kB")
    if available is None:
        return None
    free = available * 1024
    for limit, use, details, reclaimable in _ACCOUNTS:
        most, used = (_number(cgroup / name, r"(\d+)") for name in (limit, use))
        if most is not None:
            inactive = _number(cgroup / details, rf"{reclaimable} (\d+)") or 0
            free = min(free, max(most - max((used or 0) - inactive, 0), 0))
    return free


def _number(path: Path, line: str, base: int = 10) -> int | None:
    """The number in the line of a file that matches."""
    match = re.search(f"^{line}$", _text(path), re.MULTILINE)
    return int(match[1], base) if match else None


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError:
        return b""
