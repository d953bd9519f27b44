"""Compares two sides of runs, traces or benchmark results: rows with their intervals, a sentence, what else changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import ceil, hypot, log
from operator import mul
from statistics import fmean
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.comparison.ratio import PLAUSIBLE, decide, geometric_mean, ratio_of
from lightning_forge_profiling.comparison.source import FIT, KERNELS, TRACE_METRICS, Source, mean_amount
from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.diagnosis.rule import REGION_OF
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import (
    ComparedAmount,
    ComparedMetric,
    ComparedSide,
    Comparison,
    FixedFinding,
)

SCATTER_IN_TURNS_PCT: Final = 3.0
# Assumed standard deviation between equal runs with one run a side, if one followed the other and if not. The error
# rates that follow are those of `python -m benchmarks.compare_false_alarms`.
SCATTER_APART_PCT: Final = 6.0
_FOLLOWS_S: Final = 900.0  # longest pause between runs that were made in turns
# runs a side to begin with: two leave two degrees of freedom instead of four, and an interval twice as wide
REPEATS: Final = 3
_PER_STEPS: Final = 1000
_LENGTHS_DIFFER: Final = 0.01
_NONE: Final = (0.0, 0.0)
_ONCE: Final = ("startup", "sanity_check", "teardown")  # parts of the ledger that do not grow with the run
_PLAUSIBLE_ONCE: Final = 10.0  # one value a run: with cold caches a start-up takes four times as long
_PARTS: Final = (*REGIONS, *TRACE_METRICS[1:])  # of a step
_CAUSES: Final = (*REGIONS, *KERNELS, "validation", "checkpoint")  # what a change of the step or fit can come from
# So many times the interval of one part must leave out "no difference": of six parts of equal runs, one would otherwise
# differ by chance in every fourth comparison (C. E. Bonferroni, 1936: the quantile at 0.4 % over that at 2.5 %).
_OF_SIX: Final = 1.35
_LEAST_SHARE_PCT: Final = 1.0
_PLAIN_PCT: Final = 20.0  # the largest difference of which it is any use to say that there is none above
_MOST_OF_IT: Final = 0.5  # least share of a finding's change that the step or its region changed by, too
_CAUSE: Final = 2 / 3  # least share of a change that its cause explains
_CONDITIONS: Final = {
    "device": "device",
    "world_size": "world size",
    "precision": "precision",
    "batch_size": "batch size",
}
Sources = Sequence[Source]


class Kind(NamedTuple):
    """A kind of metric: its name, its unit, the heading of its row; whether it is a rate, or comes once a run."""

    words: str
    unit: str = "ms"
    heading: str = ""
    is_rate: bool = False
    once: bool = False


_KINDS: Final = {
    "step": Kind("step", heading="step, mean ms"),
    "median": Kind("median step", heading="step, median ms"),
    "p95": Kind("p95 of the step", heading="step, p95 ms"),
    "call": Kind("call", "µs", "call, median µs"),
    "samples": Kind("samples/s", "/s", "samples/s", is_rate=True),
    "tokens": Kind("tokens/s", "/s", "tokens/s", is_rate=True),
    "last_fifth": Kind("last over first fifth", "", "last / first fifth"),
    "validation": Kind("a validation", "s", once=True),
    "checkpoint": Kind("a checkpoint", "s", once=True),
    "startup": Kind("start-up", "s", once=True),
    "goodput": Kind("goodput", "%", is_rate=True, once=True),
    FIT: Kind("whole fit", "s"),
    "other_kernels": Kind("other kernels"),
}


def kind_of(name: str) -> Kind:
    """The kind of a metric; of those without an entry, milliseconds of a step."""
    words = f"step of rank {name.removeprefix('rank')}" if name.startswith("rank") else name
    return _KINDS.get(name, Kind(words))


def compare(a: Sources, b: Sources, *, scatter_pct: float | None = None, limit_pct: float | None = None) -> Comparison:
    """Compare two sides with at least one run each; the scatter is that between equal runs, None for the default."""
    for side in (a, b):
        _refuse_twice(side)
    followed = _followed(a, b)
    pairs = _in_turns(a, b)
    sides = [list(side) for side in zip(*pairs, strict=True)] if pairs else [list(a), list(b)]
    alone, given = len(a) + len(b) <= REPEATS, scatter_pct is not None
    if scatter_pct is None:
        scatter_pct = 0.0 if a[0].kind == "trace" else SCATTER_IN_TURNS_PCT if followed else SCATTER_APART_PCT
    metrics = {
        name: _metric(name, sides, scatter_pct / 100, limit_pct, in_turns=bool(pairs))
        for name in dict.fromkeys(name for run in (*a, *b) for name in run.metrics)
    }
    if not _alike(a, b) and FIT in metrics:  # the wall times of runs of different lengths have no ratio
        metrics[FIT] = replace(metrics[FIT], ratio=None, pct=None, outcome=None, differs=False)
    metrics = {name: _with_share(metric, metrics, (*a, *b)) for name, metric in metrics.items()}
    findings = _findings(a, b, metrics)
    return Comparison(
        kind=a[0].kind,
        a=_side(a),
        b=_side(b),
        headline=_headline(metrics, a, b),
        rows=tuple(_rows(metrics)),
        metrics=metrics,
        ledger=_ledger(a, b),
        findings=findings,
        fixed=tuple(_fixed(a, b, metrics, findings)),
        gpu=tuple(_gpu(a, b)),
        **{table: _changes(a, b, table, "step") for table in ("idle", "kinds", "kernels")},
        verdict=_verdict(_side(a), _side(b), {change.name for change in findings}),
        differs=differences(a, b),
        doubts=tuple(_doubts(a, b)),
        notes=tuple(_notes(a, b)),
        assumed_scatter_pct=scatter_pct if alone else None,
        followed=None if given else followed,
    )


def _refuse_twice(side: Sources) -> None:
    first: dict[str, str] = {}
    for run in side:
        name = run.run or run.source
        if name in first:
            raise ConfigurationError(
                f"{run.source} and {first[name]} are the same run. Give each run once: counting it twice would "
                "make the scatter between runs too small"
            )
        first[name] = run.source


def _followed(a: Sources, b: Sources) -> bool:
    """Whether no longer pause was between runs of one machine."""
    runs = [*a, *b]
    times = sorted((run.began_s, run.ended_s) for run in runs if run.began_s is not None)
    pauses = [later[0] - earlier[1] for earlier, later in pairwise(times)]
    return len(times) == len(runs) and max(pauses, default=0.0) <= _FOLLOWS_S and len({run.host for run in runs}) == 1


def _in_turns(a: Sources, b: Sources) -> list[tuple[Source, Source]]:
    """Pairs of neighbours in time, one of each side; empty if the runs were not made in turns."""
    began = sorted(
        (run.began_s, side, number)
        for side, runs in enumerate((a, b))
        for number, run in enumerate(runs)
        if run.began_s is not None
    )
    if len(a) != len(b) or len(began) < len(a) + len(b) or len(a) < REPEATS:
        return []
    pairs = [sorted(began[at : at + 2], key=lambda run: run[1]) for at in range(0, len(began), 2)]
    if any([side for _, side, _ in pair] != [0, 1] for pair in pairs):
        return []
    return [(a[first[2]], b[second[2]]) for first, second in pairs]


def _metric(
    name: str, sides: Sequence[Sources], scatter: float, limit_pct: float | None, *, in_turns: bool
) -> ComparedMetric:
    estimates = [[run.metrics[name] for run in side if name in run.metrics] for side in sides]
    a, b = (geometric_mean([each.value for each in side]) if side else None for side in estimates)
    kind = kind_of(name)
    metric = ComparedMetric(name=name, unit=kind.unit, a=a, b=b, more_is_better=kind.is_rate)
    if a == 0 or b == 0:  # of a trace
        return replace(metric, outcome="same" if a == b else "faster" if a else "slower", differs=a != b)
    if [len(side) for side in estimates] != [len(side) for side in sides]:
        return metric
    unsteady = max(hypot(run.unsteadiness, run.slow_steps if name != "median" else 0.0) for run in chain(*sides))
    ratio = ratio_of(estimates[0], estimates[1], hypot(scatter, unsteady), in_turns=in_turns)
    plausible = _PLAUSIBLE_ONCE if kind.once else PLAUSIBLE
    outcome = decide(ratio, limit_pct, more_is_better=kind.is_rate, plausible=plausible)
    if outcome == "too short" and kind.once:
        outcome = "too noisy"
    if ratio.low is None or ratio.high is None:
        differs = outcome in {"slower", "faster"}
    else:
        differs = abs(log(ratio.ratio)) > log(ratio.high / ratio.low) / 2 * (_OF_SIX if name in _PARTS else 1.0)
    return replace(metric, ratio=ratio, pct=100 * (ratio.ratio - 1), outcome=outcome, differs=differs)


def _with_share(metric: ComparedMetric, metrics: Mapping[str, ComparedMetric], runs: Sources) -> ComparedMetric:
    """The metric with its share of the step; of the wall time for what is no part of a step."""
    share = 100.0
    if metric.name in {*REGIONS, "unknown"}:
        step = metrics["step"]
        parts = [part / whole for part, whole in ((metric.a, step.a), (metric.b, step.b)) if part and whole]
        share = 100 * max(parts, default=0.0)
    elif metric.unit == "s" and metric.name != FIT:
        parts = [_ledger_s(run, metric.name) / run.wall_s for run in runs if run.wall_s]
        share = 100 * max(parts, default=1.0)
    return replace(metric, share_pct=share, differs=metric.differs and share >= _LEAST_SHARE_PCT)


def _ledger_s(run: Source, name: str) -> float:
    return sum(s for part, (s, _) in run.amounts.get("ledger", {}).items() if part.startswith(name))


# -- what is said ------------------------------------------------------------------------------------------------------


def _headline(metrics: Mapping[str, ComparedMetric], a: Sources, b: Sources) -> str:
    """The part that explains most of a change of the fit or the step, else these themselves, or that none changed."""
    step = metrics["call" if a[0].kind == "benchmark" else "step"]
    wholes = [metric for metric in (metrics.get(FIT), step) if metric is not None and metric.differs]
    costs = {
        name: _cost_s(metrics[name], a, b)
        for name in _CAUSES
        if name in metrics and (metrics[name].differs or (wholes and _is_clear(metrics[name])))
    }
    cause = max(costs, key=lambda name: abs(costs[name]), default="")
    if not cause:
        wholes = wholes or [metric for name, metric in metrics.items() if name == "median" and metric.differs]
        return change_words(wholes[0]) if wholes else none_above(step)
    words = change_words(metrics[cause])
    if not wholes:  # what one part gained another may have lost
        least_pct, most = 100 * abs(costs[cause]) / _step_s(step.a, b), reach_pct(step)
        is_same = most is not None and most < min(least_pct, _PLAIN_PCT)
        return f"{none_above(step)} in the step; {words}" if is_same else words
    by = [_cost_s(whole, a, b) for whole in wholes]
    if costs[cause] / by[0] >= _CAUSE:
        return words
    explains_step = by[-1] * by[0] > 0 and costs[cause] / by[-1] >= _CAUSE
    return f"{change_words(wholes[0])}; {words}" if explains_step else change_words(wholes[0])


def _is_clear(metric: ComparedMetric) -> bool:
    """Whether its interval leaves out "no difference", which is enough for a part of a change that is established."""
    ratio = metric.ratio
    return ratio is not None and ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def _cost_s(metric: ComparedMetric, a: Sources, b: Sources) -> float:
    """How many seconds more the steps, or a run's validations, take now."""
    if metric.unit != "s":
        return _step_s((metric.b or 0.0) - (metric.a or 0.0), b)
    if metric.name != FIT:
        return fmean(_ledger_s(run, metric.name) for run in b) - fmean(_ledger_s(run, metric.name) for run in a)
    return (metric.b or 0.0) - (metric.a or 0.0)


def _step_s(ms: float | None, runs: Sources) -> float:
    """Seconds of all steps, of which each takes so long."""
    return (ms or 0.0) / 1e3 * fmean(run.steps for run in runs)


def _rows(metrics: Mapping[str, ComparedMetric]) -> Iterator[str]:
    """The rows that are shown without `--verbose`."""
    step = metrics.get("step") or metrics["call"]
    yield step.name
    if "median" in metrics and metrics["median"].differs != step.differs:
        yield "median"
    yield from (name for name in _PARTS if name in metrics and metrics[name].differs)
    yield from (name for name in ("samples", "tokens", "validation", FIT) if name in metrics)


def change_words(metric: ComparedMetric) -> str:
    """The change with its 95 % interval: "forward 22 % slower (18 to 27 %): 11 to 13.4 ms"."""
    ratio, name = metric.ratio, kind_of(metric.name).words
    values = " to ".join(digits(value or 0.0) for value in (metric.a, metric.b))
    values = f"{values} {metric.unit}".removesuffix(" /s").rstrip()
    if ratio is None:
        return f"{name} {values}"
    low, high = ratio.low, ratio.high
    interval = f" ({percent(low)} to {percent(high)} %)" if low is not None and high is not None else ", no interval"
    if not metric.differs:
        return f"{name} {percent(ratio.ratio)} %{interval}: {values}"
    more = ratio.ratio > 1
    word = ("higher" if more else "lower") if metric.more_is_better else "slower" if more else "faster"
    if low is None or high is None:
        interval = ", more than equal runs differ"
    else:
        ends = [percent(end).lstrip("+-") for end in ((low, high) if more else (high, low))]
        interval = f" ({' to '.join(ends)} %)"
    return f"{name} {percent(ratio.ratio).lstrip('+-')} % {word}{interval}: {values}"


def none_above(metric: ComparedMetric) -> str:
    """That there is no difference above so many percent; the interval where that says nothing."""
    above = reach_pct(metric)
    if above is None or above > _PLAIN_PCT:
        return f"undecided: {change_words(metric)}"
    return f"no difference above {above:.2g} %" if above < 1 else f"no difference above {ceil(above)} %"


def reach_pct(metric: ComparedMetric) -> float | None:
    """The largest difference in the interval, in percent; None without one."""
    ratio = metric.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return 100 * max(1 - ratio.low, ratio.high - 1)


def percent(ratio: float) -> str:
    """A ratio as a change in percent: two digits or more, and no more than four."""
    change = 100 * (ratio - 1)
    if change >= 9999.5:  # noqa: PLR2004
        return "+>9999"
    return f"{change:+.1f}" if abs(change) < 9.95 else f"{change:+.0f}"  # noqa: PLR2004


# -- what else changed -------------------------------------------------------------------------------------------------


def differences(a: Sources, b: Sources) -> tuple[str, ...]:
    """Conditions in which any two of the runs differ, one sentence each. Unknown conditions are ignored."""
    differing = []
    for name, words in _CONDITIONS.items():
        sides = [sorted({str(value) for run in side if (value := getattr(run.conditions, name))}) for side in (a, b)]
        if len({*sides[0], *sides[1]}) > 1:
            before, now = (" and ".join(side) or "unknown" for side in sides)
            differing.append(f"different {words}: {before} before, {now} now")
    return tuple(differing)


def _side(runs: Sources) -> ComparedSide:
    verdicts = Counter(run.verdict for run in runs if run.verdict)
    return ComparedSide(
        sources=tuple(run.source for run in runs),
        steps=tuple(run.steps for run in runs),
        conditions=runs[0].conditions,
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        verdict=verdicts.most_common(1)[0][0] if verdicts else "",
        verdicts=dict(verdicts),
        wall_s=fmean(run.wall_s for run in runs),
    )


def _changes(a: Sources, b: Sources, table: str, per: str) -> tuple[ComparedAmount, ...]:
    """Means over the runs, the largest change first."""
    sides = [[run.amounts.get(table, {}) for run in side] for side in (a, b)]
    names = dict.fromkeys(name for side in sides for amounts in side for name in amounts)
    return _largest_first(_change(name, per, *(mean_amount(side, name) for side in sides)) for name in names)


def _largest_first(changes: Iterable[ComparedAmount]) -> tuple[ComparedAmount, ...]:
    return tuple(sorted(changes, key=lambda change: -abs(change.b - change.a)))


def _change(name: str, per: str, *sides: tuple[float, float]) -> ComparedAmount:
    (a, a_calls), (b, b_calls) = sides
    pct = 100 * (b - a) / a if a else None if b else 0.0
    return ComparedAmount(name=name, a=a, b=b, pct=pct, per=per, a_calls=a_calls, b_calls=b_calls)


def _ledger(a: Sources, b: Sources) -> tuple[ComparedAmount, ...]:
    """Seconds per run if all runs have as many steps; else per 1,000 steps, except for one-time parts."""
    runs = (*a, *b)
    if not all(run.amounts.get("ledger") for run in runs):
        return ()
    alike = _alike(a, b)
    changes = []
    for part in dict.fromkeys(part for run in runs for part in run.amounts["ledger"]):
        of_run = alike or part.startswith(_ONCE)
        means = []
        for side in (a, b):
            factors = (1 if of_run else _PER_STEPS / run.all_steps for run in side)
            seconds = (run.amounts["ledger"].get(part, _NONE)[0] for run in side)
            means.append((fmean(map(mul, seconds, factors)), 0.0))
        changes.append(_change(part, "run" if of_run else f"{_PER_STEPS:,} steps", *means))
    return _largest_first(changes)


def _alike(a: Sources, b: Sources) -> bool:
    """Whether all runs have as many steps."""
    lengths = [run.all_steps for run in (*a, *b)]
    return max(lengths) - min(lengths) <= _LENGTHS_DIFFER * max(lengths)


def _findings(a: Sources, b: Sources, metrics: Mapping[str, ComparedMetric]) -> tuple[ComparedAmount, ...]:
    """Findings whose cost changed with that of the step, of their region or of the run.

    The same code may be `blocked-forward` in one run and `python-bound` in the next: nothing became faster or slower by
    what the one costs less and the other more, and neither has changed.
    """
    of_run = frozenset[str]().union(*(run.of_run for run in (*a, *b)))
    changes = []
    for change in _changes(a, b, "findings", "step"):
        per = "run" if change.name in of_run else "step"
        wholes = ("validation", "checkpoint", "startup", FIT) if per == "run" else (REGION_OF.get(change.name), "step")
        cost = _cost(b, change.name, per) - _cost(a, change.name, per)
        moved = [
            (metric.b or 0.0) - (metric.a or 0.0)
            for name in wholes
            if name is not None and (metric := metrics.get(name)) is not None and metric.differs
        ]
        if abs(change.b - change.a) >= 1 and any(cost * by > 0 and abs(by) >= _MOST_OF_IT * abs(cost) for by in moved):
            changes.append(replace(change, per=per))
    return tuple(changes)


def _cost(side: Sources, code: str, per: str) -> float:
    """Milliseconds of each step, or seconds of the run; 0 where it is too small to be a finding."""
    shares = [run.amounts.get("findings", {}).get(code, _NONE)[0] / 100 for run in side]
    wholes = [run.wall_s if per == "run" else run.metrics["step"].value for run in side]
    return fmean(map(mul, shares, wholes))


def _verdict(a: ComparedSide, b: ComparedSide, changed: set[str]) -> str:
    if not (a.verdict or b.verdict):
        return ""
    before, now = (
        f"{side.verdict or 'none'}{_of_runs(side.verdicts.get(side.verdict, 0), len(side.steps))}" for side in (a, b)
    )
    if a.verdict == b.verdict:
        return f"{now}, as before"
    if changed & {a.verdict, b.verdict}:
        return f"{before} -> {now}"
    return f"{before} before, {now} now; no time changed by as much as either costs"


def _of_runs(having: int, runs: int) -> str:
    return f" (in {having} of {runs} runs)" if having < runs and runs > 1 else ""


def _fixed(
    a: Sources, b: Sources, metrics: Mapping[str, ComparedMetric], changed: Sequence[ComparedAmount]
) -> Iterator[FixedFinding]:
    step = metrics.get("step")
    names = {change.name for change in changed} - {run.verdict for run in b}
    codes = [code for code in a[0].predicted if code not in MACHINE and all(code in run.predicted for run in a)]
    if step is None or step.a is None or step.b is None:
        return
    for code in codes:
        saves = [one for run in a if (one := run.predicted[code].saves) is not None]
        region = metrics.get(REGION_OF.get(code, ""))
        if region is None:
            before_ms, now_ms = _cost(a, code, "step"), _cost(b, code, "step")
        else:
            before_ms, now_ms = region.a or 0.0, region.b or 0.0
        if code in names and before_ms and 2 * now_ms <= before_ms:
            yield FixedFinding(
                code=code,
                part=code if region is None else region.name,
                before_ms=before_ms,
                now_ms=now_ms,
                predicted_ms=fmean(one.ms_per_step for one in saves),
                at_most=any(one.at_most for one in saves),
                step_ms=step.a - step.b,
            )


def _gpu(a: Sources, b: Sources) -> Iterator[ComparedAmount]:
    """Means over the runs that have a sensor, of the sensors that both sides have."""
    sides = [[run.amounts.get("gpu", {}) for run in side] for side in (a, b)]
    for name in dict.fromkeys(chain.from_iterable(sides[0])):
        known = [[amounts for amounts in side if name in amounts] for side in sides]
        if all(known):
            yield _change(name, "run", *(mean_amount(side, name) for side in known))


def _doubts(a: Sources, b: Sources) -> Iterator[str]:
    """What makes the runs hard to compare."""
    if {run.run for run in a if run.run} & {run.run for run in b}:
        yield "the same run is on both sides"
    hosts = [sorted({run.host for run in side if run.host}) for side in (a, b)]
    if all(hosts) and hosts[0] != hosts[1]:
        yield f"on different hosts: {', '.join(hosts[0])} before, {', '.join(hosts[1])} now"
    for side, runs in (("before", a), ("now", b)):
        for number, run in enumerate(runs, 1):
            where = side if len(runs) == 1 else f"{side}, run {number}"
            yield from (f"{where}: {text}" for text in run.notes)


def _notes(a: Sources, b: Sources) -> Iterator[str]:
    """Settings and versions that differ."""
    for name in dict.fromkeys(name for run in (*a, *b) for name in run.settings):
        before, now = ([*dict.fromkeys(run.settings[name] for run in side if name in run.settings)] for side in (a, b))
        if before and now and sorted(before) != sorted(now):
            yield f"{name} {' and '.join(before)} before, {' and '.join(now)} now"
