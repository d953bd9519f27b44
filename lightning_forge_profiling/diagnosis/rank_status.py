"""All ranks as they are now: who is live, how much work each has of its own, who is late and why, where they stand."""

from collections.abc import Mapping
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.hangs import find_hang, silent_ranks, whereabouts
from lightning_forge_profiling.diagnosis.ranks import late_rank, not_measured, with_waits
from lightning_forge_profiling.schema import Hang, Heard, LateRank, RanksStatus, RankState, RankStatus, RankWork

_LATE_S: Final = 10.0
_SILENT_S: Final = 30.0


def ranks_status(heard: Mapping[int, Heard], world_size: int, now: float) -> RanksStatus:
    """The status of all ranks. `now` is by the clock of `Heard.at`, which is rank 0's; no host's own clock counts.

    A reader on another machine may give its own time: if that is behind, the latest pulse is taken to be of now.
    """
    heard = {rank: one for rank, one in heard.items() if rank < world_size}
    now = max([now, *(one.at for one in heard.values())])
    found = {rank: silent.process for rank, silent in silent_ranks(heard, now).items()}
    works = with_waits(one.pulse.work for one in heard.values() if one.pulse.work is not None)
    by_rank = {work.rank: work for work in works}
    ranks = tuple(_status(rank, heard, by_rank.get(rank), found.get(rank, ""), now) for rank in range(world_size))
    moving = all(one.state in {"live", "late"} for one in ranks)
    all_known = moving and len(works) == world_size
    late = late_rank(works) if all_known else None
    unmeasured = not_measured(works) if all_known and late is None else ""
    if late is not None:
        ranks = tuple(replace(one, cause=late.cause) if one.rank == late.rank else one for one in ranks)
    hang = find_hang(heard, world_size, now)
    return summed_up(ranks, late, hang, "" if hang is not None else whereabouts(heard), unmeasured)


def summed_up(
    ranks: tuple[RankStatus, ...], straggler: LateRank | None, hang: Hang | None, where: str, unmeasured: str
) -> RanksStatus:
    """The ranks with what follows from their work."""
    own_ms = [one.own_ms for one in ranks if one.own_ms is not None]
    waits_ms = [one.waits_ms for one in ranks if one.waits_ms is not None]
    return RanksStatus(
        ranks=ranks,
        straggler=straggler,
        unmeasured=unmeasured,
        hang=hang,
        where=where,
        spread_ms=max(own_ms) - min(own_ms) if len(own_ms) > 1 else None,
        exposed_comm_ms=fmean(waits_ms) if waits_ms else None,
    )


def _status(rank: int, heard: Mapping[int, Heard], work: RankWork | None, process: str, now: float) -> RankStatus:
    one = heard.get(rank)
    if one is None:
        return RankStatus(rank=rank)
    pulse, age_s = one.pulse, max(now - one.at, 0.0)
    return RankStatus(
        rank=rank,
        host=pulse.host,
        pid=pulse.pid,
        state=_state(one, process, age_s),
        age_s=age_s,
        step=pulse.step,
        own_ms=None if work is None or work.exposed_ms is None else sum(work.step_leaves_ms.values()),
        waits_ms=None if work is None or work.exposed_ms is None else work.waited_ms,
        restarts=one.restarts + pulse.restarts,
        sensors=pulse.sensors,
    )


def _state(one: Heard, process: str, age_s: float) -> RankState:
    pulse = one.pulse
    if pulse.ended:
        return pulse.ended
    if process == "gone":
        return "gone"
    if process == "stopped":
        return "stopped"
    if pulse.standing is not None or process == "blocked":
        return "waits" if pulse.standing is not None and pulse.standing.waits else "stands"
    if age_s > _SILENT_S:
        return "silent"
    return "late" if age_s > _LATE_S else "live"
