"""Synchronizing calls, with their cause and the line of user code."""

import re
from collections import defaultdict
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Nesting, take
from lightning_forge_profiling.analysis.launches import WAITS, named
from lightning_forge_profiling.analysis.python_functions import users_line
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints, Trace
from lightning_forge_profiling.schema import SyncCause

_COPY: Final = "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"
# The first cause with an operator anywhere around the call is taken: most specific first.
_CAUSES: Final = {
    "a truth test of a tensor (`if tensor:`)": ("aten::is_nonzero",),
    "nonzero() or a boolean mask": ("aten::nonzero",),
    "masked_select()": ("aten::masked_select",),
    "unique()": ("aten::_unique2", "aten::unique_consecutive"),
    "repeat_interleave() without output_size": ("aten::repeat_interleave",),
    "torch.equal()": ("aten::equal",),
    "bincount()": ("aten::bincount",),
    ".item()": ("aten::item", "aten::_local_scalar_dense"),
    "pin_memory()": ("aten::pin_memory", "aten::_pin_memory"),
    _COPY: ("aten::_to_copy", "aten::copy_"),
}
_CALLS: Final = (
    (re.compile(r"(?:cuda|hip)Device.*|cuCtx.*|(?:cuda|hip)Thread.*"), "torch.cuda.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Stream.*"), "stream.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Event.*"), "event.synchronize()"),
    (re.compile(r".*Memcpy.*"), _COPY),
)

# Before every batch on several devices, Lightning checks whether any rank received a SIGTERM
# (`_TrainingEpochLoop._broadcast_sigterm_tensor`): torch.tensor(device=...), a broadcast, .item().
_SIGTERM_CHECK: Final = ("aten::to", "c10d::broadcast_", "aten::item")
_BETWEEN: Final = re.compile(r"aten::lift_fresh|(?:aten::)?detach_|aten::empty(?:_strided)?")


def sync_causes(recording: Recording) -> tuple[SyncCause, ...]:
    """Causes of the synchronizing calls in the recorded steps, most frequent first."""
    trace, steps = recording.trace, recording.steps
    waits = np.flatnonzero(named(trace, trace.calls, WAITS))
    waits = waits[steps.host.at(trace.calls.start[waits]) >= 0]
    if not len(waits):
        return ()
    operators, around = trace.operators, recording.links.call_operator[waits]
    number = {name: number for number, names in enumerate(_CAUSES.values()) for name in names}
    specific = np.array([number.get(name, len(_CAUSES)) for name in trace.names])[operators.name]
    specific = np.append(recording.nesting.least_around(specific), len(_CAUSES))[around]
    operator = take(operators.name, around)
    frame = _users_frame(trace, waits)
    by_lightning = is_lightning_call(recording)[waits]
    duration = (trace.calls.end - trace.calls.start)[waits]

    cause_of = cache(partial(_cause, trace))
    line_of = cache(lambda frame: users_line(trace.names[frame], trace.libraries) if frame >= 0 else "")
    durations_of: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    columns = (trace.calls.name[waits], specific, operator, frame, by_lightning, duration)
    for *call, name, lightning, spent in zip(*(column.tolist() for column in columns), strict=True):
        durations_of[cause_of(*call), line_of(name), lightning].append(spent)
    causes = [
        SyncCause(
            cause=cause,
            where=where,
            lightning=lightning,
            per_step=len(durations) / len(steps),
            host_ms_per_step=steps.mean_ms(sum(durations)),
        )
        for (cause, where, lightning), durations in durations_of.items()
    ]
    return tuple(sorted(causes, key=lambda cause: (-cause.per_step, cause.cause, cause.where)))


def is_lightning_call(recording: Recording) -> NDArray[np.bool_]:
    """Mask of the rows of `Trace.calls` that Lightning's own loop makes."""
    trace, operators = recording.trace, recording.trace.operators
    rows = np.flatnonzero((recording.nesting.parent < 0) & ~named(trace, operators, _BETWEEN))
    rows = rows[np.argsort(operators.thread[rows], kind="stable")]
    to, broadcast, item = (named(trace, operators, re.compile(name))[rows] for name in _SIGTERM_CHECK)
    thread = operators.thread[rows]
    first = np.flatnonzero(to[:-2] & broadcast[1:-1] & item[2:] & (thread[:-2] == thread[2:]))
    own = rows[np.concatenate((first, first + 2))]
    outermost = recording.nesting.outermost(np.ones(len(operators), bool))
    return np.isin(take(outermost, recording.links.call_operator), own)


def _cause(trace: Trace, call: int, specific: int, operator: int) -> str:
    """The cause of a call: the most specific operator around it, else its own name and the innermost operator."""
    if specific < len(_CAUSES):
        return tuple(_CAUSES)[specific]
    name = trace.names[call]
    cause = next((cause for pattern, cause in _CALLS if pattern.fullmatch(name)), name)
    return f"{cause} in {trace.names[operator]}" if operator >= 0 else cause


def _users_frame(trace: Trace, calls: Ints) -> Ints:
    """The name of the innermost function around each call outside PyTorch and Lightning; -1 without one."""
    frames = trace.frames
    nesting = Nesting(frames)
    users = nesting.innermost(named(trace, frames, lambda frame: users_line(frame, trace.libraries)))
    around = nesting.enclosing(trace.calls.start[calls], trace.calls.thread[calls])
    return take(frames.name, take(users, around))
