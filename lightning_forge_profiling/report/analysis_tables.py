"""The tables of an analysis, as blocks that every report renders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from lightning_forge_profiling.report.blocks import Column, Row, Table, table_of
from lightning_forge_profiling.report.run_wording import ledger_rows, slowest_rows
from lightning_forge_profiling.report.text import kernel_labels, operator_labels, short
from lightning_forge_profiling.report.wording import IDLE_WORDS, calls, rank_name, step_on_host, used_gpu
from lightning_forge_profiling.schema import (
    CATEGORIES,
    IDLE_CAUSES,
    Analysis,
    Kernel,
    Operator,
    RankSummary,
    RunEvidence,
    RunLedger,
)

_SHAPES: Final = 2

_MS: Final = Column("ms per step", brief="ms/step")
_OF_STEP: Final = Column("of step")
_CALLS: Final = Column("calls per step", brief="calls/step")


def step_table(rank: RankSummary, *, kinds: bool = False) -> Table:
    """The step of a rank: busy time by category and, with `kinds`, by kind; idle time by cause. On a CPU by region."""
    rows = _on_gpu(rank, kinds=kinds) if used_gpu(rank) else step_on_host(rank)
    cells = tuple(Row((name, f"{ms:.3f}", f"{pct:.1f} %"), depth == 0, depth) for name, ms, pct, depth in rows)
    return Table((Column("part of the step", "text", brief=" "), _MS, _OF_STEP), cells)


def _on_gpu(rank: RankSummary, *, kinds: bool) -> Iterator[tuple[str, float, float, int]]:
    yield "step", rank.step_ms.mean, 100.0, 0
    yield "busy", rank.gpu.busy_ms_per_step, rank.gpu.busy_pct, 0
    for name in CATEGORIES:
        share = rank.categories[name]
        is_hidden = not kinds and name == "comm" and rank.comm.ms_per_step
        hidden = f" ({rank.comm.hidden_pct:.0f} % hidden)" if is_hidden else ""
        yield f"{name}{hidden}", share.ms_per_step, share.pct, 1
        parts = [(part.ms_per_step, part.pct, kind) for kind, part in rank.kinds.items() if part.category == name]
        if kinds and [kind for _, _, kind in parts] != [name]:
            yield from ((kind, ms, pct, 2) for ms, pct, kind in sorted(parts, reverse=True))
    yield "idle", rank.gpu.idle_ms_per_step, rank.gpu.idle_pct, 0
    for cause in IDLE_CAUSES:
        if cause in rank.idle and (kinds or rank.idle[cause].ms_per_step):
            yield IDLE_WORDS[cause], rank.idle[cause].ms_per_step, rank.idle[cause].pct, 2


def ranks_table(ranks: Sequence[RankSummary], *, causes: bool = False) -> Table:
    """Step times and shares of the step of each rank; with `causes`, those of idle time too."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {
        "rank": rank_name,
        "step ms": lambda rank: f"{rank.step_ms.mean:.3f}",
        "median": lambda rank: f"{rank.step_ms.p50:.3f}",
    }
    if any(map(used_gpu, ranks)):
        columns["busy"] = _on_gpu_only(lambda rank: rank.gpu.busy_pct)
        for name in CATEGORIES:
            columns[name] = _on_gpu_only(lambda rank, name=name: rank.categories[name].pct)  # type: ignore[misc]
        columns["idle"] = _on_gpu_only(lambda rank: rank.gpu.idle_pct)
        if causes:
            columns |= _idle_columns("idle: ")
    return table_of(ranks, columns)


def _on_gpu_only(pct: Callable[[RankSummary], float]) -> Callable[[RankSummary], str]:
    return lambda rank: f"{pct(rank):.1f}" if used_gpu(rank) else ""


def _idle_columns(before: str) -> dict[str | Column, Callable[[RankSummary], str]]:
    def pct(cause: str) -> Callable[[RankSummary], str]:
        return _on_gpu_only(lambda rank: rank.idle[cause].pct if cause in rank.idle else 0.0)

    return {before + cause: pct(cause) for cause in IDLE_CAUSES}


def idle_table(analysis: Analysis) -> Table:
    """Idle time of each rank by cause, and its waiting for other ranks."""
    columns: dict[str | Column, Callable[[RankSummary], str]] = {"rank": rank_name, **_idle_columns("")}
    if analysis.rank_waits:
        columns["waits for others, ms"] = _waits(analysis)
    return table_of(analysis.ranks, columns)


def _waits(analysis: Analysis) -> Callable[[RankSummary], str]:
    waits = {wait.rank: f"{wait.wait_ms_per_step:.3f}" for wait in analysis.rank_waits}
    return lambda rank: waits.get(rank.rank, "")


def communication_tables(analysis: Analysis) -> Iterator[Table]:
    """Communication of each rank, then the collectives."""
    yield table_of(
        [rank for rank in analysis.ranks if rank.comm.ms_per_step],
        {
            "rank": rank_name,
            "ms per step": lambda rank: f"{rank.comm.ms_per_step:.3f}",
            "exposed": lambda rank: f"{rank.comm.exposed_ms_per_step:.3f}",
            "holds the step up": lambda rank: f"{rank.comm.holds_up_ms_per_step:.3f}",
            "hidden": lambda rank: f"{rank.comm.hidden_pct:.1f} %",
            "of it waiting for other ranks": _waits(analysis),
        },
    )
    if analysis.collectives:
        yield table_of(
            analysis.collectives,
            {
                Column("collective", "code"): lambda one: one.name,
                Column("group", "code"): lambda one: one.group,
                "calls per step": lambda one: f"{one.calls_per_step:.1f}",
                "MB per step": lambda one: f"{one.megabytes_per_step:.1f}",
                "cost, ms per step": lambda one: f"{one.cost_ms_per_step:.3f}",
                "waiting, ms per step": lambda one: f"{one.wait_ms_per_step:.3f}",
            },
        )


def efficiency_table(ranks: Iterable[RankSummary]) -> Table:
    """What each rank asks of its GPU and of the host."""
    return table_of(
        filter(used_gpu, ranks),
        {
            "rank": rank_name,
            "GPU busy": lambda rank: f"{rank.gpu.busy_pct:.1f} %",
            "GFLOP per step": lambda rank: f"{rank.flops.per_step / 1e9:.1f}" if rank.flops else "",
            "launches per step": lambda rank: f"{rank.host.launches_per_step:.1f}",
            "device syncs per step": lambda rank: f"{rank.host.device_syncs_per_step:.1f}",
            "Lightning's own": lambda rank: f"{rank.host.lightning_syncs_per_step:.1f}",
            "`cudaMalloc` per step": lambda rank: f"{rank.host.cuda_mallocs_per_step:.1f}",
            "MB to the device per step": lambda rank: f"{rank.host.h2d_bytes_per_step / 1e6:.3f}",
            "peak MB allocated": lambda rank: f"{rank.memory.peak_allocated_bytes / 1e6:.1f}" if rank.memory else "",
        },
    )


def regions_table(rank: RankSummary) -> Table:
    """Regions of the recorded steps."""
    return table_of(
        rank.regions,
        {
            Column("region", "code"): lambda region: region.name,
            "GPU ms per step": lambda region: f"{region.gpu_ms_per_step:.3f}",
            "of step": lambda region: f"{region.pct:.1f} %",
            "host ms per step": lambda region: f"{region.host_ms_per_step:.3f}",
            "launches per step": lambda region: f"{region.launches_per_step:.1f}",
        },
    )


def syncs_table(rank: RankSummary) -> Table:
    """Calls that wait for the GPU."""
    return table_of(
        rank.host.syncs,
        {
            Column("cause", "text"): lambda sync: sync.cause,
            Column("where", "code"): lambda sync: sync.where,
            Column("whose", "text"): lambda sync: "Lightning's" if sync.lightning else "yours",
            "per step": lambda sync: f"{sync.per_step:.1f}",
            "host ms per step": lambda sync: f"{sync.host_ms_per_step:.3f}",
        },
    )


def functions_table(rank: RankSummary) -> Table:
    """The user's Python functions."""
    return table_of(
        rank.python.users if rank.python else (),
        {
            Column("function", "code"): lambda user: user.where,
            "own ms per step": lambda user: f"{user.own_ms_per_step:.3f}",
            "ms per step": lambda user: f"{user.ms_per_step:.3f}",
            "calls per step": lambda user: calls(user.calls_per_step),
        },
    )


def copies_table(rank: RankSummary) -> Table:
    """Copies between host and GPU."""
    return table_of(
        rank.copies,
        {
            Column("direction", "text"): lambda copies: copies.direction,
            Column("host memory", "text"): lambda copies: copies.memory,
            "calls per step": lambda copies: f"{copies.calls_per_step:.1f}",
            "MB per step": lambda copies: f"{copies.bytes_per_step / 1e6:.3f}",
            "ms per step": lambda copies: f"{copies.ms_per_step:.3f}",
            "exposed": lambda copies: f"{copies.exposed_ms_per_step:.3f}",
            "GB/s": lambda copies: f"{copies.gb_per_s:.2f}" if copies.gb_per_s else "",
        },
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
            _CALLS: lambda kernel: calls(kernel.calls_per_step),
            _MS: lambda kernel: f"{kernel.ms_per_step:.3f}",
            **(mean if means else {}),
            _OF_STEP: lambda kernel: f"{kernel.pct:.1f} %",
        },
    )


def operators_table(operators: Sequence[Operator], name_width: int, *, on_gpu: bool, shapes: bool = False) -> Table:
    """Operators, without columns that would be empty; with the shapes of their inputs if asked for."""
    labels = operator_labels([operator.name for operator in operators], name_width)
    columns: dict[str | Column, Callable[[Operator], str]] = {
        Column("operator", "code"): lambda operator: labels[operator.name]
    }
    if shapes and any(operator.input_shapes for operator in operators):
        columns[Column("input shapes", "codes")] = lambda operator: "\n".join(
            short(shape, name_width) for shape in operator.input_shapes[:_SHAPES]
        )
    columns["calls"] = lambda operator: calls(operator.calls_per_step)
    if on_gpu:
        columns["self GPU"] = lambda operator: f"{operator.self_device_ms_per_step:.3f}"
        columns["GPU"] = lambda operator: f"{operator.device_ms_per_step:.3f}"
    columns["self host"] = lambda operator: f"{operator.self_host_ms_per_step:.3f}"
    columns["host"] = lambda operator: f"{operator.host_ms_per_step:.3f}"
    if any(operator.allocated_bytes_per_step is not None for operator in operators):
        columns["MB"] = lambda operator: f"{(operator.allocated_bytes_per_step or 0.0) / 1e6:.1f}"
    return table_of(operators, columns)


def run_regions_table(run: RunEvidence) -> Table:
    """Means of the regions over a whole run."""
    columns = ("device ms per step", "host ms per step") if run.timing.on_device else ("ms per step",)
    cells = ((name, f"{part.device_ms:.3f}", f"{part.host_ms:.3f}") for name, part in run.timing.regions.items())
    return Table(
        (Column("region", "code"), *map(Column, columns)), tuple(Row(row[: 1 + len(columns)]) for row in cells)
    )


def slowest_table(run: RunEvidence) -> Table:
    """The slowest steps of a run."""
    return table_of(
        list(slowest_rows(run)),
        {
            "step": lambda slow: str(slow[0]),
            Column("what took long", "code"): lambda slow: slow[3],
            "ms": lambda slow: f"{slow[1]:.3f}",
            "times the median": lambda slow: f"{slow[2]:.1f}",
        },
    )


def ledger_table(ledger: RunLedger, decimals: int = 3) -> Table:
    """Parts of a run's wall time."""
    return table_of(
        ledger_rows(ledger),
        {
            Column("part", "code"): lambda part: part[0],
            "seconds": lambda part: f"{part[1]:.{decimals}f}",
            "of the run": lambda part: f"{100 * part[1] / ledger.wall_s:.1f} %" if ledger.wall_s > 0 else "",
            "times": lambda part: "" if part[2] is None else str(part[2]),
        },
    )
