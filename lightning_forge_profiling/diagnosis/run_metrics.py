"""Metrics of two sides of runs: values, ratio with its interval, outcome."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import fmean
from typing import Final, Literal

from lightning_forge_profiling.diagnosis.block_bootstrap import BlockBootstrap, RunValue
from lightning_forge_profiling.diagnosis.log_ratio import Ratio, ratio_of
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.results.run_samples import RunSamples

RUN_METRICS: Final = ("step", "median", "samples", "tokens", *REGIONS)
"""Metrics that a gate can test."""

SAME_WITHIN_PCT: Final = 5.0
"""Without a limit, sides are the same if the whole interval is within this percentage."""

RunOutcome = Literal["same", "faster", "slower", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetric:
    """One metric on both sides.

    `samples` and `tokens` are per second on rank 0; `step`, `median` and regions are milliseconds per step.

    Attributes:
        name: one of `RUN_METRICS`.
        a: geometric mean over the runs before; None if no run has the metric.
        b: geometric mean over the runs now; None likewise.
        ratio: now over before, with its interval; None unless all runs have the metric.
        outcome: outcome by the limit, or by `SAME_WITHIN_PCT` without one; None without a ratio.
        share_pct: share of the step in percent, on the side where it is larger; 100 for a metric that is no region.
    """

    name: str
    a: float | None
    b: float | None
    ratio: Ratio | None
    outcome: RunOutcome | None
    share_pct: float = 100.0

    @property
    def more_is_better(self) -> bool:
        """Whether the metric is a rate."""
        return self.name in {"samples", "tokens"}


def run_metrics(
    a: Sequence[RunSamples], b: Sequence[RunSamples], *, scatter: float, limit_pct: float | None = None
) -> dict[str, RunMetric]:
    """Metrics by name: times first, then rates, then the regions in their order.

    With one run a side, the scatter between the blocks of the less steady run is added to the scatter between
    processes: if parts of a run differ, whole runs differ too. Of 200 pairs of equal runs on a busy machine, errors
    from their own steps called 15 % slower by more than 5 %, and with both scatters 1 %
    (`python -m benchmarks.compare_false_alarms`).
    """
    sides = [[_values(run, seed) for seed, run in enumerate(side)] for side in (a, b)]
    scatter = hypot(scatter, max(run["step"].unsteadiness for side in sides for run in side))
    names = dict.fromkeys(name for side in sides for values in side for name in values)
    steps_ms = [_mean(side, "step") for side in sides]
    found = {}
    for name in names:
        means = [_mean(side, name) for side in sides]
        values = [[run[name] for run in side if name in run] for side in sides]
        whole = all(len(of_side) == len(side) for of_side, side in zip(values, sides, strict=True))
        ratio = ratio_of(values[0], values[1], scatter) if whole else None
        parts = [mean / step for mean, step in zip(means, steps_ms, strict=True) if mean and step]
        metric = RunMetric(
            name=name,
            a=means[0],
            b=means[1],
            ratio=ratio,
            outcome=None,
            share_pct=100.0 if name in {"step", "median", "samples", "tokens"} else 100 * max(parts, default=0.0),
        )
        found[name] = _decided(metric, limit_pct)
    return found


def run_outcome(ratio: Ratio, limit_pct: float | None, *, more_is_better: bool = False) -> RunOutcome:
    """Outcome that an interval supports."""
    if ratio.low is None or ratio.high is None:
        return "inconclusive"
    low, high = (1 / ratio.high, 1 / ratio.low) if more_is_better else (ratio.low, ratio.high)
    limit = 1 + (limit_pct or 0.0) / 100
    if low > limit:
        return "slower"
    if high < 1:
        return "faster"
    within = 1 + SAME_WITHIN_PCT / 100
    same = high <= limit if limit_pct is not None else 1 / within <= low and high <= within
    return "same" if same else "inconclusive"


def _decided(metric: RunMetric, limit_pct: float | None) -> RunMetric:
    if metric.ratio is None:
        return metric
    outcome = run_outcome(metric.ratio, limit_pct, more_is_better=metric.more_is_better)
    return RunMetric(
        name=metric.name, a=metric.a, b=metric.b, ratio=metric.ratio, outcome=outcome, share_pct=metric.share_pct
    )


def _values(run: RunSamples, seed: int) -> dict[str, RunValue]:
    bootstrap = BlockBootstrap(run.counted, run.step_ms, seed)
    seconds = [ms / 1e3 for ms in run.step_ms]
    found = {
        "step": bootstrap.ratio(run.step_ms, run.counted),
        "median": bootstrap.median(run.steps_us, run.bucket_ratio),
        "samples": bootstrap.ratio(run.samples, seconds) if run.samples is not None else None,
        "tokens": bootstrap.ratio(run.tokens, seconds) if run.tokens is not None else None,
        **{name: bootstrap.ratio(ms, run.counted) for name, ms in run.region_ms.items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def _mean(side: Iterable[Mapping[str, RunValue]], name: str) -> float | None:
    values = [run[name].value for run in side if name in run]  # all positive
    return exp(fmean(map(log, values))) if values else None
