"""All figures of one rank, a `RankSummary`, and its collectives matched with those of other ranks."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.gpu_time import BusyTime, IdleTime, busy_time, idle_parts, idle_time
from lightning_forge_profiling.analysis.host import python_functions, sync_causes
from lightning_forge_profiling.analysis.intervals import Intervals, Nesting
from lightning_forge_profiling.analysis.kernels import CATEGORY_OF, KINDS, base_name
from lightning_forge_profiling.analysis.modules import module_table
from lightning_forge_profiling.analysis.operators import flop_rate, operator_table
from lightning_forge_profiling.analysis.recording import Recording, with_steps
from lightning_forge_profiling.analysis.regions import cpu_time, outside_operators, region_table
from lightning_forge_profiling.analysis.steps import (
    ALLOCATES,
    FREES,
    GRAPH_LAUNCHES,
    LAUNCHES,
    LOADS_DATA,
    WAITS,
    Steps,
    captures,
    named,
    spans_of,
    step_marks,
)
from lightning_forge_profiling.kineto.trace import ACTIVITIES, Ints
from lightning_forge_profiling.schema import (
    Collective,
    CollectiveCall,
    Communication,
    Copies,
    Distribution,
    Gpu,
    Host,
    Kernel,
    Kind,
    Memory,
    RankCollectives,
    RankSummary,
    RankWait,
    Share,
    Step,
)

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
    lengths = {rank: np.array(own.end_ns, np.int64) - np.array(own.start_ns, np.int64) for rank, own in ranks.items()}
    by_group: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # rows, in order, by rank
    for rank, own in ranks.items():
        for row, kind in enumerate(own.call):
            by_group[own.calls[kind].group][rank].append(row)
    for group, members in sorted(by_group.items()):
        if len(members) < 2:  # noqa: PLR2004 - one rank alone cannot be compared
            continue
        calls = {rank: [ranks[rank].calls[ranks[rank].call[row]] for row in rows] for rank, rows in members.items()}
        steps = {rank: [ranks[rank].step[row] for row in rows] for rank, rows in members.items()}
        if len({(*(call.name for call in calls[rank]), *steps[rank]) for rank in members}) > 1:
            notes.append(f"the collectives of process group {group or '(unnamed)'} differ between ranks: not compared")
            continue
        durations = np.array([lengths[rank][rows] for rank, rows in members.items()])
        shortest = durations.min(axis=0)
        for rank, own_ns in zip(members, durations, strict=True):
            waits[rank] += int((own_ns - shortest).sum())
            spent[rank] += int(own_ns.sum())
        first = next(iter(members))
        mean_waits = (durations - shortest).mean(axis=0)
        for call, least, wait in zip(calls[first], shortest.tolist(), mean_waits.tolist(), strict=True):
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


TO_DEVICE: Final = "HtoD"

# "Memcpy HtoD (Pageable -> Device)" on NVIDIA, "CopyHostToDevice" and "Memcpy HtoD (Host -> Device)" on AMD
_DIRECTIONS: Final = (
    (re.compile(r"HtoD|HostToDevice", re.IGNORECASE), TO_DEVICE),
    (re.compile(r"DtoH|DeviceToHost", re.IGNORECASE), "DtoH"),
    (re.compile(r"PtoP|PeerToPeer|DtoP", re.IGNORECASE), "PtoP"),
    (re.compile(r"DtoD|DeviceToDevice", re.IGNORECASE), "DtoD"),
    (re.compile(r"HtoH|HostToHost", re.IGNORECASE), "HtoH"),
)


def copies(recording: Recording, busy: BusyTime) -> tuple[Copies, ...]:
    """Copies by direction and memory, longest first."""
    gpu, steps = recording.trace.gpu, recording.steps
    is_copy = (gpu.activity == ACTIVITIES.index("gpu_memcpy")) & (recording.step >= 0)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in np.unique(gpu.name[is_copy]).tolist():
        groups[_direction_and_memory(recording.trace.names[name])].append(name)
    table = []
    for (direction, memory_kind), names in groups.items():
        rows = is_copy & np.isin(gpu.name, names)
        others = int(steps.gpu.measure(spans_of(gpu, ~rows)).sum())
        spent, size = int((gpu.end - gpu.start)[rows].sum()), int(np.maximum(gpu.size[rows], 0).sum())
        table.append(
            Copies(
                direction=direction,
                memory=memory_kind,
                calls_per_step=int(rows.sum()) / len(steps),
                ms_per_step=steps.mean_ms(spent),
                bytes_per_step=size / len(steps),
                gb_per_s=size / spent if spent else 0.0,
                exposed_ms_per_step=steps.mean_ms(int(busy.busy.sum()) - others),
            )
        )
    return tuple(sorted(table, key=lambda copy: -copy.ms_per_step))


def memory(recording: Recording) -> Memory | None:
    """Device memory of PyTorch's caching allocator during the recorded steps; None if not recorded."""
    steps, rows = recording.steps, recording.trace.allocations
    rows = rows.at(steps.host.at(rows.start) >= 0)
    if not len(rows):
        return None
    return Memory(
        # before a free, more was allocated
        peak_allocated_bytes=int((rows.allocated + np.maximum(-rows.size, 0)).max()),
        peak_reserved_bytes=int(rows.reserved.max()),
        allocations_per_step=int((rows.size > 0).sum()) / len(steps),
        frees_per_step=int((rows.size < 0).sum()) / len(steps),
    )


def _direction_and_memory(name: str) -> tuple[str, str]:
    direction = next((direction for pattern, direction in _DIRECTIONS if pattern.search(name)), "other")
    host_side = {TO_DEVICE: name.partition("->")[0], "DtoH": name.partition("->")[2]}.get(direction, "")
    return direction, next((kind for kind in ("pageable", "pinned") if kind in host_side.lower()), "")


_FEWEST_FOR_P95: Final = 20
_LOADER: Final = re.compile(r"enumerate\(DataLoader\)#(\w+)\.__next__")


def summarize(
    recording: Recording, rank: int, counted: NDArray[np.bool_], *, sort: str | None = None, top: int = 20
) -> RankSummary:
    """Measure the recorded window of one rank."""
    every, recording = recording, with_steps(recording, counted)
    trace, steps = recording.trace, recording.steps
    busy = busy_time(recording)
    idle = idle_time(recording, busy.union)
    length = steps.gpu.length()
    work_ns = np.where(recording.step >= 0, trace.gpu.end - trace.gpu.start, 0)
    copied, cpu = copies(recording, busy), cpu_time(recording)
    flops, flops_note = flop_rate(recording, int(busy.busy.sum()), int(length.sum()))
    return RankSummary(
        rank=rank,
        file=trace.file,
        device=trace.device,
        steps=len(steps),
        step_ms=_distribution(length),
        gpu=Gpu(
            busy_ms_per_step=steps.mean_ms(busy.busy),
            busy_pct=steps.pct(busy.busy),
            idle_ms_per_step=steps.mean_ms(idle.idle),
            idle_pct=steps.pct(idle.idle),
            kernels_per_step=int(((recording.step >= 0) & (trace.gpu.activity == 0)).sum()) / len(steps),
        ),
        categories={category: _share(steps, spent) for category, spent in busy.categories.items()},
        kinds=_kinds(recording, busy),
        idle={cause: _share(steps, spent) for cause, spent in idle.causes.items()},
        idle_parts=idle_parts(recording, idle),
        cpu=cpu,
        comm=_communication(steps, busy),
        copies=copied,
        host=_host(recording, idle, copied),
        memory=memory(recording),
        regions=region_table(recording, idle),
        operators=operator_table(recording, sort=sort, top=top),
        modules=module_table(recording),
        top_kernels=_top_kernels(recording, top),
        flops=flops,
        flops_note=flops_note,
        per_step=_per_step(every, counted),
        unlinked_pct=100 * int(work_ns[~recording.links.linked].sum()) / max(int(work_ns.sum()), 1),
        loader=trace.loader,
        python=python_functions(recording, _spent(recording, idle, on_cpu=cpu is not None)),
        unseen=_unseen(recording),
        warnings=tuple(_warnings(every, on_cpu=cpu is not None)),
    )


def _spent(recording: Recording, idle: IdleTime, *, on_cpu: bool) -> dict[str, Intervals]:
    """Times on the host of which the user's function is wanted, see `PythonFunctions.spent`."""
    trace = recording.trace
    if not len(trace.frames):
        return {}
    if not on_cpu:
        data = spans_of(trace.annotations, named(trace, trace.annotations, LOADS_DATA))
        return {"data": data, "launching": idle.for_python, "waiting": idle.for_host}
    outside, host = outside_operators(recording), recording.on_host
    inside = {name: outside & host[name] for name in ("forward", "backward", "optimizer")}
    return {"data": host["data"], "python": outside, **inside}


def _share(steps: Steps, spent: Ints) -> Share:
    return Share(ms_per_step=steps.mean_ms(spent), pct=steps.pct(spent))


def _distribution(length: Ints) -> Distribution:
    ms = length / 1e6
    return Distribution(
        mean=float(ms.mean()),
        p50=float(np.median(ms)),
        min=float(ms.min()),
        max=float(ms.max()),
        p95=float(np.percentile(ms, 95)) if len(ms) >= _FEWEST_FOR_P95 else None,
    )


def _kinds(recording: Recording, busy: BusyTime) -> dict[str, Kind]:
    steps, calls = recording.steps, np.bincount(recording.kind[recording.step >= 0], minlength=len(KINDS))
    spent = {kind: ns for kind, ns in busy.kinds.items() if ns.any() or calls[KINDS.index(kind)]}
    return {
        kind: Kind(
            category=CATEGORY_OF[kind],
            ms_per_step=steps.mean_ms(ns),
            pct=steps.pct(ns),
            calls_per_step=int(calls[KINDS.index(kind)]) / len(steps),
        )
        for kind, ns in sorted(spent.items(), key=lambda item: -int(item[1].sum()))
    }


def _communication(steps: Steps, busy: BusyTime) -> Communication:
    full, exposed = int(busy.comm.sum()), int(busy.comm_exposed.sum())
    return Communication(
        ms_per_step=steps.mean_ms(full),
        exposed_ms_per_step=steps.mean_ms(exposed),
        holds_up_ms_per_step=steps.mean_ms(busy.comm_holds_up),
        hidden_pct=100 * (full - exposed) / full if full else 0.0,
        exposed_pct=steps.pct(exposed),
    )


def _host(recording: Recording, idle: IdleTime, copied: tuple[Copies, ...]) -> Host:
    trace, steps = recording.trace, recording.steps
    inside = (steps.host.at(trace.calls.start) >= 0) & ~captures(trace).contains(trace.calls.start)
    launches, graphs, mallocs, frees = (
        int((inside & named(trace, trace.calls, pattern)).sum()) / len(steps)
        for pattern in (LAUNCHES, GRAPH_LAUNCHES, ALLOCATES, FREES)
    )
    causes = sync_causes(recording)
    return Host(
        device_syncs_per_step=sum(cause.per_step for cause in causes if not cause.lightning),
        lightning_syncs_per_step=sum(cause.per_step for cause in causes if cause.lightning),
        idle_after_sync_ms_per_step=steps.mean_ms(idle.after_sync),
        idle_after_allocator_ms_per_step=steps.mean_ms(idle.after_allocator),
        idle_launching_ms_per_step=steps.mean_ms(idle.launching),
        launches_per_step=launches,
        graph_launches_per_step=graphs,
        cuda_mallocs_per_step=mallocs,
        cuda_frees_per_step=frees,
        h2d_bytes_per_step=sum(copy.bytes_per_step for copy in copied if copy.direction == TO_DEVICE),
        data_wait_ms_per_step=steps.mean_ms(idle.data_wait),
        data_loader=next((loader[1] for loader in map(_LOADER.fullmatch, trace.names) if loader), ""),
        syncs=causes,
    )


def _top_kernels(recording: Recording, top: int) -> tuple[Kernel, ...]:
    gpu, steps = recording.trace.gpu, recording.steps
    rows = np.flatnonzero((recording.step >= 0) & (gpu.activity == ACTIVITIES.index("kernel")))
    # a kernel may be of several kinds: an elementwise kernel counts to the optimizer only in its step
    key = gpu.name[rows] * len(KINDS) + recording.kind[rows]
    keys, number = np.unique(key, return_inverse=True)
    spent = np.bincount(number, (gpu.end - gpu.start)[rows], len(keys))
    calls = np.bincount(number, minlength=len(keys))
    return tuple(
        Kernel(
            name=recording.trace.names[keys[row] // len(KINDS)],
            kind=KINDS[keys[row] % len(KINDS)],
            category=CATEGORY_OF[KINDS[keys[row] % len(KINDS)]],
            calls_per_step=int(calls[row]) / len(steps),
            ms_per_step=steps.mean_ms(spent[row]),
            mean_us=float(spent[row] / calls[row]) / 1e3,
            pct=steps.pct(spent[row]),
        )
        for row in np.argsort(-spent, kind="stable")[:top].tolist()
    )


def _per_step(recording: Recording, counted: NDArray[np.bool_]) -> tuple[Step, ...]:
    steps, busy = recording.steps, busy_time(recording)
    length, host_length = steps.gpu.length(), steps.host.length()
    return tuple(
        Step(
            number=int(steps.number[row]),
            ms=int(length[row]) / 1e6,
            host_ms=int(host_length[row]) / 1e6,
            busy_ms=int(busy.busy[row]) / 1e6,
            categories_ms={category: int(spent[row]) / 1e6 for category, spent in busy.categories.items()},
            whole=bool(steps.whole[row]),
            counted=bool(counted[row]),
            light=bool(steps.light[row]),
            captures=bool(steps.captures[row]),
        )
        for row in range(len(steps))
    )


def _unseen(recording: Recording) -> str:
    """What a device did that is not in the trace or is not analysed."""
    trace = recording.trace
    if captured := _captured(recording):
        return captured
    if len(trace.gpu):
        lost = not recording.steps.whole.any() and not any(trace.cuts)
        return f"in no step have all launches a kernel. {_LOST}" if lost else _starting(recording)
    if trace.foreign:
        [(device, events), *_] = Counter(trace.foreign).most_common()
        are = "event is" if events == 1 else "events are"
        return f"{events:,} {are} of {device}, which is not analysed: only the host's figures are known"
    launches = int(named(trace, trace.calls, LAUNCHES).sum())
    if launches:
        have = "launch has" if launches == 1 else "launches have"
        return (
            f"{launches:,} {have} no kernel: what the GPU did was not recorded. Another tool may use CUPTI (Nsight, "
            "DCGM, a second profiler), or the driver allows it to root alone (RmProfilingAdminOnly)"
        )
    return "" if len(trace.operators) or len(recording.steps.marks) else "neither operators nor GPU work were recorded"


def _captured(recording: Recording) -> str:
    """That the steps that count capture CUDA graphs, as they do where there are no others; "" for none."""
    trace, steps = recording.trace, recording.steps
    numbers = steps.number[steps.captures].tolist()
    launched = trace.calls.start[named(trace, trace.calls, LAUNCHES)]
    launches = int(captures(trace).contains(launched[steps.host.at(launched) >= 0]).sum())
    if not numbers or (not len(steps.marks) and launches < len(trace.gpu)):  # without marks a warm-up may be in it
        return ""
    one = len(numbers) == 1
    which = f"step{'' if one else 's'} {', '.join(map(str, numbers))}" if len(steps.marks) else "the recording"
    return (
        f"{which} capture{'s' if one else ''} a CUDA graph, and {launches:,} captured launches run nothing. "
        "Record later steps, which replay it"
    )


_LOST: Final = "The profiler loses kernels at the beginning of a window after idle time (pytorch issue 192021)"
_MOSTLY: Final = 0.5
_LEAST_START_NS: Final = 100_000_000  # CUDA takes longer to start


def _starting(recording: Recording) -> str:
    """That CUDA starts in the recorded steps, if that takes most of them: by a call before the first GPU work."""
    trace, calls, steps = recording.trace, recording.trace.calls, recording.steps
    other = named(trace, calls, WAITS) | named(trace, calls, LAUNCHES)  # for work from before, or a module
    before = np.flatnonzero(~other & (calls.end <= trace.gpu.start[0]))
    took = steps.host.spans.within(calls.start[before], calls.end[before])
    if not len(took) or took.max() < max(_LEAST_START_NS, _MOSTLY * int(steps.gpu.length().sum())):
        return ""
    longest = trace.names[calls.name[before[took.argmax()]]]
    return (
        f"the GPU is started in the recorded steps: {longest} takes {took.max() / 1e9:.1f} s before its first work. "
        "Record later steps"
    )


def _warnings(recording: Recording, *, on_cpu: bool) -> list[str]:
    trace, steps = recording.trace, recording.steps
    warnings = []
    cut_off = all(trace.cuts)
    if not len(steps.marks):
        where = " before the cut" if cut_off else ""
        counts = "each recording" if len(steps) > 1 else "the whole recording"
        warnings.append(f"no ProfilerStep marks{where}, so {counts} counts as one step")
    elif len(steps.marks) < int(step_marks(trace).sum()):
        thread = trace.threads[trace.annotations.thread[steps.marks[0]]][1]
        warnings.append(
            f"two profilers or threads marked steps at the same time; the steps are those of thread {thread}"
        )
    if not len(trace.gpu) and (cut_off or not on_cpu):
        warnings.append("no GPU work before the cut" if cut_off else "no GPU work was recorded")
    elif len(trace.gpu) and not recording.links.linked.any():
        warnings.append("no GPU work can be joined to its launch, so steps are those of the host")
    cut = steps.number[~steps.whole].tolist()
    if cut and not cut_off:
        numbers, lost = ", ".join(map(str, cut)), int(steps.lost[~steps.whole].sum())
        why = "which may be cut off" if any(trace.cuts) else f"as {lost:,} launches have no kernel. {_LOST}"
        warnings.append(f"GPU work is missing in step {numbers}, {why}")
    return [*trace.warnings, *(f"{trace.file}: {warning}" for warning in warnings)]
