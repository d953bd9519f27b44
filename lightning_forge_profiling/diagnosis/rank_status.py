"""All ranks as they are now: who is live, how much work each has of its own, who is late and why, where they stand."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.ranks import late_rank, not_measured, with_waits
from lightning_forge_profiling.names import STEPS
from lightning_forge_profiling.schema import (
    Hang,
    LastPulse,
    LateRank,
    Pulse,
    RanksStatus,
    RankState,
    RankStatus,
    RankWork,
    SilentRank,
    Stall,
)

# -- where the ranks are stuck -----------------------------------------------------------------------------------------

_LATE_S: Final = 10.0
_SILENT_S: Final = 30.0
_LISTED: Final = 8  # ranks, and places, that a sentence lists
_VERBS: Final = {"wait": "waits", "have": "has"}


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks of a run by what is known of them. One that is in none of the last seven moves, or is silent."""

    pulses: Mapping[int, Pulse]
    ages_s: Mapping[int, float]
    missing: Collection[int]  # never heard
    ended: Mapping[int, Pulse]
    lost: Mapping[int, SilentRank]  # gone or stopped
    runs: Collection[int]  # silent, while it computes
    blocked: Collection[int]  # silent, in a call that lets no Python run
    stalled: Mapping[int, Stall]  # outside of a collective
    waits: Mapping[int, Stall]  # in a collective


def find_hang(heard: Mapping[int, LastPulse], world_size: int, now: float) -> Hang | None:
    """Where the ranks have come to a standstill; None while they move. `now` is by the clock of `LastPulse.at`.

    A rank that others wait for is blamed only if it is stalled outside of a collective, is gone, stopped or silent, has
    ended, or has not entered their collective.
    """
    ranks = _sorted(heard, world_size, now)
    return _lost(ranks) or _stalled(ranks) or _silent(ranks) or _waiting(ranks)


def whereabouts(heard: Mapping[int, LastPulse]) -> str:
    """Where the ranks are that have ended no step for long, in a sentence; "" for none."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    pulses = [one.pulse for _, one in sorted(heard.items()) if one.pulse.no_step_s and not one.pulse.ended]
    for pulse in pulses:
        part = f"step {pulse.step}" if pulse.part == STEPS else pulse.part
        found[f" in {part}{pulse.place and f', {pulse.place}'}"].append(pulse.rank)
    said = "; ".join(_named(ranks) + where for where, ranks in list(found.items())[:_LISTED])
    return said and f"no step for {max(pulse.no_step_s for pulse in pulses):.0f} s: {said}"


def silent_ranks(heard: Mapping[int, LastPulse], now: float) -> dict[int, SilentRank]:
    """What neighbours say of ranks that have not been heard since, nor begun anew."""
    found: dict[int, SilentRank] = {}
    for silent in (one for observer in heard.values() for one in observer.pulse.silent):
        own = heard.get(silent.rank)
        if own is None or own.pulse.ended or own.pulse.pid != silent.pid:
            continue
        if silent.process == "gone" or now - own.at > _LATE_S:
            found[silent.rank] = silent
    return found


def _sorted(heard: Mapping[int, LastPulse], world_size: int, now: float) -> _Ranks:
    pulses = {rank: heard[rank].pulse for rank in sorted(heard)}
    ages_s = {rank: max(now - heard[rank].at, 0.0) for rank in pulses}
    ended = {rank: pulse for rank, pulse in pulses.items() if pulse.ended}
    found = silent_ranks(heard, now)
    stalls = {rank: pulse.stall for rank, pulse in pulses.items() if pulse.stall is not None and rank not in ended}
    for rank, one in found.items():
        if one.process == "blocked":
            call = "" if one.waits else "a call that holds Python's interpreter lock"
            stalls[rank] = Stall(seconds=one.seconds, place=one.place, call=call, waits=one.waits)
    lost = {rank: one for rank, one in found.items() if one.process in {"gone", "stopped"}}
    return _Ranks(
        pulses=pulses,
        ages_s=ages_s,
        missing=[rank for rank in range(world_size) if rank not in pulses],
        ended=ended,
        lost=lost,
        runs={rank for rank, one in found.items() if one.process == "running"},
        blocked={rank for rank, one in found.items() if one.process == "blocked"},
        stalled={rank: one for rank, one in stalls.items() if not one.waits and rank not in lost},
        waits={rank: one for rank, one in stalls.items() if one.waits and rank not in lost},
    )


def _lost(ranks: _Ranks) -> Hang | None:
    """A process has ended or was stopped, and others are stalled or have failed."""
    failed = any(pulse.ended == "failed" for pulse in ranks.ended.values())
    if not ranks.lost or not (ranks.waits or ranks.stalled or failed):
        return None
    first = min(ranks.lost)
    said_s = ranks.lost[first].seconds
    seconds = said_s if failed else max(said_s, ranks.ages_s[first])  # of a run that has ended, as it was then
    what = "gone" if ranks.lost[first].process == "gone" else "stopped, as by SIGSTOP,"
    said = f"{_process(ranks, first)}, last heard in step {ranks.pulses[first].step}"
    where = f"rank {first} has been {what} for {seconds:.0f} s ({said})"
    return _hang(ranks.lost, where + _too(ranks.lost, first) + _wait_for(ranks.lost, ranks), seconds)


def _stalled(ranks: _Ranks) -> Hang | None:
    """A rank is stalled outside of a collective."""
    if not ranks.stalled:
        return None
    first = max(ranks.stalled, key=lambda rank: (ranks.stalled[rank].seconds, -rank))
    one = ranks.stalled[first]
    step = ranks.pulses[first].step
    # one that runs no Python has not said for long where it is
    who = (
        f"rank {first} has been stalled in step {step}"
        if first not in ranks.blocked
        else f"rank {first}, last heard in step {step}, has been stalled"
    )
    where = f"{who} for {one.seconds:.0f} s: {_place(one)}"
    return _hang(ranks.stalled, where + _too(ranks.stalled, first) + _wait_for(ranks.stalled, ranks), one.seconds)


def _silent(ranks: _Ranks) -> Hang | None:
    """A rank gives no sign of life, the system says nothing of it, and others wait."""
    known = {*ranks.ended, *ranks.lost, *ranks.runs, *ranks.stalled, *ranks.waits}
    silent = {rank: age_s for rank, age_s in ranks.ages_s.items() if age_s > _SILENT_S and rank not in known}
    if 0 in silent:  # who was heard through it alone is not heard any more
        silent = {rank: age_s for rank, age_s in silent.items() if not rank or age_s < silent[0]}
    if not silent or not ranks.waits:
        return None
    first, seconds = next(iter(silent.items()))
    where = f"no sign of life from {_named(silent)} for {seconds:.0f} s ({_process(ranks, first)})"
    return _hang(silent, where + _wait_for(silent, ranks), seconds)


def _waiting(ranks: _Ranks) -> Hang | None:
    """All ranks wait, but for those that have ended or never began."""
    waits, seconds = ranks.waits, max((one.seconds for one in ranks.waits.values()), default=0.0)
    if not waits or waits.keys() | ranks.ended.keys() != ranks.pulses.keys():
        return None
    if ranks.missing and 0 in ranks.pulses:
        where = f"{_named(ranks.missing, 'have')} not begun to train{_wait_for(ranks.missing, ranks)}"
        return _hang(ranks.missing, where, seconds)
    if ranks.missing:  # only rank 0 hears of all: these are cut off from it, or it writes elsewhere
        where = (
            f"{_named(waits, 'have')} waited{_in_call(ranks)} for {seconds:.0f} s; {_named(ranks.missing)} not heard"
        )
        return Hang(rank=None, where=where, seconds=seconds)
    if ranks.ended:
        how = {pulse.ended for pulse in ranks.ended.values()}
        what = f"{_named(ranks.ended, 'have')} {'failed' if 'failed' in how else 'finished'}"
        return _hang(ranks.ended, what + _wait_for(ranks.ended, ranks), seconds)
    rank = next(iter(waits))
    everywhere = Hang(rank=None, where=f"{_named(waits, 'wait', all_=True)} in {_what(waits[rank])}", seconds=seconds)
    return _never_entered(waits, seconds) or _other_collective(waits, seconds) or everywhere


def _never_entered(waits: Mapping[int, Stall], seconds: float) -> Hang | None:
    """The collective that the fewest ranks have not entered; of several the one that was entered first."""
    best: tuple[int, float] | None = None
    hang = None
    for one in waits.values():
        absent = {rank: w for rank, w in waits.items() if w.entered.get(one.group, one.number) < one.number}
        order = len(absent), -one.seconds
        if absent and (best is None or order < best):
            best, present = order, {rank: w for rank, w in waits.items() if rank not in absent}
            first = next(iter(absent))
            where = f"{_named(present, 'wait')} in {_what(one)}, which {_named(absent)} never entered"
            other = absent[first]
            # without a number it sets up a group, which the others may not do
            neither = not other.number or all(
                w.entered.get(other.group, other.number) < other.number for w in present.values()
            )
            blamed = [] if neither and len(present) <= len(absent) else absent  # either may be the odd one
            at = f", {other.place}" if other.place else ""
            hang = _hang(blamed, f"{where}; {_named([first], 'wait')} in {_what(other)}{at}", seconds)
    return hang


def _other_collective(waits: Mapping[int, Stall], seconds: float) -> Hang | None:
    """The ranks that entered another collective than most, as the same number of a group."""
    entered = {rank: (one.group, one.number, one.collective, one.shape) for rank, one in waits.items() if one.number}
    usual, most = next(iter(Counter(entered.values()).most_common(1)), (None, 0))
    if usual is None:
        return None
    odd = [rank for rank, one in entered.items() if one[:2] == usual[:2] and one != usual]
    if not odd:
        return None
    usually = [rank for rank, one in entered.items() if one == usual]
    where = (
        f"{_named(usually, 'wait')} in {_what(waits[usually[0]], shape=True)}, where {_named(odd)} entered "
        f"{_what(waits[odd[0]], shape=True)}"
    )
    return _hang(odd if most > len(odd) else [], where, seconds)


def _hang(blamed: Collection[int], where: str, seconds: float) -> Hang:
    return Hang(rank=next(iter(blamed)) if len(blamed) == 1 else None, where=where, seconds=seconds)


def _named(ranks: Collection[int], verb: str = "", *, all_: bool = False) -> str:
    """Some ranks and what they do, such as `ranks 0, 2, 3 wait`."""
    listed = sorted(ranks)
    numbers = ", ".join(map(str, listed[:_LISTED]))
    more = f" and {len(listed) - _LISTED:,} more" if len(listed) > _LISTED else ""
    one = len(listed) == 1
    who = f"rank {numbers}" if one else "all ranks" if all_ else f"ranks {numbers}{more}"
    return f"{who} {_VERBS.get(verb, verb) if one else verb}".rstrip()


def _too(ranks: Mapping[int, object], first: int) -> str:
    """The other ranks of some: the end of a sentence; "" for none."""
    others = [rank for rank in ranks if rank != first]
    return f"; so {'has' if len(others) == 1 else 'have'} {_named(others)}" if others else ""


def _wait_for(blamed: Collection[int], ranks: _Ranks) -> str:
    """Who waits for some ranks, and in what: the end of a sentence; "" for nobody."""
    whom = "it" if len(blamed) == 1 else "them"
    return f"; {_named(ranks.waits, 'wait')} for {whom}{_in_call(ranks)}" if ranks.waits else ""


def _in_call(ranks: _Ranks) -> str:
    """What most of those wait in that wait; "" if unknown."""
    [(call, _)] = Counter(one.collective or one.call for one in ranks.waits.values()).most_common(1)
    return f" in {call}" if call else ""


def _process(ranks: _Ranks, rank: int) -> str:
    return f"host {ranks.pulses[rank].host}, pid {ranks.pulses[rank].pid}"


def _what(one: Stall, *, shape: bool = False) -> str:
    """The collective that a rank waits in."""
    if not one.collective:
        return one.call or "a collective"
    return f"{one.collective} #{one.number}{f' ({one.shape})' if shape and one.shape else ''}"


def _place(one: Stall) -> str:
    """The line that a rank is stalled in."""
    where = one.place
    if one.call and one.call != one.place.partition(" at ")[0] and not one.worker:
        where = f"{where}, in {one.call}" if where else one.call
    return ": ".join(filter(None, (one.worker, where))) or "in an unknown line"


def ranks_status(heard: Mapping[int, LastPulse], world_size: int, now: float) -> RanksStatus:
    """The status of all ranks. `now` is by the clock of `LastPulse.at`, which is rank 0's; no host's own clock counts.

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


def _status(rank: int, heard: Mapping[int, LastPulse], work: RankWork | None, process: str, now: float) -> RankStatus:
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


def _state(one: LastPulse, process: str, age_s: float) -> RankState:
    pulse = one.pulse
    if pulse.ended:
        return pulse.ended
    if process == "gone":
        return "gone"
    if process == "stopped":
        return "stopped"
    if pulse.stall is not None or process == "blocked":
        return "waits" if pulse.stall is not None and pulse.stall.waits else "stalled"
    if age_s > _SILENT_S:
        return "silent"
    return "late" if age_s > _LATE_S else "live"
