"""A run on the terminal, from its record: a frame of `forge-profiling watch`, and `forge-profiling show`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import structs

from lightning_forge_profiling.names import MFU, per_second
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.report import run_status
from lightning_forge_profiling.report.ranks import (
    hang_line,
    ranks_of,
    ranks_title,
    status_lines,
    worst_ranks,
)
from lightning_forge_profiling.report.run_status import span
from lightning_forge_profiling.report.run_table import of_step_ms, run_table, step_table, to_try
from lightning_forge_profiling.report.run_wording import rate_words
from lightning_forge_profiling.report.screen import NAMES_WIDTH, Line, Screen, Table, Text
from lightning_forge_profiling.report.terminal import print_run
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.schema import (
    Analysis,
    EventLine,
    IntervalLine,
    RanksStatus,
    RecordSummary,
    RunTiming,
    State,
)
from lightning_forge_profiling.timing.counters import percentile_ms, step_total_ms

_STYLES: Final[Mapping[str, str]] = {
    "running": "bold green",
    "finished": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
    "silent": "bold yellow",
}
_FINDINGS, _EVENTS = 3, 5
_OF_RANKS: Final = ("straggler", "hang")  # kinds of events
_OF_RUN: Final = ("compute", "whole fit", "goodput")
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_RECENT_S: Final = 10.0  # how old the steps shown may be before the step of the latest pulse is said instead
# smallest range of a sparkline, as a share of its lowest value, so that noise does not look like a change
_LEAST_RANGE: Final = 0.1
_MOST_TIMES: Final = 60

# widths of numbers, so that columns stay where they are from frame to frame
_GPU: Final = (
    ("gpu/utilization_pct", "{:3.0f} % utilized"),
    ("gpu/memory_used_gib", "{:5.1f} GiB used"),
    ("gpu/power_w", "{:4.0f} W"),
    ("gpu/temperature_c", "{:3.0f} °C"),
    ("gpu/sm_mhz", "{:4.0f} MHz"),
)
_RATE: Final = 7
_MS: Final = 9


def print_frame(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print one frame: status, the latest steps of a rank, the totals of the run, all ranks, the latest events."""
    shown, status = record.ranks[0], run_status.status_of(record, now)
    stretch = run_status.latest_stretch(shown)
    text = status.text
    if status.outcome == "running":
        recent = stretch is not None and now - stretch.at < _RECENT_S
        step = stretch.end if stretch is not None and recent else status.step
        progress = run_status.run_progress(shown, step, now)
        text = f"running: {run_status.progress_words(progress)}{run_status.silent_ranks(record, now)}"
    screen.line(where, whole=True)
    ranks = ranks_of(record, now)
    screen.line(Text(text, _STYLES[status.outcome if ranks.hang is None else "silent"]))
    screen.lines(hang_line(ranks))
    screen.line(Text(setting_words(shown), "dim"))
    screen.line()
    print_pace(shown, now, screen)
    _, state = run_status.totals(record)
    if state is not None:
        age = f"the first {state.step:,} steps, written {run_status.duration(now - state.at)} ago"
        screen.line()
        screen.line(Text(f"Totals of the run: {age}", "bold"))
        screen.lines(_of_run(record, state))
    if len(ranks.ranks) > 1:
        screen.line()
        _print_ranks(record, ranks, now, screen)
    if latest := list(_until_now(record, shown, now, screen.width - NAMES_WIDTH - 1)):
        screen.line()
        screen.lines(latest)


def setting_words(rank: RankRecord) -> str:
    """Device, host, ranks and main settings of a run in words."""
    begin = rank.begin
    names = ("precision", "strategy", "max_steps", "max_epochs")
    said = {name: begin.settings.get(name) for name in names}
    chosen = [f"{name} {value}" for name, value in said.items() if value not in {None, -1, ""}]
    ranks = f"{begin.world_size} ranks" if begin.world_size > 1 else ""
    return ", ".join(filter(None, (f"{begin.device} on {begin.host}", ranks, *chosen)))


def print_pace(rank: RankRecord, now: float, screen: Screen) -> None:
    """Print the latest steps of a rank: their time, regions, rates and GPU, all over the same steps."""
    stretch = run_status.latest_stretch(rank)
    if stretch is None:
        waiting = "no counted step on record yet" if rank.end is None else "only warm-up steps"
        screen.lines([Line("step", Text(waiting))])
        return
    timing, (p50, p95) = run_status.timing_of(stretch.intervals), run_status.spread_of(stretch.intervals)
    of_rank = f" of rank {rank.begin.rank}" if rank.begin.world_size > 1 else ""
    written = f"written {run_status.duration(now - stretch.at)} ago"
    screen.line(Text(f"Steps {stretch.first:,} to {stretch.end - 1:,}{of_rank}, {written}", "bold"))
    mean_ms = timing.step_ms.mean
    times = [f"{of_step_ms(mean_ms, mean_ms):>{_MS}} ms mean"]
    if p50:
        times += [f"{of_step_ms(p50, mean_ms):>{_MS}} median", f"{of_step_ms(p95, mean_ms):>{_MS}} p95"]
    screen.lines([Line("step", Text(",".join(times)))])
    if table := latest_regions(stretch.intervals):
        screen.table(table)
    metrics = run_status.mean_metrics(stretch.intervals, lambda one: step_total_ms(one.counters))
    parts = (("throughput", _throughput(timing, metrics)), ("gpu", _gpu(metrics)))
    screen.lines((Line(name, Text(", ".join(words))) for name, words in parts if words))


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values as bars of eight heights."""
    shown = values[-width:]
    low = min(shown, default=0.0)
    span = max(max(shown, default=0.0) - low, _LEAST_RANGE * low)
    return "".join(_LEVELS[min(int(8 * (value - low) / span), 7) if span else 0] for value in shown)


def latest_regions(intervals: Sequence[IntervalLine]) -> Table | None:
    """Table of the regions over the steps of intervals; None if they have no split step."""
    timing = run_status.timing_of(intervals)
    return step_table(timing, spread=False, steady=True) if timing.split_steps else None


def _throughput(timing: RunTiming, metrics: Mapping[str, float]) -> list[str]:
    of_device = metrics.get(per_second("samples", device=True))
    replicas = metrics[per_second("samples")] / of_device if of_device and per_second("samples") in metrics else 1.0
    words = rate_words(timing, replicas, _RATE)
    return words + ([f"MFU {100 * metrics[MFU]:.1f} %"] if MFU in metrics else [])


def _gpu(metrics: Mapping[str, float]) -> list[str]:
    words = [form.format(metrics[name]) for name, form in _GPU if name in metrics]
    throttled = metrics.get("gpu/throttled_pct", 0.0)
    return words + ([f"throttled {throttled:.0f} % of the time"] if throttled >= 1 else [])


def _of_run(record: RunRecord, state: State) -> Iterator[Line]:
    """Lines about the run as a whole, from its latest totals."""
    analysis = state.report.analysis
    if analysis is not None:
        yield from _causes(analysis)
    if state.report.run.timing.steps:
        yield Line("mean step", Text(f"{digits(state.report.run.timing.step_ms.mean)} ms"))
    yield from (line for line in run_table(state.report).lines if line.name in _OF_RUN)
    yield from _energy(record)


def _causes(analysis: Analysis) -> Iterator[Line]:
    if not analysis.findings:
        yield Line("verdict", Text(analysis.verdict, "bold"))
    names = ["verdict", *(_FINDINGS - 1) * ["also"]]
    for name, finding in zip(names, analysis.findings, strict=False):
        text = f"{finding.code}, {finding.share()}: {finding.title}"
        yield Line(name, Text(text, "bold yellow", marked=finding.code))
        if finding.code == analysis.verdict and name == "verdict":
            yield from to_try(finding)


def _energy(record: RunRecord) -> Iterator[Line]:
    energy = run_status.run_energy(record)
    if energy is not None:
        yield Line("energy", Text(run_status.energy_words(energy)))


def _until_now(record: RunRecord, rank: RankRecord, now: float, width: int) -> Iterator[Line]:
    """The course of a rank's step time, and the latest events, newest first."""
    medians = [
        percentile_ms(interval.counters.steps_us, 50)
        for interval in run_status.counted(rank)
        if interval.counters.steps_us
    ]
    if len(medians) > 1:
        shown = medians[-min(_MOST_TIMES, max(1, width)) :]
        yield Line("step times", Text(sparkline(shown, len(shown))))
        over = f"{digits(min(shown))} to {digits(max(shown))} ms, medians of the latest {len(shown)} log entries"
        yield Line("", Text(over))
    yield from _events(run_status.events_once(record), len(record.ranks), now)


def _events(events: Sequence[tuple[EventLine, Sequence[int]]], ranks: int, now: float) -> Iterator[Line]:
    """The latest events, newest first, each with the rank that it is of."""
    for position, (event, of) in enumerate(reversed(events[-_EVENTS:])):
        on = f" on rank {of[0]}" if len(of) == 1 < ranks and event.kind not in _OF_RANKS else ""
        took = f", {span(event.seconds)}" if event.seconds else ""
        said = f": {event.text}" if event.text else ""
        text = f"{run_status.duration(now - event.at):>10} ago, step {event.step:>7,}: {event.kind}{on}{took}{said}"
        yield Line("" if position else "events", Text(text))


def _print_ranks(record: RunRecord, status: RanksStatus, now: float, screen: Screen) -> None:
    """Print all ranks side by side: of many the worst."""
    screen.line(Text(ranks_title(record, status, now), "bold"))
    screen.lines(status_lines(status))
    table, others = worst_ranks(status, screen.width)
    screen.table(table)
    if others:
        screen.line(others)


def run_summary(record: RunRecord, now: float) -> RecordSummary:
    """Summarize a run as data."""
    status, (first, state) = run_status.status_of(record, now), run_status.totals(record)
    return RecordSummary(
        **structs.asdict(status),
        run=first.begin.run,
        record=str(record.folder),
        metrics={} if state is None else state.metrics,
        analysis=None if state is None else state.report.analysis,
        ranks=ranks_of(record, now),
        progress=run_status.run_progress(first, status.step, now),
        energy=run_status.run_energy(record),
        problems=record.problems,
    )


def print_summary(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print the status of a run, then its table so far."""
    status, (first, state) = run_status.status_of(record, now), run_status.totals(record)
    screen.line(where, whole=True)
    screen.line(Text(status.text, "bold red" if status.outcome == "failed" else "bold"))
    ranks = ranks_of(record, now)
    screen.lines(hang_line(ranks))
    if status.outcome in {"running", "silent"}:
        progress = run_status.run_progress(first, status.step, now)
        if progress.steps or progress.epoch:
            screen.line(run_status.progress_words(progress))
    if state is None:
        screen.line()
        print_pace(first, now, screen)
        screen.line()
    else:
        if state.step < status.step:
            screen.line(f"the table covers the first {state.step:,} steps")
        screen.lines(_energy(record))
        print_run(state.report, screen)
    if len(ranks.ranks) > 1:
        _print_ranks(record, ranks, now, screen)
        screen.line()
    events = [event for event in run_status.events_once(record) if event[0].kind in _OF_RANKS]
    screen.lines(_events(events, len(record.ranks), now))
