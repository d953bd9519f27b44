"""The outcome of a comparison: decided on one metric, in a sentence, as tables on a terminal, and for CI."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_forge_profiling.comparison.compare import (
    OF_THE_RUN,
    REPEATS,
    Change,
    Comparison,
    Fixed,
    Metric,
    Side,
)
from lightning_forge_profiling.comparison.ratio import (
    SAME_WITHIN_PCT,
    Outcome,
    Ratio,
    runs_needed,
    steps_needed,
    tolerable_scatter,
)
from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_PIECES
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.report.screen import Row, Screen, Table, Text, columns_of
from lightning_forge_profiling.report.wording import IDLE_WORDS, digits, kernel_labels
from lightning_forge_profiling.schema import CATEGORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a comparison says of one metric and a limit."""

    metric: str
    limit_pct: float | None
    outcome: Outcome
    text: str
    missing: str = ""  # what would decide it
    needed_runs: int | None = None  # a side; None if unknown, or over 100


def gate(comparison: Comparison, name: str, limit_pct: float | None) -> Gate:
    """Decide on one metric. An undecided gate says what would decide it."""
    metric = comparison.metrics.get(name)
    if metric is None or metric.outcome is None:
        having = ", ".join(name for name, other in comparison.metrics.items() if other.outcome is not None)
        raise ConfigurationError(f"no values of {name!r} on both sides; available: {having}")
    undecided = metric.outcome.startswith("too")
    return Gate(
        metric=name,
        limit_pct=limit_pct,
        outcome=metric.outcome,
        text=change_words(metric),
        missing=_what_would_tell(comparison, metric, limit_pct) if undecided else "",
        needed_runs=_needed_runs(comparison, metric, limit_pct),
    )


def _needed_runs(comparison: Comparison, metric: Metric, limit_pct: float | None) -> int | None:
    """Number of runs a side that decide, if they are more than there are."""
    if metric.outcome != "too noisy" or metric.ratio is None or not metric.ratio.scatter:
        return None
    needed = runs_needed(metric.ratio.scatter, SAME_WITHIN_PCT if limit_pct is None else limit_pct)
    few = min(len(comparison.a.steps), len(comparison.b.steps))
    return needed if needed is not None and needed > few else None


def overall(gates: Iterable[Gate]) -> Outcome | None:
    """The outcome of several gates: the worst, and faster where all of them are; None without any."""
    outcomes = {decided.outcome for decided in gates}
    order: tuple[Outcome, ...] = ("slower", "too noisy", "too short", "same", "faster")
    return next((outcome for outcome in order if outcome in outcomes), None)


def headline(comparison: Comparison, decided: Gate) -> str:
    """What the comparison says of a gate's metric; if it is undecided or the same, which other metric stands out."""
    limit = "" if decided.limit_pct is None else f", limit {decided.limit_pct:g} %"
    if decided.needed_runs is not None:
        limit += f"; about {decided.needed_runs} runs a side would tell"
    other = _standing_out(comparison, decided)
    if other is None or decided.metric != "step":
        return decided.text + limit
    state = "the same" if decided.outcome == "same" else "undecided"
    return f"{change_words(other)}; the {metric_title(decided.metric)} is {state}: {decided.text}{limit}"


def _standing_out(comparison: Comparison, decided: Gate) -> Metric | None:
    """What got slower beyond the limit and what is called the same: the part with the most time, else the median."""
    if decided.outcome in {"slower", "faster"}:
        return None
    beyond = 1 + max(decided.limit_pct or 0.0, SAME_WITHIN_PCT) / 100
    slower = [
        metric
        for metric in comparison.metrics.values()
        if metric.name in {*REGIONS, *CATEGORIES, "median"} and metric.ratio is not None and metric.share_pct >= 1
        if metric.ratio.low is not None and metric.ratio.low > beyond
    ]
    return max(
        slower, key=lambda metric: (metric.name != "median", (metric.b or 0.0) - (metric.a or 0.0)), default=None
    )


def metric_title(name: str) -> str:
    """A metric's name in words."""
    words = {
        "median": "median step",
        "p95": "p95 of the step",
        "samples": "samples/s",
        "tokens": "tokens/s",
        "last_fifth": "last over first fifth",
        "startup": "start-up",
        "checkpoint": "a checkpoint",
        "validation": "a validation",
    }
    return words.get(name, f"step of rank {name.removeprefix('rank')}" if name.startswith("rank") else name)


def change_words(metric: Metric) -> str:
    """The change with its 95 % interval."""
    ratio, name = metric.ratio, metric_title(metric.name)
    if ratio is None:
        return f"{name} {metric.a or 0:.3g} {metric.unit} before, {metric.b or 0:.3g} {metric.unit} now"
    low, high = ratio.low, ratio.high
    if metric.outcome not in {"slower", "faster"}:
        interval = (
            f" ({percent(low)} to {percent(high)} %)" if low is not None and high is not None else ", no interval"
        )
        return f"{name} {percent(ratio.ratio)} %{interval}"
    more = ratio.ratio > 1
    word = ("higher" if more else "lower") if metric.more_is_better else "slower" if more else "faster"
    amount = percent(ratio.ratio).lstrip("+-")
    if low is None or high is None:
        return f"{name} {word} by {amount} %, more than equal runs differ"
    ends = [percent(end).lstrip("+-") if (end > 1) == more else percent(end) for end in (low, high)]
    return f"{name} {word} by {amount} % ({' to '.join(ends if more else reversed(ends))} %)"


def percent(ratio: float) -> str:
    """A ratio as a change in percent: two digits or more, and no more than four."""
    change = 100 * (ratio - 1)
    if change >= 9999.5:  # noqa: PLR2004
        return "+>9999"
    return f"{change:+.1f}" if abs(change) < 9.95 else f"{change:+.0f}"  # noqa: PLR2004


def _what_would_tell(comparison: Comparison, metric: Metric, limit_pct: float | None) -> str:
    """How many repeats or steps decide a limit in four of five comparisons of equal runs."""
    ratio, limit_pct = metric.ratio, SAME_WITHIN_PCT if limit_pct is None else limit_pct
    if ratio is None or ratio.log_error is None or ratio.scatter is None:
        if metric.name in OF_THE_RUN:
            return f"One value a run: repeat each side {REPEATS} times"
        return f"Too few steps for an interval: each side needs {FEWEST_PIECES}, and some 50 of a record"
    if not limit_pct:
        return "More repeats narrow the interval"
    if comparison.assumed_scatter_pct is None:
        return _more_runs(ratio.scatter, min(len(comparison.a.steps), len(comparison.b.steps)), limit_pct)
    return _more_steps(ratio, ratio.scatter, min(*comparison.a.steps, *comparison.b.steps), limit_pct)


def _more_steps(ratio: Ratio, scatter: float, steps: int, limit_pct: float) -> str:
    needed = steps_needed(ratio, steps, limit_pct)
    if not scatter:
        if needed is None or needed <= steps:
            return f"The difference is close to the limit of {limit_pct:g} %: more steps on each side separate them"
        return f"The steps vary: a limit of {limit_pct:g} % needs about {needed:,} steps a side"
    text = (
        f"Repeat each side {REPEATS} times: that decides a limit of {limit_pct:g} % where equal runs differ by "
        f"{100 * tolerable_scatter(REPEATS, limit_pct):.1f} % or less (one standard deviation); if they differ by "
        f"{100 * scatter:.1f} %, as is expected of these, it needs {runs_needed(scatter, limit_pct) or 'over 100'}"
    )
    return f"{text}, or train about {needed:,} steps a side" if needed is not None and needed > steps else text


def _more_runs(scatter: float, runs: int, limit_pct: float) -> str:
    needed = runs_needed(scatter, limit_pct)
    words = f"a limit of {limit_pct:g} % needs {needed or 'over 100'} a side"
    close = needed is not None and needed <= runs
    but = "; the difference is close to the limit, so more repeats are needed" if close else ""
    return f"Runs of a side scatter by {100 * scatter:.1f} %: {words}{but}"


_TITLES: Final = {
    "step": "step, mean ms",
    "median": "step, median ms",
    "p95": "step, p95 ms",
    "call": "call, median µs",
    "samples": "samples/s",
    "tokens": "tokens/s",
    "last_fifth": "last / first fifth",
    "startup": "start-up s",
    "goodput": "goodput %",
}
_STYLES: Final = {"slower": "bold red", "faster": "bold green", "same": "bold green"}
_UNDECIDED: Final = "bold yellow"
_LEAST_SHARE_PCT: Final = 1.0
_LEAST_PART: Final = 0.01
_ROWS: Final = 8
_KERNELS: Final = 10
_COLUMN: Final = 7
_KERNEL_LINES: Final = 2
_BESIDE, _NARROWEST_NAME = 50, 20  # columns that the numbers take, and those of a name


def print_comparison(comparison: Comparison, gates: Sequence[Gate], screen: Screen | None = None) -> None:
    """Print the outcome, then the numbers behind it."""
    screen = screen or Screen(wrap=True)
    worst = overall(gates)
    for gate in sorted(gates, key=lambda gate: gate.outcome != worst):
        screen.line(headline(comparison, gate), name=Text(f"{gate.outcome}:", _STYLES.get(gate.outcome, _UNDECIDED)))
    for name, side in (("before", comparison.a), ("now", comparison.b)):
        _print_side(name, side, screen)
    screen.line()
    screen.table(_metric_table(comparison))
    screen.tables(_other_tables(comparison, screen.width))
    for name, text in _remarks(comparison, gates):
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


def _print_side(name: str, side: Side, screen: Screen) -> None:
    runs = f"{len(side.steps)} runs, " if len(side.steps) > 1 else ""
    commits = f", commit {', '.join(commit[:10] for commit in side.commits)}" if side.commits else ""
    steps = " + ".join(f"{steps:,}" for steps in side.steps)
    device = f" on {side.conditions.device}" if side.conditions.device else ""
    screen.line(f"{runs}{steps} steps{device}{commits}", name=name, column=_COLUMN)
    for source in side.sources:
        screen.line(source, column=_COLUMN, whole=True)


def _metric_table(comparison: Comparison) -> Table:
    rows = []
    for metric in comparison.metrics.values():
        if metric.share_pct < _LEAST_SHARE_PCT or not (metric.a or metric.b) or _without_gpu(comparison, metric.name):
            continue
        style = "" if metric.outcome in {"same", None} else _STYLES.get(metric.outcome, "yellow")
        of_trace = comparison.kind == "trace" and metric.name == "step"
        title = (
            "step, median ms" if of_trace else _TITLES.get(metric.name) or f"{metric_title(metric.name)} {metric.unit}"
        )
        sides = ("" if value is None else digits(value) for value in (metric.a, metric.b))
        rows.append(Row((title, *sides, *_change_cells(metric), Text(metric.outcome or "", style))))
    return Table(columns_of("", "before", "now", "change", "95 % interval", "", align="<>>>><"), tuple(rows))


def _without_gpu(comparison: Comparison, name: str) -> bool:
    """Without GPU work all of the step would be idle, and none of it busy."""
    on_gpu = _on_gpu(comparison)
    return comparison.kind == "trace" and name != "step" and (not any(on_gpu) or (name == "idle" and not all(on_gpu)))


def _on_gpu(comparison: Comparison) -> tuple[bool, bool]:
    """Whether there was GPU work before, and now: the kinds sum to the busy time."""
    return any(kind.a for kind in comparison.kinds), any(kind.b for kind in comparison.kinds)


def _change_cells(metric: Metric) -> tuple[str, str]:
    ratio = metric.ratio
    if ratio is None:
        return ("gone" if metric.a else "new"), ""
    change = f"{percent(ratio.ratio)} %"
    if ratio.low is None or ratio.high is None:
        return change, "unknown"
    return change, f"{percent(ratio.low)} to {percent(ratio.high)}"


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


def _share(change: Change, comparison: Comparison) -> float:
    """A part of the ledger in the sum of the parts."""
    before, now = (sum(getattr(part, side) for part in comparison.ledger) for side in ("a", "b"))
    return max(change.a / before if before else 0.0, change.b / now if now else 0.0)


def _change_table(changes: Sequence[Change], width: int) -> Table:
    counted = any(change.a_calls or change.b_calls for change in changes)
    rows = []
    labels = kernel_labels([change.name for change in changes], _KERNEL_LINES * max(width - _BESIDE, _NARROWEST_NAME))
    for change in changes:
        pct = "new" if change.pct is None else f"{change.pct:+.1f}"
        numbers = f"{change.a:.3f}", f"{change.b:.3f}", f"{change.b - change.a:+.3f}", pct
        rows.append(Row((labels[change.name], *numbers, *([_calls(change)] if counted else []))))
    return Table(columns_of("", "before", "now", "ms", "%", *(["calls"] if counted else [])), tuple(rows))


def _calls(change: Change) -> str:
    before, now = f"{change.a_calls:.4g}", f"{change.b_calls:.4g}"
    return now if before == now else f"{before} > {now}"


def _remarks(comparison: Comparison, gates: Sequence[Gate]) -> Iterator[tuple[str, str]]:
    if comparison.a.verdict or comparison.b.verdict:
        before, now = (_verdict(side) for side in (comparison.a, comparison.b))
        yield "verdict", f"{before}, as before" if before == now else f"{before} -> {now}"
    for change in comparison.findings[:_ROWS]:
        if abs(change.b - change.a) >= 1:
            before, now = (f"{pct:.0f} %" if pct else "not named" for pct in (change.a, change.b))
            yield "finding", f"{change.name} (of the {change.per}) {before} -> {now}"
    yield from (("fixed", _fixed_words(one)) for one in comparison.fixed)
    for gate in gates:
        if gate.missing:
            yield "open", f"{gate.metric}: {gate.missing}"
    yield "basis", _basis(comparison)
    for text in (*comparison.differs, *comparison.notes):
        yield "note", text
    if comparison.kind == "trace" and not all(_on_gpu(comparison)):
        without = [side for side, on in zip(("before", "now"), _on_gpu(comparison), strict=True) if not on]
        yield "note", f"no GPU activity in the trace of {' and of '.join(without)}"


def _fixed_words(one: Fixed) -> str:
    now = f"{digits(one.now_ms)} ms" if one.now_ms or one.part != one.code else "gone"
    predicted = f"{'at most ' if one.at_most else ''}{digits(one.predicted_ms)} ms less a step were predicted"
    measured = f"the whole step takes {digits(abs(one.step_ms))} ms {'less' if one.step_ms >= 0 else 'more'}"
    return f"{one.code}: {one.part} {digits(one.before_ms)} ms -> {now}; {predicted}, {measured}"


def _verdict(side: Side) -> str:
    several = len(side.steps) > 1 and side.verdicts.get(side.verdict, 0) < len(side.steps)
    of = f" (in {side.verdicts.get(side.verdict, 0)} of {len(side.steps)} runs)" if several else ""
    return f"{side.verdict or 'none'}{of}"


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
