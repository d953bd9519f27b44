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
    MIN_STEPS,
    NAMED_FROM_PCT,
    REGION_OF,
    Rule,
    RuleContext,
    as_finding,
    in_ms,
    in_s,
    replayed_saving,
    saving,
)
from lightning_forge_profiling.diagnosis.where import located
from lightning_forge_profiling.schema import Finding, RankSummary, RankWait, RunEvidence, Saving

_GPU_RULES: Final = (*loader.GPU_RULES, *host_rules.GPU_RULES, *optimizer.GPU_RULES, *compute.GPU_RULES)
# for a rank with GPU work. A straggler takes all ranks together: `ranks.py`.
TRACE_RULES: Final = (*_GPU_RULES, host_rules.largest_idle(_GPU_RULES))

# for a rank without GPU work, beside `INPUT_IN_TRACE`: each part of its step belongs to one of them
CPU_RULES: Final = (*optimizer.CPU_RULES, *compute.CPU_RULES, *host_rules.CPU_RULES)

RUN_RULES: Final = (*loader.RUN_RULES, *optimizer.RUN_RULES, *host_rules.RUN_RULES, *compute.RUN_RULES)

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
    rules = TRACE_RULES if on_gpu else (*CPU_RULES, loader.INPUT_IN_TRACE)
    return [finding for rule in rules if (finding := _worst(rule, contexts, on_gpu=on_gpu)) is not None]


def _contexts(ranks: Sequence[RankSummary], waits: Sequence[RankWait]) -> list[RuleContext]:
    wait_ms = {wait.rank: wait.wait_ms_per_step for wait in waits}
    least_ms = min((rank.comm.exposed_ms_per_step for rank in ranks if rank.rank in wait_ms), default=None)
    return [RuleContext(rank, wait_ms.get(rank.rank), least_ms) for rank in ranks]


def _worst(rule: Rule[RuleContext], contexts: Sequence[RuleContext], *, on_gpu: bool) -> Finding | None:
    """A rule's finding, in the words of the rank that it costs most."""
    # beside ranks that use a GPU, one without has nothing that waits, except for data
    costs = [
        context.pct(rule.cost(context)) if context.on_gpu == on_gpu or rule is loader.INPUT_IN_TRACE else 0.0
        for context in contexts
    ]
    over = sum(cost >= NAMED_FROM_PCT for cost in costs)
    if not over:
        return None
    worst_pct, mean_pct = max(costs), sum(costs) / len(costs)
    context = contexts[costs.index(worst_pct)]
    rank, alone = context.rank, over == 1 < len(contexts)
    finding = as_finding(
        rule, context, step_ms=rank.step_ms.mean, share_pct=mean_pct, source="trace", rank=rank.rank if alone else None
    )
    saves = replayed_saving(rank.replay, rule.code) or finding.saves
    finding = replace(located(finding, rank), saves=_at_the_others_pace(saves, rule, context, contexts))
    where = "" if alone or len(contexts) == 1 else f"on rank {rank.rank} "
    differ = ""
    if worst_pct - mean_pct > _RANKS_DIFFER_PCT:  # the sentence is of one rank, the share is not
        differ = f"; that costs {worst_pct:.0f} % of its step, {mean_pct:.0f} % on the mean of these {len(costs)} ranks"
    return replace(finding, title=f"{where}{finding.title}{differ}")


def _at_the_others_pace(
    saves: Saving | None, rule: Rule[RuleContext], context: RuleContext, contexts: Sequence[RuleContext]
) -> Saving | None:
    """A rank's saving, but no more than each other rank saves, by the same fix and of its waits for others."""
    if saves is None or len(contexts) == 1 or any(other.wait_ms is None for other in contexts):
        return saves
    others = (other for other in contexts if other is not context)
    own = ((other, replayed_saving(other.rank.replay, rule.code)) for other in others)
    most_ms = min((saved.ms_per_step if saved else rule.cost(other)) + other.exposed_wait_ms for other, saved in own)
    if saves.ms_per_step <= _SAME * most_ms:
        return saves
    return saving(most_ms, context.rank.step_ms.mean, at_most=True)


def run_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """What costs at least `NAMED_FROM_PCT` of a step. No two findings count the same time, those of hooks included."""
    return _of_run(RUN_RULES, run)


def cpu_work(run: RunEvidence) -> tuple[Finding, ...]:
    """What a step on the CPU computes, as a finding beside others: without the waits, and without what those name."""
    return () if run.timing.on_device else _of_run((compute.CPU_WORK,), run)


def _of_run(rules: Sequence[Rule[RunEvidence]], run: RunEvidence) -> tuple[Finding, ...]:
    step_ms = run.timing.step_ms.mean
    if run.timing.steps < MIN_STEPS or step_ms <= 0:
        return ()
    run = self_times(run)
    costs = [(rule, 100 * rule.cost(run) / step_ms) for rule in rules]
    return tuple(_run_finding(rule, run, share_pct) for rule, share_pct in costs if share_pct >= NAMED_FROM_PCT)


def _run_finding(rule: Rule[RunEvidence], run: RunEvidence, share_pct: float) -> Finding:
    step, rank = run.timing.step_ms, run.ranks.rank if run.ranks.world_size > 1 else None
    finding = as_finding(rule, run, step_ms=step.mean, share_pct=share_pct, source="run", rank=rank)
    numbers = {**finding.evidence, "step_ms": step.mean, "median_step_ms": step.p50, "steps": run.timing.steps}
    if run.timing.gpu_starved_pct is not None:
        numbers["gpu_starved_pct"] = run.timing.gpu_starved_pct
    if rule is loader.WORKER_RESTARTS and finding.saves is not None:  # which do not come in each step
        saved, steps = (in_s(ms * run.timing.steps / 1e3) for ms in (finding.saves.ms_per_step, step.mean))
        text = f"That saves about {saved} of the {steps} that the steps take ({finding.saves.pct:.0f} %)."
        finding = replace(finding, saves=replace(finding.saves, text=text))
    times = run.timing.regions.get(REGION_OF.get(finding.code, ""))
    if times is not None and times.p50_ms is not None and times.p50_ms < times.device_ms / 2:
        finding = replace(finding, title=f"{finding.title}; {in_ms(times.p50_ms)} in the median step")
    rounded = {name: value if isinstance(value, str) else round(value, 3) for name, value in numbers.items()}
    return replace(finding, evidence=rounded)
