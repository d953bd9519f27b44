"""From trace files to an `Analysis`: each rank by itself, then all of them together.

What one rank's analysis leaves is a `RankResult`, which may lie in a file beside the trace. `merge` puts such results
together, in any order, and `compare_ranks` matches collectives, finds causes and decides the verdict.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from lightning_forge_profiling.analysis.fixes import path_of, predictions
from lightning_forge_profiling.analysis.operators import SORTS
from lightning_forge_profiling.analysis.rank_analysis import collectives_of, match_collectives, summarize
from lightning_forge_profiling.analysis.recording import Recording, prepared, where_cut, with_steps
from lightning_forge_profiling.analysis.timeline import MOST_SPANS, CriticalPath, draw
from lightning_forge_profiling.diagnosis.combine import combine, judge, naming_missing
from lightning_forge_profiling.diagnosis.ranks import MOST_SHOWN, shown, spread
from lightning_forge_profiling.errors import ConfigurationError, TraceError
from lightning_forge_profiling.host import usable_cores
from lightning_forge_profiling.json_layout import (
    PACKAGE,
    described,
    is_of,
    read_rank_result,
    read_summary,
    write_rank_result,
)
from lightning_forge_profiling.kineto.files import (
    exported_ns,
    find_rank_summaries,
    find_ranks,
    find_traces,
    in_order,
    is_rank_summary,
    rank_in_name,
    windows_by_rank,
)
from lightning_forge_profiling.kineto.reader import read_trace
from lightning_forge_profiling.kineto.trace import Trace, join_traces
from lightning_forge_profiling.names import SUMMARY_JSON, rank_summary_path
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.processes import WorkerDiedError, run_in_processes
from lightning_forge_profiling.schema import UNKNOWN_RANK, Analysis, RankResult, RankSummary, Step, Timeline

TOP: Final = 20  # operators and kernels of a rank

# A window's first step is left out if 2 to 10 were recorded: among more it weighs little, and a single one is needed.
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


_T = TypeVar("_T")


def analyze(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    steps: tuple[int, int] | None = None,
    top: int = TOP,
    sort: str | None = None,
    progress: Callable[[str], None] | None = None,
    processes: int | None = None,
    reduce: bool = False,
    expected: Collection[int] = (),
    with_run: bool = True,
) -> AnalysisResult:
    """Analyse a trace, or a folder with one trace per rank.

    The callbacks' measurements of the whole run count, too, if they lie beside the traces and no rank or steps are
    asked for. What an earlier analysis of a rank left, `rankN.summary.json`, is taken where it is of the same file and
    version.

    Args:
        path: a trace that `torch.profiler` exported, or a folder of traces.
        rank: analyse only this rank.
        steps: analyse only the steps from the first number up to, not including, the second.
        top: number of operators and kernels to list.
        sort: sort key of the operators: `self_device`, `device`, `self_host`, `host`, `calls` or `memory`; None for
            `self_device`, or `self_host` without GPU work.
        progress: called with a description of each stage.
        processes: number of ranks that are read at a time; None for one on each usable core.
        reduce: take what earlier analyses of the ranks left, without a look at the traces.
        with_run: whether the callbacks' measurements count.
        expected: ranks of which it is said if they are missing; by default, of a folder without traces, those of the
            run.

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
    files, notes = (find_rank_summaries if reduce else find_ranks)(path)
    groups = windows_by_rank(files)
    if rank is not None:
        groups = [group for group in groups if rank_in_name(group[0]) in {None, rank}]
    analyze_one = partial(_analyze_rank, steps=steps, top=top, sort=sort, spans=spans_for(len(groups)))
    most = usable_cores() if processes is None else processes
    results, problems = _each(groups, analyze_one, most, progress or (lambda _: None))
    merged = merge(results)
    if len(merged) < len(results):
        problems = [
            *problems,
            f"{path}: {len(results) - len(merged)} of {len(results)} files say what another one says: left out",
        ]
    merged, of_other_runs = _of_newest_run(merged)
    problems = [*problems, *(f"{path}: {name} is of an earlier run, and is left out" for name in of_other_runs)]
    alone = sum(one.world_size == 1 for one in merged)
    if alone and len(merged) > 1:
        runs = f"{alone} of {len(merged)} traces are of runs of one process, and are taken for ranks of one run"
        problems = [*problems, f"{path}: {runs}; forge-profiling compare compares runs"]
    results = [one for one in _numbered(merged) if rank in {None, one.rank}]
    if not results:
        raise TraceError.of(problems or [f"{path}: no trace of rank {rank}"])
    by_results = rank is None and path.is_dir() and all(map(is_rank_summary, files))
    of_run = range(max((one.world_size or 0 for one in results), default=0)) if by_results else ()
    missing = sorted({*(expected or of_run)} - {one.rank for one in results})
    warnings = tuple(map(encodable, (*notes, *problems)))
    result = compare_ranks(results, source=encodable(path), warnings=warnings, missing=missing)
    if not with_run or rank is not None or steps is not None:
        return result
    return replace(result, analysis=_with_run(result.analysis, {file.parent for file in files}))


_ONE_WINDOW_NS: Final = 60 * 10**9  # ranks of a run end a window together


def _of_newest_run(results: Sequence[RankResult]) -> tuple[tuple[RankResult, ...], list[str]]:
    """The results without those of other runs, and the files of these: traces without ranks that were written apart."""
    written = [max((exported_ns(file.name) or 0 for file in one.traces), default=0) for one in results]
    if not all(written) or any(one.rank != UNKNOWN_RANK or one.world_size for one in results):
        return tuple(results), []
    begins = max(written, default=0)
    for ns in sorted(written, reverse=True):
        begins = ns if begins - ns < _ONE_WINDOW_NS else begins
    both = [*zip(results, written, strict=True)]
    return tuple(one for one, ns in both if ns >= begins), [one.summary.file for one, ns in both if ns < begins]


def _with_run(analysis: Analysis, folders: set[Path]) -> Analysis:
    """The analysis combined with the callbacks' measurements of the whole run, if they lie beside the traces."""
    summary = folders.pop() / SUMMARY_JSON
    if folders or not summary.is_file():
        return analysis
    try:
        run = read_summary(summary).run
    except (OSError, ValueError) as exc:  # written by another program, or by another version of this one
        return structs.replace(analysis, warnings=(*analysis.warnings, f"{summary} cannot be read: {exc}"))
    return combine(analysis, run)


def write_rank_results(path: Path, *, progress: Callable[[str], None] | None = None) -> tuple[list[Path], list[str]]:
    """Write what the analysis of each rank leaves beside its trace.

    Returns:
        The files, and what is wrong with traces that cannot be read.

    Raises:
        TraceError: none can be read.
    """
    files, notes = find_traces(path)
    if is_rank_summary(files[0]):
        raise TraceError(f"{path}: what the analysis of a rank left, not its trace")
    outcomes, problems = _each(windows_by_rank(files), _write_one, usable_cores(), progress or (lambda _: None))
    if not outcomes:
        raise TraceError.of(problems)
    return outcomes, [*notes, *problems]


def _write_one(files: Sequence[Path]) -> Path:
    target = rank_summary_path(files[0])
    write_rank_result(_analyze_rank(files), target)
    return target


def spans_for(ranks: int) -> int:
    """How many spans the timeline of each of so many ranks has."""
    return MOST_SPANS // min(max(ranks, 1), MOST_SHOWN)


def merge(*parts: Iterable[RankResult]) -> tuple[RankResult, ...]:
    """The results of several ranks together, each once; the order in which parts are merged does not matter."""
    each = {(one.rank, tuple(trace.name for trace in one.traces), one.traces): one for part in parts for one in part}
    return tuple(each[key] for key in sorted(each, key=lambda key: (key[0], [in_order(name) for name in key[1]])))


def compare_ranks(
    results: Sequence[RankResult], *, source: str, warnings: Sequence[str] = (), missing: Sequence[int] = ()
) -> AnalysisResult:
    """Compare the ranks, find causes and decide the verdict.

    Args:
        results: at least one.
        source: what was analysed.
        warnings: what could not be read.
        missing: the ranks that are missing, which are named before the verdict.
    """
    results = _numbered(results)
    ranks = tuple(result.summary for result in results)
    collectives, waits, unmatched = match_collectives({result.rank: result.collectives for result in results})
    cut_off = tuple(encodable(result.cut_off) for result in results if result.cut_off)
    findings, hints, verdict, text = judge(ranks, waits, cut_off)
    shows = shown(ranks, waits, findings, hints)
    numbers = {summary.rank for summary in shows}
    analysis = Analysis(
        source=source,
        verdict=verdict,
        verdict_text=text,
        findings=findings,
        findings_note=_not_counted(ranks[0]),
        hints=hints,
        ranks=shows,
        all_ranks=len(ranks),
        missing=tuple(missing),
        spread=spread(ranks, waits),
        collectives=collectives,
        rank_waits=tuple(wait for wait in waits if wait.rank in numbers),
        cut_off=cut_off,
        warnings=(*warnings, *(text for summary in shows for text in summary.warnings), *unmatched),
    )
    timelines = tuple(result.timeline for result in results if result.rank in numbers)
    return AnalysisResult(naming_missing(analysis), timelines)


def _kept(files: Sequence[Path], *, by_default: bool) -> RankResult | None:
    """What an earlier analysis left; None if it is not of these files, or this one is not with the default options.

    Raises:
        TraceError: the files are such results, whose traces are not here, and cannot be used.
    """
    alone = is_rank_summary(files[0])
    if not by_default:
        if alone:
            raise TraceError(f"{files[0]}: its trace is needed for these options")
        return None
    try:
        result = read_rank_result(files[0] if alone else rank_summary_path(files[0]))
        if not alone:
            return result if is_of(result, files) else None
    except (OSError, ValueError) as exc:
        if alone:
            raise TraceError(f"{files[0]}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc
        return None
    if result.package != PACKAGE:
        by = f"by version {result.package} of this package, and this is {PACKAGE}"
        raise TraceError(f"{files[0]}: {by}: analyse its trace again")
    return result


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


def _analyze_rank(
    files: Sequence[Path],
    *,
    steps: tuple[int, int] | None = None,
    top: int = TOP,
    sort: str | None = None,
    spans: int | None = None,
) -> RankResult:
    """The result of one rank. Raises TraceError with what is wrong with each of its files."""
    kept = _kept(files, by_default=(steps, top, sort) == (None, TOP, None))
    if kept is not None:
        return kept
    traces, problems = _read(files)
    if not traces:
        raise TraceError.of(problems)
    trace = join_traces(traces)
    recording = prepared(trace)
    number = recording.steps.number
    first = number[0]
    if steps is not None:
        recording = with_steps(recording, (number >= steps[0]) & (number < steps[1]))
        if not len(recording.steps):
            raise TraceError(f"{files[0]}: no recorded step in {steps[0]}:{steps[1]}")
    rank = trace.rank if trace.rank is not None else rank_in_name(files[0])
    counted = counted_steps(recording, from_the_start=recording.steps.number[0] == first)
    spans = spans_for(trace.world_size or 1) if spans is None else spans
    played = with_steps(recording, counted)
    result = rank_result(recording, rank, counted, path=path_of(played), spans=spans, sort=sort, top=top)
    summary = structs.replace(
        result.summary,
        replay=predictions(played, result.summary),
        warnings=(*map(encodable, problems), *result.summary.warnings),
        cut_off=bool(all(trace.cuts) and not recording.steps.whole[counted].all()),
    )
    return structs.replace(result, summary=summary, traces=described(files))


def rank_result(
    recording: Recording,
    rank: int | None,
    counted: NDArray[np.bool_],
    *,
    path: CriticalPath | None = None,
    spans: int = 1,
    sort: str | None = None,
    top: int = TOP,
) -> RankResult:
    """The figures of one rank's recording, over the steps that count, and its timeline of so many spans."""
    rank, trace = UNKNOWN_RANK if rank is None else rank, recording.trace
    return RankResult(
        package=PACKAGE,
        rank=rank,
        world_size=trace.world_size,
        base_ns=trace.base_ns,
        traces=(),
        cut_off=where_cut(trace, recording.steps),
        summary=summarize(recording, rank, counted, sort=sort, top=top),
        collectives=collectives_of(with_steps(recording, counted)),
        timeline=draw(recording, rank, most_spans=spans, path=path),
    )


def counted_steps(recording: Recording, *, from_the_start: bool) -> NDArray[np.bool_]:
    """Mask of the steps that count: whole, with GPU work if any has it, and not the first of a window of few.

    One that captures a CUDA graph counts only where there is no other. Of a window with light steps those count, if the
    operators of other steps explain most of them; else the others.
    """
    steps, light, explained = len(recording.steps), recording.steps.light, recording.steps.explained
    counted = np.ones(steps, bool)
    has_work = np.isin(np.arange(steps), recording.step)
    of_kind = explained if 2 * explained.sum() > light.sum() else ~light
    for wanted in (~recording.steps.captures, of_kind, recording.steps.whole, has_work):
        if (counted & wanted).any():
            counted &= wanted
    window = np.searchsorted(recording.trace.begins, recording.steps.host_start, side="right")
    first = np.diff(window, prepend=window[0] - from_the_start) != 0
    few = np.isin(np.bincount(window, counted)[window], range(_FEW_STEPS, _MANY_STEPS + 1))
    return counted & ~(first & few) if len(recording.steps.marks) else counted


def _not_counted(rank: RankSummary) -> str:
    """Names the recorded steps that the figures leave out, and why; "" for none."""
    on_gpu = rank.gpu.busy_ms_per_step > 0
    by_light = any(step.counted and step.light for step in rank.per_step)
    reasons: dict[str, list[int]] = {}
    for place, step in enumerate(rank.per_step):
        if step.counted:
            continue
        if step.captures:
            why = "capture of a CUDA graph, whose launches run nothing"
        elif not step.whole and any(step.whole for step in rank.per_step):
            why = "not all of its GPU work is in the trace"
        elif place and step.light is not by_light:
            why = _other_part(rank.per_step, light=step.light)
        elif on_gpu and not step.busy_ms:
            why = "no GPU work"
        else:
            empty = "an empty GPU queue, and " if on_gpu else ""
            which = "the first of a later window" if place else "the first recorded step"
            why = f"{which}: {empty}ranks and data loader not in steady state"
        reasons.setdefault(why, []).append(step.number)
    parts = [
        f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(map(str, numbers))} ({why})"
        for why, numbers in reasons.items()
    ]
    left_out = f"all figures leave out {' and '.join(parts)}" if parts else ""
    if not by_light:
        return left_out
    light = [step for step in rank.per_step if step.counted]
    numbers = f"{light[0].number} to {light[-1].number}" if len(light) > 1 else str(light[0].number)
    what = f"the light steps {numbers}, recorded without operators, {_mean_ms(light)} on average"
    return f"figures are of {what}; {left_out}"


def _mean_ms(steps: Sequence[Step]) -> str:
    return f"{np.mean([step.ms for step in steps]):.2f} ms"


def _other_part(steps: Sequence[Step], *, light: bool) -> str:
    """Why steps with operators do not count, or steps without."""
    mean = f"{_mean_ms([step for step in steps[1:] if step.light is light])} on average"
    if light:
        return f"light: recorded without operators, and the others launched something else or in another order; {mean}"
    return f"with operators, which slow the host and say what the light steps did; {mean}"


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[_T]):
    """What comes of the files of a rank, or what is wrong with them."""

    result: _T | None = None
    problems: tuple[str, ...] = ()


def _tried(work: Callable[[Sequence[Path]], _T], files: Sequence[Path]) -> _Outcome[_T]:
    try:
        return _Outcome(work(files))
    except MemoryError:
        raise TraceError(f"{files[0]}: not enough memory to analyse it") from None
    except TraceError as exc:
        return _Outcome(problems=(str(exc), *getattr(exc, "__notes__", ())))


def _each(
    groups: Sequence[Sequence[Path]],
    work: Callable[[Sequence[Path]], _T],
    most: int,
    progress: Callable[[str], None],
) -> tuple[list[_T], list[str]]:
    """What comes of the files of each rank, and what is wrong with those that nothing comes of."""
    # with torch loaded this process may hold a CUDA context, which does not survive a fork
    processes = 1 if "torch" in sys.modules else min(len(groups), most)
    outcomes: list[_Outcome[_T]] = []
    if processes <= 1:
        for group in groups:
            progress(f"reading {group[0]}")
            outcomes.append(_tried(work, group))
    else:
        progress(f"reading {len(groups)} ranks, {processes} at a time")
        try:
            outcomes = run_in_processes(partial(_tried, work), groups, processes)
        except WorkerDiedError as exc:
            file = groups[exc.task][0]
            rank = rank_in_name(file)
            raise TraceError(
                f"{file}: the process that read {'it' if rank is None else f'rank {rank}'} {exc.how}. If memory ran "
                f"out, read fewer than {processes} ranks at a time: with taskset -c 0 it is one"
            ) from exc
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    return [outcome.result for outcome in outcomes if outcome.result is not None], problems


def _numbered(results: Sequence[RankResult]) -> list[RankResult]:
    """The results in order of rank; an unknown or duplicate rank is replaced by a free number."""
    numbered: dict[int, RankResult] = {}
    unnumbered = []
    for result in results:
        if result.rank == UNKNOWN_RANK or result.rank in numbered:
            unnumbered.append(result)
        else:
            numbered[result.rank] = result
    free = (number for number in count() if number not in numbered)
    for result in unnumbered:
        number = next(free)
        numbered[number] = structs.replace(
            result,
            rank=number,
            summary=structs.replace(result.summary, rank=number),
            timeline=structs.replace(result.timeline, rank=number),
        )
    return [numbered[number] for number in sorted(numbered)]
