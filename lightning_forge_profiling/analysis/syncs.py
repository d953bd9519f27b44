"""Calls in which the host waited for the GPU, and who made them."""

import re
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.host_calls import WAITS, named
from lightning_forge_profiling.analysis.nesting import ancestors, enclosing, parents
from lightning_forge_profiling.analysis.rank_summary import SyncCause
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.trace import Ints

__all__ = ["sync_causes"]

# The first of these that stands anywhere around the call names the cause: the more telling first.
_OPERATORS: Final = (
    ("aten::is_nonzero", "a truth test of a tensor (`if tensor:`)"),
    ("aten::nonzero", "nonzero() or a boolean mask"),
    ("aten::masked_select", "masked_select()"),
    ("aten::_unique2", "unique()"),
    ("aten::unique_consecutive", "unique()"),
    ("aten::repeat_interleave", "repeat_interleave() without output_size"),
    ("aten::equal", "torch.equal()"),
    ("aten::bincount", "bincount()"),
    ("aten::item", ".item()"),
    ("aten::_local_scalar_dense", ".item()"),
    ("aten::pin_memory", "pin_memory()"),
    ("aten::_pin_memory", "pin_memory()"),
    ("aten::_to_copy", "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"),
    ("aten::copy_", "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"),
)
_CALLS: Final = (
    (re.compile(r"(?:cuda|hip)Device.*|cuCtx.*|(?:cuda|hip)Thread.*"), "torch.cuda.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Stream.*"), "stream.synchronize()"),
    (re.compile(r"(?:cuda|hip|cu)Event.*"), "event.synchronize()"),
    (re.compile(r".*Memcpy.*"), "a blocking copy (.to(), .cpu(), .tolist(), torch.tensor(device=...))"),
)

# Lightning asks before every batch of a run on several devices whether any rank got a SIGTERM
# (`_TrainingEpochLoop._broadcast_sigterm_tensor`): torch.tensor(device=...), a broadcast, .item().
_BROADCAST: Final = "c10d::broadcast_"
_BETWEEN: Final = ("aten::lift_fresh", "aten::detach_", "detach_", "aten::empty", "aten::empty_strided")

_FRAME: Final = re.compile(r"(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)")
_NOT_THE_USERS: Final = re.compile(r"(?:.*/)?(?:torch|lightning|pytorch_lightning|lightning_fabric)/|<")


def sync_causes(recording: Recording) -> tuple[SyncCause, ...]:
    """Who made the host wait, in calls within the recorded steps; most frequent first."""
    trace, steps = recording.trace, recording.steps
    waits = np.flatnonzero(named(trace, trace.calls, WAITS))
    waits = waits[steps.of_host(trace.calls.start[waits]) >= 0]
    if not len(waits):
        return ()
    frame_parent = parents(trace.frames)
    frames = enclosing(trace.frames, frame_parent, trace.calls.start[waits], trace.calls.thread[waits])
    outermost = np.flatnonzero(recording.operator_parent < 0)
    found: dict[tuple[str, str, bool], list[int]] = {}
    for row, frame in zip(waits.tolist(), frames.tolist(), strict=True):
        chain = ancestors(recording.operator_parent, recording.links.call_operator[row])
        around = [trace.names[trace.operators.name[operator]] for operator in chain]
        lightning = bool(chain) and _is_lightnings(recording, outermost, chain[-1])
        cause = _cause(trace.names[trace.calls.name[row]], around)
        duration = int(trace.calls.end[row] - trace.calls.start[row])
        found.setdefault((cause, _line(recording, frame_parent, frame), lightning), []).append(duration)
    causes = [
        SyncCause(
            cause=cause,
            where=where,
            lightning=lightning,
            per_step=len(durations) / len(steps),
            host_ms_per_step=sum(durations) / len(steps) / 1e6,
        )
        for (cause, where, lightning), durations in found.items()
    ]
    return tuple(sorted(causes, key=lambda cause: (-cause.per_step, cause.cause, cause.where)))


def _cause(call: str, around: list[str]) -> str:
    for operator, cause in _OPERATORS:
        if operator in around:
            return cause
    cause = next((cause for pattern, cause in _CALLS if pattern.fullmatch(call)), call)
    return f"{cause} in {around[0]}" if around else cause


def _is_lightnings(recording: Recording, outermost: Ints, operator: int) -> bool:
    operators, names = recording.trace.operators, recording.trace.names
    same_thread = outermost[operators.thread[outermost] == operators.thread[operator]]
    place = int(np.searchsorted(same_thread, operator))

    def neighbour(direction: int) -> tuple[int, str]:
        at = place + direction
        while 0 <= at < len(same_thread) and names[operators.name[same_thread[at]]] in _BETWEEN:
            at += direction
        return at, names[operators.name[same_thread[at]]] if 0 <= at < len(same_thread) else ""

    name = names[operators.name[operator]]
    if name == "aten::item":
        return neighbour(-1)[1] == _BROADCAST
    if name == "aten::to":
        at, following = neighbour(1)
        after = names[operators.name[same_thread[at + 1]]] if at + 1 < len(same_thread) else ""
        return following == _BROADCAST and after == "aten::item"
    return False


def _line(recording: Recording, frame_parent: Ints, frame: int) -> str:
    """File and line of the innermost frame that is neither PyTorch's nor Lightning's."""
    for row in ancestors(frame_parent, frame):
        match = _FRAME.fullmatch(recording.trace.names[recording.trace.frames.name[row]])
        if match and not _NOT_THE_USERS.match(match["file"]):
            return f"{match['file']}:{match['line']} in {match['function']}"
    return ""
