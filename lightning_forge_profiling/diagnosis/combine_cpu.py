"""Findings of a trace without GPU work, merged with the run, which decides how long each part takes."""

from dataclasses import replace

from lightning_forge_profiling.diagnosis.cpu_rules import CPU_RULES, PYTHON_BOUND
from lightning_forge_profiling.diagnosis.differences import (
    DIFFER_BY_PCT,
    SLOWED_FROM,
    disagreement,
    recorded_shorter,
    recorded_slower,
)
from lightning_forge_profiling.diagnosis.ledger_rules import hooks_pct, self_times
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, finding
from lightning_forge_profiling.diagnosis.rule_context import RuleContext
from lightning_forge_profiling.diagnosis.run_regions import share_pct
from lightning_forge_profiling.diagnosis.run_rules import BETWEEN_REGIONS, blocked_ms, run_findings
from lightning_forge_profiling.results.analysis import Finding, RunEvidence
from lightning_forge_profiling.results.cpu import CpuTime
from lightning_forge_profiling.results.rank import RankSummary

_SLOW_OPTIMIZER = "slow-optimizer"

_WITH_PYTHON = ("transfer", "forward", "backward", "optimizer", "other")
"""The regions whose time outside of operators is Python's."""


def without_gpu_work(
    traced: tuple[Finding, ...], recorded: RankSummary | None, evidence: RunEvidence, of_ranks_ms: float = 0.0
) -> tuple[list[Finding], list[str]]:
    """Merge findings where the trace has no GPU work. On the run's own rank, it knows no more of waits than the run.

    `of_ranks_ms` is the part of the live step that the regions lack: this rank waits for others, or they for it.
    """
    rank = recorded.rank if recorded else 0
    live = {found.code: found for found in run_findings(evidence)}
    others = [found for found in traced if found.code not in live and found.rank not in {None, rank}]
    mine = [found for found in traced if found.code == "input-bound" and found.rank in {None, rank}]
    of_cpu, differences = _of_cpu(traced, recorded, evidence, of_ranks_ms)
    python = next((found for found in of_cpu if found.code == PYTHON_BOUND), None)
    if python is not None and BETWEEN_REGIONS in live:  # they overlap: keep the one that explains more
        mostly = live[BETWEEN_REGIONS].share_pct > python.share_pct / 2
        of_cpu = [found for found in of_cpu if found is not python or not mostly]
        live = {code: found for code, found in live.items() if code != BETWEEN_REGIONS or mostly}
    for found in of_cpu:
        live.pop(found.code, None)  # the trace shows how the update is computed
    others += of_cpu
    if "data" not in evidence.regions:  # the region was not timed
        return [*mine, *others, *live.values()], differences
    if mine and "input-bound" in live and not evidence.on_device and evidence.loader is None:
        # the trace's advice knows the loader
        live["input-bound"] = replace(live["input-bound"], advice=mine[0].advice)
    in_run = share_pct(evidence, "data")
    in_trace = max((found.share_pct for found in mine), default=NAMED_FROM_PCT)
    far = abs(in_run - in_trace) > DIFFER_BY_PCT
    differences += [disagreement("input-bound", mine, in_run, evidence)] if far else []
    return [*live.values(), *others], differences


def _of_cpu(
    traced: tuple[Finding, ...], recorded: RankSummary | None, evidence: RunEvidence, of_ranks_ms: float
) -> tuple[list[Finding], list[str]]:
    """Findings on operators and Python, from the trace; converted to the live step where that differs.

    It differs where recording changed the step time, or where the run's region `optimizer` has another share than the
    trace's.
    """
    if recorded is None or recorded.cpu is None or evidence.on_device:
        return [], []
    mine = {
        found.code: found
        for found in traced
        if found.code in {rule.code for rule in CPU_RULES} and found.rank in {None, recorded.rank}
    }
    step, live = recorded.step_ms, evidence.step_ms
    slowed = step.mean > SLOWED_FROM * live.mean and step.p50 > SLOWED_FROM * live.p50
    changed = slowed or step.mean * SLOWED_FROM < live.mean
    update = [mine[_SLOW_OPTIMIZER]] if _SLOW_OPTIMIZER in mine else []
    in_run_pct = share_pct(evidence, "optimizer")
    of_update = "optimizer" in evidence.regions and update and abs(update[0].share_pct - in_run_pct) > DIFFER_BY_PCT
    own = self_times(evidence)
    hooks_ms = hooks_pct(evidence, *_WITH_PYTHON) * live.mean / 100 + blocked_ms(own) + of_ranks_ms
    if not changed and not of_update and 100 * hooks_ms < NAMED_FROM_PCT * live.mean:
        known = RuleContext(recorded, run=evidence)
        advice = {rule.code: rule.explain(known).advice for rule in CPU_RULES if rule.code in mine}
        return [replace(found, advice=advice[code]) for code, found in mine.items()], []
    context = _live_cpu(recorded, recorded.cpu, own, hooks_ms)
    several = evidence.world_size > 1
    findings = []
    for rule in CPU_RULES:
        pct = context.pct(rule.cost(context))
        if rule.code in mine and pct >= NAMED_FROM_PCT:
            rank = recorded.rank if several else mine[rule.code].rank
            found = finding(rule, context, step_ms=live.mean, share_pct=pct, source="trace", rank=rank)
            recorded_pct = round(mine[rule.code].share_pct, 3)
            findings.append(replace(found, evidence={**found.evidence, "share_of_recorded_step_pct": recorded_pct}))
    if not changed:
        return findings, [disagreement(_SLOW_OPTIMIZER, update, in_run_pct, evidence)] if of_update else []
    return findings, [(recorded_slower if slowed else recorded_shorter)(step.mean, evidence)]


def _live_cpu(recorded: RankSummary, cpu: CpuTime, evidence: RunEvidence, hooks_ms: float) -> RuleContext:
    """CPU times of a live step without hooks and waits: loader and update as in the run, the rest bounds the others."""
    live_ms = evidence.step_ms.mean
    regions = {name: region.device_ms for name, region in evidence.regions.items()}
    data_ms = regions.get("data", cpu.data_ms_per_step)
    update_ms = regions.get("optimizer", cpu.optimizer_ms_per_step)
    added_ms = max(recorded.step_ms.mean - live_ms, 0.0)
    python_ms = max(cpu.python_ms_per_step - added_ms - hooks_ms, 0.0)  # assumes that recording slows only Python
    operators_ms = live_ms - hooks_ms - data_ms - update_ms - max(python_ms, regions.get("other", 0.0))
    operators_ms = min(cpu.operators_ms_per_step, max(operators_ms, 0.0))
    scale = operators_ms / cpu.operators_ms_per_step if cpu.operators_ms_per_step else 0.0
    live_cpu = replace(
        cpu,
        data_ms_per_step=data_ms,
        optimizer_ms_per_step=min(update_ms, live_ms),
        operators_ms_per_step=operators_ms,
        python_ms_per_step=min(python_ms, live_ms),
        costliest_ms_per_step={name: ms * scale for name, ms in cpu.costliest_ms_per_step.items()},
    )
    return RuleContext(replace(recorded, step_ms=evidence.step_ms, cpu=live_cpu), live=True, run=evidence)
