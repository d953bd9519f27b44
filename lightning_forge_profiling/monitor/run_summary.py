"""What `forge-profiling summary` says: how a run stands, and its table as far as it came."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.monitor.live_view import print_pace
from lightning_forge_profiling.monitor.pace import RankPace, rank_paces
from lightning_forge_profiling.monitor.standing import Outcome, Standing, run_standing
from lightning_forge_profiling.record.lines import State
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.report.run_output import print_run
from lightning_forge_profiling.report.screen import Screen
from lightning_forge_profiling.report.table import Text
from lightning_forge_profiling.results.analysis import Analysis

_STYLES: Final[Mapping[Outcome, str]] = {"running": "bold", "finished": "bold", "failed": "bold red", "silent": "bold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSummary:
    """What `summary --json` prints.

    Attributes:
        outcome: `running`; `finished` or `failed`, by its last line; `silent`: killed, or not written for long.
        run: identifies the run; the same on all its ranks.
        record: the folder of its record.
        step: number of steps up to the last line.
        began: when the fit began, in seconds since 1970.
        at: the time of the last line, likewise.
        text: the outcome in words.
        metrics: the logged names with their values over all counted steps up to the latest totals; {} before the first.
        analysis: verdict, findings and measurements, laid out as `summary.json`; None before the first totals.
        ranks: the ranks side by side.
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
    """A run as data.

    Args:
        record: the run's.
        now: the time, in seconds since 1970.
    """
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


def totals(record: RunRecord) -> tuple[RankRecord, State | None]:
    """The lowest rank that wrote totals, with the latest of them; without any the lowest rank and None."""
    found = ((rank, rank.state) for rank in record.ranks if rank.state is not None)
    return next(found, (record.ranks[0], None))


def print_summary(record: RunRecord, where: str, now: float, screen: Screen) -> None:
    """Print how a run stands, then the table of its end as far as the run came.

    Args:
        record: the run's.
        where: what to call it.
        now: the time, in seconds since 1970.
        screen: where to.
    """
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
    """Which steps the table lacks."""
    return f"the table is of the first {state.step:,} steps" if state.step < standing.step else ""
