"""All ranks of a run side by side: live by their pulses, else by their records; the straggler and the hang in words."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec import structs

from lightning_forge_profiling.diagnosis.rank_status import ranks_status, summed_up
from lightning_forge_profiling.diagnosis.ranks import STRAGGLER, not_measured
from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.record.files import MOST_RANKS
from lightning_forge_profiling.record.reader import RankRecord, RunRecord
from lightning_forge_profiling.report.run_status import duration, rank_status, status_of, totals
from lightning_forge_profiling.report.screen import Column, Line, Say, Table, Text, table_of
from lightning_forge_profiling.schema import Analysis, LateRank, RanksStatus, RankState, RankStatus, RankWork

_SHOWN: Final = 8
_OLD_S: Final = 10.0  # rank 0 writes what it hears once a second, and a shared file system may show it seconds later
_WITH_STEPS, _WITH_SENSORS = 60, 100  # widths of a terminal that has room for these columns
_STEP, _MS, _AGE = 7, 7, 6  # widths of numbers, so that columns stay where they are from frame to frame
# from these differences on, the GPUs' sensors are compared: those of equal GPUs scatter by less
_SENSORS: Final[Mapping[str, tuple[str, Callable[[float], float]]]] = {
    "sm_mhz": ("MHz", lambda most: 0.05 * most),
    "temperature_c": ("°C", lambda _: 10.0),
}
_STATES: Final[Mapping[RankState, str]] = {
    "live": "",
    "late": "late pulse",
    "waits": "waiting",
    "missing": "never heard",
}
_BAD: Final = ("stalled", "gone", "stopped", "silent", "missing", "late", "failed", "interrupted")  # worst first


def ranks_of(record: RunRecord, now: float) -> RanksStatus:
    """All ranks as they are now, and of a run that has finished as they were at its end."""
    (first, state), run = totals(record), status_of(record, now)
    if run.outcome == "finished":
        now = min(now, run.at)  # rank 0 no longer hears those that end after it
    records = {rank.begin.rank: rank for rank in record.ranks}
    live = ranks_status(record.heard, min(first.begin.world_size, MOST_RANKS), now)
    merged = [_with_record(one, records.get(one.rank), now) for one in live.ranks]
    # only rank 0 hears all
    live = structs.replace(live, ranks=tuple(one for one in merged if 0 in record.heard or one.state != "missing"))
    if run.outcome not in {"running", "silent"}:
        live = structs.replace(live, where="")
    elif live.unmeasured or any(one.own_ms is not None for one in live.ranks):
        return live
    return _over_the_run(live, None if state is None else state.report.analysis)


def _with_record(one: RankStatus, record: RankRecord | None, now: float) -> RankStatus:
    """The rank by its record, if that has its end or is newer than its pulse."""
    if record is None:
        return one
    run, host = rank_status(record, now), one.host or record.begin.host
    age_s = max(now - run.at, 0.0)
    if run.ended:
        return structs.replace(one, host=host, state=run.outcome, age_s=age_s, step=run.step)
    if one.state == "missing" or (one.state in {"late", "silent"} and age_s < one.age_s):
        return structs.replace(
            one, host=host, state="silent" if run.outcome == "silent" else "live", age_s=age_s, step=run.step
        )
    return one


def _over_the_run(status: RanksStatus, analysis: Analysis | None) -> RanksStatus:
    """The status with the ranks' work over all counted steps, and the straggler that the analysis names."""
    if analysis is None or analysis.run is None:
        return status
    works = {work.rank: work for work in analysis.run.ranks.works}
    late = next((one for one in analysis.findings if one.code == STRAGGLER and one.rank is not None), None)
    straggler = None
    if late is not None and late.rank is not None:
        said = late.evidence
        cause, ms = said.get("cause") or said.get("late", ""), float(said.get("others_wait_ms_per_step", 0.0))
        straggler = LateRank(rank=late.rank, cause=str(cause), ms=ms)
    ranks = tuple(_with_work(one, works, straggler) for one in status.ranks)
    unmeasured = "" if straggler is not None else not_measured(analysis.run.ranks.works)
    return summed_up(ranks, straggler, status.hang, status.where, unmeasured)


def _with_work(one: RankStatus, works: Mapping[int, RankWork], late: LateRank | None) -> RankStatus:
    cause, work = late.cause if late is not None and late.rank == one.rank else "", works.get(one.rank)
    if work is None or work.exposed_ms is None:
        return structs.replace(one, own_ms=None, waits_ms=None, cause=cause)
    waits_ms = work.waited_ms if len(works) > 1 else None
    return structs.replace(one, own_ms=sum(work.step_leaves_ms.values()), waits_ms=waits_ms, cause=cause)


def worst_first(status: RanksStatus) -> list[RankStatus]:
    """The ranks: that of a hang, those that are not live, then by their own work."""
    stalled = None if status.hang is None else status.hang.rank

    def key(one: RankStatus) -> tuple[float, ...]:
        bad = _BAD.index(one.state) if one.state in _BAD else len(_BAD)
        return one.rank != stalled, bad, -(one.own_ms or 0.0), one.rank

    return sorted(status.ranks, key=key)


def ranks_title(record: RunRecord, status: RanksStatus, now: float) -> str:
    """What the table of the ranks is by, and how old that is."""
    run, first = status_of(record, now), record.heard.get(0)
    if run.ended:
        return "Ranks over the run"
    if not record.heard:
        return "Ranks by their records"
    if first is None:
        return "Ranks by what each wrote itself"
    ago = f"{duration(now - first.at)} ago"
    if now - first.at <= _OLD_S:
        return f"Ranks, heard {ago}"
    newer = sum(one.age_s < now - first.at - _OLD_S for one in status.ranks)
    return f"Ranks, last heard by rank 0 {ago}; {newer or 'none'} of {len(status.ranks)} wrote since"


def straggler_words(late: LateRank) -> str:
    """The rank that the others wait for, in a sentence."""
    return f"the others wait {in_ms(late.ms)} a step for rank {late.rank}{late.cause and f': {late.cause}'}"


def hang_line(status: RanksStatus) -> Iterator[Line]:
    """Where the ranks have come to a standstill, or have been for long; none while they train."""
    if status.hang is not None:
        yield Line("hang", Text(status.hang.where, "bold red"))
    elif status.where:
        yield Line("where", Text(status.where, "bold yellow"))


def status_lines(status: RanksStatus) -> Iterator[Line]:
    """What holds for all ranks together."""
    if status.straggler is not None:
        yield Line("straggler", Text(straggler_words(status.straggler), "bold yellow"))
    elif status.unmeasured:
        yield Line("straggler", Text(f"not measured: {status.unmeasured}"))
    known = {"own work differs by": status.spread_ms, "exposed communication and waits": status.exposed_comm_ms}
    parts = [f"{name} {in_ms(ms)}" for name, ms in known.items() if ms is not None]
    if parts:
        yield Line("per step", Text(", ".join(parts)))


def state_words(one: RankStatus, status: RanksStatus) -> str:
    """What is special about a rank; "" for one that trains as the others do."""
    cause, late = one.cause, status.straggler
    if late is not None and late.rank == one.rank:
        cause = f"straggler: {late.cause}" if late.cause else "straggler"
    restarts = f"restarted {'once' if one.restarts == 1 else f'{one.restarts} times'}" if one.restarts else ""
    as_rank_0 = one.state == status.ranks[0].state == "finished"
    state = "" if as_rank_0 else _STATES.get(one.state, one.state)
    return ", ".join(filter(None, (state, cause, restarts)))


def rank_table(status: RanksStatus, width: int | None = None) -> Table:
    """The ranks, worst first; what there is room for on a terminal so wide."""
    ranks = worst_first(status)
    late = None if status.straggler is None else status.straggler.rank
    note = (
        "Own work is the step without waiting for other ranks. The rank with most of it is the one that the others "
        "wait for."
    )
    table = table_of(ranks, _columns(status, width), title="Ranks of the run", note=note)
    styles = ("yellow" if one.state in _BAD or one.rank == late else "" for one in ranks)
    rows = tuple(replace(row, style=style) for row, style in zip(table.rows, styles, strict=True))
    return replace(table, rows=rows)


def worst_ranks(status: RanksStatus, width: int) -> tuple[Table, str]:
    """The eight worst ranks, and a line on the others."""
    table = rank_table(status, width)
    return replace(table, rows=table.rows[:_SHOWN]), _others(worst_first(status)[_SHOWN:])


def _columns(status: RanksStatus, width: int | None) -> dict[str | Column, Say[RankStatus]]:
    """What a table says of each rank; where there is room, of its host, its step and its GPU too."""
    hosts = len({one.host for one in status.ranks if one.host}) > 1
    ages = any(one.state != "finished" for one in status.ranks)
    with_steps, with_sensors = (width is None or width >= least for least in (_WITH_STEPS, _WITH_SENSORS))
    columns: dict[str | Column, Say[RankStatus]] = {
        "rank": "{.rank}",
        Column("host", "text"): "{.host}" if hosts and with_steps else "",
        Column("step", brief="step".rjust(_STEP)): "{.step:,}" if with_steps else "",
        Column("own ms", brief="own ms".rjust(_MS)): lambda one: _ms(one.own_ms),
        Column("wait ms", brief="wait ms".rjust(_MS)): lambda one: _ms(one.waits_ms),
        Column("age", "text", brief="age".rjust(_AGE), means="since it was last heard"): lambda one: (
            duration(one.age_s).rjust(_AGE) if ages and one.state != "missing" else ""
        ),
        Column("", "text"): lambda one: state_words(one, status),
    }
    for name, (unit, least) in _SENSORS.items() if with_sensors else ():
        known = {one.rank: one.sensors[name] for one in status.ranks if name in one.sensors}
        if known and max(known.values()) - min(known.values()) >= least(max(known.values())):
            columns[unit] = partial(_sensor, name)
    return columns


def _sensor(name: str, one: RankStatus) -> str:
    return f"{one.sensors[name]:.0f}" if name in one.sensors else ""


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:,.2f}"


def _others(ranks: Sequence[RankStatus]) -> str:
    """The ranks without a row, in a line; "" for none."""
    if not ranks:
        return ""
    own_ms = [one.own_ms for one in ranks if one.own_ms is not None]
    states = Counter(_STATES.get(one.state, one.state) for one in ranks)
    parts = [f"{number:,} {state}" for state, number in states.items() if state]
    if own_ms:
        parts.append(f"own work {min(own_ms):,.1f} to {max(own_ms):,.1f} ms")
    return f"{len(ranks):,} more{': ' if parts else ''}{', '.join(parts)}"
