"""From trace files to an `Analysis`: reads each rank, matches collectives, finds causes, decides the verdict."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.collectives import RankCollectives, collectives_of, match_collectives
from lightning_forge_profiling.analysis.operators import SORTS
from lightning_forge_profiling.analysis.rank_analysis import summarize
from lightning_forge_profiling.analysis.recording import Recording, no_verdict, prepare, where_cut, with_steps
from lightning_forge_profiling.analysis.timeline_lanes import MOST_SPANS, draw
from lightning_forge_profiling.diagnosis.findings import find_causes
from lightning_forge_profiling.diagnosis.hints import rules_of_thumb
from lightning_forge_profiling.diagnosis.verdict import by_gain, decide
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.kineto.files import find_traces, rank_in_name, windows_by_rank
from lightning_forge_profiling.kineto.join import join_traces
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.kineto.trace import Trace
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.results.analysis import NO_VERDICT, Analysis
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.timeline import Timeline

_UNKNOWN_RANK = -1

# The first step is left out if 2 to 10 were recorded: among more it weighs little, and a single one is needed.
_FEW_STEPS, _MANY_STEPS = 2, 10


@dataclass(frozen=True, slots=True)
class AnalysisResult:
    """An analysis and its timelines.

    Attributes:
        analysis: verdict, findings and figures.
        timelines: the timeline of each rank.
    """

    analysis: Analysis
    timelines: tuple[Timeline, ...]

    def _repr_html_(self) -> str | None:
        return self.analysis._repr_html_()


@dataclass(frozen=True, slots=True)
class _Rank:
    """Result of one rank, as a worker process returns it."""

    summary: RankSummary
    collectives: RankCollectives
    timeline: Timeline
    cut_off: str  # where its file is cut off; "" for complete files


# Analyses the files of one rank; returns what is wrong with each if none can be.
_AnalyzeOne = Callable[[Sequence[Path]], _Rank | list[str]]


def analyze(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    steps: tuple[int, int] | None = None,
    top: int = 20,
    sort: str | None = None,
    progress: Callable[[str], None] | None = None,
    processes: int | None = None,
) -> AnalysisResult:
    """Analyse a trace, or a folder with one trace per rank.

    Args:
        path: a trace that `torch.profiler` exported, or a folder of traces.
        rank: analyse only this rank.
        steps: analyse only the steps from the first number up to, not including, the second.
        top: number of operators and kernels to list.
        sort: sort key of the operators: `self_device`, `device`, `self_host`, `host`, `calls` or `memory`; None for
            `self_device`, or `self_host` without GPU work.
        progress: called with a description of each stage.
        processes: number of ranks that are read at a time; None for one on each usable core.

    Returns:
        Verdict, findings and figures as `.analysis`, and the timelines of the reports as `.timelines`.

    Raises:
        TraceError: there is no trace, none of the rank, or none of the steps. If several files cannot be read, it is
            about the first, and its notes are about the others.
        ConfigurationError: `sort` is unknown.
        OSError: a file could not be read.

    Examples:
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
    analyze_one = partial(_analyze_rank, steps=steps, top=top, sort=sort, spans=MOST_SPANS // max(len(groups), 1))
    most = usable_cores() if processes is None else processes
    results, problems = _analyze_all(groups, analyze_one, most, progress or (lambda _: None))
    results = _numbered(results, rank)
    if not results:
        raise TraceError.of(problems or [f"{path}: no trace of rank {rank}"])
    ranks = tuple(result.summary for result in results)
    collectives, waits, unmatched = match_collectives({result.summary.rank: result.collectives for result in results})
    judged = [result.summary for result in results if not result.summary.cut_off]
    cut_off = tuple(encodable(result.cut_off) for result in results if result.cut_off)
    findings = by_gain(find_causes(judged, waits))
    verdict, text = decide(findings, gpu=any(summary.gpu.busy_ms_per_step for summary in ranks))
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
        warnings=(
            *map(encodable, (*notes, *problems)),
            *(text for summary in ranks for text in summary.warnings),
            *unmatched,
        ),
    )
    return AnalysisResult(analysis, tuple(result.timeline for result in results))


def _analyze_rank(files: Sequence[Path], **options: Any) -> _Rank | list[str]:
    """The result of one rank, or what is wrong with each of its files; options as of `_measure`."""
    try:
        traces, problems = _read(files)
        return _measure(files[0], traces, problems, **options) if traces else problems
    except MemoryError:
        raise TraceError(f"{files[0]}: not enough memory to analyse it") from None


def _read(files: Sequence[Path]) -> tuple[list[Trace], list[str]]:
    """The traces that can be read, and the problems of the others."""
    traces, problems = [], []
    for file in files:
        try:
            traces.append(read_trace(file))
        except TraceError as exc:
            problems.append(str(exc))
        except OSError as exc:
            problems.append(f"{exc.filename}: {exc.strerror}")
    return traces, problems


def _measure(
    file: Path,
    traces: Sequence[Trace],
    problems: Sequence[str],
    *,
    steps: tuple[int, int] | None,
    top: int,
    sort: str | None,
    spans: int,
) -> _Rank | list[str]:
    trace = join_traces(traces)
    recording = prepare(trace)
    number = recording.steps.number
    first = number[0]
    if steps is not None:
        recording = with_steps(recording, (number >= steps[0]) & (number < steps[1]))
        if not len(recording.steps):
            return [f"{file}: no recorded step in {steps[0]}:{steps[1]}"]
    rank = trace.rank if trace.rank is not None else rank_in_name(file)
    counted = _counted(recording, from_the_start=recording.steps.number[0] == first)
    summary = summarize(recording, _UNKNOWN_RANK if rank is None else rank, counted, sort=sort, top=top)
    cut_off = all(trace.cuts) and not recording.steps.whole[counted].all()
    summary = replace(summary, warnings=(*map(encodable, problems), *summary.warnings), cut_off=bool(cut_off))
    timeline = draw(recording, summary.rank, most_spans=spans)
    collectives = collectives_of(with_steps(recording, counted))
    return _Rank(summary, collectives, timeline, where_cut(trace, recording.steps))


def _counted(recording: Recording, *, from_the_start: bool) -> NDArray[np.bool_]:
    """Mask of the steps that the figures are over: whole, with GPU work if any has it, and without the first of few."""
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
    """Names the recorded steps that the figures leave out, and why; "" for none."""
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
            empty = "an empty GPU queue, and " if on_gpu else ""
            why = f"the first recorded step: {empty}ranks and data loader not in steady state"
        reasons.setdefault(why, []).append(str(step.number))
    parts = [f"step {', '.join(numbers)} ({why})" for why, numbers in reasons.items()]
    return f"all figures leave out {' and '.join(parts)}" if parts else ""


def _analyze_all(
    groups: Sequence[Sequence[Path]], analyze_one: _AnalyzeOne, most: int, progress: Callable[[str], None]
) -> tuple[list[_Rank], list[str]]:
    # with torch loaded this process may hold a CUDA context, which does not survive a fork
    processes = 1 if "torch" in sys.modules else min(len(groups), most)
    outcomes: list[_Rank | list[str]] = []
    if processes <= 1:
        for group in groups:
            progress(f"reading {group[0]}")
            outcomes.append(analyze_one(group))
    else:
        progress(f"reading {len(groups)} ranks, {processes} at a time")
        try:
            outcomes = run_in_processes(analyze_one, groups, processes)
        except WorkerDiedError as exc:
            file = groups[exc.task][0]
            rank = rank_in_name(file)
            raise TraceError(
                f"{file}: the process that read {'it' if rank is None else f'rank {rank}'} {exc.how}. If memory ran "
                f"out, read fewer than {processes} ranks at a time: with taskset -c 0 it is one"
            ) from exc
    problems = [problem for outcome in outcomes if isinstance(outcome, list) for problem in outcome]
    return [outcome for outcome in outcomes if not isinstance(outcome, list)], problems


def _numbered(results: Sequence[_Rank], only: int | None) -> list[_Rank]:
    """The results in order of rank; an unknown or duplicate rank is replaced by a free number."""
    numbered: dict[int, _Rank] = {}
    unnumbered = []
    for result in results:
        if result.summary.rank == _UNKNOWN_RANK or result.summary.rank in numbered:
            unnumbered.append(result)
        else:
            numbered[result.summary.rank] = result
    free = (number for number in count() if number not in numbered)
    for result in unnumbered:
        number = next(free)
        numbered[number] = replace(
            result, summary=replace(result.summary, rank=number), timeline=replace(result.timeline, rank=number)
        )
    return [numbered[number] for number in sorted(numbered) if only in {None, number}]


T = TypeVar("T")
R = TypeVar("R")


class WorkerDiedError(Exception):
    """A process ended without a result."""

    def __init__(self, task: int, how: str) -> None:
        super().__init__(f"task {task}: the process {how}")
        self.task, self.how = task, how


def run_in_processes(work: Callable[[T], R], tasks: Sequence[T], processes: int) -> list[R]:
    """Call a function for each task, each call in a separate process, of which none is left afterwards."""
    results: dict[int, R] = {}
    running: dict[Connection, tuple[int, Process]] = {}
    coming = iter(range(len(tasks)))
    try:
        while len(results) < len(tasks):
            while len(running) < processes and (task := next(coming, None)) is not None:
                receiver, sender = Pipe(duplex=False)
                with sender:  # closed in this process, so that the receiver sees the end of the other
                    process = Process(target=_call, args=(sender, work, tasks[task]), daemon=True)
                    _start(process)
                running[receiver] = task, process
            for receiver in set(running).intersection(wait(list(running))):
                task, process = running[receiver]
                results[task] = _result(receiver, task, process)
                del running[receiver]
    finally:
        for receiver, (_, process) in running.items():
            process.kill()
            process.join()
            receiver.close()
    return [results[task] for task in range(len(tasks))]


def _start(process: Process) -> None:
    """Start a process with Ctrl-C blocked, which would else end it with a traceback before it ignores Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(sender: Connection, work: Callable[[T], R], task: T) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills this process
    outcome: tuple[R | Exception, str]
    try:
        outcome = work(task), ""
    except Exception as exc:
        outcome = exc, traceback.format_exc()  # pickling drops the traceback
    with suppress(BrokenPipeError):  # the parent is gone
        sender.send(outcome)


def _result(receiver: Connection, task: int, process: Process) -> Any:
    try:
        outcome, raised = receiver.recv()
    except (EOFError, OSError):  # the process ended before or while sending
        process.join()
        raise WorkerDiedError(task, _how_ended(process.exitcode or 0)) from None
    process.join()
    receiver.close()
    if raised:
        outcome.add_note(raised)
        raise outcome
    return outcome


def _how_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"
