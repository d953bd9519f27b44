"""The tables of a trace, each made once: a terminal, Markdown, pages and notebooks show the same rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.report import wording
from lightning_forge_profiling.report.labels import kernel_labels, operator_labels, short, short_kernel_name
from lightning_forge_profiling.report.screen import Column, Row, Table, table_of
from lightning_forge_profiling.schema import CATEGORIES, IDLE_CAUSES, Analysis, Kernel, Operator, RankSummary, Share

_SHOWN_PCT: Final = 0.05  # what is shorter shows as 0.0 %
_LONGEST_NAME: Final = 120
_MS: Final = Column("ms per step", brief="ms/step")
_OF_STEP: Final = Column("of step", "share")
_CALLS: Final = Column("calls per step", brief="calls/step")


def _ms(value: float) -> str:
    return f"{value:.3f}"


def rank_tables(rank: RankSummary, most: int | None = None) -> dict[str, Table]:
    """The tables about one rank that have rows, by their place on a page; of kernels and operators at most so many."""
    on_gpu = wording.used_gpu(rank)
    tables = {
        "kernels": kernels_table(rank.top_kernels[:most], _LONGEST_NAME, means=True),
        "idle": _idle_parts_table(rank),
        "python": _functions_table(rank),
        "operators": operators_table(rank.operators[:most], _LONGEST_NAME, on_gpu=on_gpu, shapes=True),
        "regions": _regions_table(rank),
        "syncs": _syncs_table(rank),
        "copies": _copies_table(rank),
    }
    if rank.gpu.idle_pct > rank.gpu.busy_pct:
        tables = {"idle": tables["idle"], **tables}
    return {place: table for place, table in tables.items() if table.rows}


def step_table(rank: RankSummary, *, kinds: bool = False) -> Table:
    """The step of a rank: busy time by category and, with `kinds`, by kind; idle time by cause. On a CPU by region."""
    rows = tuple(_on_gpu(rank, kinds=kinds) if wording.used_gpu(rank) else _on_host(rank, kinds=kinds))
    columns = (Column("part of the step", "text", brief=" "), _MS, _OF_STEP, *((_CALLS,) if kinds else ()))
    return Table(columns, rows, title="Parts of the step")


def _part(name: str, ms: float, pct: float, depth: int, *, calls: float | None = None, key: str = "") -> Row:
    cells = (name, _ms(ms), f"{pct:.1f} %", *(() if calls is None else (wording.calls(calls),)))
    return Row(cells, depth == 0, depth, key=key)


def _on_gpu(rank: RankSummary, *, kinds: bool) -> Iterator[Row]:
    yield _part("step", rank.step_ms.mean, 100.0, 0)
    yield _part("busy", rank.gpu.busy_ms_per_step, rank.gpu.busy_pct, 0)
    for name, share in rank.categories.items():
        if kinds and not share.ms_per_step:
            continue
        is_hidden = not kinds and name == "comm" and rank.comm.ms_per_step
        hidden = f" ({rank.comm.hidden_pct:.0f} % hidden)" if is_hidden else ""
        parts = {kind: part for kind, part in rank.kinds.items() if kinds and part.category == name}
        alone = parts.pop(name).calls_per_step if [*parts] == [name] else None
        yield _part(f"{name}{hidden}", share.ms_per_step, share.pct, 1, calls=alone, key="" if alone is None else name)
        for kind, part in sorted(parts.items(), key=lambda item: -item[1].ms_per_step):
            yield _part(kind, part.ms_per_step, part.pct, 2, calls=part.calls_per_step, key=kind)
    yield _part("idle", rank.gpu.idle_ms_per_step, rank.gpu.idle_pct, 0)
    for cause, idle in rank.idle.items():
        if idle.ms_per_step:
            name = wording.IDLE_WORDS.get(cause, cause)
            yield _part(name, idle.ms_per_step, idle.pct, 2, key=f"idle: {cause}")


def _on_host(rank: RankSummary, *, kinds: bool) -> Iterator[Row]:
    """The parts of a step without GPU work. The user's regions overlap the others."""
    step = rank.step_ms.mean
    parts: list[tuple[str, float, int, float | None]] = [("step", step, 0, None)]
    for one in rank.regions:
        calls = one.calls_per_step or None if kinds else None
        parts.append((f"your {one.name}" if one.user else one.name, one.host_ms_per_step, 1, calls))
    if rank.cpu is not None:
        parts.append(("operators, without data and optimizer", rank.cpu.operators_ms_per_step, 0, None))
        parts.append(("Python between operators", rank.cpu.python_ms_per_step, 0, None))
    for name, ms, depth, calls in parts:
        if ms:
            key = name if depth else ""
            yield _part(name, ms, 100 * ms / step if step else 0.0, depth, calls=calls, key=key)


def ranks_table(ranks: Sequence[RankSummary], *, causes: bool = False) -> Table:
    """Step times and shares of the step of each rank; with `causes`, those of idle time too."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {
        "rank": wording.rank_name,
        "step ms": lambda rank: _ms(rank.step_ms.mean),
        "median": lambda rank: _ms(rank.step_ms.p50),
        "busy": _on_gpu_only(lambda rank: rank.gpu.busy_pct),
    }
    for name in CATEGORIES:
        columns[name] = _on_gpu_only(lambda rank, name=name: _pct(rank.categories, name))  # type: ignore[misc]
    columns["idle"] = _on_gpu_only(lambda rank: rank.gpu.idle_pct)
    if causes:
        columns |= _idle_columns("idle: ")
    return table_of(ranks, columns, title="Ranks")


def _on_gpu_only(pct: Callable[[RankSummary], float]) -> Callable[[RankSummary], str]:
    return lambda rank: f"{pct(rank):.1f}" if wording.used_gpu(rank) else ""


def _pct(shares: Mapping[str, Share], name: str) -> float:
    return shares[name].pct if name in shares else 0.0


def _idle_columns(before: str) -> dict[str | Column, Callable[[RankSummary], str]]:
    return {
        before + cause: _on_gpu_only(lambda rank, cause=cause: _pct(rank.idle, cause))  # type: ignore[misc]
        for cause in IDLE_CAUSES
    }


def idle_table(analysis: Analysis) -> Table:
    """Idle time of each rank by cause, and its waiting for other ranks."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {"rank": wording.rank_name, **_idle_columns("")}
    columns["waits for others, ms"] = _waits_of_ranks(analysis)
    return table_of(analysis.ranks, columns)


def _waits_of_ranks(analysis: Analysis) -> Callable[[RankSummary], str]:
    waits = {wait.rank: _ms(wait.wait_ms_per_step) for wait in analysis.rank_waits}
    return lambda rank: waits.get(rank.rank, "")


def communication_tables(analysis: Analysis) -> Iterator[Table]:
    """Communication of each rank, then the collectives; none without communication."""
    communicating = [rank for rank in analysis.ranks if rank.comm.ms_per_step]
    if not communicating:
        return
    yield table_of(
        communicating,
        {
            "rank": wording.rank_name,
            _MS: lambda rank: _ms(rank.comm.ms_per_step),
            Column("exposed", means="during which no other kernel ran"): lambda rank: _ms(
                rank.comm.exposed_ms_per_step
            ),
            Column("holds the step up", means="exposed, and the next kernel or the host waits"): lambda rank: _ms(
                rank.comm.holds_up_ms_per_step
            ),
            Column("hidden", means="during which another kernel ran"): lambda rank: f"{rank.comm.hidden_pct:.1f} %",
            "of it waiting for other ranks": _waits_of_ranks(analysis),
        },
        title="Communication",
    )
    collectives = table_of(
        analysis.collectives,
        {
            Column("collective", "code"): lambda one: one.name,
            Column("group", "code"): lambda one: one.group,
            "calls per step": lambda one: f"{one.calls_per_step:.1f}",
            Column("MB per step", means="input of one rank"): lambda one: f"{one.megabytes_per_step:.1f}",
            Column("cost, ms per step", means="the shortest over the ranks: what it takes itself"): lambda one: _ms(
                one.cost_ms_per_step
            ),
            Column("waiting, ms per step", means="mean over the ranks: for the last to join"): lambda one: _ms(
                one.wait_ms_per_step
            ),
        },
        title="Collectives",
    )
    if collectives.rows:
        yield collectives


# of a step, unless it says otherwise; a quantity that no rank has, has no row
_WORK: Final[Mapping[str, Callable[[RankSummary], str]]] = MappingProxyType(
    {
        "GPU busy": lambda rank: f"{rank.gpu.busy_pct:.1f} %",
        "kernels": lambda rank: wording.calls(rank.gpu.kernels_per_step),
        "launches": lambda rank: wording.calls(rank.host.launches_per_step),
        "device syncs": lambda rank: wording.calls(rank.host.device_syncs_per_step),
        "Lightning's own": lambda rank: wording.calls(rank.host.lightning_syncs_per_step),
        "ms idle after syncs": lambda rank: _ms(rank.host.idle_after_sync_ms_per_step),
        "ms in the data loader": lambda rank: _ms(rank.host.data_wait_ms_per_step),
        "cudaMalloc": lambda rank: wording.calls(rank.host.cuda_mallocs_per_step),
        "cudaFree": lambda rank: wording.calls(rank.host.cuda_frees_per_step),
        "MB to the device": lambda rank: f"{rank.host.h2d_bytes_per_step / 1e6:.3f}",
        "peak MB allocated": lambda rank: f"{rank.memory.peak_allocated_bytes / 1e6:.1f}" if rank.memory else "",
        "peak MB reserved": lambda rank: f"{rank.memory.peak_reserved_bytes / 1e6:.1f}" if rank.memory else "",
        "allocations": lambda rank: wording.calls(rank.memory.allocations_per_step) if rank.memory else "",
        "frees": lambda rank: wording.calls(rank.memory.frees_per_step) if rank.memory else "",
        "GFLOP": lambda rank: wording.digits(rank.flops.per_step / 1e9) if rank.flops else "",
        "GFLOP of the model": lambda rank: (
            wording.digits(rank.flops.model_per_step / 1e9) if rank.flops and rank.flops.model_per_step else ""
        ),
        "TFLOP/s over the step": lambda rank: wording.digits(rank.flops.step_tflops) if rank.flops else "",
    }
)


def work_table(ranks: Sequence[RankSummary]) -> Table:
    """What host and GPU do in a step: a row for each quantity, a column for each rank that used a GPU."""
    shown = [rank for rank in ranks if wording.used_gpu(rank)]
    names = [f"rank {wording.rank_name(rank)}" for rank in shown] if len(shown) > 1 else ["value"][: len(shown)]
    rows = (Row((name, *map(say, shown))) for name, say in _WORK.items())
    kept = tuple(row for row in rows if any(row.cells[1:]))
    return Table((Column("per step", "text"), *map(Column, names)), kept, title="Host, memory and FLOPs")


def _idle_parts_table(rank: RankSummary) -> Table:
    """The longest parts of the GPU's idle time, by what the thread was in that launched the work after them."""
    step = rank.step_ms.mean
    on_gpu = wording.used_gpu(rank)
    shown = [part for part in rank.idle_parts if on_gpu and 100 * part.ms_per_step >= _SHOWN_PCT * step]
    threads = len({part.thread for part in shown}) > 1
    return table_of(
        shown,
        {
            Column("the host was in", "text"): lambda part: (
                (part.activity or ("anything: launched already" if part.launched else "Python outside of operators"))
                + (f" in {part.operator}" if part.operator else "")
                + (f", thread {part.thread}" if threads and part.thread else "")
            ),
            _MS: lambda part: _ms(part.ms_per_step),
            _OF_STEP: lambda part: f"{100 * part.ms_per_step / step:.1f} %" if step else "",
            Column("ended by", "code"): lambda part: short_kernel_name(part.following, _LONGEST_NAME),
        },
        title="Idle time",
    )


def kernels_table(kernels: Sequence[Kernel], name_width: int, *, means: bool = False) -> Table:
    """Kernels, with the mean time of a call if asked for."""
    labels = kernel_labels([kernel.name for kernel in kernels], name_width)
    mean: dict[str | Column, Callable[[Kernel], str]] = {"mean µs": lambda kernel: f"{kernel.mean_us:.1f}"}
    return table_of(
        kernels,
        {
            Column("kernel", "code"): lambda kernel: labels[kernel.name],
            Column("kind", "text"): lambda kernel: kernel.kind,
            _CALLS: lambda kernel: wording.calls(kernel.calls_per_step),
            _MS: lambda kernel: _ms(kernel.ms_per_step),
            **(mean if means else {}),
            _OF_STEP: lambda kernel: f"{kernel.pct:.1f} %",
        },
        title="Top kernels",
        key=lambda kernel: kernel.name,
    )


def operators_table(operators: Sequence[Operator], name_width: int, *, on_gpu: bool, shapes: bool = False) -> Table:
    """Operators, without columns that would be empty; with the shapes of their inputs if asked for."""
    labels = operator_labels([operator.name for operator in operators], name_width)
    columns: dict[str | Column, Callable[[Operator], str]] = {
        Column("operator", "code"): lambda operator: labels[operator.name]
    }
    if shapes:
        columns[Column("input shapes", "codes")] = lambda operator: "\n".join(
            short(shape, name_width) for shape in operator.input_shapes
        )
    alone, all_of_it = "without the operators it called", "with the operators it called"
    columns["calls"] = lambda operator: wording.calls(operator.calls_per_step)
    if on_gpu:
        columns[Column("self GPU", means=alone)] = lambda operator: _ms(operator.self_device_ms_per_step)
        columns[Column("GPU", means=all_of_it)] = lambda operator: _ms(operator.device_ms_per_step)
    columns[Column("self host", means=alone)] = lambda operator: _ms(operator.self_host_ms_per_step)
    columns[Column("host", means=all_of_it)] = lambda operator: _ms(operator.host_ms_per_step)
    columns[Column("MB", means="of GPU memory, without what it freed")] = lambda operator: (
        "" if operator.allocated_bytes_per_step is None else f"{operator.allocated_bytes_per_step / 1e6:.1f}"
    )
    note = "Per step, times in milliseconds."
    return table_of(operators, columns, title="Operators", note=note, key=lambda operator: operator.name)


def _regions_table(rank: RankSummary) -> Table:
    """The regions of a step with GPU work; the step on a CPU is in `step_table`."""
    return table_of(
        rank.regions if wording.used_gpu(rank) else (),
        {
            Column("region", "code"): lambda region: region.name,
            "GPU ms per step": lambda region: _ms(region.gpu_ms_per_step),
            _OF_STEP: lambda region: f"{region.pct:.1f} %",
            "host ms per step": lambda region: _ms(region.host_ms_per_step),
            "launches per step": lambda region: f"{region.launches_per_step:.1f}",
            Column("entered per step", means="unknown where inferred from operators"): lambda region: (
                wording.calls(region.calls_per_step) if region.calls_per_step else ""
            ),
            Column("whose", "text"): lambda region: "yours" if region.user else "",
        },
        title="Regions",
    )


def _syncs_table(rank: RankSummary) -> Table:
    return table_of(
        rank.host.syncs,
        {
            Column("cause", "text"): lambda sync: sync.cause,
            Column("where", "code"): lambda sync: sync.where or ("" if sync.lightning else "no stacks recorded"),
            Column("whose", "text"): lambda sync: "Lightning's" if sync.lightning else "yours",
            "per step": lambda sync: f"{sync.per_step:.1f}",
            "host ms per step": lambda sync: _ms(sync.host_ms_per_step),
        },
        title="Calls that wait for the GPU",
    )


def _functions_table(rank: RankSummary) -> Table:
    step = rank.step_ms.mean
    return table_of(
        rank.python.users if rank.python else (),
        {
            Column("function", "code"): lambda user: user.where,
            Column("own ms per step", means="without your other functions"): lambda user: _ms(user.own_ms_per_step),
            _OF_STEP: lambda user: f"{100 * user.own_ms_per_step / step:.1f} %" if step else "",
            Column("ms per step", means="with all that it calls"): lambda user: _ms(user.ms_per_step),
            "calls per step": lambda user: wording.calls(user.calls_per_step),
        },
        title="Your functions",
        note=f"{wording.STACKS_NOTE}.",
    )


def _copies_table(rank: RankSummary) -> Table:
    return table_of(
        rank.copies,
        {
            Column("direction", "text"): lambda copies: copies.direction,
            Column("host memory", "text"): lambda copies: copies.memory,
            "calls per step": lambda copies: f"{copies.calls_per_step:.1f}",
            "MB per step": lambda copies: f"{copies.bytes_per_step / 1e6:.3f}",
            _MS: lambda copies: _ms(copies.ms_per_step),
            Column("exposed", means="the GPU did nothing but such copies"): lambda copies: _ms(
                copies.exposed_ms_per_step
            ),
            "GB/s": lambda copies: f"{copies.gb_per_s:.2f}" if copies.gb_per_s else "",
        },
        title="Copies",
    )
