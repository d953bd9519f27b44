"""Collectives matched over the ranks: cost of the communication, and time that each rank waits for the others."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.kernel_kinds import KINDS
from lightning_forge_profiling.analysis.kernel_names import base_name
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import CollectiveCall, Ints
from lightning_forge_profiling.results.analysis import Collective, RankWait

_COMM: Final = "comm"
_SEND_RECEIVE: Final = frozenset({"send", "recv", "sendrecv"})
"""Point to point: their order differs between the ranks of a group, so they cannot be matched."""
_OPERATION: Final = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+)")
_BYTES: Final = {
    "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives of one rank's recorded steps, in the order they were launched.

    Attributes:
        steps: number of steps.
        groups: for each process group its collectives and the durations of their kernels, in nanoseconds.
    """

    steps: int
    groups: Mapping[str, tuple[tuple[CollectiveCall, ...], tuple[int, ...]]]


def collectives_of(recording: Recording) -> RankCollectives:
    """The collectives of one rank, to be matched with those of others."""
    gpu, trace = recording.trace.gpu, recording.trace
    rows = np.flatnonzero((recording.kind == KINDS.index(_COMM)) & (recording.step >= 0))
    rows = rows[np.argsort(_launch_order(recording, rows), kind="stable")]
    streams = np.unique(gpu.lane[rows[gpu.collective[rows] < 0]]).tolist()
    calls: dict[str, list[CollectiveCall]] = defaultdict(list)
    durations: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        if gpu.collective[row] >= 0:
            call = trace.collectives[gpu.collective[row]]
        else:
            call = _unnamed(trace.names[gpu.name[row]], streams.index(gpu.lane[row]))
        if call.name not in _SEND_RECEIVE:
            calls[call.group].append(call)
            durations[call.group].append(int(gpu.end[row] - gpu.start[row]))
    groups = {group: (tuple(calls[group]), tuple(durations[group])) for group in calls}
    return RankCollectives(len(recording.steps), groups)


def _unnamed(kernel: str, stream: int) -> CollectiveCall:
    """The collective by its kernel's name, for a trace without `Collective name` (PyTorch before 2.2).

    The stream stands for the process group: each group has a communicator with its own stream.
    """
    name = _OPERATION.match(base_name(kernel))
    group = f"on communication stream {stream + 1}"
    return CollectiveCall(name[1].lower() if name else base_name(kernel), group, elements=0, dtype="")


def _launch_order(recording: Recording, rows: Ints) -> Ints:
    time = recording.links.time[rows]
    return np.where(time >= 0, time, recording.trace.gpu.start[rows])


def match_collectives(
    ranks: Mapping[int, RankCollectives],
) -> tuple[tuple[Collective, ...], tuple[RankWait, ...], tuple[str, ...]]:
    """Match collectives over the ranks, and split their time into communication and waiting.

    A collective ends on all ranks together, once the last has joined and the data has moved. So the shortest kernel, on
    the rank that joined last, is the communication itself; the rest of a longer kernel is waiting. Only durations are
    compared, never the clocks of two ranks. The n-th collective of a process group is the same one on all its ranks;
    in a trace without group names, the n-th of a stream.

    Args:
        ranks: the collectives of each rank.

    Returns:
        The collectives, most expensive first; the waiting time of each rank; and notes about what cannot be matched.
    """
    notes = []
    cost: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    waits, spent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    members_of: dict[str, list[int]] = defaultdict(list)
    for rank, own in ranks.items():
        for group in own.groups:
            members_of[group].append(rank)
    for group, members in sorted(members_of.items()):
        if len(members) < 2:  # noqa: PLR2004 - one rank alone cannot be compared
            continue
        matched = _same_calls([ranks[rank].groups[group][0] for rank in members])
        if matched is None:
            notes.append(f"the collectives of process group {group or '(unnamed)'} differ between ranks: not compared")
            continue
        durations = np.array([ranks[rank].groups[group][1][:matched] for rank in members])
        shortest = durations.min(axis=0)
        for position, rank in enumerate(members):
            waits[rank] += int((durations[position] - shortest).sum())
            spent[rank] += int(durations[position].sum())
        steps = ranks[members[0]].steps
        calls = ranks[members[0]].groups[group][0][:matched]
        mean_waits = (durations - shortest).mean(axis=0)
        for call, least, wait in zip(calls, shortest.tolist(), mean_waits.tolist(), strict=True):
            sums = cost[call.name, group]
            sums[0] += 1 / steps
            sums[1] += call.elements * _BYTES.get(call.dtype, 0) / 1e6 / steps
            sums[2] += least / 1e6 / steps
            sums[3] += wait / 1e6 / steps
    if not any(spent.values()):
        return (), (), tuple(notes)
    found = [
        Collective(
            name=name, group=group, calls_per_step=calls, megabytes_per_step=megabytes, cost_ms_per_step=ms,
            wait_ms_per_step=wait,
        )
        for (name, group), (calls, megabytes, ms, wait) in cost.items()
    ]  # fmt: skip
    per_rank = tuple(
        RankWait(
            rank=rank,
            comm_ms_per_step=spent[rank] / ranks[rank].steps / 1e6,
            wait_ms_per_step=waits[rank] / ranks[rank].steps / 1e6,
        )
        for rank in sorted(ranks)
        if spent[rank]
    )
    return tuple(sorted(found, key=lambda one: -one.cost_ms_per_step - one.wait_ms_per_step)), per_rank, tuple(notes)


def _same_calls(of_ranks: Sequence[Sequence[CollectiveCall]]) -> int | None:
    """The number of calls; None if the ranks' calls differ."""
    count = min(len(calls) for calls in of_ranks)
    if len({len(calls) for calls in of_ranks}) > 1:
        return None
    names = [[call.name for call in calls] for calls in of_ranks]
    return count if count and all(name == names[0] for name in names) else None
