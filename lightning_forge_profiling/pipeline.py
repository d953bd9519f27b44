"""From files to an analysis: read, account, compare, diagnose."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.collectives import RankCollectives, collectives_of, match_collectives
from lightning_forge_profiling.analysis.cut_files import no_verdict, where_cut
from lightning_forge_profiling.analysis.operators import SORTS
from lightning_forge_profiling.analysis.rank_analysis import summarize
from lightning_forge_profiling.analysis.recording import Recording, prepare, with_steps
from lightning_forge_profiling.analysis.steps import find_steps
from lightning_forge_profiling.analysis.timeline_lanes import MOST_SPANS, draw
from lightning_forge_profiling.analysis.worker_processes import WorkerDiedError, run_in_processes
from lightning_forge_profiling.diagnosis.findings import find_causes
from lightning_forge_profiling.diagnosis.hints import rules_of_thumb
from lightning_forge_profiling.diagnosis.verdict import by_gain, decide
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank
from lightning_forge_profiling.kineto.join import join_traces
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.results.analysis import NO_VERDICT, Analysis
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.timeline import Timeline

__all__ = ["AnalysisResult", "analyze"]

_UNKNOWN_RANK = -1

_FEW_STEPS, _MANY_STEPS = 2, 10
"""Among many steps the first weighs little, and a single one cannot be spared."""


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """An analysis, and the timelines that its report draws.

    Attributes:
        analysis: what `summary.json` holds.
        timelines: one per rank, for `write_reports`.
    """

    analysis: Analysis
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True, slots=True)
class _Rank:
    """What a process of its own hands back of a rank."""

    summary: RankSummary
    collectives: RankCollectives
    timeline: Timeline
    cut_off: str
    """Where its files end too early, "" for whole ones."""


_Work = Callable[[Sequence[Path]], _Rank | list[str]]
"""Analyses the files of one rank, or says what is wrong with each."""


def analyze(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    steps: tuple[int, int] | None = None,
    top: int = 20,
    sort: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> AnalysisResult:
    """Analyse a trace, or a folder with one for each rank.

    Args:
        path: a trace as `torch.profiler` exports it, or a folder of them.
        rank: look at this rank alone.
        steps: take only steps from the first number to before the second.
        top: how many operators and kernels to list.
        sort: what to sort operators by: `self_device`, `device`, `self_host`, `host`, `calls` or `memory`; None for
            `self_device`, and `self_host` for a trace without GPU work.
        progress: is told what is being done.

    Returns:
        The figures as `.analysis`, and as `.timelines` what a report's timeline shows, one a rank.

    Raises:
        TraceError: there is no trace there, none of the rank, or it has none of the steps. Of several files that could
            not be read, it is about the first, and its notes are about the others.
        ConfigurationError: an unknown `sort`.
        OSError: a file could not be read.

    Example:
        >>> result = analyze("tests/data/traces/input_bound")
        >>> result.analysis.verdict, result.analysis.ranks[0].steps
        ('input-bound', 2)
    """
    if sort is not None and sort not in SORTS:
        raise ConfigurationError(f"sort must be one of {', '.join(SORTS)}, got {sort!r}.")
    path = Path(path)
    files, notes = find_traces(path)
    groups = windows_by_rank(files)
    if rank is not None:
        groups = [group for group in groups if rank_in_name(group[0]) in {None, rank}]
    work = partial(_analyze_rank, steps=steps, top=top, sort=sort, spans=MOST_SPANS // max(len(groups), 1))
    done, problems = _run(groups, work, progress or _silent)
    done = _numbered(done, rank)
    if not done:
        raise TraceError.of(problems or [f"{path}: no trace of rank {rank}"])
    ranks = tuple(one.summary for one in done)
    collectives, waits, differing = match_collectives({one.summary.rank: one.collectives for one in done})
    judged = [one.summary for one in done if not one.summary.cut_off]
    cut_off = tuple(encodable(one.cut_off) for one in done if one.cut_off)
    findings = by_gain(find_causes(judged, waits))
    verdict, text = decide(findings, gpu=any(one.gpu.busy_ms_per_step for one in ranks))
    if cut_off:
        verdict, text = (verdict, f"{cut_off[0]} {text}") if judged else (NO_VERDICT, no_verdict(cut_off[0]))
    analysis = Analysis(
        source=encodable(path),
        verdict=verdict,
        verdict_text=text,
        findings=findings,
        findings_note=_not_counted(ranks[0]),
        hints=rules_of_thumb(judged),
        ranks=ranks,
        collectives=collectives,
        rank_waits=waits,
        cut_off=cut_off,
        warnings=(*map(encodable, (*notes, *problems)), *(text for one in ranks for text in one.warnings), *differing),
    )
    return AnalysisResult(analysis, tuple(one.timeline for one in done))


def _analyze_rank(files: Sequence[Path], **options: Any) -> _Rank | list[str]:
    """One rank, or what is wrong with each of its files; the options are those of `_summarized`."""
    try:
        return _summarized(files, **options)
    except MemoryError:
        raise TraceError(f"{files[0]}: not enough memory to analyse it") from None


def _summarized(
    files: Sequence[Path], *, steps: tuple[int, int] | None, top: int, sort: str | None, spans: int
) -> _Rank | list[str]:
    traces, problems = [], []
    for file in files:
        try:
            traces.append(read_trace(file))
        except TraceError as exc:
            problems.append(str(exc))
        except OSError as exc:
            problems.append(f"{exc.filename}: {exc.strerror}")
    if not traces:
        return problems
    trace = join_traces(traces)
    recording = prepare(trace, steps)
    if not len(recording.steps):
        which = f"it has no step from {steps[0]} to before {steps[1]}" if steps else "no steps"
        return [f"{files[0]}: {which}"]
    rank = trace.rank if trace.rank is not None else rank_in_name(files[0])
    from_the_start = steps is None or recording.steps.number[0] == find_steps(trace, recording.links).number[0]
    counted = _counted(recording, from_the_start=from_the_start)
    summary = summarize(recording, _UNKNOWN_RANK if rank is None else rank, counted, sort=sort, top=top)
    cut_off = all(trace.cuts) and not recording.steps.whole[counted].all()
    summary = replace(summary, warnings=(*map(encodable, problems), *summary.warnings), cut_off=bool(cut_off))
    timeline = draw(recording, summary.rank, most_spans=spans)
    collectives = collectives_of(with_steps(recording, counted))
    return _Rank(summary, collectives, timeline, where_cut(trace, recording.steps))


def _counted(recording: Recording, *, from_the_start: bool) -> NDArray[np.bool_]:
    """Which steps the figures are over: whole ones, with GPU work where any has it, without the first of a few."""
    steps = len(recording.steps)
    counted = np.ones(steps, bool)
    has_work = np.isin(np.arange(steps), recording.step)
    for wanted in (recording.steps.whole, has_work):
        if (counted & wanted).any():
            counted &= wanted
    if from_the_start and counted[0] and _FEW_STEPS <= counted.sum() <= _MANY_STEPS:
        counted[0] = False
    return counted


def _not_counted(rank: RankSummary) -> str:
    """Which of the recorded steps the figures are without, and why."""
    on_gpu = rank.gpu.busy_ms_per_step > 0
    reasons: dict[str, list[str]] = {}
    for place, step in enumerate(rank.per_step):
        if step.counted:
            continue
        if not step.whole and any(step.whole for step in rank.per_step):
            why = "cut off"
        elif place > 0 or (on_gpu and not step.busy_ms):
            why = "no GPU work"
        else:
            empty = "the GPU's queue is empty there, and " if on_gpu else ""
            why = f"the first that was recorded: {empty}ranks and the data loader are out of step"
        reasons.setdefault(why, []).append(str(step.number))
    parts = [f"step {', '.join(numbers)} ({why})" for why, numbers in reasons.items()]
    return f"all figures are without {' and '.join(parts)}" if parts else ""


def _run(
    groups: Sequence[Sequence[Path]], work: _Work, progress: Callable[[str], None]
) -> tuple[list[_Rank], list[str]]:
    # a process that has torch loaded may hold a GPU, which no fork of it can share
    processes = 1 if "torch" in sys.modules else min(len(groups), usable_cores())
    if processes <= 1:
        results: Iterable[_Rank | list[str]] = _one_by_one(groups, work, progress)
    else:
        progress(f"reading {len(groups)} ranks, {processes} at a time")
        try:
            results = run_in_processes(work, groups, processes)
        except WorkerDiedError as exc:
            raise TraceError(_died(groups[exc.task][0], exc.how, processes)) from exc
    done: list[_Rank] = []
    problems: list[str] = []
    for result in results:
        if isinstance(result, list):
            problems += result
        else:
            done.append(result)
    return done, problems


def _died(file: Path, how: str, processes: int) -> str:
    rank = rank_in_name(file)
    return (
        f"{file}: the process that read {'it' if rank is None else f'rank {rank}'} {how}. Where memory ran out, "
        f"read fewer than {processes} ranks at a time: taskset -c 0 leaves one core, and so one rank at a time"
    )


def _one_by_one(
    groups: Sequence[Sequence[Path]], work: _Work, progress: Callable[[str], None]
) -> Iterable[_Rank | list[str]]:
    for group in groups:
        progress(f"reading {group[0]}")
        yield work(group)


def _numbered(done: Sequence[_Rank], only: int | None) -> list[_Rank]:
    """In order of rank; those whose number nobody knows, or that others have too, get one that is free."""
    numbered: dict[int, _Rank] = {}
    homeless = []
    for one in done:
        if one.summary.rank == _UNKNOWN_RANK or one.summary.rank in numbered:
            homeless.append(one)
        else:
            numbered[one.summary.rank] = one
    free = (number for number in count() if number not in numbered)
    for one in homeless:
        number = next(free)
        numbered[number] = replace(
            one,
            summary=replace(one.summary, rank=number),
            timeline=replace(one.timeline, rank=number),
        )
    return [numbered[number] for number in sorted(numbered) if only in {None, number}]


def _silent(_: str) -> None:
    pass
