"""A comparison of runs on a terminal."""

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_forge_profiling.diagnosis.gate import Gate, overall
from lightning_forge_profiling.diagnosis.log_ratio import Ratio
from lightning_forge_profiling.diagnosis.run_comparison import RunComparison, RunSide, ShareChange
from lightning_forge_profiling.diagnosis.run_gate import change_pct, interval_words
from lightning_forge_profiling.diagnosis.run_metrics import RunMetric, RunOutcome
from lightning_forge_profiling.report.screen import Screen, Table, Text
from lightning_forge_profiling.report.text import digits

_TITLES: Final = {
    "step": "step, mean ms",
    "median": "step, median ms",
    "samples": "samples/s",
    "tokens": "tokens/s",
}
_STYLES: Final = {"slower": "bold red", "inconclusive": "bold yellow", "faster": "bold green", "same": "bold green"}
_LEAST_SHARE_PCT: Final = 1.0
_LEAST_PART: Final = 0.01
_ROWS: Final = 8
_COLUMN: Final = 7


def print_run_comparison(comparison: RunComparison, gates: Sequence[Gate], screen: Screen | None = None) -> None:
    """Print the outcome, then the numbers behind it."""
    screen = screen or Screen(wrap=True)
    _print_answer(comparison, gates, screen)
    for name, side in (("before", comparison.a), ("now", comparison.b)):
        _print_side(name, side, screen)
    screen.line()
    screen.table(_metric_table(comparison))
    screen.tables(_other_tables(comparison))
    for name, text in _remarks(comparison, gates):
        screen.line(text, name=Text(name, "yellow"), column=_COLUMN)


def _print_answer(comparison: RunComparison, gates: Sequence[Gate], screen: Screen) -> None:
    """One line for each gate, the one that decides first; without a gate, for the step."""
    worst = overall(gates)
    answers: list[tuple[RunOutcome | None, str, str]] = [
        (gate.outcome, gate.metric, f", limit {gate.limit_pct:g} %")
        for gate in sorted(gates, key=lambda gate: gate.outcome != worst)
    ] or [(comparison.metrics["step"].outcome, "step", "")]
    for outcome, name, limit in answers:
        ratio = comparison.metrics[name].ratio
        words = interval_words(ratio) if ratio is not None else "on one side only"
        title = _title(name).replace(", mean ms", "").replace(", median ms", " (median)")
        screen.line(f"{title} {words}{limit}", name=Text(f"{outcome}:", _STYLES.get(outcome or "", "")))


def _print_side(name: str, side: RunSide, screen: Screen) -> None:
    runs = f"{len(side.steps)} runs, " if len(side.steps) > 1 else ""
    commits = f", commit {', '.join(commit[:10] for commit in side.commits)}" if side.commits else ""
    steps = " + ".join(f"{steps:,}" for steps in side.steps)
    screen.line(f"{runs}{steps} steps on {side.conditions.device}{commits}", name=name, column=_COLUMN)
    for source in side.sources:
        screen.line(source, column=_COLUMN, whole=True)


def _metric_table(comparison: RunComparison) -> Table:
    table = Table("", "before", "now", "change", "95 % interval", "", align="<>>>><")
    for metric in comparison.metrics.values():
        if metric.share_pct < _LEAST_SHARE_PCT:
            continue
        outcome = metric.outcome or ""
        change, interval = _change(metric.ratio, metric)
        quiet = outcome in {"same", ""}
        table.row(
            _title(metric.name),
            _number(metric.a),
            _number(metric.b),
            change,
            interval,
            Text(outcome, "" if quiet else _STYLES[outcome]),
        )
    return table


def _change(ratio: Ratio | None, metric: RunMetric) -> tuple[str, str]:
    if ratio is None:
        return ("new" if metric.a is None else "gone"), ""
    if ratio.low is None or ratio.high is None:
        return change_pct(ratio.ratio), "too few steps"
    return change_pct(ratio.ratio), f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f}"


def _title(name: str) -> str:
    return _TITLES.get(name, f"{name} ms")


def _number(value: float | None) -> str:
    return "" if value is None else digits(value)


def _other_tables(comparison: RunComparison) -> Iterator[tuple[str, Table]]:
    parts = [change for change in comparison.ledger if _share(change.a_s, change.b_s, comparison) >= _LEAST_PART]
    if parts:
        table = Table("", "before", "now", "change", "per", align="<>>><")
        for change in parts[:_ROWS]:
            table.row(
                change.part,
                f"{change.a_s:.2f}",
                f"{change.b_s:.2f}",
                f"{change.b_s - change.a_s:+.2f}",
                change.per,
            )
        wall = f"{comparison.a.wall_s:.1f} s before, {comparison.b.wall_s:.1f} s now"
        yield f"Wall time by part of the ledger, s (whole run: {wall})", table
    if comparison.gpu:
        table = Table("", "before", "now", "change")
        for mean in comparison.gpu[: 2 * _ROWS]:
            table.row(mean.name, _number(mean.a), _number(mean.b), _difference(mean))
        yield "GPU, means of the run, not tested", table


def _share(a_s: float, b_s: float, comparison: RunComparison) -> float:
    """A part of the ledger in the sum of the parts that are of the same thing."""
    whole = [sum(getattr(change, side) for change in comparison.ledger) for side in ("a_s", "b_s")]
    return max(a_s / whole[0] if whole[0] else 0.0, b_s / whole[1] if whole[1] else 0.0)


def _difference(change: ShareChange) -> str:
    if not change.a or change.b is None:
        return ""
    return change_pct(change.b / change.a)


def _remarks(comparison: RunComparison, gates: Sequence[Gate]) -> Iterator[tuple[str, str]]:
    if comparison.a.verdict or comparison.b.verdict:
        yield "verdict", _verdicts(comparison)
    for change in comparison.findings[:_ROWS]:
        if abs((change.b or 0.0) - (change.a or 0.0)) >= 1:
            yield "finding", f"{change.name} {change.a:.0f} % -> {change.b:.0f} % of the {change.of}"
    for gate in gates:
        if gate.outcome == "inconclusive":
            yield "open", f"{gate.metric}: {gate.missing}"
    yield "basis", _basis(comparison)
    for text in (*comparison.differs, *comparison.notes):
        yield "note", text


def _verdicts(comparison: RunComparison) -> str:
    before, now = (_verdict(side) for side in (comparison.a, comparison.b))
    return f"{before}, as before" if before == now else f"{before} -> {now}"


def _verdict(side: RunSide) -> str:
    several = len(side.steps) > 1 and side.verdicts.get(side.verdict, 0) < len(side.steps)
    of = f" (in {side.verdicts.get(side.verdict, 0)} of {len(side.steps)} runs)" if several else ""
    return f"{side.verdict or 'none'}{of}"


def _basis(comparison: RunComparison) -> str:
    if comparison.assumed_scatter_pct is None:
        ratio = comparison.metrics["step"].ratio
        scatter = (
            f": they scatter by {100 * ratio.scatter:.1f} %" if ratio is not None and ratio.scatter is not None else ""
        )
        return f"the interval is from the differences between the runs of a side{scatter}"
    ratio = comparison.metrics["step"].ratio
    total = (
        ""
        if ratio is None or ratio.scatter is None
        else f", {100 * ratio.scatter:.1f} % with the differences within a run"
    )
    return (
        "one run a side: its steps do not show how much equal runs differ. The interval allows for "
        f"{comparison.assumed_scatter_pct:g} % (--scatter{total}, one standard deviation); repeats measure it"
    )
