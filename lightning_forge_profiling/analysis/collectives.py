"""Collectives matched over the ranks: cost of the communication, and time that each rank waits for the others."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.intervals import Nesting
from lightning_forge_profiling.analysis.kernels import KINDS, base_name
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import CollectiveCall, Ints
from lightning_forge_profiling.results.analysis import Collective, RankWait

_COMM: Final = "comm"
_SEND_RECEIVE: Final = re.compile(r"(?:send|recv|coalesced)(?![a-z]).*|sendrecv")
"""Point to point: their order differs between the ranks of a group, so they cannot be matched."""
_SEND_RECEIVE_KERNEL: Final = "sendrecv"
"""The kernel of point-to-point transfers and of all-to-all, and in some versions of NCCL of all collectives."""
_HOST_RANGE: Final = re.compile(r"(?:nccl|rccl|c10d):+_?(.+)")
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
        unnamed: for each group that only a stream stands for, the step of each of its collectives.
    """

    steps: int
    groups: Mapping[str, tuple[tuple[CollectiveCall, ...], tuple[int, ...]]]
    unnamed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def collectives_of(recording: Recording) -> RankCollectives:
    """The collectives of one rank, to be matched with those of others."""
    gpu, trace = recording.trace.gpu, recording.trace
    rows = np.flatnonzero((recording.kind == KINDS.index(_COMM)) & (recording.step >= 0))
    rows = rows[np.argsort(_launch_order(recording, rows), kind="stable")]
    without_name = rows[gpu.collective[rows] < 0]
    streams, ranges = np.unique(gpu.lane[without_name]).tolist(), _host_ranges(recording, without_name)
    calls: dict[str, list[CollectiveCall]] = defaultdict(list)
    durations: dict[str, list[int]] = defaultdict(list)
    unnamed: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        if gpu.collective[row] >= 0:
            call = trace.collectives[gpu.collective[row]]
        else:
            call = _unnamed(trace.names[gpu.name[row]], ranges.get(row, ""), streams.index(gpu.lane[row]))
        if not _SEND_RECEIVE.fullmatch(call.name):
            calls[call.group].append(call)
            durations[call.group].append(int(gpu.end[row] - gpu.start[row]))
            if gpu.collective[row] < 0:
                unnamed[call.group].append(int(recording.step[row]))
    groups = {group: (tuple(calls[group]), tuple(durations[group])) for group in calls}
    steps = {group: tuple(of_calls) for group, of_calls in unnamed.items()}
    return RankCollectives(len(recording.steps), groups, steps)


def _unnamed(kernel: str, host_range: str, stream: int) -> CollectiveCall:
    """The collective by its kernel's name, for a trace without `Collective name` (PyTorch before 2.2).

    The stream stands for the process group: each group has a communicator with its own stream.
    """
    found = _OPERATION.match(base_name(kernel))
    name = found[1].lower() if found else base_name(kernel)
    group = f"on communication stream {stream + 1}"
    if name == _SEND_RECEIVE_KERNEL:
        name = host_range or "transfer"
    return CollectiveCall(name, group, elements=0, dtype="")


def _host_ranges(recording: Recording, rows: Ints) -> dict[int, str]:
    """By row of GPU work the collective that `nccl:...` or `c10d::...` around its launch names, if there is one."""
    trace, links = recording.trace, recording.links
    around = Nesting(trace.annotations).enclosing(links.time[rows], links.thread[rows])
    found = {}
    for row, annotation in zip(rows.tolist(), around.tolist(), strict=True):
        names = [] if annotation < 0 else [trace.names[trace.annotations.name[annotation]]]
        operator = int(links.operator[row])
        while operator >= 0:
            names.append(trace.names[trace.operators.name[operator]])
            operator = int(recording.nesting.parent[operator])
        named = next(filter(None, map(_HOST_RANGE.fullmatch, names)), None)
        if named is not None:
            found[row] = named[1]
    return found


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
    in a trace without group names, the n-th of a stream, if each step has the same number of them on all ranks.
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
        if len({ranks[rank].unnamed.get(group) for rank in members}) > 1:
            matched = None
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
