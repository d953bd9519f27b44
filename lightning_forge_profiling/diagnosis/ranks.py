"""The ranks of a run compared by their own work: which one the others wait for, and in which part of its step.

Ranks that train together end a step together. A rank whose own work takes longer makes the others wait for it, in the
next collective: in backward, where gradients are exchanged, between two batches, where Lightning synchronizes the
ranks, or in a collective of the user's code. So where the ranks' times differ, the first difference after a collective
is work, and the opposite difference in the collective that follows is waiting. Only durations are compared, each by one
clock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import ONCE, LedgerCosts, in_s
from lightning_forge_profiling.diagnosis.ledger_rules import ledger_advice, self_times
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, in_ms, saving
from lightning_forge_profiling.diagnosis.run_rules import leaf_of, region_advice
from lightning_forge_profiling.diagnosis.sampled_lines import LEAST_PCT
from lightning_forge_profiling.names import REGIONS, STEPS, part_kind
from lightning_forge_profiling.results.analysis import Finding, RankWork, RunEvidence, RunRegion, Saving

STRAGGLER: Final = "straggler"

_AFTER_BACKWARD: Final = ("optimizer", "hooks", "other", "data", "transfer", "forward", "backward")
_AFTER_OTHER: Final = ("data", "transfer", "forward", "backward", "optimizer", "hooks", "other")
"""The step in order, from either of the places where ranks are synchronized. Hooks are most often those of its end."""

_MAY_WAIT: Final = frozenset({"forward", "backward", "optimizer", "other"})
"""The regions that may have collectives."""
_SYNCHRONIZED: Final = frozenset({"backward", "other"})

_AS_LATE: Final = 0.5
"""Ranks with at least this part of the slowest one's excess are late, too."""
_MOST_OF_IT: Final = 0.5
"""A leaf with a smaller part of a rank's excess is not its cause."""

Works = Mapping[int, RankWork]


def rank_work(evidence: RunEvidence, *, host: str) -> RankWork:
    """What a rank reports of itself for `straggler`."""
    own = self_times(evidence)
    outside: dict[str, float] = {}
    leaves = {name: region.device_ms for name, region in own.regions.items() if name in REGIONS}
    if evidence.ledger is not None:
        run = LedgerCosts(evidence, evidence.ledger)
        parts = [part for part in run.leaves() if part_kind(part) not in {*ONCE, STEPS, "compile"}]
        inside = {part for part in parts if run.region(part) or part_kind(part) == "gc"}
        leaves |= {part: run.exposed_ms(part) for part in parts if part in inside}
        outside = {part: 1e3 * run.seconds(part) / run.steps for part in parts if part not in inside}
    return RankWork(
        rank=evidence.rank,
        host=host,
        steps=evidence.steps,
        step_ms=evidence.step_ms.mean,
        errors_ms={
            name: round((own.intervals[name].high_pct - own.intervals[name].low_pct) * own.step_ms.mean / 200, 6)
            for name in REGIONS
            if name in own.intervals
        },
        on_device=evidence.on_device,
        leaves_ms={name: round(ms, 6) for name, ms in (leaves | outside).items()},
        outside=tuple(outside),
        cpu=own.cpu,
        lines={leaf: lines[:1] for leaf, lines in evidence.lines.items()},
    )


def with_waits(works: Iterable[RankWork]) -> tuple[RankWork, ...]:
    """The ranks in order, each with the part of its time in which it waits for others."""
    ranks = {work.rank: work for work in sorted(works, key=lambda work: work.rank)}
    if len(ranks) < 2:  # noqa: PLR2004
        return tuple(ranks.values())
    before, after = (_waits(ranks, order) for order in (_AFTER_BACKWARD, _AFTER_OTHER))
    # which of two differences comes first is unknown where both are in collectives, and neither is taken for work
    waits = {
        rank: {leaf: max(ms, after[rank][leaf] if leaf in _SYNCHRONIZED else 0.0) for leaf, ms in of_rank.items()}
        for rank, of_rank in before.items()
    }
    return tuple(
        replace(work, waits_ms={leaf: round(ms, 6) for leaf, ms in waits[rank].items() if ms > 0})
        for rank, work in ranks.items()
    )


def _waits(ranks: Works, order: Sequence[str]) -> dict[int, dict[str, float]]:
    """How long each rank waits in each region: what it takes longer there than another, at most as it was early."""
    clock_ms = dict.fromkeys(ranks, 0.0)
    waits: dict[int, dict[str, float]] = {rank: {} for rank in ranks}
    for leaf in order:
        computed_ms = {rank: _computed_ms(work, leaf) for rank, work in ranks.items()}
        for rank, ms in computed_ms.items():
            clock_ms[rank] += ms
        if leaf not in _MAY_WAIT:
            continue
        left_ms = {rank: work.leaves_ms.get(leaf, 0.0) - computed_ms[rank] for rank, work in ranks.items()}
        least_ms, last_ms = min(left_ms.values()), max(clock_ms.values())
        for rank, ms in left_ms.items():
            waits[rank][leaf] = max(min(ms - least_ms, last_ms - clock_ms[rank]), 0.0)
        for rank, ms in left_ms.items():
            clock_ms[rank] += ms
    return waits


def _computed_ms(work: RankWork, leaf: str) -> float:
    """Milliseconds of a leaf that are no wait for another rank; `hooks` are all that is in no region."""
    if leaf == "hooks":
        return sum(ms for name, ms in work.leaves_ms.items() if name not in REGIONS)
    ms = work.leaves_ms.get(leaf, 0.0)
    if leaf not in _MAY_WAIT:
        return ms
    known = work.cpu is not None and not work.on_device and leaf in work.cpu.regions
    return ms * max(1 - work.cpu.blocked_pct(leaf) / 100, 0.0) if known and work.cpu is not None else 0.0


def straggler(works: Works, run: RunEvidence) -> Finding | None:
    """The rank that the others wait for, with the part of its step in which it takes longer."""
    if len(works) < 2:  # noqa: PLR2004
        return None
    last = max(works.values(), key=RankWork.own_ms)
    others = [work for work in works.values() if work is not last]
    typical_ms, step_ms = median(work.own_ms() for work in others), fmean(work.step_ms for work in works.values())
    late_ms = last.own_ms() - typical_ms
    error_ms = (last.error_ms**2 + median(work.error_ms for work in others) ** 2) ** 0.5
    waits_ms = min(late_ms, median(sum(work.waits_ms.values()) for work in others))
    leaf, leaf_ms, others_ms = _largest_excess(last, others)
    steps, of_fit = max(run.all_steps or run.steps, 1), leaf in last.outside and run.ledger is not None
    whole_ms = 1e3 * LedgerCosts(run, run.ledger).whole_s / steps if of_fit and run.ledger is not None else step_ms
    if whole_ms <= 0 or 100 * waits_ms < NAMED_FROM_PCT * whole_ms or waits_ms <= error_ms:
        return None
    late = [work.rank for work in others if work.own_ms() - typical_ms >= _AS_LATE * late_ms]
    who = f"ranks {', '.join(map(str, sorted([*late, last.rank])))}" if late else f"rank {last.rank}"
    several_hosts = len({work.host for work in works.values()}) > 1

    def in_words(ms: float) -> str:
        return in_s(ms * steps / 1e3) if of_fit else in_ms(ms)

    what, own_ms, their_ms = f"its {leaf}", leaf_ms, others_ms
    if leaf_ms - others_ms < _MOST_OF_IT * late_ms:
        what, own_ms, their_ms = f"its own work, most of it in {leaf},", last.own_ms(), typical_ms
    each = f"of the fit's {in_words(whole_ms)}" if of_fit else f"of each {in_words(whole_ms)} step"
    return Finding(
        code=STRAGGLER,
        share_pct=min(100 * waits_ms / whole_ms, 100.0),
        of="run" if of_fit else "step",
        rank=last.rank,
        source="run",
        title=f"the other ranks wait {in_words(waits_ms)} {each} for {who}"
        f"{f' on {last.host}' if several_hosts else ''}: {what} takes {in_words(own_ms)}{'' if of_fit else ' a step'}, "
        f"the others' {in_words(their_ms)}{_line(last, leaf)}",
        evidence={
            "leaf": leaf,
            "leaf_ms_per_step": round(leaf_ms, 3),
            "others_leaf_ms_per_step": round(others_ms, 3),
            "own_ms_per_step": round(last.own_ms(), 3),
            "others_own_ms_per_step": round(typical_ms, 3),
            "others_wait_ms_per_step": round(waits_ms, 3),
            "step_ms": round(step_ms, 3),
            **({"host": last.host} if several_hosts else {}),
        },
        advice=_advice(leaf, last, run),
        low_pct=max(100 * (waits_ms - error_ms) / whole_ms, 0.0) if error_ms else None,
        high_pct=min(100 * (waits_ms + error_ms) / whole_ms, 100.0) if error_ms else None,
        saves=_saves(waits_ms, whole_ms, in_words, of_fit=of_fit, at_most=bool(late)),
    )


def _line(last: RankWork, leaf: str) -> str:
    """The line of the user's code that most of the leaf is in on that rank; "" if it is unknown."""
    line = next(iter(last.lines.get(leaf, ())), None)
    if line is None or line.pct < LEAST_PCT:
        return ""
    return f"; {line.pct:.0f} % of that in {line.file}:{line.line} {line.function}"


def _largest_excess(last: RankWork, others: Sequence[RankWork]) -> tuple[str, float, float]:
    """The leaf in which a rank takes most longer than the others, its time there and theirs."""
    leaves = dict.fromkeys(leaf for work in (last, *others) for leaf in work.leaves_ms)
    each = [(leaf, last.own_ms(leaf), median(work.own_ms(leaf) for work in others)) for leaf in leaves]
    return max(each, key=lambda found: found[1] - found[2])


def _saves(
    ms: float, whole_ms: float, in_words: Callable[[float], str], *, of_fit: bool, at_most: bool
) -> Saving | None:
    if not of_fit:
        return saving(ms, whole_ms, at_most=at_most)
    pct, bound = 100 * ms / whole_ms, "at most" if at_most else "about"
    text = f"That saves {bound} {in_words(ms)} of the fit's {in_words(whole_ms)} ({pct:.0f} %)."
    return Saving(ms_per_step=ms, pct=pct, at_most=at_most, text=text)


def _advice(leaf: str, last: RankWork, run: RunEvidence) -> str:
    """What to do about the leaf: the advice of its own rule where it has one."""
    waits_pct = 0.0 if last.cpu is None else last.cpu.waits_pct or 0.0
    starved = (
        f"Rank {last.rank} waited for a core in {waits_pct:.0f} % of its time, which lengthens any part of a step. "
    )
    before = starved if waits_pct >= NAMED_FROM_PCT else ""
    if leaf not in REGIONS:
        return f"{before}{ledger_advice(leaf, run)}"
    regions = {name: RunRegion(device_ms=last.own_ms(name), host_ms=last.own_ms(name)) for name in REGIONS}
    of_leaf = region_advice(leaf, replace(run, regions=regions, cpu=last.cpu, rank=last.rank))
    return f"{before}{compare_advice(last.rank)} {of_leaf}".rstrip()


def compare_advice(rank: int) -> str:
    """What to look at where one rank is slower than the others."""
    return (
        f"Compare rank {rank} with the others: uneven batches or sequence lengths, work that only it does "
        "(logging, checkpoints, evaluation), a throttled GPU, a busy host."
    )


def own_times(run: RunEvidence, found: Finding | None) -> RunEvidence:
    """A rank's regions without its waiting for others, and without what it takes longer if others wait for it.

    Both are the straggler's finding, and no other one.
    """
    work = next((work for work in run.ranks if work.rank == run.rank), None)
    if work is None:
        return run
    less_ms = dict(work.waits_ms)
    if found is not None and _is_late(work, found):
        leaf = str(found.evidence["leaf"])
        excess_ms = work.own_ms(leaf) - float(found.evidence["others_leaf_ms_per_step"])
        less_ms[leaf] = less_ms.get(leaf, 0.0) + max(excess_ms, 0.0)
    regions = {name: _shorter(region, less_ms.get(name, 0.0)) for name, region in run.regions.items()}
    return replace(run, regions=regions)


def _shorter(region: RunRegion, ms: float) -> RunRegion:
    p50_ms = None if region.p50_ms is None else max(region.p50_ms - ms, 0.0)
    return replace(
        region, device_ms=max(region.device_ms - ms, 0.0), host_ms=max(region.host_ms - ms, 0.0), p50_ms=p50_ms
    )


def _is_late(work: RankWork, found: Finding) -> bool:
    own_ms, others_ms = (float(found.evidence[name]) for name in ("own_ms_per_step", "others_own_ms_per_step"))
    return work.own_ms() - others_ms >= _AS_LATE * (own_ms - others_ms)


def beside_straggler(findings: Iterable[Finding], run: RunEvidence, found: Finding | None) -> list[Finding]:
    """Findings on one rank without those that are the straggler's, and of all ranks if each of them has as much."""
    mine = next((work for work in run.ranks if work.rank == run.rank), None)
    if mine is None:
        return list(findings)
    kept = []
    for each in findings:
        leaf = leaf_of(each)
        if found is not None and leaf not in REGIONS and leaf == found.evidence["leaf"]:
            continue  # a hook's times, which are still in the ledger
        if found is not None and not run.on_device and each.rank == found.rank != run.rank:
            continue  # a trace's
        least_ms = min(work.own_ms(leaf) for work in run.ranks)
        of_all = len(run.ranks) == run.world_size > 1 and least_ms >= mine.own_ms(leaf) / 2 > 0
        kept.append(replace(each, rank=None) if of_all and each.source == "run" else each)
    return kept
