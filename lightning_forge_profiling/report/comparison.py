"""A comparison on a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_forge_profiling.analysis.compare import Change, Comparison, Gate
from lightning_forge_profiling.report.text import plain, short_kernel_name
from lightning_forge_profiling.report.wording import IDLE_WORDS

__all__ = ["print_comparison"]

_SHOWN = 10
_NUMBERS = ("before", "now", "ms", "%")
_NUMBERS_WIDTH = 52  # what the numbers beside a name need
_NARROWEST_NAME = 20


def print_comparison(comparison: Comparison, gates: Sequence[Gate], console: Console) -> None:
    """Print what changed, the biggest movers first, and what the gates decided.

    Args:
        comparison: what to print.
        gates: decisions, none where no limit was given.
        console: where to; it leaves out the colours where it is no terminal.
    """
    for side, source in (("before", comparison.a), ("now", comparison.b)):
        console.print(Text(f"{side:<7} {plain(source)}"), soft_wrap=True, highlight=False)
    room = max(_NARROWEST_NAME, console.width - _NUMBERS_WIDTH)
    for title, table in _tables(comparison, room):
        console.print()
        console.print(Text(title, "bold"))
        console.print(table)
    console.print()
    for style, name, text in _lines(comparison, gates):
        line = Text.assemble((name, style), " ", plain(text))
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)  # a terminal would break words


def _tables(comparison: Comparison, room: int) -> Iterator[tuple[str, Table]]:
    table = _table("", *_NUMBERS, "95 % interval, ms")
    on_gpu = _on_gpu(comparison)
    # without GPU work all of the step would be idle, and none of it busy
    senseless = () if all(on_gpu) else ("idle",) if any(on_gpu) else comparison.metrics.keys() - {"step"}
    for name, metric in comparison.metrics.items():
        if name in senseless:
            continue
        known = metric.low_ms is not None and metric.high_ms is not None
        interval = f"{metric.low_ms:+.3f} to {metric.high_ms:+.3f}" if known else "too few steps"
        table.add_row(name, *_numbers(metric.a_ms, metric.b_ms, metric.difference_ms, metric.pct), interval)
    yield "Median step", table
    causes = tuple(replace(change, name=IDLE_WORDS.get(change.name, change.name)) for change in comparison.idle)
    for title, changes in (
        ("Idle by cause, mean step", causes if all(on_gpu) else ()),
        ("Kinds of kernels, mean step", comparison.kinds),
        ("Kernels, mean step", comparison.kernels),
    ):
        moved = [change for change in changes if change.a_ms or change.b_ms]
        if moved:
            more = f"; the {_SHOWN} biggest movers of {len(moved)}" if len(moved) > _SHOWN else ""
            yield title + more, _change_table(moved[:_SHOWN], room)


def _on_gpu(comparison: Comparison) -> tuple[bool, bool]:
    """Whether there was GPU activity before, and now: the kinds are all of the busy time."""
    return any(kind.a_ms for kind in comparison.kinds), any(kind.b_ms for kind in comparison.kinds)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _change_table(changes: Sequence[Change], room: int) -> Table:
    counted = any(change.a_calls or change.b_calls for change in changes)
    table = _table("", *_NUMBERS, *(["calls"] if counted else []))
    for change in changes:
        table.add_row(
            Text(short_kernel_name(change.name, 2 * room - 4)),
            *_numbers(change.a_ms, change.b_ms, change.difference_ms, change.pct),
            *([_calls(change)] if counted else []),
        )
    return table


def _calls(change: Change) -> str:
    before, now = f"{change.a_calls:.4g}", f"{change.b_calls:.4g}"
    return now if before == now else f"{before} > {now}"


def _numbers(before: float, now: float, difference: float, pct: float | None) -> tuple[str, ...]:
    return f"{before:.3f}", f"{now:.3f}", f"{difference:+.3f}", "new" if pct is None else f"{pct:+.1f}"


def _lines(comparison: Comparison, gates: Iterable[Gate]) -> Iterator[tuple[str, str, str]]:
    without = [side for side, on_gpu in zip(("before", "now"), _on_gpu(comparison), strict=True) if not on_gpu]
    if without:
        yield "yellow", "note", f"no GPU activity in the trace of {' and of '.join(without)}"
    yield from (("yellow", "note", note) for note in comparison.notes)
    for gate in gates:
        yield ("bold green", "passed", gate.text) if gate.passed else ("bold red", "failed", gate.text)
