"""The rules applied to every rank, and the ranks compared."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from lightning_forge_profiling.diagnosis.cpu_rules import CPU_RULES
from lightning_forge_profiling.diagnosis.late_rank import GPU_IS_SLOWER
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, Rule, Seen, in_ms
from lightning_forge_profiling.diagnosis.trace_rules import RULES, WITHOUT_GPU
from lightning_forge_profiling.results.analysis import Finding, RankWait
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.saving import Saving, saving

__all__ = ["find_causes"]

_PAIR: Final = 2
_RANKS_DIFFER_PCT: Final = 1.0
"""From here on a finding's sentence says the share of both, the rank that it is of and the mean."""
_STRAGGLES_BELOW: Final = 0.25
"""The rank that others wait for waits itself less than this part of what they do; ranks that wait for each other by
turns do not differ so much."""


def find_causes(ranks: Sequence[RankSummary], waits: Sequence[RankWait] = ()) -> list[Finding]:
    """Apply the rules to every rank.

    A finding's share of the step is the mean over the ranks. Where a cause is found on one of several ranks only, the
    finding names it.

    Args:
        ranks: the figures of each rank.
        waits: how long each waited for others.
    """
    wait_ms = {wait.rank: wait.wait_ms_per_step for wait in waits}
    seen = [Seen(rank, wait_ms.get(rank.rank)) for rank in ranks]
    rules = RULES if any(map(_used_gpu, seen)) else (*RULES, *CPU_RULES)
    findings = [found for rule in rules if (found := _apply(rule, seen)) is not None]
    straggler = _straggler(seen) if waits else None
    return [*findings, *([straggler] if straggler else [])]


def _apply(rule: Rule, seen: Sequence[Seen]) -> Finding | None:
    costs = [_cost_pct(rule, one) for one in seen]
    over = [one for one, cost in zip(seen, costs, strict=True) if cost >= NAMED_FROM_PCT]
    if not over:
        return None
    worst = max(over, key=lambda one: _cost_pct(rule, one))
    title, evidence, advice = rule.describe(worst)
    alone = len(over) == 1 < len(seen)
    mean_pct, worst_pct = sum(costs) / len(costs), max(costs)
    if worst_pct - mean_pct > _RANKS_DIFFER_PCT:  # the sentence is of one rank, the share is not
        title += f"; that costs {worst_pct:.0f} % of its step, {mean_pct:.0f} % on the mean of all {len(seen)} ranks"
    return Finding(
        code=rule.code,
        share_pct=mean_pct,
        rank=worst.rank.rank if alone else None,
        source="trace",
        title=title if alone or len(seen) == 1 else f"on rank {worst.rank.rank} {title}",
        evidence=evidence,
        advice=advice,
        saves=_saving(rule, worst),
    )


def _saving(rule: Rule, seen: Seen) -> Saving | None:
    saves_ms = None if rule.saves_ms is None else rule.saves_ms(seen)
    return saving(saves_ms, seen.rank.step_ms.mean, at_most=rule.at_most(seen), cost_ms=rule.cost_ms(seen))


def _cost_pct(rule: Rule, seen: Seen) -> float:
    """Without a GPU there is nothing that waits, except for data."""
    applies = _used_gpu(seen) or rule.code == WITHOUT_GPU or rule in CPU_RULES
    return seen.pct(rule.cost_ms(seen)) if applies else 0.0


def _used_gpu(seen: Seen) -> bool:
    return seen.rank.gpu.busy_ms_per_step > 0


def _straggler(seen: Sequence[Seen]) -> Finding | None:
    """The rank that the others wait for, of those whose collectives could be matched."""
    waited = sorted(((one.wait_ms, one) for one in seen if one.wait_ms is not None), key=itemgetter(0))
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
    why = GPU_IS_SLOWER if last.compute_ms - others_compute > cost / 2 else "its host is late"
    return Finding(
        code="straggler",
        share_pct=100 * cost / step,
        rank=rank,
        source="trace",
        title=f"the other ranks' GPUs do nothing but wait for rank {rank} for {in_ms(cost)} of each {in_ms(step)} "
        f"step: {why}",
        evidence={
            "others_wait_exposed_ms_per_step": cost,
            "others_wait_ms_per_step": waits,
            "own_wait_ms_per_step": own_wait,
            "own_compute_ms_per_step": last.compute_ms,
            "others_compute_ms_per_step": others_compute,
        },
        advice=f"Compare rank {rank} with the others: uneven batches or sequence lengths, work that only it does "
        "(logging, checkpoints, evaluation), a throttled GPU, a busy host.",
        saves=saving(cost, step, at_most=False),
    )
