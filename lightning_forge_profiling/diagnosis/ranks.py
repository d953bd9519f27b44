"""The ranks of a run compared by their own work: which one the others wait for, and in which part of its step.

Ranks that train together end a step together. A rank whose own work takes longer makes the others wait for it, in the
next collective: in backward, where gradients are exchanged, between two batches, where Lightning synchronizes the
ranks, or in a collective of the user's code. Each rank measures those waits by events of its own, and the rest of its
step is its own work; where they are not measured, no rank is named. Only durations are compared, each by one clock.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from operator import attrgetter, itemgetter
from statistics import fmean, median, quantiles
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis import loader, optimizer
from lightning_forge_profiling.diagnosis.catalogue import place_of
from lightning_forge_profiling.diagnosis.ledger_costs import ONCE, LedgerCosts, lines_in, self_times
from lightning_forge_profiling.diagnosis.ledger_rules import ledger_advice
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    MIN_SHARE_PCT,
    REGION_OF,
    Explanation,
    RuleContext,
    RunTimes,
    as_finding,
    in_ms,
    in_s,
    of_step,
    saving,
    saving_of_fit,
    subtract,
)
from lightning_forge_profiling.diagnosis.verdict import LEAST_PCT
from lightning_forge_profiling.names import (
    EXCLUDED,
    HANG,
    OWN_WORK,
    REGIONS,
    SIGTERM_LEAF,
    STEPS,
    hook_region,
    part_kind,
    whole_part,
)
from lightning_forge_profiling.schema import (
    Distribution,
    Finding,
    Hint,
    LateRank,
    RankSummary,
    RankWait,
    RankWork,
    RunEvidence,
    RunLedger,
    RunRegion,
    Saving,
)

STRAGGLER: Final = "straggler"

_HOST_WAITS: Final = frozenset({"launch-bound", "sync-bound", "allocator-churn", "slow-optimizer", "slow-launches"})

_PAIR: Final = 2
_MOST_NAMED: Final = 4

# the rank that others wait for waits itself less than this part of what they do; ranks that wait for each other by
# turns do not differ so much
_STRAGGLES_BELOW: Final = 0.25

_LOW_CLOCK: Final = 0.9  # clocks of equal GPUs differ by a few percent, as each keeps its own power limit
_STARVED_PCT: Final = 50.0  # of the steps

_AS_LATE: Final = 0.5  # ranks with at least this part of the slowest one's excess are late, too
# by region the words of its rule
_EXPLAIN: Final = {
    REGION_OF.get(rule.code): rule.run.explain for rule in (*loader.RULES, *optimizer.RULES) if rule.run is not None
}

_MOST_OF_IT: Final = 0.5  # a leaf with a smaller part of a rank's excess is not its cause


class Waits(NamedTuple):
    """A rank's waits for others as far as it measures them: the fields of `RankWork` with these names."""

    exposed_ms: Mapping[str, float] | None = None
    unmeasured: tuple[str, ...] = ()
    because: str = ""


def rank_work(
    evidence: RunEvidence,
    *,
    host: str,
    waits: Waits | None = None,
    late: tuple[Mapping[int, float], str] = (MappingProxyType({}), ""),
) -> RankWork:
    """What a rank reports of itself to be compared with the others.

    Args:
        evidence: of the rank.
        host: name of its machine.
        waits: for other ranks, as far as they are measured.
        late: by how many milliseconds its own work was longer than usual, by step, and the region of most of that.
    """
    waits, own = waits or Waits(), self_times(evidence)
    exposed_ms = waits.exposed_ms
    leaves = {name: region.device_ms for name, region in own.regions.items() if name in REGIONS}
    if exposed_ms and SIGTERM_LEAF in exposed_ms and "other" in leaves:
        leaves[SIGTERM_LEAF] = min(exposed_ms[SIGTERM_LEAF], leaves["other"])
        leaves["other"] -= leaves[SIGTERM_LEAF]
    run = LedgerCosts(evidence)
    parts = [part for part in run.leaves() if part_kind(part) not in {*ONCE, STEPS, HANG}]
    inside = {part for part in parts if run.region(part) or part_kind(part) == "gc"}
    leaves |= {part: run.exposed_ms(part) for part in parts if part in inside}
    leaves = _without_garbage(leaves, evidence.timing.step_ms.mean)
    outside = {part: 1e3 * run.seconds(part) / run.steps for part in parts if part not in inside}
    error, (excess_ms, region) = evidence.timing.intervals.get(OWN_WORK), late
    now_and_then = (part for part in inside if run.region(part) == region and run.steps_apart(part) > 1)
    return RankWork(
        rank=evidence.ranks.rank,
        host=host,
        steps=evidence.timing.steps,
        step_ms=evidence.timing.step_ms.mean,
        error_ms=0.0 if error is None else round((error.high_pct - error.low_pct) * own.step_ms / 200, 6),
        on_device=evidence.timing.on_device,
        leaves_ms={name: round(ms, 6) for name, ms in (leaves | outside).items()},
        outside=tuple(outside),
        cpu=own.cpu,
        exposed_ms=None if exposed_ms is None else {name: round(ms, 6) for name, ms in exposed_ms.items()},
        unmeasured=waits.unmeasured,
        unmeasured_because=waits.because,
        starved_pct=evidence.timing.gpu_starved_pct,
        sm_mhz=None if evidence.machine.telemetry is None else evidence.machine.telemetry.sm_mhz,
        throttled_pct=None if evidence.machine.telemetry is None else evidence.machine.telemetry.throttled_pct,
        lines={leaf: lines_in(evidence, leaf)[:1] for leaf in map(whole_part, evidence.lines)},
        excess_ms={step: round(ms, 3) for step, ms in excess_ms.items()},
        excess_leaf=max(now_and_then, key=run.per_step_ms, default=region),
    )


def _without_garbage(leaves_ms: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """The leaves with what they exceed the step taken from its regions: collections, which lie in them."""
    regions_ms = sum(ms for leaf, ms in leaves_ms.items() if leaf in REGIONS)
    collected_ms = sum(ms for leaf, ms in leaves_ms.items() if part_kind(leaf) == "gc")
    over_ms = min(sum(leaves_ms.values()) - step_ms, collected_ms)
    if over_ms <= 0 or regions_ms <= 0:
        return dict(leaves_ms)
    left = max(1 - over_ms / regions_ms, 0.0)
    return {leaf: ms * left if leaf in REGIONS else ms for leaf, ms in leaves_ms.items()}


def with_waits(works: Iterable[RankWork]) -> tuple[RankWork, ...]:
    """The ranks in order, each with how much longer it waits in each leaf than the rank that waits least there."""
    # what all have in common is the exchange itself, in which the last rank is held up, too
    ranks = tuple(sorted(works, key=lambda work: work.rank))
    measured = [work.exposed_ms for work in ranks if work.exposed_ms is not None]
    if len(ranks) < _PAIR or len(measured) < len(ranks):
        return ranks
    least = {leaf: min(one.get(leaf, 0.0) for one in measured) for leaf in {leaf for one in measured for leaf in one}}
    if least:  # but what they wait for each other in turns, each does
        leaf = max(least, key=least.__getitem__)
        least[leaf] = max(least[leaf] - in_turns_ms(ranks), 0.0)
    return tuple(
        replace(
            work,
            waits_ms={
                leaf: round(waits_ms, 6)
                for leaf, ms in exposed_ms.items()
                if (waits_ms := min(ms - least[leaf], work.leaves_ms.get(leaf, 0.0))) > 0
            },
        )
        for work, exposed_ms in zip(ranks, measured, strict=True)
    )


_FEWEST_STEPS: Final = 12


def in_turns_ms(works: Sequence[RankWork]) -> float:
    """How much longer a step takes because ranks are late in different steps: then all wait for one after the other.

    Of the same steps, the mean of the latest rank's excess, less that of the rank which has most.
    """
    steps = set.intersection(*({*work.excess_ms} for work in works)) if works else set()
    if len(works) < _PAIR or len(steps) < _FEWEST_STEPS or any(work.unmeasured for work in works):
        return 0.0
    each = [[work.excess_ms[step] for step in steps] for work in works]
    return fmean(map(max, zip(*each, strict=True))) - max(map(fmean, each))


def late_in_turns(run: RunEvidence) -> Finding | None:
    """Ranks that are late in different steps, with the part of the step in which they are."""
    works, step_ms = run.ranks.works, run.timing.step_ms.mean
    if any(work.exposed_ms is None for work in works) or step_ms <= 0:
        return None
    ms = in_turns_ms(works)
    if 100 * ms < MIN_SHARE_PCT * step_ms:
        return None
    late = [(work, [each for each in work.excess_ms.values() if each]) for work in works]
    some = sorted((each for each in late if each[1]), key=lambda each: -sum(each[1]))[:_MOST_NAMED]
    first, by_ms = some[0][0], fmean(fmean(each) for _, each in some)
    leaf = first.excess_leaf
    often = ((work.rank, 100 * len(each) / len(work.excess_ms)) for work, each in some)
    whose = ", ".join(f"rank {rank} in {pct:.0f} % of the steps" for rank, pct in sorted(often))
    line = next(iter(first.lines.get(leaf, ())), None)
    where = "" if line is None or line.pct < LEAST_PCT else f"; {line.pct:.0f} % of that in {place_of(line)}"
    explained = Explanation(
        f"the ranks are late in turns, and wait {of_step(ms, step_ms)} for each other: {whose}, by {in_ms(by_ms)} in "
        f"{leaf}{where}",
        {"leaf": leaf, "in_turns_ms_per_step": round(ms, 3), "late_by_ms": round(by_ms, 3)},
        "Have all ranks do it in the same steps, as by their number (trainer.global_step % n == 0) and not by chance "
        "or by the clock: then a step waits for one delay, and not for that of each rank. Or spread it: do less of it, "
        "more often.",
    )
    saves = saving(ms, step_ms, at_most=True)
    return replace(as_finding(STRAGGLER, explained, share_pct=100 * ms / step_ms, saves=saves, run=run), rank=None)


def not_measured(works: Collection[RankWork]) -> str:
    """Why nobody can say which rank is late, although ranks differ where waits are not measured; "" if not so."""
    because = next((work.unmeasured_because for work in works if work.unmeasured_because), "")
    if not because or len(works) < _PAIR:
        return ""
    leaves = {leaf for work in works for leaf in (work.leaves_ms if work.exposed_ms is None else work.unmeasured)}
    each = [[work.own_ms(leaf) for work in works] for leaf in leaves]
    most_ms = max((max(own_ms) - min(own_ms) for own_ms in each), default=0.0)
    return because if 100 * most_ms >= MIN_SHARE_PCT * fmean(work.step_ms for work in works) else ""


class _Late(NamedTuple):
    """The rank that the others wait for, and what it takes longer than they, in milliseconds per step."""

    last: RankWork
    others: Sequence[RankWork]
    leaf: str
    waits_ms: float
    error_ms: float  # of the waits
    of: Literal["step", "run"]  # what the waits are a part of
    whole_ms: float
    steps: int

    def others_ms(self, leaf: str | None = None) -> float:
        """What the others take for a leaf, or for all of their own work."""
        return median(work.own_ms(leaf) for work in self.others)

    def excess_ms(self, leaf: str | None = None) -> float:
        """What the rank takes longer than they."""
        return self.last.own_ms(leaf) - self.others_ms(leaf)

    def words(self, ms: float) -> str:
        """Milliseconds per step as a time of the step, or of the whole fit."""
        return in_s(ms * self.steps / 1e3) if self.of == "run" else in_ms(ms)

    @property
    def cause(self) -> str:
        """The leaf in which the rank takes longer, with what makes it longer there as far as that is known."""
        leaf, last = self.leaf, self.last
        waited = None if last.cpu is None else last.cpu.regions.get(leaf)
        if waited is not None and waited.waits_pct / 100 * last.own_ms(leaf) >= _MOST_OF_IT * self.excess_ms(leaf):
            return f"{leaf}, in which it waits for a core"
        if not last.on_device or leaf not in COMPUTE:
            return leaf
        mhz = [work.sm_mhz for work in self.others if work.sm_mhz]
        if last.sm_mhz and mhz and last.sm_mhz < _LOW_CLOCK * median(mhz):
            return f"{leaf}, at {last.sm_mhz:.0f} MHz where the others' GPUs run at {median(mhz):.0f}"
        if last.starved_pct is None:
            return leaf
        return f"{leaf} on the {'host' if last.starved_pct >= _STARVED_PCT else 'GPU'}"


def _late(works: Sequence[RankWork], run: RunEvidence | None = None) -> _Late | None:
    """The rank that the others wait for longer than the figure's error; None if there is none."""
    if len(works) < _PAIR or any(work.exposed_ms is None for work in works):
        return None
    last = max(works, key=RankWork.own_ms)
    others = [work for work in works if work is not last]

    def excess_ms(leaf: str | None = None) -> float:
        return last.own_ms(leaf) - median(work.own_ms(leaf) for work in others)

    leaves = dict.fromkeys(leaf for work in (last, *others) for leaf in work.leaves_ms if leaf not in last.unmeasured)
    leaf = max(leaves, key=excess_ms)
    waits_ms = min(excess_ms(), median(sum(work.waits_ms.values()) for work in others))
    error_ms = (last.error_ms**2 + median(work.error_ms for work in others) ** 2) ** 0.5
    of: Literal["step", "run"] = "step"
    whole_ms, steps = fmean(work.step_ms for work in works), last.steps
    if run is not None:
        costs = LedgerCosts(run)
        steps = costs.steps
        if leaf in last.outside and run.ledger is not None:
            of, whole_ms = "run", 1e3 * costs.whole_s / steps
    if whole_ms <= 0 or 100 * waits_ms < MIN_SHARE_PCT * whole_ms or waits_ms <= error_ms:
        return None
    return _Late(last, others, leaf, waits_ms, error_ms, of, whole_ms, steps)


def late_rank(works: Sequence[RankWork]) -> LateRank | None:
    """The rank that the others wait for, with the cause, of ranks as `with_waits` gives them; None if there is none."""
    found = _late(works)
    return None if found is None else LateRank(rank=found.last.rank, cause=found.cause, ms=found.waits_ms)


def straggler(run: RunEvidence) -> Finding | None:
    """The rank that the others wait for, with the part of its step in which it takes longer."""
    found = _late(run.ranks.works, run)
    if found is None:
        return None
    last, leaf, waits_ms, whole_ms, error_ms = found.last, found.leaf, found.waits_ms, found.whole_ms, found.error_ms
    least_ms = found.others_ms() + _AS_LATE * found.excess_ms()
    also = [work.rank for work in found.others if work.own_ms() >= least_ms]
    if found.of == "run":
        seconds, whole_s = (ms * found.steps / 1e3 for ms in (waits_ms, whole_ms))
        saves: Saving | None = saving_of_fit(seconds, whole_s, found.steps, at_most=bool(also))
    else:
        saves = saving(waits_ms, whole_ms, at_most=bool(also))
    host = {"host": last.host} if len({work.host for work in run.ranks.works}) > 1 else {}
    explained = Explanation(
        _title(found, also, host.get("host", "")),
        {
            "leaf": leaf,
            "cause": found.cause,
            "leaf_ms_per_step": round(last.own_ms(leaf), 3),
            "others_leaf_ms_per_step": round(found.others_ms(leaf), 3),
            "own_ms_per_step": round(last.own_ms(), 3),
            "others_own_ms_per_step": round(found.others_ms(), 3),
            "others_wait_ms_per_step": round(waits_ms, 3),
            "step_ms": round(fmean(work.step_ms for work in run.ranks.works), 3),
            **host,
        },
        _advice(leaf, last, run),
    )
    low_pct, pct, high_pct = (100 * (waits_ms + ms) / whole_ms for ms in (-error_ms, 0.0, error_ms))
    return as_finding(
        STRAGGLER,
        explained,
        share_pct=pct,
        saves=saves,
        run=run,
        rank=last.rank,
        of=found.of,
        between_pct=(max(low_pct, 0.0), min(high_pct, 100.0)) if error_ms else None,
    )


def _title(found: _Late, also: Sequence[int], host: str) -> str:
    last, words, cause = found.last, found.words, found.cause
    who = f"ranks {', '.join(map(str, sorted([*also, last.rank])))}" if also else f"rank {last.rank}"
    whole, a_step = f"of each {words(found.whole_ms)} step", " a step"
    if found.of == "run":
        whole, a_step = f"of the fit's {words(found.whole_ms)}", ""
    leaf: str | None = found.leaf
    what = f"its {cause}{',' * (', ' in cause)}"
    if found.excess_ms(leaf) < _MOST_OF_IT * found.excess_ms():
        what, leaf = f"its own work, most of it in {cause},", None
    title = (
        f"the other ranks wait {words(found.waits_ms)} {whole} for {who}{f' on {host}' if host else ''}: {what} takes "
        f"{words(last.own_ms(leaf))}{a_step}, the others' {words(found.others_ms(leaf))}"
    )
    line = next(iter(last.lines.get(found.leaf, ())), None)
    if line is None or line.pct < LEAST_PCT:
        return title
    return f"{title}; {line.pct:.0f} % of that in {line.file}:{line.line} {line.function}"


def _advice(leaf: str, last: RankWork, run: RunEvidence) -> str:
    """What to do about the leaf: the advice of its own rule where it has one."""
    waits_pct, starved = 0.0 if last.cpu is None else last.cpu.waits_pct or 0.0, ""
    if waits_pct >= MIN_SHARE_PCT:
        starved = (
            f" Rank {last.rank} waited for a core in {waits_pct:.0f} % of its time, which lengthens any part of a step."
        )
    if leaf not in REGIONS:
        return f"{ledger_advice(leaf, run)}{starved}"
    explain = _EXPLAIN.get(leaf)
    if explain is None or (leaf == "transfer" and not run.timing.on_device):
        return f"{compare_advice(last.rank)}{starved}"
    regions = {name: RunRegion(device_ms=last.own_ms(name), host_ms=last.own_ms(name)) for name in REGIONS}
    return f"{explain(RunTimes(run, regions, last.cpu)).advice} {compare_advice(last.rank)}{starved}"


def compare_advice(rank: int) -> str:
    """What to look at where one rank is slower than the others."""
    return (
        f"Compare rank {rank} with the others: uneven batches or sequence lengths, work that only it does "
        "(logging, checkpoints, evaluation), a throttled GPU, a busy host."
    )


def without_rank_waits(run: RunEvidence, late: Finding | None) -> RunEvidence:
    """A rank's regions without its waiting for others, and without what it takes longer if others wait for it."""
    # both are the straggler's finding, and no other one.
    work = next((work for work in run.ranks.works if work.rank == run.ranks.rank), None)
    if work is None:
        return run
    less_ms = dict(work.waits_ms)
    if late is not None:
        last_ms, others_ms = (float(late.evidence[name]) for name in ("own_ms_per_step", "others_own_ms_per_step"))
        leaf = str(late.evidence["leaf"])
        if work.own_ms() - others_ms >= _AS_LATE * (last_ms - others_ms):
            excess_ms = work.own_ms(leaf) - float(late.evidence["others_leaf_ms_per_step"])
            less_ms[leaf] = less_ms.get(leaf, 0.0) + max(excess_ms, 0.0)
    less_ms["other"] = less_ms.get("other", 0.0) + less_ms.get(SIGTERM_LEAF, 0.0)
    for part, ms in work.waits_ms.items():
        if region := hook_region(part):  # which has it, too
            less_ms[region] = less_ms.get(region, 0.0) + ms
    return replace(
        run,
        ledger=run.ledger and _without_waits(run.ledger, work.waits_ms, run),
        timing=replace(
            run.timing,
            regions={
                name: subtract(times, ms := less_ms.get(name, 0.0), ms, p50_ms=ms)
                for name, times in run.timing.regions.items()
            },
        ),
    )


def _without_waits(ledger: RunLedger, waits_ms: Mapping[str, float], run: RunEvidence) -> RunLedger:
    """The ledger with its hooks and loggers, such as `self.log(sync_dist=True)`, without waits for other ranks."""
    counted_s = {part: ms * run.timing.steps / 1e3 for part, ms in waits_ms.items() if part in ledger.parts}
    all_s = {part: s * (run.timing.all_steps or run.timing.steps) / run.timing.steps for part, s in counted_s.items()}
    return replace(
        ledger,
        parts=_less(ledger.parts, all_s),
        counted_s=ledger.counted_s and _less(ledger.counted_s, counted_s),
    )


def _less(parts_s: Mapping[str, float], waits_s: Mapping[str, float]) -> dict[str, float]:
    # a rank waits for others also in the parts inside a checkpoint or a validation, as behind what it has written
    left_s = {part: max(s - waits_s.get(part, 0.0), 0.0) for part, s in parts_s.items()}
    for whole in EXCLUDED:
        more_s = waits_s.get(whole, 0.0) - parts_s.get(whole, 0.0)
        inside = [part for part in parts_s if whole_part(part) == whole != part]
        if inside and more_s > 0:
            left = max(1 - more_s / max(sum(parts_s[part] for part in inside), 1e-9), 0.0)
            left_s |= {part: left_s[part] * left for part in inside}
    return left_s


def beside_straggler(findings: Iterable[Finding], run: RunEvidence, late: Finding | None) -> list[Finding]:
    """Findings on one rank without those that are the straggler's, and of all ranks if each of them has as much."""
    mine = next((work for work in run.ranks.works if work.rank == run.ranks.rank), None)
    if mine is None:
        return list(findings)
    kept = []
    for finding in findings:
        leaf = REGION_OF.get(finding.code) or str(finding.evidence.get("part", ""))
        if late is not None and leaf not in REGIONS and leaf == late.evidence["leaf"]:
            continue  # a hook's times, which are still in the ledger
        if late is not None and not run.timing.on_device and finding.rank == late.rank != run.ranks.rank:
            continue  # a trace's
        least_ms = min(work.own_ms(leaf) for work in run.ranks.works)
        of_all = len(run.ranks.works) == run.ranks.world_size > 1 and least_ms >= mine.own_ms(leaf) / 2 > 0
        kept.append(replace(finding, rank=None) if of_all and finding.source == "run" else finding)
    return kept


# -- in a trace -------------------------------------------------------------------------------------------------------


def trace_straggler(contexts: Sequence[RuleContext]) -> Finding | None:
    """The rank that the others wait for, of those whose collectives could be matched."""
    waited = [(context.wait_ms, context) for context in contexts if context.wait_ms is not None]
    waited.sort(key=itemgetter(0))
    if len(waited) < _PAIR:
        return None
    (own_wait_ms, last), *others_waited = waited
    others = [context for _, context in others_waited]
    waits_ms = fmean(wait_ms for wait_ms, _ in others_waited)
    cost_ms = fmean(context.exposed_wait_ms for context in others)
    step_ms = fmean(context.rank.step_ms.mean for _, context in waited)
    if 100 * cost_ms < MIN_SHARE_PCT * step_ms or own_wait_ms > _STRAGGLES_BELOW * waits_ms:
        return None
    rank, others_compute_ms = last.rank.rank, fmean(context.compute_ms for context in others)
    host_is_late = last.compute_ms - others_compute_ms <= cost_ms / 2
    explained = Explanation(
        f"the other ranks' GPUs do nothing but wait for rank {rank} for {of_step(cost_ms, step_ms)}: "
        f"{'its host is late' if host_is_late else 'its GPU computes longer'}",
        {
            "late": "host" if host_is_late else "gpu",
            "others_wait_exposed_ms_per_step": cost_ms,
            "others_wait_ms_per_step": waits_ms,
            "own_wait_ms_per_step": own_wait_ms,
            "own_compute_ms_per_step": last.compute_ms,
            "others_compute_ms_per_step": others_compute_ms,
        },
        compare_advice(rank),
    )
    saves = saving(cost_ms, step_ms, at_most=False)
    return as_finding(STRAGGLER, explained, share_pct=100 * cost_ms / step_ms, saves=saves, rank=rank)


def keeps_waiting(finding: Finding) -> bool:
    """Whether the GPU waits for the host in what a finding is of, the data loader apart."""
    return finding.code in _HOST_WAITS or finding.evidence.get("waits_for") == "host"


def part_of(straggler: Finding, finding: Finding) -> Finding:
    """A late rank's own waits for its host are what the others wait for, and no second thing to fix."""
    if finding.rank != straggler.rank or not keeps_waiting(finding) or straggler.evidence.get("late") == "gpu":
        return finding
    advice = f"This makes rank {finding.rank} late: see straggler, whose fix saves this time."
    return replace(finding, advice=advice, fix="", saves=None)


# -- many ranks in few numbers -----------------------------------------------------------------------------------------

MOST_SHOWN: Final = 16  # two machines of eight GPUs: a table of more is not read

_FEWEST_FOR_P95: Final = 20


def spread(ranks: Sequence[RankSummary], waits: Iterable[RankWait]) -> dict[str, Distribution]:
    """Distributions over the ranks of their mean times per step, in milliseconds; {} without ranks."""
    figures = {
        "step": [rank.step_ms.mean for rank in ranks],
        "busy": [rank.gpu.busy_ms_per_step for rank in ranks],
        "idle": [rank.gpu.idle_ms_per_step for rank in ranks],
        "comm": [rank.categories["comm"].ms_per_step for rank in ranks],
        "waits": [wait.wait_ms_per_step for wait in waits],
    }
    return {name: _distribution(values) for name, values in figures.items() if values}


def _distribution(values: Sequence[float]) -> Distribution:
    return Distribution(
        mean=fmean(values),
        p50=median(values),
        min=min(values),
        max=max(values),
        p95=quantiles(values, n=20, method="inclusive")[-1] if len(values) >= _FEWEST_FOR_P95 else None,
    )


def shown(
    ranks: Sequence[RankSummary], waits: Iterable[RankWait], findings: Iterable[Finding], hints: Iterable[Hint]
) -> tuple[RankSummary, ...]:
    """Those of many ranks that a report shows, by number: rank 0, those that are named, a typical one, the worst."""
    if len(ranks) <= MOST_SHOWN:
        return tuple(ranks)
    of_rank = {rank.rank: rank for rank in ranks}
    by_step = sorted(ranks, key=lambda rank: rank.step_ms.mean)
    named = [ranks[0].rank, *_named(findings), *_named(hints), by_step[len(by_step) // 2].rank]
    worst = (
        [wait.rank for wait in sorted(waits, key=attrgetter("wait_ms_per_step"))],  # that others wait for
        [rank.rank for rank in reversed(by_step)],
        [rank.rank for rank in sorted(ranks, key=lambda rank: -rank.gpu.idle_ms_per_step)],
        [rank.rank for rank in sorted(ranks, key=lambda rank: -rank.gpu.busy_ms_per_step)],
    )
    by_turns = dict.fromkeys((*named, *chain.from_iterable(zip_longest(*worst))))
    chosen = islice((number for number in by_turns if number in of_rank), MOST_SHOWN)
    return tuple(of_rank[number] for number in sorted(chosen))


def _named(marks: Iterable[Finding | Hint]) -> list[int]:
    return [mark.rank for mark in marks if mark.rank is not None]


def rank_list(numbers: Iterable[int]) -> str:
    """Ranks in words.

    Examples:
        >>> rank_list([3]), rank_list([0, 1, 2, 3, 7])
        ('rank 3', 'ranks 0 to 3, 7')
    """
    numbers = sorted(numbers)
    starts = [place for place, number in enumerate(numbers) if not place or number != numbers[place - 1] + 1]
    runs = [numbers[start:end] for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > _PAIR else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(parts)}"
