"""What is compared: a run by its record, a trace, or results of `benchmark`, each as metrics with their errors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import hypot, sqrt
from statistics import fmean, mean, stdev
from typing import Final, Literal

from msgspec import structs

from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.names import REGIONS, STARTUP, STEPS, wholes
from lightning_forge_profiling.record.reader import RankRecord, RecordError, RunRecord
from lightning_forge_profiling.report.run_status import mean_metrics
from lightning_forge_profiling.schema import (
    CATEGORIES,
    NO_VERDICT,
    Analysis,
    Begin,
    Conditions,
    Finding,
    IntervalLine,
    Kernel,
    Kind,
    LoaderSettings,
    RunLedger,
    Step,
    StepCounters,
)
from lightning_forge_profiling.timing.bootstrap import FEWEST_PIECES, BlockBootstrap, Estimate, median_estimate
from lightning_forge_profiling.timing.counters import BUCKET_RATIO, known, step_total_ms, summed
from lightning_forge_profiling.timing.estimate import region_pieces

KERNELS: Final = {f"{name}_kernels" if name in REGIONS else name: name for name in CATEGORIES}  # `other` is a region
TRACE_METRICS: Final = ("step", "busy", "idle", *KERNELS)  # of a trace: medians over whole steps
Amounts = Mapping[str, tuple[float, float]]  # amount and number of calls, by name
_FEWEST_FOR_P95: Final = 20
# number of steps in a row that count as one independent step, where the steps' distribution is all that is known
_CORRELATED: Final = 9
# Assumed scatter between runs for each unit of the mean step that is above the median. Steps that wait for a core make
# the mean 2 to 6 times the median: of 400 comparisons of equal runs on two cores with a load of 10, without it 7.6 %
# were `slower` by more than 5 %, with 0.2 of it 1.2 %, with 0.3 of it 0.2 %.
_SLOW_STEPS: Final = 0.3
# Slow steps that come regularly, such as every eighth that waits for a loader, are in each run alike. The error of the
# mean is then 0.01 to 0.3 times that of as many independent steps. Of steps that are slow at random it is 0.7 to 1.3
# times, and more on a machine that is busy at times (simulated, 220 to 6,000 steps).
_REGULAR: Final = 0.5
_FIFTHS: Final = 5
FIT: Final = "fit"  # the wall time without the start-up
PART_ERROR: Final = 0.2  # of a validation or checkpoint between runs, where too few show it


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One run, trace or benchmark result."""

    source: str
    kind: Literal["record", "trace", "benchmark"]
    run: str = ""  # id of the run
    conditions: Conditions
    steps: int  # counted ones
    all_steps: int = 0  # those that do not count included
    began_s: float | None = None  # Unix time
    ended_s: float = 0.0
    metrics: Mapping[str, Estimate]
    unsteadiness: float = 0.0  # deviation of the logarithm to expect between runs as unsteady
    slow_steps: float = 0.0  # the same because of slow steps, of all but the median
    amounts: Mapping[str, Amounts] = field(default_factory=dict)  # by table, shown without a test
    of_run: frozenset[str] = frozenset()  # findings whose share is of the run, not of the step
    predicted: Mapping[str, Finding] = field(default_factory=dict)  # whose fix saves time of each step, by code
    wall_s: float = 0.0  # 0 if unknown
    verdict: str = ""
    host: str = ""
    commit: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)  # and versions
    notes: tuple[str, ...] = ()


def record_source(record: RunRecord) -> Source:
    """A run by its record: rank 0's steps, and the mean step of the other ranks."""
    rank, *others = record.ranks
    begin, state = rank.begin, rank.state
    pieces = _pieces(rank)
    if not pieces:
        raise RecordError(f"{rank.path}: no counted step to compare (warm-up steps do not count): train longer")
    steps = sum(piece.steps for piece in pieces)
    if steps == 1:
        raise RecordError(f"{rank.path}: a single counted step cannot be compared: train longer")
    metrics = _record_metrics(pieces)
    analysis = state.report.analysis if state is not None else None
    loader = begin.loader  # which a loop without a Trainer does not know when it begins
    if loader is None and analysis is not None and analysis.run is not None:
        loader = analysis.run.settings.loader
    findings = analysis.findings if analysis is not None else ()
    ledger = analysis.run.ledger if analysis is not None and analysis.run is not None else None
    ledger_s = _ledger_s(ledger, rank.intervals)
    steps_of_others = {
        f"rank{other.begin.rank}": _step(theirs, BlockBootstrap(*_step_columns(theirs)))
        for other in others
        if (theirs := _pieces(other))
    }
    return Source(
        source=str(record.folder),
        kind="record",
        run=begin.run,
        conditions=_conditions(begin, loader),
        steps=steps,
        all_steps=max((interval.step for interval in rank.intervals), default=0) or steps,
        began_s=begin.at,
        ended_s=rank.lines[-1].at,
        metrics=metrics | _run_metrics(rank, metrics["step"], ledger, ledger_s) | steps_of_others,
        unsteadiness=hypot(metrics["step"].log_drift, _machine_share(findings)),
        slow_steps=slow_steps(metrics["step"], metrics.get("median"), _spread(pieces) / sqrt(steps)),
        amounts={
            "ledger": {part: (seconds, 0.0) for part, seconds in ledger_s.items()},
            "findings": {  # the largest last
                finding.code: (finding.share_pct, 0.0)
                for finding in reversed(findings)
                if finding.of in {"step", "run"}
            },
            "gpu": {  # the GPU's sensors and the allocator's figures over the run, by logged name
                name: (value, 0.0)
                for name, value in (mean_metrics(rank.intervals) if state is None else state.metrics).items()
                if name.startswith("gpu/")
            },
        },
        of_run=frozenset(finding.code for finding in findings if finding.of == "run"),
        predicted={finding.code: finding for finding in findings if finding.of == "step" and finding.saves},
        wall_s=sum(ledger_s.values()),
        verdict=analysis.verdict if analysis is not None else "",
        host=begin.host,
        commit=begin.commit,
        settings=_settings(begin, loader),
        notes=(*_ended(rank, steps), *_waited(findings), *record.problems),
    )


def slow_steps(step: Estimate, median: Estimate | None, independent: float) -> float:
    """The deviation between runs to expect of what slow steps take, unless they come regularly.

    `independent` is the error that the mean step would have if each step were independent of the others.
    """
    if median is None or (step.log_error is not None and step.log_error < _REGULAR * independent):
        return 0.0
    return _SLOW_STEPS * max(1 - median.value / step.value, 0.0)


def _machine_share(findings: Iterable[Finding]) -> float:
    """The share of the step that the run waited for a core or the interpreter lock, of 1."""
    return max((finding.share_pct for finding in findings if finding.code in MACHINE), default=0.0) / 100


def _pieces(rank: RankRecord) -> list[StepCounters]:
    """The counted steps in pieces: a short run has few intervals, so the blocks of its totals are preferred."""
    pieces = (rank.state.blocks if rank.state is not None else ()) or [one.counters for one in rank.intervals]
    return [piece for piece in pieces if piece.steps and step_total_ms(piece) > 0]


def _step_columns(pieces: Sequence[StepCounters]) -> tuple[list[int], list[float]]:
    return [piece.steps for piece in pieces], [*map(step_total_ms, pieces)]


def _record_metrics(pieces: Sequence[StepCounters]) -> dict[str, Estimate]:
    counted, step_ms = _step_columns(pieces)
    bootstrap = BlockBootstrap(counted, step_ms)
    seconds = [ms / 1e3 for ms in step_ms]
    histograms = [piece.steps_us for piece in pieces]
    estimates = {
        "step": _step(pieces, bootstrap),
        "median": bootstrap.quantile(histograms, BUCKET_RATIO, 0.5),
        "p95": bootstrap.quantile(histograms, BUCKET_RATIO, 0.95) if sum(counted) >= _FEWEST_FOR_P95 else None,
        "samples": _rate(bootstrap, [known(piece.samples, piece.no_samples) for piece in pieces], seconds),
        "tokens": _rate(bootstrap, [known(piece.tokens, piece.no_tokens) for piece in pieces], seconds),
        "last_fifth": _last_fifth(counted, step_ms),
    }
    regions = region_pieces(pieces)  # which add up to what is estimated of all steps
    for region in (*REGIONS, "unknown"):
        estimates[region] = bootstrap.ratio([one.get(region, 0.0) for one in regions], counted) if regions else None
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _rate(bootstrap: BlockBootstrap, amounts: Sequence[float | None], seconds: Sequence[float]) -> Estimate | None:
    return None if None in amounts else bootstrap.ratio(amounts, seconds)


def _step(pieces: Sequence[StepCounters], bootstrap: BlockBootstrap) -> Estimate:
    """The mean step; in a few pieces, its error is from the distribution of the steps."""
    counted, step_ms = _step_columns(pieces)
    estimate = bootstrap.ratio(step_ms, counted)
    if estimate is not None and estimate.log_error is not None:
        return estimate
    value = sum(step_ms) / sum(counted)
    independent = sum(sum(piece.steps_us.values()) for piece in pieces) / _CORRELATED
    if independent < FEWEST_PIECES:
        return Estimate(value=value)
    return Estimate(value=value, log_error=_spread(pieces) / sqrt(independent), blocks=independent)


def _spread(pieces: Sequence[StepCounters]) -> float:
    """The standard deviation of the steps relative to their mean."""
    histogram = [(BUCKET_RATIO**bucket, number) for piece in pieces for bucket, number in piece.steps_us.items()]
    steps = sum(number for _, number in histogram)
    if not steps:
        return 0.0
    mean_us = sum(us * number for us, number in histogram) / steps
    return sqrt(sum(number * (us / mean_us - 1) ** 2 for us, number in histogram) / steps)


def _last_fifth(counted: Sequence[int], step_ms: Sequence[float]) -> Estimate | None:
    """The mean step of the last fifth of the run over that of the first."""
    length = len(counted) // _FIFTHS
    if length < 1:
        return None
    ends = [
        BlockBootstrap(counted[part], step_ms[part]).ratio(step_ms[part], counted[part])
        for part in (slice(length), slice(-length, None))
    ]
    first, last = (end or Estimate(value=1.0) for end in ends)
    known = first.log_error is not None and last.log_error is not None
    return Estimate(
        value=last.value / first.value,
        log_error=sqrt((first.log_error or 0.0) ** 2 + (last.log_error or 0.0) ** 2) if known else None,
        blocks=first.blocks,
    )


def _run_metrics(
    rank: RankRecord, step: Estimate, ledger: RunLedger | None, ledger_s: Mapping[str, float]
) -> dict[str, Estimate]:
    """One value a run, or one for each validation or checkpoint."""
    estimates, ledger_s = {}, wholes(ledger_s)
    for kind in ("validation", "checkpoint"):
        seconds = [event.seconds for event in rank.events if event.kind == kind]
        if sum(seconds) > 0:
            estimates[kind] = _mean(seconds)
        elif ledger_s.get(kind):
            estimates[kind] = Estimate(value=ledger_s[kind])
    startup_s = sum(seconds for part, seconds in ledger_s.items() if part.startswith(STARTUP))
    if startup_s > 0:
        estimates["startup"] = Estimate(value=startup_s)
    if ledger is not None and ledger.goodput:
        estimates["goodput"] = Estimate(value=100 * ledger.goodput)
    fit_s = sum(ledger_s.values()) - startup_s
    if rank.end is not None and rank.end.outcome == "finished" and fit_s > 0 and step.log_error is not None:
        errors = {kind: one.log_error for kind, one in estimates.items() if one.log_error is not None}
        parts = {part: seconds for part, seconds in ledger_s.items() if part != STEPS and not part.startswith(STARTUP)}
        own = [seconds * errors.get(part, PART_ERROR) for part, seconds in parts.items()]
        error = hypot(ledger_s.get(STEPS, 0.0) * step.log_error, *own) / fit_s
        estimates[FIT] = Estimate(value=fit_s, log_error=error, blocks=step.blocks)
    return estimates


def _mean(values: Sequence[float]) -> Estimate:
    value = fmean(values)
    if len(values) < FEWEST_PIECES:
        return Estimate(value=value)
    return Estimate(value=value, log_error=stdev(values) / value / sqrt(len(values)), blocks=len(values))


def _conditions(begin: Begin, loader: LoaderSettings | None) -> Conditions:
    precision = begin.settings.get("precision")
    return Conditions(
        device=begin.device,
        world_size=begin.world_size,
        precision="" if precision is None else str(precision),
        batch_size=loader.batch_size if loader is not None else None,
    )


def _settings(begin: Begin, loader: LoaderSettings | None) -> dict[str, str]:
    of_loader = structs.asdict(loader) if loader is not None else {}
    settings = {name: str(value) for name, value in {**begin.settings, **of_loader}.items()}
    conditions = Conditions.__struct_fields__
    return {name: value for name, value in {**begin.versions, **settings}.items() if name not in conditions}


def _ended(rank: RankRecord, steps: int) -> Iterable[str]:
    so_far = max([steps, *(interval.step for interval in rank.intervals)])
    if rank.end is None:
        yield f"{so_far:,} steps so far; the run is still going on, or was killed"
    elif rank.end.outcome == "failed":
        yield f"the run failed after {so_far:,} steps"


def _waited(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        if finding.code in MACHINE:
            yield f"{finding.code}, {finding.share_pct:.0f} % of the step: repeat the run on a free machine"


def _ledger_s(ledger: RunLedger | None, intervals: Sequence[IntervalLine]) -> dict[str, float]:
    """Seconds by part, from the newest state; summed over the intervals if there is none."""
    if ledger is not None:
        rest = {"unexplained": ledger.unexplained_s} if ledger.unexplained_s > 0 else {}
        return {**ledger.parts, **rest}
    return summed(interval.ledger_s for interval in intervals)


def trace_source(analysis: Analysis) -> Source:
    """A trace: a step takes as long as on its slowest rank, for which others wait; the rest are means over ranks."""
    if not analysis.ranks:
        raise TraceError(f"{analysis.source}: no recorded rank to compare")
    if analysis.verdict == NO_VERDICT:
        why = f"no whole step to compare. {' '.join(analysis.cut_off)}" if analysis.cut_off else analysis.verdict_text
        raise TraceError(f"{analysis.source}: {why}")
    steps = _common_steps(analysis)
    cut = [step.number for step in analysis.ranks[0].per_step if not step.whole]
    left_out = f"not counted in the medians, for they are cut off: steps {', '.join(map(str, cut))}"
    metrics = {name: median_estimate([_of_step(name, ranks) for ranks in steps]) for name in TRACE_METRICS}
    return Source(
        source=analysis.source,
        kind="trace",
        conditions=Conditions(
            device=", ".join(sorted({rank.device for rank in analysis.ranks if rank.device})),
            world_size=max(analysis.all_ranks, len(analysis.ranks)),
        ),
        steps=len(steps),
        all_steps=len(analysis.ranks[0].per_step),
        metrics={name: estimate or Estimate(value=0.0) for name, estimate in metrics.items()},
        amounts={
            table: {name: mean_amount(ranks, name) for name in chain.from_iterable(ranks)}
            for table, ranks in (
                ("idle", [{c: (s.ms_per_step, 0.0) for c, s in rank.idle.items()} for rank in analysis.ranks]),
                ("kinds", [_calls(rank.kinds.items()) for rank in analysis.ranks]),
                ("kernels", [_calls((one.name, one) for one in rank.top_kernels) for rank in analysis.ranks]),
            )
        },
        notes=(*([left_out] if cut else []), *analysis.warnings),
    )


def _calls(spent: Iterable[tuple[str, Kind | Kernel]]) -> Amounts:
    return {name: (one.ms_per_step, one.calls_per_step) for name, one in spent}


def mean_amount(amounts: Sequence[Amounts], name: str) -> tuple[float, float]:
    """The mean of an amount and of its calls; 0 where there is none."""
    means = zip(*(each.get(name, (0.0, 0.0)) for each in amounts), strict=True)
    amount, calls = map(fmean, means)
    return amount, calls


def _common_steps(analysis: Analysis) -> list[list[Step]]:
    """The steps that count on every rank, or else all, each with its ranks."""
    by_rank = [{step.number: step for step in rank.per_step} for rank in analysis.ranks]
    common = set[int].intersection(*map(set, by_rank))
    if not common:  # the ranks recorded different steps: take the first of each together, and so on
        by_rank = [dict(enumerate(rank.per_step)) for rank in analysis.ranks]
        common = set[int].intersection(*map(set, by_rank))
    steps = [[steps[number] for steps in by_rank] for number in sorted(common)]
    if not steps:
        raise TraceError(f"{analysis.source}: no recorded step to compare")
    return [ranks for ranks in steps if all(step.counted for step in ranks)] or steps


def _of_step(metric: str, ranks: Sequence[Step]) -> float:
    match metric:
        case "step":
            return max(step.ms for step in ranks)
        case "busy":
            return mean(step.busy_ms for step in ranks)
        case "idle":
            return mean(step.ms - step.busy_ms for step in ranks)
    return mean(step.categories_ms.get(KERNELS[metric], 0.0) for step in ranks)
