"""The page of a run, from its record and the reports of its recorded window."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from msgspec import structs

from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.json_layout import read_summary
from lightning_forge_profiling.names import MFU, REPORT_HTML, SUMMARY_JSON, TFLOPS, per_second
from lightning_forge_profiling.record.files import read_plan
from lightning_forge_profiling.record.reader import RankRecord, RunRecord, read_run
from lightning_forge_profiling.report import run_status
from lightning_forge_profiling.report.live_view import latest_regions, setting_words
from lightning_forge_profiling.report.page import report_page, timelines_of
from lightning_forge_profiling.report.ranks import (
    rank_table,
    ranks_of,
    ranks_title,
    status_lines,
    straggler_words,
)
from lightning_forge_profiling.report.run_table import RunTable, run_table
from lightning_forge_profiling.report.screen import Column, Line, Say, Table, Text, table_of
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import (
    Analysis,
    End,
    EventLine,
    IntervalLine,
    RunReport,
    State,
    Timeline,
)

_PROBLEMS: Final = frozenset({"exception", "slow-step", "recompilation", "hang", "straggler", "memory-growth"})
_MOST_EVENTS: Final = 2000
_MOST_POINTS: Final = 500
# at the end of a fit with more ranks the page has the record of the first alone: each is up to a megabyte
_MOST_RANKS_READ: Final = 64
_NO_VERDICT: Final = Analysis(source="", verdict="no verdict yet", verdict_text="No verdict yet.", findings=())

_METRICS: Final = (
    ("Samples", "per second", per_second("samples"), 1.0),
    ("Tokens", "per second", per_second("tokens"), 1.0),
    ("MFU", "%", MFU, 100.0),
    ("TFLOP/s", "per device", TFLOPS, 1.0),
)
_GPU_METRICS: Final = (
    ("GPU utilization", "%", "gpu/utilization_pct", 1.0),
    ("GPU memory", "GiB", "gpu/memory_used_gib", 1.0),
    ("GPU power", "W", "gpu/power_w", 1.0),
    ("GPU clock", "MHz", "gpu/sm_mhz", 1.0),
    ("GPU temperature", "°C", "gpu/temperature_c", 1.0),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over the run."""

    title: str
    unit: str
    name: str
    values: Sequence[float | None]  # None for a point without the metric
    highs: Sequence[float] = ()  # upper edge of a band above the line; () for none


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """What a page shows of all ranks."""

    title: str  # what the table is by, and how old that is
    hang: str  # where they have come to a standstill; "" while they move
    straggler: str  # the rank that the others wait for; "" for none
    lines: tuple[Line, ...]  # what holds for all of them together
    table: Table  # worst first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a page shows of a run's record."""

    outcome: str  # of a `RunStatus`
    status: str  # the status in words
    folder: str
    facts: tuple[tuple[str, str], ...]  # name and value of what the page shows first
    step: RunTable  # the split of the step, the rates and where the files are
    length_s: float  # length of the run so far
    seconds: tuple[float, ...]  # times of the points of the curves, in seconds since the run began
    curves: tuple[Curve, ...]
    curves_of: int  # a rank
    lost_steps: int  # number of first steps whose intervals were deleted
    began: float  # Unix time in seconds
    events: tuple[EventLine, ...]  # the latest events, newest last; one of several ranks once
    problems: frozenset[str]  # kinds of events that are highlighted
    event_table: Table  # newest first
    ranks: RanksView | None  # None for a single rank that trains
    setting: tuple[Line, ...]
    throughput: str


def run_page(record: RunRecord, now: float) -> str:
    """The page of a run: what its record says, and the recorded window if its reports can be found."""
    _, state = run_status.totals(record)
    report = None if state is None else state.report
    window = recorded_window(record)
    analysis = _analysis(report, window)
    return report_page(analysis, _timelines(window), run_view(record, now, has_sensors=_has_sensors(analysis)))


def write_run_page(folder: Path, report: RunReport, end: End) -> None:
    """Add a run to its window's page; the record lacks report and end. Raises OSError, ValueError or RecordError."""
    trace, analysis = report.trace, report.analysis
    if trace is None or trace.report_path is None or analysis is None:
        return
    record = read_run(folder, first_only=report.replicas > _MOST_RANKS_READ)
    first, *others = record.ranks
    end = structs.replace(end, at=end.at + end.set_s)  # as the reader does
    state = State(at=end.at, step=end.step, report=report, metrics={})
    first = replace(first, lines=(*first.lines, state, end))
    view = run_view(replace(record, ranks=(first, *others)), end.at, has_sensors=_has_sensors(analysis))
    timelines = timelines_of(read_regular(trace.report_path).decode())
    write_whole(trace.report_path, report_page(analysis, timelines, view).encode(errors="replace"))


def recorded_window(record: RunRecord) -> Path | None:
    """The folder with the newest window's reports, also where the run's folder has been moved; None without one."""
    _, state = run_status.totals(record)
    trace, plan = None if state is None else state.report.trace, read_plan(record.folder)
    written = [] if trace is None or trace.report_path is None else [trace.report_path.parent]
    if plan is not None and plan.folder:  # `forge-profiling trace` has recorded it, perhaps since the latest totals
        written.append(Path(plan.folder))
    moved = [record.folder.parent.joinpath(*folder.parts[-2:]) for folder in written]
    reports = [folder / REPORT_HTML for folder in (*written, *moved) if (folder / REPORT_HTML).is_file()]
    return max(reports, key=lambda report: report.stat().st_mtime).parent if reports else None


def _timelines(window: Path | None) -> tuple[Timeline, ...]:
    with suppress(OSError, ValueError):
        return () if window is None else timelines_of(read_regular(window / REPORT_HTML).decode())
    return ()


def _analysis(report: RunReport | None, window: Path | None) -> Analysis:
    """The analysis of window and run; a run that was killed has not combined them."""
    of_run = (None if report is None else report.analysis) or _NO_VERDICT
    if window is None:
        return of_run
    try:
        recorded = read_summary(window / SUMMARY_JSON)
    except (OSError, ValueError):
        return of_run
    if recorded.run is not None or of_run.run is None:
        return recorded
    return structs.replace(combine(recorded, of_run.run), tracked=of_run.tracked)


def _has_sensors(analysis: Analysis) -> bool:
    """Whether the page has curves of the GPU's sensors already."""
    run = analysis.run
    return run is not None and run.machine.telemetry is not None and bool(run.machine.telemetry.series.seconds)


def run_view(record: RunRecord, now: float, *, has_sensors: bool = False) -> RunView:
    """What a page shows of a record; without curves of the GPU where the page has them."""
    status, (first, state) = run_status.status_of(record, now), run_status.totals(record)
    began, begin = status.began, first.begin
    intervals = run_status.counted(first)
    points = _points(intervals)
    events = tuple(event for event, _ in run_status.events_once(record))
    if state is not None:
        step = replace(run_table(state.report), verdict=())
    else:
        step = RunTable((), "", latest_regions(intervals))
    lost = intervals[0] if intervals else None
    return RunView(
        outcome=status.outcome,
        status=status.text,
        folder=str(record.folder),
        facts=(
            ("Device", begin.device),
            ("Host", begin.host),
            ("Ranks", f"{begin.world_size:,}"),
            ("Steps", f"{status.step:,}"),
            ("Time", run_status.duration(status.at - began)),
        ),
        step=step,
        length_s=max(status.at - began, 0.1),
        seconds=tuple(point[-1].at - began for point in points),
        curves=tuple(_curves(points, has_sensors=has_sensors)),
        curves_of=begin.rank,
        lost_steps=lost.step if lost is not None and lost.step > 2 * lost.counted + 1000 else 0,
        began=began,
        events=events[-_MOST_EVENTS:],
        problems=_PROBLEMS,
        event_table=_event_table(events, began),
        ranks=_ranks(record, now),
        setting=tuple(_setting(first, record.problems)),
        throughput=next((line.text.text for line in step.lines if line.name == "throughput"), ""),
    )


def _event_table(events: Sequence[EventLine], began: float) -> Table:
    columns: dict[str | Column, Say[EventLine]] = {
        Column("event", "text"): "{.kind}",
        "step": "{.step:,}",
        Column("after, s", means="since the run began"): lambda event: f"{event.at - began:,.1f}",
        Column("seconds", means="with what ran inside it"): lambda event: (
            f"{event.seconds:,.2f}" if event.seconds else ""
        ),
        Column("what", "text"): "{.text}",
    }
    left_out = len(events) - _MOST_EVENTS
    note = f"{left_out:,} earlier events are left out." if left_out > 0 else ""
    return table_of(reversed(events[-_MOST_EVENTS:]), columns, title="Events", note=note)


def _ranks(record: RunRecord, now: float) -> RanksView | None:
    status = ranks_of(record, now)
    if len(status.ranks) < 2 and status.hang is None:  # noqa: PLR2004
        return None
    return RanksView(
        title=ranks_title(record, status, now),
        hang="" if status.hang is None else status.hang.where,
        straggler="" if status.straggler is None else straggler_words(status.straggler),
        lines=tuple(status_lines(status)),
        table=rank_table(status),
    )


def _points(intervals: Sequence[IntervalLine]) -> list[Sequence[IntervalLine]]:
    """The intervals in at most 500 parts, each of which is a point of the curves."""
    each = max(1, -(-len(intervals) // _MOST_POINTS))
    return [intervals[start : start + each] for start in range(0, len(intervals), each)]


def _curves(points: Sequence[Sequence[IntervalLine]], *, has_sensors: bool) -> Iterator[Curve]:
    """Curves of the step time, then of the rates and, unless the page has them, of the sensors."""
    if not points:
        return
    medians, highs = zip(*map(run_status.spread_of, points), strict=True)
    yield Curve("Step time", "ms", "median", [*map(_rounded, medians)], [*map(_rounded, highs)])
    means = [*map(run_status.mean_metrics, points)]
    for title, unit, name, factor in (*_METRICS, *(() if has_sensors else _GPU_METRICS)):
        values = [_rounded(factor * each[name]) if name in each else None for each in means]
        if any(value is not None for value in values):
            yield Curve(title, unit, "mean", values)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _setting(first: RankRecord, problems: Sequence[str]) -> Iterator[Line]:
    begin = first.begin
    setting = {
        "Trainer": setting_words(first),
        "Versions": ", ".join(f"{name} {version}" for name, version in begin.versions.items()),
        "Command": " ".join(begin.argv) + (" (values are not recorded)" if len(begin.argv) > 1 else ""),
        "Commit": begin.commit,
        "Resumed from": begin.restored_from,
        "Continues": begin.continues,
        "Could not be read": "; ".join(problems),
    }
    return (Line(name, Text(value)) for name, value in setting.items() if value)
