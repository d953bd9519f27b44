"""The rules applied to every rank of a trace, and the ranks compared."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from lightning_forge_profiling.diagnosis.cpu_rules import CPU_RULES
from lightning_forge_profiling.diagnosis.ranks import compare_advice
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, Rule, RuleContext, finding, in_ms, located, saving
from lightning_forge_profiling.diagnosis.trace_rules import INPUT_BOUND, TRACE_RULES
from lightning_forge_profiling.results.analysis import Finding, RankWait
from lightning_forge_profiling.results.rank import RankSummary

HOST_WAITS: Final = frozenset({"launch-bound", "sync-bound", "allocator-churn", "slow-optimizer", "slow-launches"})
"""What keeps the GPU waiting for the host, the data loader apart."""

_PAIR: Final = 2
_RANKS_DIFFER_PCT: Final = 1.0
"""From here on a finding's sentence says the share of both, the rank that it is of and the mean."""
_STRAGGLES_BELOW: Final = 0.25
"""The rank that others wait for waits itself less than this part of what they do; ranks that wait for each other by
turns do not differ so much."""


def find_causes(ranks: Sequence[RankSummary], waits: Sequence[RankWait] = ()) -> list[Finding]:
    """Apply the rules to every rank, and compare the ranks.

    A finding's share of the step is the mean over the ranks. Where a cause is found on one of several ranks only, the
    finding names it.
    """
    findings = rank_causes(ranks, waits)
    straggler = _straggler(_contexts(ranks, waits))
    return findings if straggler is None else [*(part_of(straggler, found) for found in findings), straggler]


def rank_causes(ranks: Sequence[RankSummary], waits: Sequence[RankWait] = ()) -> list[Finding]:
    """`find_causes` without a straggler."""
    contexts = _contexts(ranks, waits)
    on_gpu = any(context.on_gpu for context in contexts)
    rules = TRACE_RULES if on_gpu else (*CPU_RULES, INPUT_BOUND)
    return [found for rule in rules if (found := _apply(rule, contexts, on_gpu=on_gpu)) is not None]


def _contexts(ranks: Sequence[RankSummary], waits: Sequence[RankWait]) -> list[RuleContext]:
    wait_ms = {wait.rank: wait.wait_ms_per_step for wait in waits}
    least_ms = min((rank.comm.exposed_ms_per_step for rank in ranks if rank.rank in wait_ms), default=None)
    return [RuleContext(rank, wait_ms.get(rank.rank), least_ms) for rank in ranks]


def _apply(rule: Rule[RuleContext], contexts: Sequence[RuleContext], *, on_gpu: bool) -> Finding | None:
    # beside ranks that use a GPU, one without has nothing that waits, except for data
    applies = [context.on_gpu == on_gpu or rule is INPUT_BOUND for context in contexts]
    costs = [
        context.pct(rule.cost(context)) if applied else 0.0 for context, applied in zip(contexts, applies, strict=True)
    ]
    over = sum(cost >= NAMED_FROM_PCT for cost in costs)
    if not over:
        return None
    worst_pct, mean_pct = max(costs), sum(costs) / len(costs)
    worst = contexts[costs.index(worst_pct)]
    alone, number = over == 1 < len(contexts), worst.rank.rank
    found = finding(
        rule,
        worst,
        step_ms=worst.rank.step_ms.mean,
        share_pct=mean_pct,
        source="trace",
        rank=number if alone else None,
    )
    found = located(found, worst.rank)
    where = "" if alone or len(contexts) == 1 else f"on rank {number} "
    differ = ""
    if worst_pct - mean_pct > _RANKS_DIFFER_PCT:  # the sentence is of one rank, the share is not
        differ = f"; that costs {worst_pct:.0f} % of its step, {mean_pct:.0f} % averaged over all {len(costs)} ranks"
    return replace(found, title=f"{where}{found.title}{differ}")


def _straggler(contexts: Sequence[RuleContext]) -> Finding | None:
    """The rank that the others wait for, of those whose collectives could be matched."""
    waited = sorted(((one.wait_ms, one) for one in contexts if one.wait_ms is not None), key=itemgetter(0))
    if len(waited) < _PAIR:
        return None
    (own_wait, last), *others_waited = waited
    others = [one for _, one in others_waited]
    waits = sum(wait for wait, _ in others_waited) / len(others)
    cost = sum(one.exposed_wait_ms for one in others) / len(others)
    step = sum(one.rank.step_ms.mean for _, one in waited) / len(waited)
    if 100 * cost < NAMED_FROM_PCT * step or own_wait > _STRAGGLES_BELOW * waits:
        return None
    rank = last.rank.rank
    others_compute = sum(one.compute_ms for one in others) / len(others)
    late = last.compute_ms - others_compute <= cost / 2
    return Finding(
        code="straggler",
        share_pct=100 * cost / step,
        rank=rank,
        source="trace",
        title=f"the other ranks' GPUs do nothing but wait for rank {rank} for {in_ms(cost)} of each {in_ms(step)} "
        f"step: {'its host is late' if late else 'its GPU computes longer'}",
        evidence={
            "late": "host" if late else "gpu",
            "others_wait_exposed_ms_per_step": cost,
            "others_wait_ms_per_step": waits,
            "own_wait_ms_per_step": own_wait,
            "own_compute_ms_per_step": last.compute_ms,
            "others_compute_ms_per_step": others_compute,
        },
        advice=compare_advice(rank),
        saves=saving(cost, step, at_most=False),
    )


def part_of(straggler: Finding, found: Finding) -> Finding:
    """A late rank's own waits for its host are what the others wait for, and no second thing to fix."""
    if found.rank != straggler.rank or found.code not in HOST_WAITS or straggler.evidence.get("late") == "gpu":
        return found
    advice = f"This makes rank {found.rank} late: see straggler, whose fix saves this time."
    return replace(found, advice=advice, saves=None)
