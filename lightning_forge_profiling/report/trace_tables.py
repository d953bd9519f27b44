"""The tables of a trace, each made once: a terminal, Markdown, pages and notebooks show the same rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.kernel_name import short, short_kernel_name
from lightning_forge_profiling.report import wording
from lightning_forge_profiling.report.labels import kernel_labels, operator_labels
from lightning_forge_profiling.report.screen import Column, Row, Say, Table, table_of
from lightning_forge_profiling.schema import (
    CATEGORIES,
    IDLE_CAUSES,
    Analysis,
    Kernel,
    Operator,
    RankSummary,
    Share,
)

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
        "modules": modules_table(rank),
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
        parts.append(("exchange with other ranks", rank.cpu.exchange_ms_per_step, 0, None))
    for name, ms, depth, calls in parts:
        if ms:
            key = name if depth else ""
            yield _part(name, ms, 100 * ms / step if step else 0.0, depth, calls=calls, key=key)


def ranks_table(ranks: Sequence[RankSummary], *, causes: bool = False) -> Table:
    """Step times and shares of the step of each rank; with `causes`, those of idle time too."""
    columns: dict[str | Column, Say[RankSummary]] = {
        "rank": wording.rank_name,
        "step ms": "{.step_ms.mean:.3f}",
        "median": "{.step_ms.p50:.3f}",
        "busy %": _on_gpu_only(lambda rank: rank.gpu.busy_pct),
    }
    for name in CATEGORIES:
        columns[f"{name} %"] = _on_gpu_only(lambda rank, name=name: _pct(rank.categories, name))  # type: ignore[misc]
    columns["idle %"] = _on_gpu_only(lambda rank: rank.gpu.idle_pct)
    if causes:
        columns |= _idle_columns("idle: ")
    return table_of(ranks, columns, title="Ranks")


def _on_gpu_only(pct: Callable[[RankSummary], float]) -> Callable[[RankSummary], str]:
    return lambda rank: f"{pct(rank):.1f}" if wording.used_gpu(rank) else ""


def _pct(shares: Mapping[str, Share], name: str) -> float:
    return shares[name].pct if name in shares else 0.0


def _idle_columns(before: str) -> dict[str | Column, Say[RankSummary]]:
    return {
        before + cause: _on_gpu_only(lambda rank, cause=cause: _pct(rank.idle, cause))  # type: ignore[misc]
        for cause in IDLE_CAUSES
    }


def idle_table(analysis: Analysis) -> Table:
    """Idle time of each rank by cause, and its waiting for other ranks."""
    columns: dict[str | Column, Say[RankSummary]] = {"rank": wording.rank_name, **_idle_columns("")}
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
            _MS: "{.comm.ms_per_step:.3f}",
            Column("exposed", means="during which no other kernel ran"): "{.comm.exposed_ms_per_step:.3f}",
            Column("holds the step up", means="the next kernel or the host waits"): "{.comm.holds_up_ms_per_step:.3f}",
            Column("hidden", means="during which another kernel ran"): "{.comm.hidden_pct:.1f} %",
            "of it waiting for other ranks": _waits_of_ranks(analysis),
        },
        title="Communication",
    )
    collectives = table_of(
        analysis.collectives,
        {
            Column("collective", "code"): "{.name}",
            Column("group", "code"): "{.group}",
            "calls per step": "{.calls_per_step:.1f}",
            Column("MB per step", means="input of one rank"): "{.megabytes_per_step:.1f}",
            Column("cost, ms per step", means="the shortest over the ranks"): "{.cost_ms_per_step:.3f}",
            Column("waiting, ms per step", means="for the last rank to join, mean"): "{.wait_ms_per_step:.3f}",
        },
        title="Collectives",
    )
    if collectives.rows:
        yield collectives


# of a step, unless it says otherwise; a quantity that no rank has, has no row
_WORK: Final[Mapping[str | Column, Say[RankSummary]]] = MappingProxyType(
    {
        "GPU busy": "{.gpu.busy_pct:.1f} %",
        "kernels": lambda rank: wording.calls(rank.gpu.kernels_per_step),
        "launches": lambda rank: wording.calls(rank.host.launches_per_step),
        "device syncs": lambda rank: wording.calls(rank.host.device_syncs_per_step),
        "Lightning's own": lambda rank: wording.calls(rank.host.lightning_syncs_per_step),
        "ms idle after syncs": "{.host.idle_after_sync_ms_per_step:.3f}",
        "ms in the data loader": "{.host.data_wait_ms_per_step:.3f}",
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
    by_rank = table_of(shown, {"rank": wording.rank_name, **_WORK})
    quantities = [column.name for column in by_rank.columns[1:]]
    names = [f"rank {row.cells[0]}" for row in by_rank.rows] if len(shown) > 1 else ["value"]
    rows = [Row((name, *(row.cells[place] for row in by_rank.rows))) for place, name in enumerate(quantities, 1)]
    columns = (Column("per step", "text"), *map(Column, names))
    return Table(columns, tuple(rows if shown else ()), title="Host, memory and FLOPs")


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
            _MS: "{.ms_per_step:.3f}",
            _OF_STEP: lambda part: f"{100 * part.ms_per_step / step:.1f} %" if step else "",
            Column("ended by", "code"): lambda part: short_kernel_name(part.following, _LONGEST_NAME),
        },
        title="Idle time",
    )


def kernels_table(kernels: Sequence[Kernel], name_width: int, *, means: bool = False) -> Table:
    """Kernels, with the mean time of a call if asked for."""
    labels = kernel_labels([kernel.name for kernel in kernels], name_width)
    return table_of(
        kernels,
        {
            Column("kernel", "code"): lambda kernel: labels[kernel.name],
            Column("kind", "text"): "{.kind}",
            _CALLS: lambda kernel: wording.calls(kernel.calls_per_step),
            _MS: "{.ms_per_step:.3f}",
            "mean µs": "{.mean_us:.1f}" if means else "",
            _OF_STEP: "{.pct:.1f} %",
        },
        title="Top kernels",
        key="{.name}",
    )


def operators_table(operators: Sequence[Operator], name_width: int, *, on_gpu: bool, shapes: bool = False) -> Table:
    """Operators, without columns that would be empty; with the shapes of their inputs if asked for."""
    labels = operator_labels([operator.name for operator in operators], name_width)
    alone, all_of_it = "without the operators it called", "with the operators it called"

    def shapes_of(operator: Operator) -> str:
        return "\n".join(short(shape, name_width) for shape in operator.input_shapes) if shapes else ""

    def megabytes(operator: Operator) -> str:
        size = operator.allocated_bytes_per_step
        return "" if size is None else f"{size / 1e6:.1f}"

    return table_of(
        operators,
        {
            Column("operator", "code"): lambda operator: labels[operator.name],
            Column("input shapes", "codes"): shapes_of,
            "calls": lambda operator: wording.calls(operator.calls_per_step),
            Column("self GPU", means=alone): "{.self_device_ms_per_step:.3f}" if on_gpu else "",
            Column("GPU", means=all_of_it): "{.device_ms_per_step:.3f}" if on_gpu else "",
            Column("self host", means=alone): "{.self_host_ms_per_step:.3f}",
            Column("host", means=all_of_it): "{.host_ms_per_step:.3f}",
            Column("MB", means="of GPU memory, without what it freed"): megabytes,
        },
        title="Operators",
        note="Per step, times in milliseconds.",
        key="{.name}",
    )


def modules_table(rank: RankSummary, least_pct: float = 0.0) -> Table:
    """The modules of the model with at least such a share of the step, those in another one below it."""
    what = "GPU" if wording.used_gpu(rank) else "host"
    return table_of(
        [module for module in rank.modules if module.pct >= least_pct],
        {
            Column("module", "code"): "{.name}",
            Column("class", "code"): "{.kind}",
            _CALLS: lambda module: wording.calls(module.calls_per_step) if module.calls_per_step else "",
            Column(f"forward, {what} ms", brief="forward"): "{.forward_ms_per_step:.3f}",
            Column(f"backward, {what} ms", brief="backward"): "{.backward_ms_per_step:.3f}",
            _OF_STEP: "{.pct:.1f} %",
        },
        title="Modules",
        note="Each with those in it; * stands for equal layers. Backward by autograd's sequence numbers.",
        key="{.name}",
    )


def _regions_table(rank: RankSummary) -> Table:
    """The regions of a step with GPU work; the step on a CPU is in `step_table`."""
    return table_of(
        rank.regions if wording.used_gpu(rank) else (),
        {
            Column("region", "code"): "{.name}",
            "GPU ms per step": "{.gpu_ms_per_step:.3f}",
            _OF_STEP: "{.pct:.1f} %",
            "host ms per step": "{.host_ms_per_step:.3f}",
            "launches per step": "{.launches_per_step:.1f}",
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
            Column("cause", "text"): "{.cause}",
            Column("where", "code"): lambda sync: sync.where or ("" if sync.lightning else "no stacks recorded"),
            Column("whose", "text"): lambda sync: "Lightning's" if sync.lightning else "yours",
            "per step": "{.per_step:.1f}",
            "host ms per step": "{.host_ms_per_step:.3f}",
        },
        title="Calls that wait for the GPU",
    )


def _functions_table(rank: RankSummary) -> Table:
    step = rank.step_ms.mean
    return table_of(
        rank.python.users if rank.python else (),
        {
            Column("function", "code"): "{.where}",
            Column("own ms per step", means="without your other functions"): "{.own_ms_per_step:.3f}",
            _OF_STEP: lambda user: f"{100 * user.own_ms_per_step / step:.1f} %" if step else "",
            Column("ms per step", means="with all that it calls"): "{.ms_per_step:.3f}",
            "calls per step": lambda user: wording.calls(user.calls_per_step),
        },
        title="Your functions",
        note=f"{wording.STACKS_NOTE}.",
    )


def _copies_table(rank: RankSummary) -> Table:
    return table_of(
        rank.copies,
        {
            Column("direction", "text"): "{.direction}",
            Column("host memory", "text"): "{.memory}",
            "calls per step": "{.calls_per_step:.1f}",
            "MB per step": lambda copies: f"{copies.bytes_per_step / 1e6:.3f}",
            _MS: "{.ms_per_step:.3f}",
            Column("exposed", means="the GPU did nothing but such copies"): "{.exposed_ms_per_step:.3f}",
            "GB/s": lambda copies: f"{copies.gb_per_s:.2f}" if copies.gb_per_s else "",
        },
        title="Copies",
    )
