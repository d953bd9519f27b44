"""Comparison of two sides of runs: metrics, ledger, findings, differing conditions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from lightning_forge_profiling.diagnosis.run_metrics import RunMetric, run_metrics
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.results.run_samples import Conditions, RunSamples

_PER_STEPS: Final = 1000
_LENGTHS_DIFFER: Final = 0.01
_ONCE: Final = ("startup", "sanity_check", "teardown")
"""Parts of the ledger that do not grow with the run."""

_CONDITIONS: Final = {
    "device": "device",
    "world_size": "world size",
    "precision": "precision",
    "batch_size": "batch size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """One side of a comparison: a run, or several repeats.

    Attributes:
        sources: folders of the records.
        steps: number of counted steps of each run.
        conditions: conditions of the first run.
        commits: distinct git commits of the runs.
        verdict: the most frequent verdict; "" without any.
        verdicts: number of runs by verdict.
        wall_s: mean wall time in seconds, by the ledger; 0 if unknown.
    """

    sources: tuple[str, ...]
    steps: tuple[int, ...]
    conditions: Conditions
    commits: tuple[str, ...]
    verdict: str
    verdicts: Mapping[str, int]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    """A part of the ledger on both sides, as means over the runs.

    Attributes:
        part: name of the part.
        a_s: seconds before.
        b_s: seconds now.
        per: what the seconds are per: `run` or `1,000 steps`.
    """

    part: str
    a_s: float
    b_s: float
    per: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """Share of a finding, or a mean that is not tested, on both sides.

    Attributes:
        name: code of the finding, or name of the logged metric.
        a: value before; None if unknown.
        b: value now; None if unknown.
        of: what a finding's percentage is of, `step` or `run`; "" for a mean.
    """

    name: str
    a: float | None
    b: float | None
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Changes from the runs of `a` to those of `b`.

    Attributes:
        a: the runs before.
        b: the runs now.
        metrics: metrics by name, see `run_metrics.RUN_METRICS`.
        ledger: parts of the wall time, largest change first.
        findings: shares of findings in percent, largest change first.
        gpu: means of the GPU's sensors and of the allocator's figures, not tested.
        differs: conditions in which the sides differ, one sentence each.
        notes: anything else that makes the sides hard to compare, one sentence each.
        assumed_scatter_pct: assumed scatter between processes, as a standard deviation in percent; None with repeats,
            which measure it.
    """

    a: RunSide
    b: RunSide
    metrics: Mapping[str, RunMetric]
    ledger: tuple[LedgerChange, ...]
    findings: tuple[ShareChange, ...]
    gpu: tuple[ShareChange, ...]
    differs: tuple[str, ...]
    notes: tuple[str, ...]
    assumed_scatter_pct: float | None


def compare_runs(
    a: Sequence[RunSamples], b: Sequence[RunSamples], *, scatter_pct: float, limit_pct: float | None = None
) -> RunComparison:
    """Compare two sides with at least one run each."""
    for side in (a, b):
        _refuse_twice(side)
    alone = len(a) == len(b) == 1
    return RunComparison(
        a=_side(a),
        b=_side(b),
        metrics=run_metrics(a, b, scatter=scatter_pct / 100, limit_pct=limit_pct),
        ledger=_ledger(a, b),
        findings=_findings(a, b),
        gpu=tuple(
            ShareChange(
                name=name, a=_known_mean(run.gpu.get(name) for run in a), b=_known_mean(run.gpu.get(name) for run in b)
            )
            for name in dict.fromkeys(name for run in (*a, *b) for name in run.gpu)
        ),
        differs=differences(a, b),
        notes=tuple(_notes(a, b)),
        assumed_scatter_pct=scatter_pct if alone else None,
    )


def differences(a: Sequence[RunSamples], b: Sequence[RunSamples]) -> tuple[str, ...]:
    """Conditions in which any two of the runs differ, one sentence each. Unknown conditions are ignored."""
    found = []
    for name, words in _CONDITIONS.items():
        sides = [sorted({str(value) for run in side if (value := getattr(run.conditions, name))}) for side in (a, b)]
        if len({*sides[0], *sides[1]}) > 1:
            before, now = (" and ".join(side) or "unknown" for side in sides)
            found.append(f"different {words}: {before} before, {now} now")
    return tuple(found)


def _refuse_twice(side: Sequence[RunSamples]) -> None:
    first: dict[str, str] = {}
    for run in side:
        if run.run in first:
            raise ConfigurationError(
                f"{run.source} and {first[run.run]} are the same run. Give each run once: counting it twice would "
                "make the scatter between runs too small"
            )
        first[run.run] = run.source


def _side(runs: Sequence[RunSamples]) -> RunSide:
    verdicts = Counter(run.verdict for run in runs if run.verdict)
    return RunSide(
        sources=tuple(run.source for run in runs),
        steps=tuple(sum(run.counted) for run in runs),
        conditions=runs[0].conditions,
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        verdict=verdicts.most_common(1)[0][0] if verdicts else "",
        verdicts=dict(verdicts),
        wall_s=fmean(sum(run.ledger_s.values()) for run in runs),
    )


def _ledger(a: Sequence[RunSamples], b: Sequence[RunSamples]) -> tuple[LedgerChange, ...]:
    """Seconds per run if all runs have as many steps; else per 1,000 steps, except for one-time parts."""
    if not all(run.ledger_s for run in (*a, *b)):
        return ()
    lengths = [run.steps for run in (*a, *b)]
    alike = max(lengths) - min(lengths) <= _LENGTHS_DIFFER * max(lengths)
    changes = []
    for part in dict.fromkeys(part for run in (*a, *b) for part in run.ledger_s):
        of_run = alike or part.startswith(_ONCE)
        a_s, b_s = (
            fmean(run.ledger_s.get(part, 0.0) * (1 if of_run else _PER_STEPS / run.steps) for run in side)
            for side in (a, b)
        )
        changes.append(LedgerChange(part=part, a_s=a_s, b_s=b_s, per="run" if of_run else f"{_PER_STEPS:,} steps"))
    return tuple(sorted(changes, key=lambda change: -abs(change.b_s - change.a_s)))


def _findings(a: Sequence[RunSamples], b: Sequence[RunSamples]) -> tuple[ShareChange, ...]:
    of_run = frozenset[str]().union(*(run.of_run for run in (*a, *b)))
    changes = [
        (fmean(run.findings.get(code, 0.0) for run in a), fmean(run.findings.get(code, 0.0) for run in b), code)
        for code in dict.fromkeys(code for run in (*a, *b) for code in run.findings)
    ]
    changes.sort(key=lambda change: -abs(change[1] - change[0]))
    return tuple(
        ShareChange(name=code, a=before, b=now, of="run" if code in of_run else "step") for before, now, code in changes
    )


def _known_mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _differing(a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for name in dict.fromkeys(name for values in (*a, *b) for name in values if name not in _CONDITIONS):
        before, now = ([*dict.fromkeys(values[name] for values in side if name in values)] for side in (a, b))
        if before and now and sorted(before) != sorted(now):
            yield f"{name} {' and '.join(before)} before, {' and '.join(now)} now"


def _notes(a: Sequence[RunSamples], b: Sequence[RunSamples]) -> Iterator[str]:
    if {run.run for run in a} & {run.run for run in b}:
        yield "the same run is on both sides"
    hosts = [sorted({run.host for run in side if run.host}) for side in (a, b)]
    if all(hosts) and hosts[0] != hosts[1]:
        yield f"on different hosts: {', '.join(hosts[0])} before, {', '.join(hosts[1])} now"
    yield from _differing([run.versions for run in a], [run.versions for run in b])
    yield from _differing([run.settings for run in a], [run.settings for run in b])
    for side, runs in (("before", a), ("now", b)):
        for number, run in enumerate(runs, 1):
            where = side if len(runs) == 1 else f"{side}, run {number}"
            yield from (f"{where}: {text}" for text in (*_end(run), *run.problems))


def _end(run: RunSamples) -> Iterator[str]:
    if run.ended == "unfinished":
        yield f"{run.steps:,} steps so far; the run is still going on, or was killed"
    elif run.ended == "failed":
        yield f"the run failed after {run.steps:,} steps"
