"""Finds other torch profilers in the process: only one can run at a time, and the user's has precedence."""

import gc
from threading import Lock
from typing import Final

import torch
from torch.profiler import ProfilerAction, profile

RECORDING: Final = Lock()
"""Held while this package records. PyTorch reports only its own thread's profilers, and two at once end the process."""


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
