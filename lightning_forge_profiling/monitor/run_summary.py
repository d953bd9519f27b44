"""Content of `forge-profiling summary`: the status of a run, and its table so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.monitor.live_view import print_pace
from lightning_forge_profiling.monitor.pace import RankPace, rank_paces, totals
from lightning_forge_profiling.monitor.standing import Outcome, Standing, run_standing
from lightning_forge_profiling.record.lines import State
from lightning_forge_profiling.record.reader import RunRecord
from lightning_forge_profiling.report.run_output import print_run
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.table import Text
from lightning_forge_profiling.results.analysis import Analysis

_STYLES: Final[Mapping[Outcome, str]] = {"running": "bold", "finished": "bold", "failed": "bold red", "silent": "bold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSummary:
    """Content of `summary --json`.

    Attributes:
        outcome: `running`; `finished` or `failed`, by the last line; `silent` without a new line for long.
        run: id of the run, the same on all ranks.
        record: folder of the record.
        step: number of steps up to the last line.
        began: start of the fit, Unix time in seconds.
        at: time of the last line, Unix time in seconds.
        text: the status in words.
        metrics: logged metrics over all counted steps up to the latest totals, by name; {} before the first totals.
        analysis: verdict, findings and measurements, as in `summary.json`; None before the first totals.
        ranks: the pace of each rank.
        problems: what could not be read.
    """

    outcome: Outcome
    run: str
    record: str
    step: int
    began: float
    at: float
    text: str
    metrics: Mapping[str, float]
    analysis: Analysis | None
    ranks: tuple[RankPace, ...]
    problems: tuple[str, ...]


def run_summary(record: RunRecord, now: float) -> RecordSummary:
    """Summarize a run as data."""
    standing, (first, state) = run_standing(record, now), totals(record)
    return RecordSummary(
        outcome=standing.outcome,
        run=first.begin.run,
        record=str(record.folder),
        step=standing.step,
        began=standing.began,
        at=standing.at,
        text=standing.text,
        metrics={} if state is None else state.metrics,
        analysis=None if state is None else state.report.analysis,
        ranks=tuple(rank_paces(record, now)),
        problems=record.problems,
    )


def print_summary(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print the status of a run, then its table so far."""
    standing, (first, state) = run_standing(record, now), totals(record)
    screen.line(Text(f"{where}: {standing.text}", _STYLES[standing.outcome], marked=standing.text))
    if state is None:
        screen.line()
        print_pace(first, screen)
        return
    if remark := _older(standing, state):
        screen.line(remark)
    print_run(state.report, screen)


def _older(standing: Standing, state: State) -> str:
    """A sentence if the table lacks the latest steps; else ""."""
    return f"the table covers the first {state.step:,} steps" if state.step < standing.step else ""
