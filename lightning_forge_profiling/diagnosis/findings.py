"""The rules, applied to every rank of a trace and to a whole run.

The regions of a run show neither what the GPU does while it works nor what the host does between launches. So its rules
name fewer causes than those of a trace, and say which ones they cannot distinguish.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis import compute, host_rules, loader, optimizer
from lightning_forge_profiling.diagnosis.ledger_costs import self_times
from lightning_forge_profiling.diagnosis.ranks import part_of, trace_straggler
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    MIN_STEPS,
    REGION_OF,
    Case,
    Explanation,
    Rule,
    RuleContext,
    RunTimes,
    as_finding,
    in_ms,
    in_s,
    replayed_saving,
    saving,
)
from lightning_forge_profiling.diagnosis.verdict import located
from lightning_forge_profiling.schema import Finding, RankSummary, RankWait, RunEvidence, Saving

_RULES: Final = (*loader.RULES, *host_rules.RULES, *optimizer.RULES, *compute.RULES)
# by cause; a straggler takes all ranks together (`ranks.py`), and others are outside the step (`ledger_rules.py`)
RULES: Final = (*_RULES, host_rules.largest_idle(_RULES))

# from here on a finding's sentence says the share of both, the rank that it is of and the mean
_RANKS_DIFFER_PCT: Final = 1.0

_SAME: Final = 1.2  # ranks whose predicted savings are up to this ratio apart differ by what predictions are off


def find_causes(ranks: Sequence[RankSummary], waits: Sequence[RankWait] = ()) -> list[Finding]:
    """Apply the rules to every rank, and compare the ranks."""
    # a finding's share of the step is the mean over the ranks. Where a cause is found on one of several ranks only, the
    # finding names it.
    findings = rank_causes(ranks, waits)
    straggler = trace_straggler(_contexts(ranks, waits))
    return findings if straggler is None else [*(part_of(straggler, finding) for finding in findings), straggler]


def rank_causes(ranks: Sequence[RankSummary], waits: Sequence[RankWait] = ()) -> list[Finding]:
    """`find_causes` without a straggler."""
    contexts = _contexts(ranks, waits)
    on_gpu = any(context.on_gpu for context in contexts)
    return [finding for rule in RULES if (finding := _worst(rule, contexts, on_gpu=on_gpu)) is not None]


def _contexts(ranks: Sequence[RankSummary], waits: Sequence[RankWait]) -> list[RuleContext]:
    wait_ms = {wait.rank: wait.wait_ms_per_step for wait in waits}
    least_ms = min((rank.comm.exposed_ms_per_step for rank in ranks if rank.rank in wait_ms), default=None)
    return [RuleContext(rank, wait_ms.get(rank.rank), least_ms) for rank in ranks]


def _worst(rule: Rule, contexts: Sequence[RuleContext], *, on_gpu: bool) -> Finding | None:
    """A rule's finding, in the words of the rank that it costs most."""
    case = rule.gpu if on_gpu else rule.cpu
    if case is None:
        return None
    # beside ranks that use a GPU, one without has nothing that waits, except for data
    shows = [rule.gpu is rule.cpu or (each.on_gpu if on_gpu else each.rank.cpu is not None) for each in contexts]
    costs = [context.pct(case.cost(context)) if here else 0.0 for context, here in zip(contexts, shows, strict=True)]
    over = sum(cost >= MIN_SHARE_PCT for cost in costs)
    if not over:
        return None
    worst_pct, mean_pct = max(costs), sum(costs) / len(costs)
    context = contexts[costs.index(worst_pct)]
    rank, alone = context.rank, over == 1 < len(contexts)
    saves = replayed_saving(rank.replay, rule.code) or case.saving(context, rank.step_ms.mean)
    others = [other for other in contexts if other is not context]
    if saves is not None and others and all(other.wait_ms is not None for other in contexts):
        saves = _at_the_others_pace(saves, rule.code, case, context, others)
    finding = located(
        as_finding(
            rule.code, case.explain(context), share_pct=mean_pct, saves=saves, rank=rank.rank if alone else None
        ),
        rank,
    )
    where = "" if alone or len(contexts) == 1 else f"on rank {rank.rank} "
    differ = ""
    if worst_pct - mean_pct > _RANKS_DIFFER_PCT:  # the sentence is of one rank, the share is not
        differ = f"; that costs {worst_pct:.0f} % of its step, {mean_pct:.0f} % on the mean of these {len(costs)} ranks"
    return replace(finding, title=f"{where}{finding.title}{differ}")


def _at_the_others_pace(
    saves: Saving, code: str, case: Case[RuleContext], context: RuleContext, others: Sequence[RuleContext]
) -> Saving | None:
    """A rank's saving, but no more than each other rank saves, by the same fix and of its waits for others."""
    own = ((other, replayed_saving(other.rank.replay, code)) for other in others)
    most_ms = min((saved.ms_per_step if saved else case.cost(other)) + other.exposed_wait_ms for other, saved in own)
    if saves.ms_per_step <= _SAME * most_ms:
        return saves
    return saving(most_ms, context.rank.step_ms.mean, at_most=True)


def run_findings(run: RunEvidence, rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """What costs at least `MIN_SHARE_PCT` of a step. No two findings count the same time, those of hooks included."""
    step_ms = run.timing.step_ms.mean
    if run.timing.steps < MIN_STEPS or step_ms <= 0:
        return ()
    times = self_times(run)
    costs = [(rule, case, 100 * case.cost(times) / step_ms) for rule in rules if (case := rule.run) is not None]
    return tuple(_run_finding(rule.code, case, times, pct) for rule, case, pct in costs if pct >= MIN_SHARE_PCT)


def _run_finding(code: str, case: Case[RunTimes], times: RunTimes, share_pct: float) -> Finding:
    timing, explained = times.evidence.timing, case.explain(times)
    step, saves, title = timing.step_ms, case.saving(times, timing.step_ms.mean), explained.title
    numbers = {**explained.evidence, "step_ms": step.mean, "median_step_ms": step.p50, "steps": timing.steps}
    if timing.gpu_starved_pct is not None:
        numbers["gpu_starved_pct"] = timing.gpu_starved_pct
    if code == "worker-restarts" and saves is not None:  # which do not come in each step
        saved, steps = (in_s(ms * timing.steps / 1e3) for ms in (saves.ms_per_step, step.mean))
        text = f"That saves about {saved} of the {steps} that the steps take ({saves.pct:.0f} %)."
        saves = replace(saves, text=text)
    region = times.regions.get(REGION_OF.get(code, ""))
    if region is not None and region.p50_ms is not None and region.p50_ms < region.device_ms / 2:
        title += f"; {in_ms(region.p50_ms)} in the median step"
    rounded = {name: value if isinstance(value, str) else round(value, 3) for name, value in numbers.items()}
    explained = Explanation(title, rounded, explained.advice, explained.fix)
    return as_finding(code, explained, share_pct=share_pct, saves=saves, run=times.evidence)
