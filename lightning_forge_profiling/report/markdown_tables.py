"""Markdown tables, and those of one rank in `summary.md`."""

from collections.abc import Iterable, Iterator, Sequence

from lightning_forge_profiling.report.labels import kernel_labels, operator_labels
from lightning_forge_profiling.report.text import code_cell, prose, short
from lightning_forge_profiling.report.wording import (
    STACKS_NOTE,
    calls,
    operator_columns,
    slowest,
    slowest_rank,
    used_gpu,
)
from lightning_forge_profiling.results.rank import Operator, RankSummary

_KERNELS = 20
_OPERATORS = 20
_LONGEST_NAME = 120
_SHAPES = 2


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> Iterator[str]:
    """A table whose first columns, as many as `texts`, are text, and whose others are numbers."""
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' if position < texts else '---:' for position in range(len(columns)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def host_tables(rank: RankSummary) -> Iterator[str]:
    """Tables of regions, calls that wait for the GPU, the user's functions and copies; an empty one is left out."""
    if rank.regions and used_gpu(rank):
        yield from ("", f"## Regions: rank {rank.rank}")
        yield from table(
            ("region", "GPU ms per step", "of step", "host ms per step", "launches per step"),
            (
                (
                    code_cell(region.name),
                    f"{region.gpu_ms_per_step:.3f}",
                    f"{region.pct:.1f} %",
                    f"{region.host_ms_per_step:.3f}",
                    f"{region.launches_per_step:.1f}",
                )
                for region in rank.regions
            ),
        )
    if rank.host.syncs:
        yield from ("", f"## Calls that wait for the GPU: rank {rank.rank}")
        yield from table(
            ("cause", "where", "whose", "per step", "host ms per step"),
            (
                (
                    prose(sync.cause),
                    code_cell(sync.where) if sync.where else "",
                    "Lightning's" if sync.lightning else "yours",
                    f"{sync.per_step:.1f}",
                    f"{sync.host_ms_per_step:.3f}",
                )
                for sync in rank.host.syncs
            ),
            texts=3,
        )
    if rank.python is not None and rank.python.users:
        yield from ("", f"## Your functions: rank {rank.rank}", "", f"{STACKS_NOTE}.")
        yield from table(
            ("function", "own ms per step", "ms per step", "calls per step"),
            (
                (
                    code_cell(user.where),
                    f"{user.own_ms_per_step:.3f}",
                    f"{user.ms_per_step:.3f}",
                    calls(user.calls_per_step),
                )
                for user in rank.python.users
            ),
        )
    if rank.copies:
        yield from ("", f"## Copies: rank {rank.rank}")
        yield from table(
            ("direction", "host memory", "calls per step", "MB per step", "ms per step", "exposed", "GB/s"),
            (
                (
                    prose(copies.direction),
                    prose(copies.memory),
                    f"{copies.calls_per_step:.1f}",
                    f"{copies.bytes_per_step / 1e6:.3f}",
                    f"{copies.ms_per_step:.3f}",
                    f"{copies.exposed_ms_per_step:.3f}",
                    f"{copies.gb_per_s:.2f}" if copies.gb_per_s else "",
                )
                for copies in rank.copies
            ),
            texts=2,
        )


def kernel_table(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """The costliest kernels of the slowest rank."""
    rank = slowest_rank(ranks)
    kernels = rank.top_kernels[:_KERNELS]
    labels = kernel_labels([kernel.name for kernel in kernels], _LONGEST_NAME)
    if kernels:
        yield from ("", f"## Top kernels: rank {rank.rank}{slowest(ranks)}")
        yield from table(
            ("kernel", "kind", "calls per step", "ms per step", "mean µs", "of step"),
            (
                (
                    code_cell(label),
                    prose(kernel.kind),
                    calls(kernel.calls_per_step),
                    f"{kernel.ms_per_step:.3f}",
                    f"{kernel.mean_us:.1f}",
                    f"{kernel.pct:.1f} %",
                )
                for label, kernel in zip(labels, kernels, strict=True)
            ),
            texts=2,
        )


def operator_table(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Its costliest operators."""
    rank = slowest_rank(ranks)
    operators = rank.operators[:_OPERATORS]
    if operators:
        columns = operator_columns(operators, on_gpu=used_gpu(rank))
        labels = operator_labels([operator.name for operator in operators], _LONGEST_NAME)
        shaped = any(operator.input_shapes for operator in operators)
        yield from ("", f"## Operators: rank {rank.rank}{slowest(ranks)}", "", "Per step, times in milliseconds:")
        yield from table(
            ("operator", *(["input shapes"] if shaped else []), *columns),
            (
                (
                    code_cell(label),
                    *([_shapes(operator)] if shaped else []),
                    *(write(operator) for write in columns.values()),
                )
                for label, operator in zip(labels, operators, strict=True)
            ),
            texts=1 + shaped,
        )


def _shapes(operator: Operator) -> str:
    return ", ".join(code_cell(short(shape, _LONGEST_NAME)) for shape in operator.input_shapes[:_SHAPES])
