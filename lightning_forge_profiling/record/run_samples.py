"""Data that `compare` takes from a record: rank 0's intervals, conditions, settings, ledger and findings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.record.histogram import PRECISION
from lightning_forge_profiling.record.lines import Begin, IntervalLine, State
from lightning_forge_profiling.record.reader import RecordError, RunRecord
from lightning_forge_profiling.results.run_samples import Conditions, RunSamples

_WHOLE = "step"
"""Key of the time of steps whose regions were not timed."""

_GPU = "gpu/"


def run_samples(record: RunRecord) -> RunSamples:
    """Columns and totals of a run, for a comparison.

    Rank 0 represents all ranks: with synchronous data parallelism, steps take equally long on each.
    """
    rank = record.ranks[0]
    intervals = [interval for interval in rank.intervals if interval.counted and _step_ms(interval.device_ms) > 0]
    if not intervals:
        raise RecordError(f"{rank.path}: no counted step to compare (warm-up steps do not count): train longer")
    state, end = rank.state, rank.end
    analysis = state.report.analysis if state is not None else None
    findings = analysis.findings if analysis is not None else ()
    return RunSamples(
        source=str(record.folder),
        run=rank.begin.run,
        conditions=_conditions(rank.begin),
        host=rank.begin.host,
        commit=rank.begin.commit,
        versions=rank.begin.versions,
        settings=_settings(rank.begin),
        ended=end.outcome if end is not None else "unfinished",
        steps=max(max(interval.step, interval.counted) for interval in intervals),
        counted=tuple(interval.counted for interval in intervals),
        step_ms=tuple(_step_ms(interval.device_ms) for interval in intervals),
        region_ms=_region_ms(intervals),
        samples=_column(interval.samples for interval in intervals),
        tokens=_column(interval.tokens for interval in intervals),
        steps_us=tuple(interval.steps_us for interval in intervals),
        bucket_ratio=(1 + PRECISION) / (1 - PRECISION),
        gpu=_gpu(state, intervals),
        ledger_s=_ledger_s(state, rank.intervals),
        verdict=analysis.verdict if analysis is not None else "",
        findings={found.code: found.share_pct for found in reversed(findings)},  # the largest of each code
        of_run=frozenset(found.code for found in findings if found.of == "run"),
        problems=record.problems,
    )


def _conditions(begin: Begin) -> Conditions:
    precision = begin.settings.get("precision")
    return Conditions(
        device=begin.device,
        world_size=begin.world_size,
        precision="" if precision is None else str(precision),
        batch_size=begin.loader.batch_size if begin.loader is not None else None,
    )


def _settings(begin: Begin) -> dict[str, str]:
    """Settings of the Trainer and of the training DataLoader."""
    loader = asdict(begin.loader) if begin.loader is not None else {}
    return {name: str(value) for name, value in {**begin.settings, **loader}.items()}


def _step_ms(by_region: Mapping[str, float]) -> float:
    return sum(by_region.get(region, 0.0) for region in (*REGIONS, _WHOLE))


def _region_ms(intervals: Sequence[IntervalLine]) -> dict[str, tuple[float | None, ...]]:
    return {
        region: tuple(
            None if interval.device_ms.get(_WHOLE) else interval.device_ms.get(region, 0.0) for interval in intervals
        )
        for region in REGIONS
        if any(region in interval.device_ms for interval in intervals)
    }


def _column(values: Iterable[float | None]) -> tuple[float, ...] | None:
    known = tuple(values)
    return None if None in known else tuple(value for value in known if value is not None)


def _gpu(state: State | None, intervals: Sequence[IntervalLine]) -> dict[str, float]:
    if state is not None:
        return {name: value for name, value in state.metrics.items() if name.startswith(_GPU)}
    sums: dict[str, tuple[float, int]] = {}
    for interval in intervals:
        for name, value in interval.metrics.items():
            if name.startswith(_GPU):
                total, steps = sums.get(name, (0.0, 0))
                sums[name] = total + value * interval.counted, steps + interval.counted
    return {name: total / steps for name, (total, steps) in sums.items()}


def _ledger_s(state: State | None, intervals: Sequence[IntervalLine]) -> dict[str, float]:
    """Seconds by part, from the newest state; summed over the intervals if there is none."""
    analysis = state.report.analysis if state is not None else None
    run = analysis.run if analysis is not None else None
    if run is not None and run.ledger is not None:
        rest = {"unexplained": run.ledger.unexplained_s} if run.ledger.unexplained_s > 0 else {}
        return {**run.ledger.parts, **rest}
    parts: dict[str, float] = {}
    for interval in intervals:
        for name, seconds in interval.ledger_s.items():
            parts[name] = parts.get(name, 0.0) + seconds
    return parts
