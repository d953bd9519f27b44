"""Collectives matched over the ranks: cost of the communication, and time that each rank waits for the others."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.intervals import Nesting
from lightning_forge_profiling.analysis.kernels import KINDS, base_name
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.kineto.trace import Ints
from lightning_forge_profiling.schema import Collective, CollectiveCall, RankCollectives, RankWait

# Point to point: their order differs between the ranks of a group, so they cannot be matched.
_SEND_RECEIVE: Final = re.compile(r"(?:send|recv|coalesced)(?![a-z]).*|sendrecv")
# The kernel of point-to-point transfers and of all-to-all, and in some versions of NCCL of all collectives.
_SEND_RECEIVE_KERNEL: Final = "sendrecv"
_HOST_RANGE: Final = re.compile(r"(?:nccl|rccl|c10d):+_?(.+)")
_OPERATION: Final = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+)")
_BYTES: Final = {
    "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


def collectives_of(recording: Recording) -> RankCollectives:
    """The collectives of one rank, to be matched with those of others."""
    gpu, trace, launch = recording.trace.gpu, recording.trace, recording.links.time
    rows = np.flatnonzero((recording.kind == KINDS.index("comm")) & (recording.step >= 0))
    rows = rows[np.argsort(np.where(launch >= 0, launch, gpu.start)[rows], kind="stable")]
    without_name = rows[gpu.collective[rows] < 0]
    streams, ranges = np.unique(gpu.lane[without_name]).tolist(), _host_ranges(recording, without_name)
    calls: dict[CollectiveCall, int] = {}
    in_group: Counter[str] = Counter()
    columns: list[tuple[int, ...]] = []
    for row in rows.tolist():
        if gpu.collective[row] >= 0:
            call, step = trace.collectives[gpu.collective[row]], -1
        else:
            call = _unnamed(trace.names[gpu.name[row]], ranges.get(row, ""), streams.index(gpu.lane[row]))
            step = int(recording.step[row])
        if not _SEND_RECEIVE.fullmatch(call.name):
            kind = calls.setdefault(call, len(calls))
            columns.append((kind, in_group[call.group], int(gpu.start[row]), int(gpu.end[row]), step))
            in_group[call.group] += 1
    kinds, sequence, start_ns, end_ns, step_of = zip(*columns, strict=True) if columns else [()] * 5
    return RankCollectives(
        steps=len(recording.steps),
        calls=tuple(calls),
        call=kinds,
        sequence=sequence,
        start_ns=start_ns,
        end_ns=end_ns,
        step=step_of,
    )


def _unnamed(kernel: str, host_range: str, stream: int) -> CollectiveCall:
    """The collective by its kernel's name, for a trace without `Collective name` (PyTorch before 2.2).

    The stream stands for the process group: each group has a communicator with its own stream.
    """
    operation = _OPERATION.match(base_name(kernel))
    name = operation[1].lower() if operation else base_name(kernel)
    group = f"on communication stream {stream + 1}"
    if name == _SEND_RECEIVE_KERNEL:
        name = host_range or "transfer"
    return CollectiveCall(name, group, elements=0, dtype="")


def _host_ranges(recording: Recording, rows: Ints) -> dict[int, str]:
    """By row of GPU work the collective that `nccl:...` or `c10d::...` around its launch names, if there is one."""
    trace, links = recording.trace, recording.links
    around = Nesting(trace.annotations).enclosing(links.time[rows], links.thread[rows])
    ranges = {}
    for row, annotation in zip(rows.tolist(), around.tolist(), strict=True):
        names = [] if annotation < 0 else [trace.names[trace.annotations.name[annotation]]]
        operator = int(links.operator[row])
        while operator >= 0:
            names.append(trace.names[trace.operators.name[operator]])
            operator = int(recording.nesting.parent[operator])
        named = next(filter(None, map(_HOST_RANGE.fullmatch, names)), None)
        if named is not None:
            ranges[row] = named[1]
    return ranges


class _Launched(NamedTuple):
    """The collectives of one rank in one process group, in order."""

    what: tuple[tuple[str, int], ...]  # name and step, which are the same on all ranks
    calls: tuple[CollectiveCall, ...]
    duration: Ints  # of their kernels, nanoseconds


def _by_group(own: RankCollectives) -> dict[str, _Launched]:
    duration = np.array(own.end_ns, np.int64) - np.array(own.start_ns, np.int64)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, call in enumerate(own.call):
        rows[own.calls[call].group].append(row)
    return {
        group: _Launched(
            tuple((own.calls[own.call[row]].name, own.step[row]) for row in of_group),
            tuple(own.calls[own.call[row]] for row in of_group),
            duration[of_group],
        )
        for group, of_group in rows.items()
    }


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
    cost: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
    waits, spent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    by_group: dict[str, dict[int, _Launched]] = defaultdict(dict)
    for rank, own in ranks.items():
        for group, launched in _by_group(own).items():
            by_group[group][rank] = launched
    for group, members in sorted(by_group.items()):
        if len(members) < 2:  # noqa: PLR2004 - one rank alone cannot be compared
            continue
        if len({launched.what for launched in members.values()}) > 1:
            notes.append(f"the collectives of process group {group or '(unnamed)'} differ between ranks: not compared")
            continue
        durations = np.array([launched.duration for launched in members.values()])
        shortest = durations.min(axis=0)
        for rank, own_ns in zip(members, durations, strict=True):
            waits[rank] += int((own_ns - shortest).sum())
            spent[rank] += int(own_ns.sum())
        first, launched = next(iter(members.items()))
        mean_waits = (durations - shortest).mean(axis=0)
        for call, least, wait in zip(launched.calls, shortest.tolist(), mean_waits.tolist(), strict=True):
            megabytes = call.elements * _BYTES.get(call.dtype, 0) / 1e6
            cost[call.name, group] += np.array([1, megabytes, least / 1e6, wait / 1e6]) / ranks[first].steps
    if not any(spent.values()):
        return (), (), tuple(notes)
    collectives = [
        Collective(
            name=name, group=group, calls_per_step=calls, megabytes_per_step=megabytes, cost_ms_per_step=ms,
            wait_ms_per_step=wait,
        )
        for (name, group), (calls, megabytes, ms, wait) in ((key, sums.tolist()) for key, sums in cost.items())
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
    collectives.sort(key=lambda one: -one.cost_ms_per_step - one.wait_ms_per_step)
    return tuple(collectives), per_rank, tuple(notes)
