"""The outcome of a comparison: decided on metrics for CI, and as text on a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from lightning_forge_profiling.comparison.compare import REPEATS, change_words, kind_of, percent
from lightning_forge_profiling.comparison.ratio import SAME_WITHIN_PCT, runs_needed, steps_needed
from lightning_forge_profiling.comparison.source import FIT
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.report.labels import kernel_labels
from lightning_forge_profiling.report.screen import Row, Screen, Table, Text, columns_of
from lightning_forge_profiling.report.wording import IDLE_WORDS, digits
from lightning_forge_profiling.schema import (
    ComparedAmount,
    ComparedMetric,
    ComparedSide,
    Comparison,
    FixedFinding,
    Gate,
    Outcome,
)
from lightning_forge_profiling.timing.bootstrap import FEWEST_PIECES

_ORDER: Final[tuple[Outcome, ...]] = ("slower", "too noisy", "too short", "same", "faster")  # the worst first


def gates(comparison: Comparison, names: Sequence[str], limit_pct: float | None) -> list[Gate]:
    """Decide on the metrics, the worst first; without names on the step, and on the whole fit where that is decided.

    A fit that is slower or faster decides where the step is undecided, since its time includes the steps'.
    """
    if names:
        decided = [_gate(comparison, name, limit_pct) for name in dict.fromkeys(names)]
    else:
        decided = [_gate(comparison, "call" if comparison.kind == "benchmark" else "step", limit_pct)]
        fit = comparison.metrics.get(FIT)
        if fit is not None and fit.outcome in {"slower", "faster"}:
            undecided = decided[0].outcome.startswith("too")
            decided = [*([] if undecided else decided), _gate(comparison, FIT, limit_pct)]
    return sorted(decided, key=lambda gate: _ORDER.index(gate.outcome))


def _gate(comparison: Comparison, name: str, limit_pct: float | None) -> Gate:
    metric = comparison.metrics.get(name)
    if metric is None or metric.outcome is None:
        having = ", ".join(name for name, other in comparison.metrics.items() if other.outcome is not None)
        raise ConfigurationError(f"no values of {name!r} on both sides; available: {having}")
    missing, needed = "", None
    if metric.outcome.startswith("too"):
        missing, needed = _missing(comparison, metric, SAME_WITHIN_PCT if limit_pct is None else limit_pct)
    return Gate(
        metric=name,
        limit_pct=limit_pct,
        outcome=metric.outcome,
        text=change_words(metric),
        missing=missing,
        needed_runs=needed,
    )


def _missing(comparison: Comparison, metric: ComparedMetric, limit_pct: float) -> tuple[str, int | None]:
    """What decides a limit in four of five comparisons of equal runs, and how many runs a side that is."""
    ratio = metric.ratio
    if ratio is None or ratio.log_error is None:
        if kind_of(metric.name).once:
            return f"one value a run: repeat each side {REPEATS} times", None
        return f"too few steps for an interval: each side needs {FEWEST_PIECES}, and some 50 of a record", None
    steps, runs = min(*comparison.a.steps, *comparison.b.steps), min(len(comparison.a.steps), len(comparison.b.steps))
    more_steps = steps_needed(ratio, steps, limit_pct) if limit_pct else None
    more_runs = runs_needed(ratio.scatter, limit_pct) if ratio.scatter and limit_pct else None
    ways = []
    if ratio.scatter and (more_runs is None or more_runs > runs):
        ways.append(f"{'over 100' if more_runs is None else f'about {more_runs}'} runs a side")
    if comparison.assumed_scatter_pct is not None and more_steps is not None and more_steps > steps:
        ways.append(f"about {more_steps:,} steps a side")
    if not ways or not limit_pct:
        return f"the difference is close to the limit of {limit_pct:g} %: repeat the runs", None
    return f"{' or '.join(ways)} would decide", more_runs


_STYLES: Final = {"slower": "bold red", "faster": "bold green", "same": "bold green"}
_UNDECIDED: Final = "bold yellow"
_LEAST_SHARE_PCT: Final = 1.0
_LEAST_PART: Final = 0.01
_ROWS: Final = 8
_KERNELS: Final = 10
_COLUMN: Final = 7
_KERNEL_LINES: Final = 2
_BESIDE, _NARROWEST_NAME = 50, 20  # columns that the numbers take, and those of a name


def print_comparison(
    comparison: Comparison, decided: Sequence[Gate], screen: Screen | None = None, *, verbose: bool = False
) -> None:
    """Print the sentence and its rows; with `verbose` all that is compared."""
    screen = screen or Screen(wrap=True)
    screen.line(Text(comparison.headline, "bold"))
    for gate in decided:
        if gate.limit_pct is not None:
            missing = f"; {gate.missing}" if gate.missing else ""
            decision = Text(f"{gate.outcome}:", _STYLES.get(gate.outcome, _UNDECIDED))
            screen.line(f"{gate.text}, limit {gate.limit_pct:g} %{missing}", name=decision)
    if verbose:
        for name, side in (("before", comparison.a), ("now", comparison.b)):
            _print_side(name, side, screen)
    screen.line()
    screen.table(_metric_table(comparison, [*comparison.metrics] if verbose else comparison.rows))
    if verbose:
        screen.tables(_other_tables(comparison, screen.width))
    for name, text in _remarks(comparison, verbose=verbose):
        screen.line(text, name=Text(name, "yellow"), column=_COLUMN)


def github_benchmark(comparison: Comparison) -> list[dict[str, Any]]:
    """The second side's times for github-action-benchmark, as its tool `customSmallerIsBetter` reads them."""
    entries = []
    for metric in comparison.metrics.values():
        if metric.b is None or metric.more_is_better:
            continue
        entry: dict[str, Any] = {"name": metric.name, "unit": metric.unit or "ratio", "value": float(f"{metric.b:.6g}")}
        ratio = metric.ratio
        if ratio is not None and ratio.low is not None and ratio.high is not None:
            error = metric.b * (ratio.high / ratio.low) ** 0.5 - metric.b
            entry["range"] = f"± {error:.3g}"
        if metric.outcome is not None:
            entry["extra"] = f"{metric.outcome}: {change_words(metric)}"
        entries.append(entry)
    return entries


def _print_side(name: str, side: ComparedSide, screen: Screen) -> None:
    runs = f"{len(side.steps)} runs, " if len(side.steps) > 1 else ""
    commits = f", commit {', '.join(commit[:10] for commit in side.commits)}" if side.commits else ""
    steps = " + ".join(f"{steps:,}" for steps in side.steps)
    device = f" on {side.conditions.device}" if side.conditions.device else ""
    screen.line(f"{runs}{steps} steps{device}{commits}", name=name, column=_COLUMN)
    for source in side.sources:
        screen.line(source, column=_COLUMN, whole=True)


def _metric_table(comparison: Comparison, names: Iterable[str]) -> Table:
    rows = []
    for metric in map(comparison.metrics.__getitem__, names):
        if metric.share_pct < _LEAST_SHARE_PCT or not (metric.a or metric.b) or _without_gpu(comparison, metric.name):
            continue
        kind = kind_of("median" if comparison.kind == "trace" and metric.name == "step" else metric.name)
        title = kind.heading or f"{kind.words} {kind.unit}"
        sides = ("" if value is None else digits(value) for value in (metric.a, metric.b))
        rows.append(Row((title, *sides, *_change_cells(metric, comparison))))
    return Table(columns_of("", "before", "now", "change", "95 % interval", "", align="<>>>><"), tuple(rows))


def _without_gpu(comparison: Comparison, name: str) -> bool:
    """Without GPU work all of the step would be idle, and none of it busy."""
    on_gpu = _on_gpu(comparison)
    return comparison.kind == "trace" and name != "step" and (not any(on_gpu) or (name == "idle" and not all(on_gpu)))


def _on_gpu(comparison: Comparison) -> tuple[bool, bool]:
    """Whether there was GPU work before, and now: the kinds sum to the busy time."""
    return any(kind.a for kind in comparison.kinds), any(kind.b for kind in comparison.kinds)


def _change_cells(metric: ComparedMetric, comparison: Comparison) -> tuple[str | Text, ...]:
    """The change, its interval and a word for it where the sides differ."""
    ratio = metric.ratio
    if ratio is None:
        change = "" if metric.a and metric.b else "gone" if metric.a else "new"
        return change, "", "of different lengths" if metric.name == FIT else ""
    fit = comparison.metrics.get(FIT)
    if metric.name == "goodput" and (fit is None or not fit.differs):
        return "", "", ""  # what the start-up took of the run
    worse = (ratio.ratio < 1) if metric.more_is_better else (ratio.ratio > 1)
    word = ("slower" if worse else "faster") if metric.differs else ""
    between = "unknown"
    if ratio.low is not None and ratio.high is not None:
        between = f"{percent(ratio.low)} to {percent(ratio.high)}"
    return f"{percent(ratio.ratio)} %", between, Text(word, _STYLES.get(word, ""))


def _other_tables(comparison: Comparison, width: int) -> Iterator[tuple[str, Table]]:
    parts = [change for change in comparison.ledger if _share(change, comparison) >= _LEAST_PART]
    if parts:
        rows = [
            Row((change.name, f"{change.a:.2f}", f"{change.b:.2f}", f"{change.b - change.a:+.2f}", change.per))
            for change in parts[:_ROWS]
        ]
        wall = f"{comparison.a.wall_s:.1f} s before, {comparison.b.wall_s:.1f} s now"
        yield (
            f"Wall time by part of the ledger, s (whole run: {wall})",
            Table(columns_of("", "before", "now", "change", "per", align="<>>><"), tuple(rows)),
        )
    if comparison.gpu:
        rows = [
            Row((mean.name, digits(mean.a), digits(mean.b), f"{mean.pct:+.1f} %" if mean.pct is not None else ""))
            for mean in comparison.gpu[: 2 * _ROWS]
        ]
        yield "GPU, means of the run, not tested", Table(columns_of("", "before", "now", "change"), tuple(rows))
    causes = tuple(replace(change, name=IDLE_WORDS.get(change.name, change.name)) for change in comparison.idle)
    for title, changes in (
        ("Idle by cause, mean step", causes if all(_on_gpu(comparison)) else ()),
        ("Kinds of kernels, mean step", comparison.kinds),
        ("Kernels, mean step", comparison.kernels),
    ):
        moved = [change for change in changes if change.a or change.b]
        if moved:
            more = f"; the {_KERNELS} largest changes of {len(moved)}" if len(moved) > _KERNELS else ""
            yield title + more, _change_table(moved[:_KERNELS], width)


def _share(change: ComparedAmount, comparison: Comparison) -> float:
    """A part of the ledger in the sum of the parts."""
    before, now = (sum(getattr(part, side) for part in comparison.ledger) for side in ("a", "b"))
    return max(change.a / before if before else 0.0, change.b / now if now else 0.0)


def _change_table(changes: Sequence[ComparedAmount], width: int) -> Table:
    counted = any(change.a_calls or change.b_calls for change in changes)
    rows = []
    labels = kernel_labels([change.name for change in changes], _KERNEL_LINES * max(width - _BESIDE, _NARROWEST_NAME))
    for change in changes:
        pct = "new" if change.pct is None else f"{change.pct:+.1f}"
        numbers = f"{change.a:.3f}", f"{change.b:.3f}", f"{change.b - change.a:+.3f}", pct
        rows.append(Row((labels[change.name], *numbers, *([_calls(change)] if counted else []))))
    return Table(columns_of("", "before", "now", "ms", "%", *(["calls"] if counted else [])), tuple(rows))


def _calls(change: ComparedAmount) -> str:
    before, now = f"{change.a_calls:.4g}", f"{change.b_calls:.4g}"
    return now if before == now else f"{before} > {now}"


def _remarks(comparison: Comparison, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if verbose:
        if comparison.verdict:
            yield "verdict", comparison.verdict
        for change in comparison.findings[:_ROWS]:
            before, now = (f"{pct:.0f} %" if pct else "not named" for pct in (change.a, change.b))
            yield "finding", f"{change.name} (of the {change.per}) {before} -> {now}"
        yield from (("fixed", _fixed_words(one)) for one in comparison.fixed)
        yield "basis", _basis(comparison)
    for text in (*comparison.differs, *comparison.doubts, *(comparison.notes if verbose else ())):
        yield "note", text
    if comparison.kind == "trace" and not all(_on_gpu(comparison)):
        without = [side for side, on in zip(("before", "now"), _on_gpu(comparison), strict=True) if not on]
        yield "note", f"no GPU activity in the trace of {' and of '.join(without)}"


def _fixed_words(one: FixedFinding) -> str:
    now = f"{digits(one.now_ms)} ms" if one.now_ms or one.part != one.code else "gone"
    predicted = f"{'at most ' if one.at_most else ''}{digits(one.predicted_ms)} ms less a step were predicted"
    measured = f"the whole step takes {digits(abs(one.step_ms))} ms {'less' if one.step_ms >= 0 else 'more'}"
    return f"{one.code}: {one.part} {digits(one.before_ms)} ms -> {now}; {predicted}, {measured}"


def _basis(comparison: Comparison) -> str:
    ratio = next((metric.ratio for metric in comparison.metrics.values() if metric.ratio is not None), None)
    scatter = 0.0 if ratio is None else 100 * (ratio.scatter or 0.0)
    if comparison.assumed_scatter_pct is None:
        between = "neighbours of runs made in turns" if ratio is not None and ratio.paired else "the runs of a side"
        return f"the interval is from the differences between {between}: they scatter by {scatter:.1f} %"
    if not comparison.assumed_scatter_pct:
        return "the interval is from the steps alone; --scatter adds differences between processes"
    followed = "one run followed the other" if comparison.followed else "the runs did not follow each other"
    given = comparison.followed is None
    why, repeats = ("by --scatter", "measure it") if given else (followed, "measure it, --scatter sets it")
    drift = scatter - comparison.assumed_scatter_pct
    with_drift = f"; with what changes within a run {scatter:.1f} %" if drift >= 0.1 else ""  # noqa: PLR2004
    return (
        "too few runs to show how much equal runs differ. Assumed: "
        f"{comparison.assumed_scatter_pct:g} % (one standard deviation; {why}){with_drift}. Repeats {repeats}"
    )
