"""One list of findings from a trace and from the whole run.

A trace has the kernels and calls of few steps, which recording slows. The run has the regions of many steps, which it
does not slow. So the trace decides what the cause is, the run how long a step takes, and `differences` says where the
two disagree. Without a GPU the run decides about waiting; operators and Python are in the trace alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from lightning_forge_profiling.diagnosis.cpu_rules import CPU_RULES, PYTHON_BOUND
from lightning_forge_profiling.diagnosis.findings import HOST_WAITS, part_of, rank_causes
from lightning_forge_profiling.diagnosis.hints import run_hints, switch_hints, switched_on
from lightning_forge_profiling.diagnosis.ledger_rules import (
    hooks_pct,
    in_steps_pct,
    ledger_findings,
    self_times,
    together,
)
from lightning_forge_profiling.diagnosis.machine_rules import before_all
from lightning_forge_profiling.diagnosis.ranks import STRAGGLER, beside_straggler, own_times, straggler, with_waits
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    NAMED_FROM_PCT,
    RuleContext,
    finding,
    in_ms,
    located,
    saving,
    share_pct,
)
from lightning_forge_profiling.diagnosis.run_rules import (
    BETWEEN_REGIONS,
    MIN_STEPS,
    WORKER_RESTARTS,
    blocked_ms,
    computing,
    run_findings,
)
from lightning_forge_profiling.diagnosis.sampled_lines import with_lines
from lightning_forge_profiling.diagnosis.verdict import by_gain, certain_first, decide, is_certain, with_intervals
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.results.analysis import NOTHING_STANDS_OUT, Analysis, Finding, RunEvidence
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.run import CpuTime

SLOWED_FROM: Final = 1.1
"""From this ratio of recorded to live steps on, the trace's shares are converted to the live step."""

DIFFER_BY_PCT: Final = 5.0
"""Percentage points from which shares of a step are reported as different. A window of few steps varies by less."""


def recorded_shorter(recorded_ms: float, evidence: RunEvidence) -> str:
    """Sentence on recorded steps that are shorter than live ones."""
    live_ms = evidence.step_ms.mean
    return (
        f"recorded steps took {recorded_ms:.2f} ms, live ones {live_ms:.2f} ms: the window lacks what happens only in "
        "some steps; shares are of live steps"
    )


def recorded_slower(recorded_ms: float, evidence: RunEvidence) -> str:
    """Sentence on recorded steps that are longer than live ones."""
    live_ms = evidence.step_ms.mean
    return (
        f"recorded steps took {recorded_ms:.2f} ms, live ones {live_ms:.2f} ms "
        f"({100 * (recorded_ms / live_ms - 1):+.0f} %): recording slows the host; shares are of live steps"
    )


def disagreement(
    code: str, of_trace: Sequence[Finding], in_run: float, evidence: RunEvidence, converted_pct: float | None = None
) -> str:
    """Sentence on a share that differs between trace and run."""
    recorded = f"{of_trace[0].share_pct:.0f}" if of_trace else f"under {NAMED_FROM_PCT:.0f}"
    of_live = f" ({converted_pct:.0f} % of a live one)" if converted_pct is not None else ""
    averaged = " (mean of the ranks)" if evidence.world_size > 1 and of_trace else ""
    of_first = " on rank 0" if evidence.world_size > 1 else ""
    return (
        f"{code}: {recorded} % of the recorded steps{averaged}{of_live}, "
        f"{in_run:.0f} % of the run's {evidence.steps} steps{of_first}"
    )


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


THE_RUN: Final = "the run"
"""The source of an analysis without a trace."""

_MOSTLY_PCT: Final = 50.0

_SMALL_PCT: Final = 10.0
"""Without a GPU, a cause that costs less is no verdict beside a step that is mostly computation."""

_TWO: Final = 2
_COMM: Final = "comm"
_ROUNDING: Final = 1 + 1e-6

_MEASURED: Final = {"input-bound": "data", "transfer-bound": "transfer"}
"""What the run measures by itself, and the region it shows in."""


def combine(analysis: Analysis | None, evidence: RunEvidence | None) -> Analysis:
    """Findings and verdict from the trace, the run, or both."""
    if evidence is None:
        if analysis is None:
            raise ValueError("combine() needs an analysis or the run's evidence.")
        return analysis
    evidence = replace(evidence, ranks=with_waits(evidence.ranks))
    late = straggler({work.rank: work for work in evidence.ranks}, evidence) if evidence.steps >= MIN_STEPS else None
    own = own_times(evidence, late)
    if analysis is None:
        combined = _of_run(evidence, own, late)
    elif evidence.steps < MIN_STEPS:
        combined = replace(analysis, run=evidence)
    else:
        combined = _of_both(analysis, evidence, own, late)
    return replace(
        combined,
        verdict_text=f"{combined.verdict_text} {switched_on(evidence.switches)}".rstrip(),
        hints=(*switch_hints(evidence.switches), *combined.hints),
    )


def _of_both(analysis: Analysis, evidence: RunEvidence, own: RunEvidence, late: Finding | None) -> Analysis:
    recorded = min(analysis.ranks, key=lambda rank: rank.rank, default=None)
    analysis = _without_late_hosts(analysis, evidence, late)
    if recorded is not None and recorded.gpu.busy_ms_per_step:
        late_ms = 0.0 if late is None else late.share_pct * evidence.step_ms.mean / 100
        findings, differences = _merge(analysis.findings, _judged(recorded, analysis), own, late_ms)
    elif any(rank.gpu.busy_ms_per_step for rank in analysis.ranks):  # of others than the one that the run is of
        known = {found.code for found in analysis.findings}
        findings = [*analysis.findings, *(found for found in run_findings(own) if found.code not in known)]
        differences = []
    else:
        findings, differences = without_gpu_work(analysis.findings, recorded, own, _sum_ms(evidence) - _sum_ms(own))
    ranked = _ranked(_of_ranks(findings, evidence, own, late), evidence)
    if len(analysis.ranks) == 1:  # of several, the trace's rules have named the function on the finding's own rank
        ranked = tuple(located(found, recorded) for found in ranked)
    verdict, text = decide(ranked, gpu=evidence.on_device, steps=evidence.steps)
    combined = replace(
        analysis,
        verdict=verdict,
        verdict_text=text,
        findings=ranked,
        hints=(*analysis.hints, *run_hints(evidence)),
        run=evidence,
        differences=(*analysis.differences, *differences),
    )
    return before_all(combined, evidence)


def _ranked(findings: Sequence[Finding], evidence: RunEvidence) -> tuple[Finding, ...]:
    """The findings, with intervals and lines: first those that may be the verdict, by what their fixes gain."""
    known = with_lines(with_intervals(findings, evidence), evidence)
    return certain_first(by_gain(known, in_steps_pct=in_steps_pct(evidence)))


def _sum_ms(evidence: RunEvidence) -> float:
    return sum(region.device_ms for name, region in evidence.regions.items() if name in REGIONS)


def _of_ranks(
    findings: Sequence[Finding], evidence: RunEvidence, own: RunEvidence, late: Finding | None
) -> list[Finding]:
    """Findings of the step and of the ledger, and the straggler, which has some of their time."""
    return [*beside_straggler(together(findings, ledger_findings(own), own), evidence, late), *([late] if late else [])]


def _without_late_hosts(analysis: Analysis, evidence: RunEvidence, late: Finding | None) -> Analysis:
    """The trace's findings without what the ranks' own clocks decide: which host is late in live steps.

    Recording slows every rank's host, each by another amount, so that in a trace another rank may be the late one.
    """
    if len(evidence.ranks) < _TWO:
        return analysis
    found = next((found for found in analysis.findings if found.code == STRAGGLER), None)
    traced = analysis.findings
    if found is not None and (late is not None or found.evidence.get("late") == "host"):
        whole = [rank for rank in analysis.ranks if not rank.cut_off]
        traced = tuple(rank_causes(whole, analysis.rank_waits))
    if late is not None and evidence.on_device:
        traced = tuple(part_of(late, each) for each in traced)
    return replace(analysis, findings=traced)


def work_ms(analysis: Analysis) -> dict[int, float]:
    """By rank, how long its GPU works on a recorded step, waiting for other ranks not counted.

    Exposed communication of the rank that has least of it is the communication; what others have more is waiting.
    """
    comm = {rank.rank: rank.categories[_COMM].ms_per_step for rank in analysis.ranks}
    least = min(comm.values(), default=0.0)
    return {rank.rank: rank.gpu.busy_ms_per_step - comm[rank.rank] + least for rank in analysis.ranks}


def _of_run(evidence: RunEvidence, own: RunEvidence, late: Finding | None) -> Analysis:
    findings = _ranked(_of_ranks(run_findings(own), evidence, own, late), evidence)
    certain = [found for found in findings if is_certain(found)]
    computes = with_intervals(beside_straggler(computing(own), evidence, late), evidence) if certain else ()
    ranked = certain_first(by_gain([*findings, *computes], in_steps_pct=in_steps_pct(evidence)))
    verdict, text = decide(ranked, gpu=evidence.on_device, steps=evidence.steps)
    small = all(found.of == "step" and found.share_pct < _SMALL_PCT for found in certain)
    computing_pct = share_pct(own, *COMPUTE)
    if certain and small and not evidence.on_device and computing_pct > _MOSTLY_PCT:
        ranked, verdict = findings, NOTHING_STANDS_OUT
        text = (
            f"Nothing stands out: forward, backward and optimizer take {computing_pct:.0f} % of the step. The largest "
            f"cause beside them costs {certain[0].share_pct:.0f} %: {decide(certain)[1]}"
        )
    if evidence.steps < MIN_STEPS and not findings:
        verdict, text = NOTHING_STANDS_OUT, f"No verdict: {evidence.steps} steady steps, at least {MIN_STEPS} needed."
    analysis = Analysis(
        source=THE_RUN,
        verdict=verdict,
        verdict_text=text,
        findings=ranked,
        hints=run_hints(evidence),
        run=evidence,
    )
    return before_all(analysis, evidence)


@dataclass(frozen=True, slots=True)
class _Judged:
    """The recorded steps, in milliseconds.

    Attributes:
        rank: the lowest rank's number; what follows is of its steps, but for `busy_ms` and `work_ms`.
        idle_pct: how much of them its GPU was idle.
        step_ms: their mean.
        median_ms: their median.
        busy_ms: how much of the mean step the GPU was busy, the mean over the ranks.
        work_ms: the same without waiting for other ranks, which depends on the hosts.
    """

    rank: int
    idle_pct: float
    step_ms: float
    median_ms: float
    busy_ms: float
    work_ms: float


def _judged(recorded: RankSummary, analysis: Analysis) -> _Judged:
    return _Judged(
        recorded.rank,
        recorded.gpu.idle_pct,
        recorded.step_ms.mean,
        recorded.step_ms.p50,
        fmean(rank.gpu.busy_ms_per_step for rank in analysis.ranks),
        fmean(work_ms(analysis).values()),
    )


def _merge(
    traced: tuple[Finding, ...], judged: _Judged, evidence: RunEvidence, late_ms: float
) -> tuple[list[Finding], list[str]]:
    """Findings of both, and where they differ. The trace has GPU work, the run enough steps."""
    differences: list[str] = []
    as_recorded = traced
    live = {found.code: found for found in run_findings(evidence)}
    slowed, shorter = _slowed(judged, evidence), judged.step_ms * SLOWED_FROM < evidence.step_ms.mean
    if slowed:
        differences.append(recorded_slower(judged.step_ms, evidence))
    if shorter:
        differences.append(recorded_shorter(judged.step_ms, evidence))
    if slowed or shorter or late_ms:  # a late host's own GPU is idle too, which is no second cause
        converted = [_of_live_step(found, judged, evidence, late_ms) for found in traced]
        differences += [
            f"{before.code} took {before.share_pct:.0f} % of the recorded steps and at most {after.share_pct:.0f} % of "
            "live ones, below the threshold of a finding"
            for before, after in zip(traced, converted, strict=True)
            if after.share_pct < NAMED_FROM_PCT
        ]
        traced = tuple(found for found in converted if found.share_pct >= NAMED_FROM_PCT)
    findings = [_bounded_by_region(found, evidence) for found in traced if found.code not in _MEASURED]
    restarts = live.get(WORKER_RESTARTS)
    findings += [] if restarts is None else [restarts]
    if BETWEEN_REGIONS in live and all(found.code != "launch-bound" for found in findings):  # of which it would be part
        findings.append(live[BETWEEN_REGIONS])
    for code, region in _MEASURED.items():
        of_trace = [found for found in traced if found.code == code]
        if region not in evidence.regions:  # the region was not timed
            findings += of_trace
            continue
        # the run's figures are of the lowest rank; and of what is no finding, the trace may still have a little
        shares = [found.share_pct for found in of_trace if found.rank in {None, judged.rank}]
        in_trace = max(shares, default=NAMED_FROM_PCT)
        in_run = share_pct(evidence, region)
        more = in_run > in_trace + DIFFER_BY_PCT
        # copies outside of the region are in the trace alone, and no sign that the two differ
        less = in_run < in_trace - DIFFER_BY_PCT and code == "input-bound"
        if more or less:
            mine = [found for found in as_recorded if found.code == code and found.rank in {None, judged.rank}]
            converted_pct = in_trace if slowed and shares else None
            differences.append(disagreement(code, mine, in_run, evidence, converted_pct))
        # a window may contain the restart of workers, which then is no part of this finding
        run_decides = not of_trace or more or (less and (slowed or restarts is not None))
        if run_decides:
            findings += [live[code]] if code in live else []
        else:
            findings += [_bounded_by_run(found, live.get(code), evidence) for found in of_trace]
    differences += _contradictions(findings, live, judged, evidence)
    return findings, differences


def _bounded_by_run(found: Finding, of_run: Finding | None, evidence: RunEvidence) -> Finding:
    """A bound on what the fix saves holds for all steps of the run, not only for the recorded ones.

    The run's advice on the loader knows the use of the cores.
    """
    if of_run is not None and found.code == "input-bound" and evidence.loader is not None:
        found = replace(found, advice=of_run.advice)
    recorded, run = found.saves, None if of_run is None else of_run.saves
    if recorded is None or run is None or not recorded.at_most or run.ms_per_step <= recorded.ms_per_step:
        return found
    return replace(found, saves=saving(run.ms_per_step, evidence.step_ms.mean, at_most=True))


def _bounded_by_region(found: Finding, evidence: RunEvidence) -> Finding:
    """The optimizer's fix takes away no more than the GPU's work in it and the time that the host spends in it.

    The step is a chain of work on host and GPU. Without the update the chain still has all of its other links, so it
    gets shorter by no more than those of the update, on either side. The run timed the host's without recording.
    """
    region, saves = evidence.regions.get("optimizer"), found.saves
    if found.code != _SLOW_OPTIMIZER or region is None or saves is None:
        return found
    most_ms = max(region.host_ms, region.device_ms) + _gpu_ms(found)
    if saves.ms_per_step <= most_ms:
        return found
    cost_ms = found.share_pct * evidence.step_ms.mean / 100
    return replace(found, saves=saving(most_ms, evidence.step_ms.mean, at_most=True, cost_ms=cost_ms))


def _gpu_ms(found: Finding) -> float:
    """The GPU's own work in an optimizer's update; 0 for other findings, whose fixes only end waits."""
    return float(found.evidence["gpu_busy_ms_per_step"]) if found.code == _SLOW_OPTIMIZER else 0.0


def _slowed(judged: _Judged, evidence: RunEvidence) -> bool:
    """Both the mean and the median: a loader that stalls every few steps, or one odd step, moves either alone."""
    return (
        judged.step_ms > SLOWED_FROM * evidence.step_ms.mean and judged.median_ms > SLOWED_FROM * evidence.step_ms.p50
    )


def _of_live_step(found: Finding, judged: _Judged, evidence: RunEvidence, late_ms: float) -> Finding:
    """A trace's finding of the live step: what recording added to a wait for the host is taken off."""
    recorded_ms, live_ms = judged.step_ms, evidence.step_ms.mean
    share = found.share_pct * recorded_ms / live_ms
    averaged = " on the mean of the ranks" if evidence.world_size > 1 else ""
    title = f"{found.title}; of a live step it is {min(share, 100.0):.0f} %{averaged}"
    saves_ms, cost_ms = found.saves.ms_per_step if found.saves else 0.0, found.share_pct * recorded_ms / 100
    if found.code in HOST_WAITS and live_ms <= recorded_ms * SLOWED_FROM:
        idle_recorded, idle_live = recorded_ms - judged.busy_ms, max(live_ms - judged.work_ms - late_ms, 0.0)
        share = min(share * idle_live / idle_recorded if idle_recorded > 0 else 0.0, share)
        words = (
            f"the GPU waits up to {in_ms(share * live_ms / 100)} of each {in_ms(live_ms)} step for the host{averaged}"
        )
        if found.code == _SLOW_OPTIMIZER and "optimizer" in evidence.regions:  # which the run has timed
            share = share_pct(evidence, "optimizer")
            words = f"the optimizer takes {in_ms(share * live_ms / 100)} of each {in_ms(live_ms)} step"
        title = f"{words}. Recorded, which slows the host: {found.title}"
        own_ms = _gpu_ms(found)
        # no more of the waits than there are in a live step; the GPU's own work stays
        if own_ms or saves_ms > _ROUNDING * cost_ms:
            saves_ms = min(saves_ms - own_ms, idle_live) + own_ms
        else:  # its own waits alone
            saves_ms = share * live_ms / 100
    at_most = found.saves is not None and found.saves.at_most
    saves = saving(saves_ms, live_ms, at_most=at_most, cost_ms=share * live_ms / 100)
    return replace(
        found,
        share_pct=min(share, 100.0),
        title=title,
        evidence={**found.evidence, "share_of_recorded_step_pct": round(found.share_pct, 3)},
        saves=saves if found.saves else None,
    )


def _contradictions(
    findings: list[Finding], live: dict[str, Finding], judged: _Judged, evidence: RunEvidence
) -> Iterator[str]:
    """Where trace and run disagree on whether host or GPU is ahead. The trace, which has both, decides."""
    found = {each.code: each for each in findings}
    if "launch-bound" in live and not HOST_WAITS & found.keys():
        yield (
            f"by the whole run's regions the host sets the pace in {live['launch-bound'].share_pct:.0f} % of a step, "
            f"in the recorded steps the GPU was idle for {judged.idle_pct:.0f} %"
        )
    queued_pct = 100 - (100.0 if evidence.drained_pct is None else evidence.drained_pct)
    if "launch-bound" in found and "launch-bound" not in live and queued_pct > _MOSTLY_PCT:
        launching = found["launch-bound"]
        recorded_pct = launching.evidence.get("share_of_recorded_step_pct", launching.share_pct)
        yield (
            f"launch-bound took {recorded_pct:.0f} % of the recorded steps, but in the whole run "
            f"the GPU still had work queued at {queued_pct:.0f} % of the batch ends"
        )
