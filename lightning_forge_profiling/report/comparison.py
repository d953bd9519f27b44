"""A comparison of two analyses on a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_forge_profiling.diagnosis.compare import Change, Comparison
from lightning_forge_profiling.diagnosis.gate import Gate
from lightning_forge_profiling.report.labels import kernel_labels
from lightning_forge_profiling.report.screen import Screen, Table, Text
from lightning_forge_profiling.report.wording import IDLE_WORDS

_SHOWN = 10
_NUMBERS = ("before", "now", "ms", "%")
_KERNEL_LINES = 2
_STYLES = {"slower": "bold red", "inconclusive": "bold yellow"}
_BESIDE, _NARROWEST_NAME = 50, 20  # columns that the numbers take, and those of a name


def print_comparison(comparison: Comparison, gates: Sequence[Gate], screen: Screen | None = None) -> None:
    """Print what changed, the biggest movers first, and what the gates decided."""
    screen = screen or Screen()
    for side, source in (("before", comparison.a), ("now", comparison.b)):
        screen.line(source, name=side, column=len("before "), whole=True)
    screen.tables(_tables(comparison, screen.width))
    for style, name, text in _lines(comparison, gates):
        screen.line(text, name=Text(name, style))


def _tables(comparison: Comparison, width: int) -> Iterator[tuple[str, Table]]:
    table = Table("", *_NUMBERS, "95 % interval, ms")
    on_gpu = _on_gpu(comparison)
    # without GPU work all of the step would be idle, and none of it busy
    senseless = () if all(on_gpu) else ("idle",) if any(on_gpu) else comparison.metrics.keys() - {"step"}
    for name, metric in comparison.metrics.items():
        if name in senseless:
            continue
        known = metric.low_ms is not None and metric.high_ms is not None
        interval = f"{metric.low_ms:+.3f} to {metric.high_ms:+.3f}" if known else "too few steps"
        table.row(name, *_numbers(metric.a_ms, metric.b_ms, metric.difference_ms, metric.pct), interval)
    yield "Median step", table
    causes = tuple(replace(change, name=IDLE_WORDS.get(change.name, change.name)) for change in comparison.idle)
    for title, changes in (
        ("Idle by cause, mean step", causes if all(on_gpu) else ()),
        ("Kinds of kernels, mean step", comparison.kinds),
        ("Kernels, mean step", comparison.kernels),
    ):
        moved = [change for change in changes if change.a_ms or change.b_ms]
        if moved:
            more = f"; the {_SHOWN} largest changes of {len(moved)}" if len(moved) > _SHOWN else ""
            yield title + more, _change_table(moved[:_SHOWN], width)


def _on_gpu(comparison: Comparison) -> tuple[bool, bool]:
    """Whether there was GPU work before, and now: the kinds sum to the busy time."""
    return any(kind.a_ms for kind in comparison.kinds), any(kind.b_ms for kind in comparison.kinds)


def _change_table(changes: Sequence[Change], width: int) -> Table:
    counted = any(change.a_calls or change.b_calls for change in changes)
    table = Table("", *_NUMBERS, *(["calls"] if counted else []))
    labels = kernel_labels([change.name for change in changes], _KERNEL_LINES * max(width - _BESIDE, _NARROWEST_NAME))
    for label, change in zip(labels, changes, strict=True):
        table.row(
            label,
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
        yield _STYLES.get(gate.outcome, "bold green"), gate.outcome, gate.text
