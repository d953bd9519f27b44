"""Compares two sides of runs, traces or benchmark results: metrics with their intervals, and what else changed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import hypot
from operator import mul
from statistics import fmean
from typing import Final

from lightning_forge_profiling.comparison.ratio import PLAUSIBLE, Outcome, Ratio, decide, geometric_mean, ratio_of
from lightning_forge_profiling.comparison.source import Conditions, Source, mean_amount
from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.diagnosis.rule import REGION_OF
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import REGIONS

SCATTER_IN_TURNS_PCT: Final = 4.0
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
_RATES: Final = frozenset({"samples", "tokens", "goodput"})
OF_THE_RUN: Final = frozenset({"validation", "checkpoint", "startup", "goodput"})
_PLAUSIBLE_ONCE: Final = 10.0  # one value a run: with cold caches a start-up takes four times as long
_UNITS: Final = {
    "samples": "/s",
    "tokens": "/s",
    "call": "µs",
    "last_fifth": "",
    "validation": "s",
    "checkpoint": "s",
    "startup": "s",
    "goodput": "%",
}
_CONDITIONS: Final = {
    "device": "device",
    "world_size": "world size",
    "precision": "precision",
    "batch_size": "batch size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric on both sides."""

    name: str
    unit: str
    a: float | None  # geometric mean over the runs before; None if no run has it
    b: float | None
    pct: float | None = None  # None unless all runs have it, as ratio and outcome
    ratio: Ratio | None = None
    outcome: Outcome | None = None
    share_pct: float = 100.0  # of the step, or of the wall time; 100 if it is no part

    @property
    def more_is_better(self) -> bool:
        """Whether the metric is a rate."""
        return self.name in _RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is shown without a test: a part of the ledger, a finding, a kernel. Means over the runs."""

    name: str
    a: float
    b: float
    pct: float | None  # None where there was none before
    per: str
    a_calls: float = 0.0
    b_calls: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A finding that costs at most half as much now, and what its fix was predicted to save. Means over the runs."""

    code: str
    part: str  # the region that it is of, or its own code
    before_ms: float  # of each step
    now_ms: float
    predicted_ms: float
    at_most: bool
    step_ms: float  # how much shorter the step is, by all that changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a run, or several repeats."""

    sources: tuple[str, ...]
    steps: tuple[int, ...]  # counted ones of each run
    conditions: Conditions
    commits: tuple[str, ...]
    verdict: str
    verdicts: Mapping[str, int]  # number of runs by verdict
    wall_s: float  # mean; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from `a` to `b`."""

    kind: str
    a: Side
    b: Side
    metrics: Mapping[str, Metric]
    ledger: tuple[Change, ...] = ()  # seconds; the largest change first, as in all that follow
    findings: tuple[Change, ...] = ()  # percent
    fixed: tuple[Fixed, ...] = ()
    gpu: tuple[Change, ...] = ()
    idle: tuple[Change, ...] = ()  # milliseconds per step by cause, as in all that follow
    kinds: tuple[Change, ...] = ()
    kernels: tuple[Change, ...] = ()
    differs: tuple[str, ...] = ()  # conditions, one sentence each
    notes: tuple[str, ...] = ()
    assumed_scatter_pct: float | None = None  # None with repeats, which measure it
    followed: bool | None = False  # whether the runs were made one after the other; None if the scatter was given


Sources = Sequence[Source]


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
    scatter = hypot(scatter_pct / 100, max(run.unsteadiness for run in (*a, *b)))
    metrics = {
        name: _metric(name, sides, scatter, limit_pct, in_turns=bool(pairs))
        for name in dict.fromkeys(name for run in (*a, *b) for name in run.metrics)
    }
    return Comparison(
        kind=a[0].kind,
        a=_side(a),
        b=_side(b),
        metrics={name: _with_share(metric, metrics, (*a, *b)) for name, metric in metrics.items()},
        ledger=_ledger(a, b),
        findings=_findings(a, b),
        fixed=tuple(_fixed(a, b, metrics)),
        gpu=_gpu(a, b),
        **{table: _changes(a, b, table, "step") for table in ("idle", "kinds", "kernels")},
        differs=differences(a, b),
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


def _metric(name: str, sides: Sequence[Sources], scatter: float, limit_pct: float | None, *, in_turns: bool) -> Metric:
    estimates = [[run.metrics[name] for run in side if name in run.metrics] for side in sides]
    a, b = (geometric_mean([each.value for each in side]) if side else None for side in estimates)
    metric = Metric(name=name, unit=_UNITS.get(name, "ms"), a=a, b=b)
    if a == 0 or b == 0:  # of a trace
        return replace(metric, outcome="same" if a == b else "faster" if a else "slower")
    if [len(side) for side in estimates] != [len(side) for side in sides]:
        return metric
    ratio = ratio_of(estimates[0], estimates[1], scatter, in_turns=in_turns)
    plausible = _PLAUSIBLE_ONCE if name in OF_THE_RUN else PLAUSIBLE
    outcome = decide(ratio, limit_pct, more_is_better=metric.more_is_better, plausible=plausible)
    if outcome == "too short" and name in OF_THE_RUN:
        outcome = "too noisy"
    return replace(metric, ratio=ratio, pct=100 * (ratio.ratio - 1), outcome=outcome)


def _with_share(metric: Metric, metrics: Mapping[str, Metric], runs: Sources) -> Metric:
    """The metric with its share of the step; of the wall time for what is no part of a step."""
    share = 100.0
    if metric.name in {*REGIONS, "unknown"}:
        step = metrics["step"]
        parts = [part / whole for part, whole in ((metric.a, step.a), (metric.b, step.b)) if part and whole]
        share = 100 * max(parts, default=0.0)
    elif metric.unit == "s":
        parts = [
            sum(s for part, (s, _) in run.amounts.get("ledger", {}).items() if part.startswith(metric.name))
            / run.wall_s
            for run in runs
            if run.wall_s
        ]
        share = 100 * max(parts, default=1.0)
    return replace(metric, share_pct=share)


def differences(a: Sources, b: Sources) -> tuple[str, ...]:
    """Conditions in which any two of the runs differ, one sentence each. Unknown conditions are ignored."""
    differing = []
    for name, words in _CONDITIONS.items():
        sides = [sorted({str(value) for run in side if (value := getattr(run.conditions, name))}) for side in (a, b)]
        if len({*sides[0], *sides[1]}) > 1:
            before, now = (" and ".join(side) or "unknown" for side in sides)
            differing.append(f"different {words}: {before} before, {now} now")
    return tuple(differing)


def _side(runs: Sources) -> Side:
    verdicts = Counter(run.verdict for run in runs if run.verdict)
    return Side(
        sources=tuple(run.source for run in runs),
        steps=tuple(run.steps for run in runs),
        conditions=runs[0].conditions,
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        verdict=verdicts.most_common(1)[0][0] if verdicts else "",
        verdicts=dict(verdicts),
        wall_s=fmean(run.wall_s for run in runs),
    )


def _changes(a: Sources, b: Sources, table: str, per: str) -> tuple[Change, ...]:
    """Means over the runs, the largest change first."""
    sides = [[run.amounts.get(table, {}) for run in side] for side in (a, b)]
    names = dict.fromkeys(name for side in sides for amounts in side for name in amounts)
    return _largest_first(_change(name, per, *(mean_amount(side, name) for side in sides)) for name in names)


def _largest_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: -abs(change.b - change.a)))


def _change(name: str, per: str, *sides: tuple[float, float]) -> Change:
    (a, a_calls), (b, b_calls) = sides
    pct = 100 * (b - a) / a if a else None if b else 0.0
    return Change(name=name, a=a, b=b, pct=pct, per=per, a_calls=a_calls, b_calls=b_calls)


def _ledger(a: Sources, b: Sources) -> tuple[Change, ...]:
    """Seconds per run if all runs have as many steps; else per 1,000 steps, except for one-time parts."""
    runs = (*a, *b)
    if not all(run.amounts.get("ledger") for run in runs):
        return ()
    lengths = [run.all_steps for run in runs]
    alike = max(lengths) - min(lengths) <= _LENGTHS_DIFFER * max(lengths)
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


def _findings(a: Sources, b: Sources) -> tuple[Change, ...]:
    of_run = frozenset[str]().union(*(run.of_run for run in (*a, *b)))
    changes = _changes(a, b, "findings", "step")
    return tuple(replace(change, per="run") if change.name in of_run else change for change in changes)


def _fixed(a: Sources, b: Sources, metrics: Mapping[str, Metric]) -> Iterator[Fixed]:
    step = metrics.get("step")
    codes = [code for code in a[0].predicted if code not in MACHINE and all(code in run.predicted for run in a)]
    if step is None or step.a is None or step.b is None:
        return
    for code in codes:
        saves = [one for run in a if (one := run.predicted[code].saves) is not None]
        region = metrics.get(REGION_OF.get(code, ""))
        before_ms, now_ms = (_of_step(side, code) for side in (a, b)) if region is None else (region.a, region.b)
        if before_ms and now_ms is not None and 2 * now_ms <= before_ms:
            yield Fixed(
                code=code,
                part=code if region is None else region.name,
                before_ms=before_ms,
                now_ms=now_ms,
                predicted_ms=fmean(one.ms_per_step for one in saves),
                at_most=any(one.at_most for one in saves),
                step_ms=step.a - step.b,
            )


def _of_step(side: Sources, code: str) -> float:
    """What a finding costs of the mean step; 0 where it is too small to be one."""
    shares = [run.amounts.get("findings", {}).get(code, (0.0, 0.0))[0] for run in side]
    return fmean(share * run.metrics["step"].value / 100 for share, run in zip(shares, side, strict=True))


def _gpu(a: Sources, b: Sources) -> tuple[Change, ...]:
    """Means over the runs that have a sensor, of the sensors that both sides have."""
    sides = [[run.amounts.get("gpu", {}) for run in side] for side in (a, b)]
    before, now = (dict.fromkeys(chain.from_iterable(side)) for side in sides)
    return tuple(
        _change(name, "run", *(mean_amount([known for known in side if name in known], name) for side in sides))
        for name in before
        if name in now
    )


def _notes(a: Sources, b: Sources) -> Iterator[str]:
    if {run.run for run in a if run.run} & {run.run for run in b}:
        yield "the same run is on both sides"
    hosts = [sorted({run.host for run in side if run.host}) for side in (a, b)]
    if all(hosts) and hosts[0] != hosts[1]:
        yield f"on different hosts: {', '.join(hosts[0])} before, {', '.join(hosts[1])} now"
    for name in dict.fromkeys(name for run in (*a, *b) for name in run.settings):
        before, now = ([*dict.fromkeys(run.settings[name] for run in side if name in run.settings)] for side in (a, b))
        if before and now and sorted(before) != sorted(now):
            yield f"{name} {' and '.join(before)} before, {' and '.join(now)} now"
    for side, runs in (("before", a), ("now", b)):
        for number, run in enumerate(runs, 1):
            where = side if len(runs) == 1 else f"{side}, run {number}"
            yield from (f"{where}: {text}" for text in run.notes)
