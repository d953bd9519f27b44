"""PyTorch's one collector in a process: whether another profiler has it, how to detach it, and marks in a recording.

Kineto, the collector behind `torch.profiler`, leaves CUPTI attached when it stops, and kernel launches then stay slower
to the end of the process (pytorch/pytorch#144455). It detaches it if the environment variable `TEARDOWN_CUPTI` is "1"
at the stop. No PyTorch release known to us does so by default (pytorch/kineto#1264, #1539).
"""

import contextlib
import ctypes
import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from threading import Lock, get_ident
from time import perf_counter, sleep
from typing import Any, Final

import torch
from torch._C._autograd import _enable_record_function
from torch.profiler import ProfilerAction, profile, record_function

from lightning_forge_profiling.profiler.child import ctrl_c_ends, exit_timeout_s

# Held while this package records. PyTorch reports only its own thread's profilers, and two at once end the process.
RECORDING: Final = Lock()


def active_profiler() -> str:
    """Why no profiler can be started now; "" if one can."""
    # the first is this thread's, the second the process's
    if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001  (no public way to ask)
        return "another torch profiler is active in this process"
    return ""


def scheduled_profiler(until: int) -> str:
    """Why none should run in the next steps: one of the user's is scheduled, and two at once end the process."""
    # PyTorch counts the steps of each profiler that was made and not closed; only then is a look through all objects
    # worth its time.
    if not torch.autograd.profiler.KinetoStepTracker._step_dict:  # noqa: SLF001
        return ""
    for other in gc.get_objects():  # type() and not isinstance(), which would wake lazy proxies among them
        if issubclass(type(other), profile) and other.record_steps and other.step_rec_fn is not None:
            steps = range(other.step_num, other.step_num + until + 1)
            if any(other.schedule(step) is not ProfilerAction.NONE for step in steps):
                return "another torch profiler in this process is scheduled for the same steps"
    return ""


def records_each_step() -> bool:
    """Whether another torch profiler is active that has no schedule, and so is not limited to a few steps."""
    return bool(active_profiler()) and not any(
        issubclass(type(each), profile) and each.record_steps for each in gc.get_objects()
    )


@functools.cache
def forks_exit_at_once() -> None:
    """Have each process that is forked from here on leave out the exit handlers of C and C++ libraries."""
    # From the first recording on Kineto has a thread that a forked process lacks: the destructor of what that waits
    # for never ends there (glibc). In a recorded step those of the recording crash.
    libc: Any = ctypes.CDLL(None) if hasattr(os, "register_at_fork") else None
    if hasattr(libc, "on_exit"):  # as glibc has

        def exit_at_once() -> None:
            libc.on_exit(libc._exit, None)  # noqa: SLF001  (which gets the exit code)
            libc.__cxa_atexit(libc.fflush, None, None)  # noqa: SLF001  (before that: the latest comes first)

        os.register_at_fork(after_in_child=exit_at_once)


@contextlib.contextmanager
def no_warning_of_later_cycles() -> Iterator[None]:
    """Silence what torch before 2.13 says of every first cycle: that later ones would forget it."""
    # only there, since afterwards Python shows each warning again that it shows once per place
    if torch.__version__ >= "2.13":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        yield


# what a rank allows the GPU also among others: while that is busy, the profiler's stop would block
_GPU_SETTLES_S: Final = 1.0
_VARIABLE: Final = "TEARDOWN_CUPTI"

_SAFE_FROM: Final = (12, 6)  # detaching crashed processes with CUDA graphs before CUDA 12.6 (pytorch/pytorch#146604)


def why_attached(environment: Mapping[str, str], cuda: str | None) -> str:
    """Why CUPTI stays attached after a recording, and what to do; "" if it will be detached."""
    chosen = environment.get(_VARIABLE)
    if cuda is None or chosen == "1":
        return ""
    if chosen is not None:
        return (
            f"{_VARIABLE}={chosen} is set, by you or by torch.compile with CUDA graphs. "
            f"With CUDA 12.6 or newer, {_VARIABLE}=1 is safe."
        )
    if tuple(int(part) for part in cuda.split(".")[:2]) < _SAFE_FROM:
        return (
            f"PyTorch is built with CUDA {cuda}, and detaching it is safe with CUDA graphs from 12.6 on. "
            f"Without CUDA graphs in the run, set {_VARIABLE}=1."
        )
    return ""


@contextlib.contextmanager
def detached_at_stop() -> Iterator[str]:
    """Make a profiler that is stopped inside detach CUPTI; the environment is restored afterwards."""
    why = why_attached(os.environ, torch.version.cuda)
    if why or torch.version.cuda is None or _VARIABLE in os.environ:
        yield why
        return
    os.environ[_VARIABLE] = "1"
    try:
        yield ""
    finally:
        os.environ.pop(_VARIABLE, None)


def let_gpu_settle(world_size: int) -> None:
    """Wait a limited time for the work queued on the GPU, without blocking on it."""
    event = torch.Event("cuda")
    event.record()
    seconds = max(exit_timeout_s(world_size), _GPU_SETTLES_S)
    deadline = perf_counter() + seconds
    with ctrl_c_ends():
        while not event.query() and perf_counter() < deadline:
            sleep(0.005)
    busy = not event.query()
    del event  # the exception keeps this frame, and a forked process cannot destroy an event
    if busy:
        raise TimeoutError(f"the GPU was still busy {seconds:.0f} s after the exception")


class Marks:
    """Begins named ranges of a recording, and leaves operators out of it or takes them in again.

    Operators and ranges are both calls of PyTorch's `RecordFunction`, which a thread can switch off; autograd's threads
    take that over with each backward pass. A range is switched on for the moment in which it begins.
    """

    def __init__(self) -> None:
        self._without_operators_on: int | None = None  # the thread

    def leave_operators_out(self) -> None:
        """Record no operators of this thread, and of backward passes that it begins."""
        if self._without_operators_on is None:
            self._without_operators_on = get_ident()
            _enable_record_function(False)  # noqa: FBT003

    def take_operators_in(self) -> None:
        """Record operators again; on the thread that left them out."""
        if self._without_operators_on == get_ident():
            self._without_operators_on = None
            _enable_record_function(True)  # noqa: FBT003

    def begin(self, name: str) -> record_function:
        """Begin a range. Leaving it as a context ends it."""
        mark = record_function(name.replace('"', "'"))  # PyTorch (2.13) does not escape it, and the trace is no JSON
        off = self._without_operators_on == get_ident()
        if off:
            _enable_record_function(True)  # noqa: FBT003
        try:
            mark.__enter__()  # type: ignore[no-untyped-call]
        finally:
            if off:
                _enable_record_function(False)  # noqa: FBT003
        return mark


_RECORDS: Final = "NSYS_PROFILING_SESSION_ID"  # which `nsys` sets in what it starts


def nsight_ranges(environment: Mapping[str, str]) -> Callable[[str], AbstractContextManager[Any]] | None:
    """What makes an NVTX range of a name; None unless `nsys` has started this process, on a machine with a GPU.

    Examples:
        >>> nsight_ranges({}) is None
        True
    """
    if _RECORDS not in environment or not torch.cuda.is_available():
        return None
    make: Callable[[str], AbstractContextManager[Any]] = torch.cuda.nvtx.range
    return make
