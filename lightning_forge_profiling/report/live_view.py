"""A run on the terminal, from its record: a frame of `forge-profiling watch`, and `forge-profiling summary`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from lightning_forge_profiling.names import MFU, per_second
from lightning_forge_profiling.record.histogram import percentile_ms
from lightning_forge_profiling.record.lines import IntervalLine
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.report.blocks import Line, Text
from lightning_forge_profiling.report.run_status import (
    Outcome,
    RankPace,
    counted,
    duration,
    events_once,
    rank_paces,
    rates_of,
    run_status,
    split,
    spread_of,
    totals,
)
from lightning_forge_profiling.report.run_table import (
    NAMES_WIDTH,
    RegionRow,
    RunTable,
    print_lines,
    print_run,
    run_table,
    step_table,
)
from lightning_forge_profiling.report.screen import Screen, Table, width_of
from lightning_forge_profiling.report.text import digits
from lightning_forge_profiling.results.analysis import Analysis

_STYLES: Final[Mapping[Outcome, str]] = {
    "running": "bold green",
    "finished": "bold green",
    "failed": "bold red",
    "silent": "bold yellow",
}
_WIDE: Final = 60  # terminal width from which the means of the whole run are shown too
_FINDINGS, _EVENTS, _RANKS = 3, 5, 8
_OF_RUN: Final = ("compute", "clocks", "whole fit")
_LEVELS: Final = "▁▂▃▄▅▆▇█"
# smallest range of a sparkline, as a share of its lowest value, so that noise does not look like a change
_LEAST_RANGE: Final = 0.1
_MOST_TIMES: Final = 60

_GPU: Final = (
    ("gpu/utilization_pct", "{:.0f} % utilized"),
    ("gpu/memory_used_gib", "{:.1f} GiB used"),
    ("gpu/power_w", "{:.0f} W"),
    ("gpu/temperature_c", "{:.0f} °C"),
    ("gpu/sm_mhz", "{:.0f} MHz"),
)


def print_frame(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print one frame: status, pace, causes of lost time, ranks, latest events."""
    first, status = record.ranks[0], run_status(record, now)
    screen.line(Text(f"{where}: {status.text}", _STYLES[status.outcome], marked=status.text))
    screen.line(Text(setting_words(first), "dim"))
    screen.line()
    print_pace(first, screen)
    print_lines(_of_run(record), screen)
    if len(record.ranks) > 1:
        screen.line()
        screen.table(_ranks(rank_paces(record, now), now))
    events = list(_events(record, now))
    if events:
        screen.line()
    print_lines((Line("" if position else "events", Text(text)) for position, text in enumerate(events)), screen)


def setting_words(rank: RankRecord) -> str:
    """Device, host, ranks and main settings of a run in words."""
    begin = rank.begin
    names = ("precision", "strategy", "max_steps", "max_epochs")
    said = {name: begin.settings.get(name) for name in names}
    chosen = [f"{name} {value}" for name, value in said.items() if value not in {None, -1, ""}]
    ranks = f"{begin.world_size} ranks" if begin.world_size > 1 else ""
    return ", ".join(filter(None, (f"{begin.device} on {begin.host}", ranks, *chosen)))


def print_pace(rank: RankRecord, screen: Screen) -> None:
    """Print step time, regions, rates and GPU over the latest intervals of a rank."""
    intervals = counted(rank)
    if not intervals:
        waiting = "no step was timed yet" if rank.end is None else "no step was timed"
        print_lines([Line("step", Text(waiting))], screen)
        return
    latest = intervals[-1]
    medians = [percentile_ms(interval.steps_us, 50) for interval in intervals if interval.steps_us]
    spread = spread_of([latest])
    times = f"{digits(spread.p50)} ms, p95 {digits(spread.p95 or 0.0)} ms " if medians else ""
    room = min(_MOST_TIMES, screen.width - NAMES_WIDTH - 1 - width_of(times))
    print_lines([Line("step", Text(times + sparkline(medians, max(room, 1))))], screen)
    by_region = split(intervals)
    if by_region:
        screen.table(step_table(latest_regions(by_region, beside_run=screen.width >= _WIDE), screen.width))
    rates = (("throughput", _throughput(latest)), ("gpu", _gpu(latest)))
    print_lines((Line(name, Text(", ".join(parts))) for name, parts in rates if parts), screen)


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values as bars of eight heights."""
    shown = values[-width:]
    low = min(shown, default=0.0)
    span = max(max(shown, default=0.0) - low, _LEAST_RANGE * low)
    return "".join(_LEVELS[min(int(8 * (value - low) / span), 7) if span else 0] for value in shown)


def latest_regions(intervals: Sequence[IntervalLine], *, beside_run: bool) -> RunTable:
    """Table of the regions of the latest interval."""
    latest, run, columns = rates_of(intervals[-1:]), rates_of(intervals), 2 if beside_run else 1
    step_ms = latest.mean_ms("step")

    def row(name: str, shown: str, pct: float | None) -> RegionRow:
        return RegionRow(shown, pct, (f"{latest.mean_ms(name):.2f}", f"{run.mean_ms(name):.2f}")[:columns])

    regions = [name for name in latest.regions if latest.mean_ms(name) or run.mean_ms(name)]
    rows = [row(name, name, 100 * latest.mean_ms(name) / step_ms if step_ms else 0.0) for name in regions]
    steps = f"{latest.steps} steps" if latest.steps > 1 else "1 step"
    headings = (f"{steps} to {intervals[-1].step:,}", "share of mean", "mean ms", f"of {run.steps:,}")
    return RunTable((), "", headings[: 2 + columns], (*rows, row("step", "step", None)))


def _throughput(latest: IntervalLine) -> list[str]:
    metrics = latest.metrics
    units = ["samples", "tokens", "steps"]
    if metrics.get(per_second("optimizer_steps")) != metrics.get(per_second("steps")):
        units.append("optimizer_steps")
    rates = ((unit.replace("_", " "), metrics.get(per_second(unit))) for unit in units)
    words = [f"{digits(rate)} {unit}/s" for unit, rate in rates if rate]
    return words + ([f"MFU {100 * metrics[MFU]:.1f} %"] if MFU in metrics else [])


def _gpu(latest: IntervalLine) -> list[str]:
    words = [form.format(latest.metrics[name]) for name, form in _GPU if name in latest.metrics]
    throttled = latest.metrics.get("gpu/throttled_pct", 0.0)
    return words + ([f"throttled {throttled:.0f} % of the time"] if throttled >= 1 else [])


def _of_run(record: RunRecord) -> Iterator[Line]:
    """Lines about the run as a whole, from its latest totals."""
    _, state = totals(record)
    if state is None:
        return
    yield from (line for line in run_table(state.report).lines if line.name in _OF_RUN)
    analysis = state.report.analysis
    if analysis is None:
        return
    if not analysis.findings:
        yield Line("verdict", Text(analysis.verdict, "bold"))
    names = ["verdict", *(_FINDINGS - 1) * ["also"]]
    for name, finding in zip(names, analysis.findings, strict=False):
        whole = "fit" if finding.of == "run" else "step"
        text = f"{finding.code}, {finding.share_pct:.0f} % of the {whole}: {finding.title}"
        yield Line(name, Text(text, "bold yellow", marked=finding.code))


def _events(record: RunRecord, now: float) -> Iterator[str]:
    """The latest events, newest first."""
    for event, ranks in reversed(events_once(record)[-_EVENTS:]):
        on = f" on rank {ranks[0]}" if len(ranks) == 1 < len(record.ranks) else ""
        length = f"{event.seconds:.1f} s" if event.seconds >= 1 else f"{1e3 * event.seconds:.0f} ms"
        took = f", {length}" if event.seconds else ""
        said = f": {event.text}" if event.text else ""
        yield f"{duration(now - event.at)} ago, step {event.step:,}: {event.kind}{on}{took}{said}"


def _ranks(paces: Sequence[RankPace], now: float) -> Table:
    """Table of the ranks: late, then silent ones, then the others by number."""
    table = Table("rank", "step", "ms", "own work", "waits", "last line")
    ordered = sorted(paces, key=lambda pace: (not pace.late, pace.outcome != "silent", pace.rank))
    for pace in ordered[:_RANKS]:
        times = ("" if ms is None else f"{ms:.2f}" for ms in (pace.step_ms, pace.own_ms, pace.waits_ms))
        style = "yellow" if pace.late or pace.outcome in {"silent", "failed"} else ""
        table.row(f"{pace.rank}", f"{pace.step:,}", *times, f"{duration(now - pace.at)} ago", style=style)
    if len(ordered) > _RANKS:
        table.row(f"{len(ordered) - _RANKS} more")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSummary:
    """Content of `summary --json`."""

    outcome: Outcome
    run: str  # id of the run, the same on all ranks
    record: str  # folder of the record
    step: int
    began: float
    at: float
    text: str  # the status in words, which the four fields above are of too
    metrics: Mapping[str, float]  # over all counted steps up to the latest totals; {} before the first
    analysis: Analysis | None  # as in `summary.json`; None before the first totals
    ranks: tuple[RankPace, ...]
    problems: tuple[str, ...]  # what could not be read


def run_summary(record: RunRecord, now: float) -> RecordSummary:
    """Summarize a run as data."""
    status, (first, state) = run_status(record, now), totals(record)
    return RecordSummary(
        **asdict(status),
        run=first.begin.run,
        record=str(record.folder),
        metrics={} if state is None else state.metrics,
        analysis=None if state is None else state.report.analysis,
        ranks=tuple(rank_paces(record, now)),
        problems=record.problems,
    )


def print_summary(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print the status of a run, then its table so far."""
    status, (first, state) = run_status(record, now), totals(record)
    style = "bold red" if status.outcome == "failed" else "bold"
    screen.line(Text(f"{where}: {status.text}", style, marked=status.text))
    if state is None:
        screen.line()
        print_pace(first, screen)
        return
    if state.step < status.step:
        screen.line(f"the table covers the first {state.step:,} steps")
    print_run(state.report, screen)
