"""Status and pace of a run, from its record: running or ended, rates, step times, events; and its energy."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Final

from msgspec import structs

from lightning_forge_profiling.diagnosis.combine import THE_RUN, combine, without_verdict_of_hang
from lightning_forge_profiling.diagnosis.rank_status import find_hang
from lightning_forge_profiling.names import HANG
from lightning_forge_profiling.record.reader import RankEnergy, RankRecord, RecordError, RunRecord, read_run
from lightning_forge_profiling.schema import (
    Begin,
    EventLine,
    IntervalLine,
    LastPulse,
    RunEnergy,
    RunProgress,
    RunStatus,
    RunTiming,
    State,
)
from lightning_forge_profiling.timing import estimate
from lightning_forge_profiling.timing.counters import is_split, percentile_ms, step_total_ms, summed, total

# Shortest silence. A run writes every few seconds; a shared file system may show that some seconds later.
_PATIENCE_S: Final = 30.0
# silence is longer than this many times the longest recent pause: steps and validation may take long
_PATIENT: Final = 3.0
_RECENT: Final = 50
_SILENT: Final = "killed, stalled, or in a long validation, checkpoint or step"

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def status_of(record: RunRecord, now: float) -> RunStatus:
    """Status of a run: finished when its lowest rank has, failed or interrupted as the first rank that was."""
    ranks = dict(_rank_statuses(record, now))
    broken = [one for one in ranks.values() if one.outcome in {"failed", "interrupted"}]
    if broken:
        return min(broken, key=lambda one: one.at)
    first = next(iter(ranks.values()))
    shown = first if first.outcome == "finished" else max(ranks.values(), key=lambda one: one.at)
    return structs.replace(shown, text=shown.text + ("" if shown.outcome == "silent" else silent_ranks(record, now)))


def silent_ranks(record: RunRecord, now: float) -> str:
    """The ranks that are silent, as the end of a sentence; "" for none."""
    silent = [(rank, one) for rank, one in _rank_statuses(record, now) if one.outcome == "silent"]
    return "".join(f"; rank {rank} silent for {duration(now - one.at)}, step {one.step:,}" for rank, one in silent)


def _rank_statuses(record: RunRecord, now: float) -> Iterator[tuple[int, RunStatus]]:
    for rank in record.ranks:
        number = rank.begin.rank
        yield number, rank_status(rank, now, record.heard.get(number))


def rank_status(rank: RankRecord, now: float, heard: LastPulse | None = None) -> RunStatus:
    """Status of one rank, by its record and its latest pulse."""
    began = rank.begin.at
    at = max((line.at for line in rank.lines), default=began)
    step = max((line.step for line in rank.lines if not isinstance(line, Begin)), default=0)
    if heard is not None:
        at, step = max(at, heard.at), max(step, heard.pulse.step)
    end = rank.end
    if end is not None:
        after = duration(end.at - began)
        steps = "1 step" if end.step == 1 else f"{end.step:,} steps"
        if end.outcome == "finished":
            return RunStatus("finished", end.step, began, end.at, f"finished {steps} in {after}")
        if end.exception.partition(":")[0] == KeyboardInterrupt.__name__:
            return RunStatus("interrupted", end.step, began, end.at, f"interrupted after {after}, step {end.step:,}")
        what = end.exception or "an exception without a message"
        return RunStatus("failed", end.step, began, end.at, f"failed after {after}, step {end.step:,}: {what}")
    times = [began, *(line.at for line in rank.lines)][-_RECENT:]
    pause = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    if now - at <= max(_PATIENCE_S, _PATIENT * pause):
        return RunStatus("running", step, began, at, f"running: step {step:,}, last written {duration(now - at)} ago")
    known = [f"the longest pause between two lines was {span(pause)}"] if pause else []
    if times_us := summed(interval.counters.steps_us for interval in rank.intervals):
        known.insert(0, f"the longest step took {span(percentile_ms(times_us, 100) / 1e3)}")
    before = f": so far {', '.join(known)}" if known else ""
    text = f"silent for {duration(now - at)}, step {step:,}{before}; {_SILENT}"
    return RunStatus("silent", step, began, at, text)


def run_progress(rank: RankRecord, step: int, now: float) -> RunProgress:
    """How far a run is, by the limits that were set when it began and by its recent pace, validation included."""
    begin, intervals = rank.begin, rank.intervals[-_PACED:]
    batches, epochs = (begin.settings.get(name) for name in ("train_batches", "max_epochs"))
    epoch = last = left_s = None
    if isinstance(batches, int) and batches > 0 and isinstance(epochs, int) and epochs > 0:
        epoch, last = max(1, begin.first_epoch + ceil((begin.first_batch + step) / batches)), epochs
    known = begin.batches is not None and step <= begin.batches
    if known and len(intervals) > 1 and rank_status(rank, now).outcome == "running":
        first, latest = intervals[0], intervals[-1]
        if latest.step > first.step:
            each_s = (latest.at - first.at) / (latest.step - first.step)
            steps = max((begin.batches or 0) - latest.step, 0)
            left_s = max(steps * each_s - max(now - latest.at, 0.0), 0.0)
            left_s = left_s if left_s or not steps else None  # it takes longer than that: it is stalled, or validates
    return RunProgress(step, begin.batches if known else None, epoch, last, left_s)


def progress_words(progress: RunProgress) -> str:
    """How far a run is in words."""
    words = f"step {progress.step:,}"
    if progress.steps:
        words += f" of {progress.steps:,} ({100 * progress.step // progress.steps} %)"
    if progress.epoch and progress.epochs and progress.epoch <= progress.epochs:
        words += f", epoch {progress.epoch:,} of {progress.epochs:,}"
    return words if progress.left_s is None else f"{words}, about {duration(progress.left_s)} left"


def span(seconds: float) -> str:
    """A short time: milliseconds below one second."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = max(0, round(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


_STRETCH_S: Final = 5.0
_PACED: Final = 400  # number of latest intervals that the time left is estimated from


def counted(rank: RankRecord) -> list[IntervalLine]:
    """The intervals of a rank that have counted steps."""
    return [interval for interval in rank.intervals if interval.counted]


def split(intervals: Iterable[IntervalLine]) -> list[IntervalLine]:
    """The intervals with times by region. A short one may have no split step."""
    return [one for one in intervals if is_split(one.counters)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The latest counted steps of a rank: what is shown of the present."""

    intervals: tuple[IntervalLine, ...]
    first: int  # number of the first step
    end: int  # number of the step after the last
    at: float  # when they were written, Unix time in seconds


def latest_stretch(rank: RankRecord) -> Stretch | None:
    """The intervals of about the last five seconds, or more until regions are known; None before the first."""
    intervals, took_ms, start = counted(rank), 0.0, 0
    if not intervals:
        return None
    has_regions = bool(split(intervals))
    for start in reversed(range(len(intervals))):
        took_ms += step_total_ms(intervals[start].counters)
        if took_ms >= 1e3 * _STRETCH_S and not (has_regions and not split(intervals[start:])):
            break
    chosen = tuple(intervals[start:])
    first = intervals[start - 1].step if start else max(0, chosen[0].step - chosen[0].counted)
    return Stretch(chosen, first, chosen[-1].step, chosen[-1].at)


def timing_of(intervals: Iterable[IntervalLine]) -> RunTiming:
    """Rates and times by region over intervals."""
    return estimate.timing_of(total(one.counters for one in intervals))


def mean_metrics(
    intervals: Iterable[IntervalLine], weight: Callable[[IntervalLine], float] = lambda one: one.counted
) -> dict[str, float]:
    """Means of the logged metrics over the counted steps, or by another weight of each interval."""
    weights = [(one.metrics, float(weight(one))) for one in intervals if one.counted]
    whole = summed(dict.fromkeys(metrics, each) for metrics, each in weights)
    totals = summed({name: value * each for name, value in metrics.items()} for metrics, each in weights)
    return {name: total / whole[name] for name, total in totals.items() if whole[name]}


def spread_of(intervals: Iterable[IntervalLine]) -> tuple[float, float]:
    """Median and 95th percentile of the step times; 0 without a step."""
    steps = summed(interval.counters.steps_us for interval in intervals)
    return (percentile_ms(steps, 50), percentile_ms(steps, 95)) if steps else (0.0, 0.0)


def events_once(record: RunRecord) -> list[tuple[EventLine, list[int]]]:
    """All events by time, each with the ranks that have it."""
    once: dict[tuple[int, str, str], tuple[EventLine, list[int]]] = {}
    for rank in record.ranks:
        for event in rank.events:
            once.setdefault((event.step, event.kind, event.text), (event, []))[1].append(rank.begin.rank)
    events = sorted(once.values(), key=lambda entry: entry[0].at)
    # a hang is written as it becomes known, once more when more is, and with its length when it is over: one is shown
    hangs = [event for event, _ in events if event.kind == HANG]
    return [entry for entry in events if entry[0].kind != HANG or entry[0].seconds or entry[0] is hangs[-1]]


def totals(record: RunRecord) -> tuple[RankRecord, State | None]:
    """The lowest rank with totals, and its latest with the analysis of all ranks; or the lowest rank, and None."""
    # a rank that has not ended knows only its own work
    states = ((rank, rank.state) for rank in record.ranks if rank.state is not None)
    first, state = next(states, (record.ranks[0], None))
    analysis, works, heard = None if state is None else state.report.analysis, record.works, record.heard
    if state is None or analysis is None or analysis.run is None:
        return first, state
    if analysis.source == THE_RUN and len(works) > len(analysis.run.ranks.works):
        ranks = structs.replace(analysis.run.ranks, works=works)
        combined = combine(None, structs.replace(analysis.run, ranks=ranks))
        analysis = structs.replace(combined, tracked=analysis.tracked)
    hang = find_hang(heard, first.begin.world_size, max((one.at for one in heard.values()), default=0.0))
    if hang is not None and first.end is None and analysis.run is not None and analysis.run.ledger is not None:
        ledger = analysis.run.ledger  # of before: no step has ended since, and perhaps the run was killed
        parts = {**ledger.parts, HANG: ledger.parts.get(HANG, 0.0) + hang.seconds}
        ledger = structs.replace(ledger, wall_s=ledger.wall_s + hang.seconds, parts=parts, goodput=None)
        analysis = without_verdict_of_hang(structs.replace(analysis, run=structs.replace(analysis.run, ledger=ledger)))
    report = structs.replace(state.report, analysis=analysis, run=analysis.run or state.report.run)
    return first, structs.replace(state, report=report)


_MOST_RUNS: Final = 100
_JOULES_PER_KWH: Final = 3.6e6
_SHOWN_KWH: Final = 0.1
_PREFIXES: Final = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))
_THOUSAND: Final = 1000


def fit_energy(record: RunRecord) -> RunEnergy | None:
    """Energy of one fit, over all ranks; None if no rank's is known."""
    by_gpu: dict[str, RankEnergy] = {}
    known = [rank for rank in record.ranks if rank.energy is not None]
    for rank in known:
        gpu = rank.begin.gpu or f"of rank {rank.begin.rank}"
        # of ranks that share a GPU, each has read its meter
        by_gpu[gpu] = max(filter(None, (by_gpu.get(gpu), rank.energy)), key=lambda energy: energy.joules)
    if not by_gpu:
        return None
    energies, world_size = [*by_gpu.values()], record.ranks[0].begin.world_size
    each = [energy.joules_per_sample for energy in energies if energy.joules_per_sample is not None]
    complete = len(known) == world_size and len(each) == len(energies)
    return RunEnergy(
        joules=sum(energy.joules for energy in energies),
        # a sample is trained on one replica, and all of them train equally fast
        joules_per_sample=sum(each) / energies[0].replicas if complete else None,
        samples=max(energy.samples for energy in energies),
        gpus=len(energies),
        ranks=len(known),
        world_size=world_size,
    )


def run_energy(record: RunRecord) -> RunEnergy | None:
    """Energy of a run and of the fits that it continues; None if this one's is not known."""
    fit = fit_energy(record)
    if fit is None:
        return None
    earlier, missing = _earlier(record.ranks[0].begin.continues, record.folder)
    if not earlier:
        return structs.replace(fit, missing=missing)
    fits = (fit, *earlier)
    samples = sum(one.samples for one in fits)
    spent = [one.joules_per_sample * one.samples for one in fits if one.joules_per_sample is not None]
    return structs.replace(
        fit,
        joules=sum(one.joules for one in fits),
        joules_per_sample=sum(spent) / samples if len(spent) == len(fits) and samples else None,
        samples=samples,
        fits=len(fits),
        missing=missing,
    )


@lru_cache(maxsize=1)
def _earlier(continues: str, folder: Path) -> tuple[tuple[RunEnergy, ...], str]:
    """Energy of each fit that a record continues, and the first record of them without one; "" if all have."""
    known: list[RunEnergy] = []
    seen = {folder.absolute()}
    while continues:
        folder = _moved(Path(continues), folder)
        if folder.absolute() in seen or len(seen) > _MOST_RUNS:
            break
        seen.add(folder.absolute())
        energy = None
        with suppress(OSError, RecordError):
            record = read_run(folder)
            energy, continues = fit_energy(record), record.ranks[0].begin.continues
        if energy is None:
            return tuple(known), str(folder)
        known.append(energy)
    return tuple(known), ""


def _moved(folder: Path, follower: Path) -> Path:
    """The folder of a record, also where it was moved together with the record that follows it."""
    beside = follower.absolute().parents[1].joinpath(*folder.parts[-2:])
    return next((each for each in (folder, beside) if each.is_dir()), folder)


def energy_words(energy: RunEnergy) -> str:
    """The energy of a run in words."""
    amounts = [_joules(energy.joules)]
    if (kwh := energy.joules / _JOULES_PER_KWH) >= _SHOWN_KWH:
        amounts[0] += f" ({kwh:,.1f} kWh)"
    if energy.joules_per_sample is not None:
        amounts.insert(0, f"{_joules(energy.joules_per_sample)} per sample")
    gpus = "1 GPU" if energy.gpus == 1 else f"{energy.gpus:,} GPUs"
    known = "" if energy.ranks == energy.world_size else f" of {energy.ranks:,} of {energy.world_size:,} ranks"
    fits = f", {energy.fits} fits together" if energy.fits > 1 else ""
    missing = f", without that of {energy.missing}, which is not known" if energy.missing else ""
    return f"{', '.join(amounts)} on {gpus}{known}{fits}{missing}"


def _joules(joules: float) -> str:
    factor, unit = next(((factor, unit) for factor, unit in _PREFIXES if joules >= factor), (1.0, "J"))
    return f"{joules / factor:.3g} {unit}" if joules < _THOUSAND * factor else f"{joules / factor:,.0f} {unit}"
