"""Findings of a trace as shares of the live step.

Recording slows the host, and a window may lack what happens only in some steps. So shares of recorded steps are
converted to the step that the run took without recording, and where the run measures a wait by itself, it decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.findings import RULES
from lightning_forge_profiling.diagnosis.ledger_costs import hooks_ms, self_times
from lightning_forge_profiling.diagnosis.loader import with_advice_of
from lightning_forge_profiling.diagnosis.machine_rules import machine_findings
from lightning_forge_profiling.diagnosis.ranks import keeps_waiting, spread
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    MIN_SHARE_PCT,
    REGION_OF,
    RuleContext,
    RunTimes,
    as_finding,
    expected,
    of_step,
    replayed_saving,
    saving,
)
from lightning_forge_profiling.schema import Analysis, Finding, RankSummary, RunEvidence

# from this ratio of recorded to live steps on, the trace's shares are converted to the live step
SLOWED_FROM: Final = 1.1

# percentage points from which shares of a step are reported as different. A window of few steps varies by less.
DIFFER_BY_PCT: Final = 5.0

_GPU_WORK: Final = ("compute-bound", "memory-bandwidth-bound")
_WAITS: Final = ("input-bound", "transfer-bound")  # what the run measures by itself

# by code a recorded CPU's work, beside waiting for data
_CPU_WORK: Final = {rule.code: rule.cpu for rule in RULES if rule.cpu is not None and rule.cpu is not rule.gpu}

_LACKS: Final = "the window lacks what happens only in some steps"
_QUEUED_PCT: Final = 50.0
_AFTER_READS: Final = ("sync", "copy", "python", "launch")  # the causes of idle time that a read may be the reason of
_IS_AHEAD: Final = "host_is_ahead"
_ROUNDING: Final = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run, its times without what its ranks do to each other and without known calls, and the straggler."""

    all: RunEvidence
    own: RunEvidence
    straggler: Finding | None

    @property
    def times(self) -> RunTimes:
        """The times without what its ranks do to each other."""
        return RunTimes.of(self.own)

    @property
    def late_ms(self) -> float:
        """How long the other ranks wait for the straggler, per step."""
        return 0.0 if self.straggler is None else self.straggler.share_pct * self.all.timing.step_ms.mean / 100

    @property
    def known_ms(self) -> float:
        """What the own times lack of the step: known calls, and waits for other ranks, or theirs for this one."""
        regions = self.all.timing.regions
        return sum(regions[name].device_ms - own.device_ms for name, own in self.own.timing.regions.items())


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The recorded steps of an analysis of at least one rank beside the live steps of the run, in milliseconds."""

    analysis: Analysis
    live: LiveRun

    @property
    def rank(self) -> RankSummary:
        """The lowest rank, which the run's figures are of."""
        return min(self.analysis.ranks, key=lambda rank: rank.rank)

    @property
    def run(self) -> RunEvidence:
        """The run's own times."""
        return self.live.own

    @property
    def idle_ms(self) -> tuple[float, float]:
        """How much of the mean step the GPU idles, recorded and at most live: the mean over the ranks."""
        of_all = self.analysis.spread or spread(self.analysis.ranks, ())
        busy, comm = of_all["busy"], of_all["comm"]
        # waiting for other ranks depends on their hosts. Exposed communication of the rank that has least of it is the
        # communication itself, and what others have more is waiting.
        work_ms = busy.mean - comm.mean + comm.min
        live_ms = self.run.timing.step_ms.mean - work_ms - self.live.late_ms
        return self.rank.step_ms.mean - busy.mean, max(live_ms, 0.0)

    @property
    def slowed(self) -> bool:
        """Whether recorded steps are longer, by mean and median: a loader that stalls now and then moves only one."""
        recorded, live = self.rank.step_ms, self.run.timing.step_ms
        return recorded.mean > SLOWED_FROM * live.mean and recorded.p50 > SLOWED_FROM * live.p50

    @property
    def shortened(self) -> bool:
        """Whether recorded steps are shorter than live ones."""
        return self.rank.step_ms.mean * SLOWED_FROM < self.run.timing.step_ms.mean

    @property
    def difference(self) -> list[str]:
        """The sentence on step times that differ; none otherwise."""
        recorded_ms, live_ms = self.rank.step_ms.mean, self.run.timing.step_ms.mean
        took, normal = f"{recorded_ms:.2f} ms recorded, {live_ms:.2f} ms not", "percentages refer to normal steps"
        if self.slowed:
            return [f"recording made steps {recorded_ms / live_ms:.1f} times slower ({took}); {normal}"]
        if self.shortened:
            waits_ms = sum(found.saves.ms_per_step for found in machine_findings(self.run) if found.saves)
            why = "normal steps also waited for a core" if 2 * waits_ms >= live_ms - recorded_ms else _LACKS
            return [f"recorded steps were shorter ({took}): {why}; {normal}"]
        return []

    @property
    def averaged(self) -> str:
        """What to say of a figure that is no single rank's."""
        return " on the mean of the ranks" if self.run.ranks.world_size > 1 else ""

    def own(self, findings: Sequence[Finding], code: str) -> list[Finding]:
        """The findings with this code on the rank that the run's figures are of."""
        return [finding for finding in findings if finding.code == code and finding.rank in {None, self.rank.rank}]

    def disagreement(self, code: str, recorded: Sequence[Finding], converted_pct: float | None = None) -> str:
        """Sentence on a share that differs between trace and run."""
        run, in_run = self.run, self.live.times.share_pct(REGION_OF[code])
        pct = f"{recorded[0].share_pct:.0f}" if recorded else f"under {MIN_SHARE_PCT:.0f}"
        of_live = f" ({converted_pct:.0f} % of a live one)" if converted_pct is not None else ""
        averaged = " (mean of the ranks)" if run.ranks.world_size > 1 and recorded else ""
        of_first = " on rank 0" if run.ranks.world_size > 1 else ""
        return (
            f"{code}: {pct} % of the recorded steps{averaged}{of_live}, "
            f"{in_run:.0f} % of the run's {run.timing.steps} steps{of_first}"
        )


# -- with a GPU ------------------------------------------------------------------------------------------------------


def gpu_findings(
    recorded: Sequence[Finding], live: Mapping[str, Finding], steps: RecordedSteps
) -> tuple[list[Finding], list[str]]:
    """The trace's causes at their share of the live step, with those that only the run shows; where the two differ."""
    recorded = _after_reads(recorded, steps)
    differences, traced = steps.difference, list(recorded)
    if differences or steps.live.late_ms:  # a late host's own GPU is idle too, which is no second cause
        converted = [_of_live_step(finding, steps) for finding in recorded]
        traced = [finding for finding in converted if finding.share_pct >= MIN_SHARE_PCT]
        differences += [
            f"{before.code} took {before.share_pct:.0f} % of the recorded steps and at most {after.share_pct:.0f} % of "
            "live ones, below the threshold of a finding"
            for before, after in zip(recorded, converted, strict=True)
            if after.share_pct < MIN_SHARE_PCT
        ]
    findings = [
        _bounded_by_region(finding, steps)
        for finding in traced
        if finding.code not in {"input-bound", "transfer-bound"}
    ]
    findings += _live_work({finding.code for finding in recorded}, steps)
    if "worker-restarts" in live:
        findings.append(live["worker-restarts"])
    # which would be a part of launch-bound
    if "between-regions" in live and all(finding.code != "launch-bound" for finding in findings):
        findings.append(live["between-regions"])
    for code in _WAITS:
        measured, difference = _measured(code, recorded, traced, live, steps)
        findings += measured
        differences += difference
    return findings, differences + _contradictions(findings, live, steps)


def _after_reads(findings: Sequence[Finding], steps: RecordedSteps) -> list[Finding]:
    """The findings with all of the waits for the host that a read within the step is the reason of as its own.

    A host that is ahead at the batch ends would be so within the step. There it waits for a value, and the GPU then for
    all that the host does until it is ahead again, which recording makes longer.
    """
    read = next((finding for finding in findings if finding.code == "sync-bound"), None)
    alone = steps.run.ranks.world_size == 1
    if read is None or not (alone and steps.slowed and steps.live.times.host_is_ahead):
        return list(findings)
    waits_ms = sum(steps.rank.idle[cause].ms_per_step for cause in _AFTER_READS)
    recorded_ms = steps.rank.step_ms.mean
    evidence = {**read.evidence, _IS_AHEAD: "at batch ends"}
    saves = expected(waits_ms, recorded_ms, read.code)
    read = replace(read, share_pct=100 * waits_ms / recorded_ms, saves=saves, evidence=evidence)
    return [read, *(finding for finding in findings if finding.code not in {"sync-bound", "launch-bound"})]


def _live_work(known: set[str], steps: RecordedSteps) -> list[Finding]:
    """The GPU's work where it fills a live step, and not the recorded ones, since recording slows the host."""
    if not steps.slowed or not known.isdisjoint(_GPU_WORK):
        return []
    timing = steps.run.timing
    context = RuleContext(replace(steps.rank, step_ms=timing.step_ms), live=True, run=steps.run)
    number = steps.rank.rank if steps.run.ranks.world_size > 1 else None
    cases = ((rule.code, rule.gpu) for rule in RULES if rule.code in _GPU_WORK)
    costs = ((code, case, context.pct(case.cost(context))) for code, case in cases if case is not None)
    return [
        as_finding(
            code,
            case.explain(context),
            share_pct=pct,
            saves=replayed_saving(steps.rank.replay, code, timing.step_ms.mean)
            or case.saving(context, timing.step_ms.mean),
            rank=number,
        )
        for code, case, pct in costs
        if pct >= MIN_SHARE_PCT
    ]


def _of_live_step(finding: Finding, steps: RecordedSteps) -> Finding:
    """A trace's finding as a share of the live step."""
    recorded_ms, live_ms = steps.rank.step_ms.mean, steps.run.timing.step_ms.mean
    share = finding.share_pct * recorded_ms / live_ms
    saves_ms = finding.saves.ms_per_step if finding.saves else 0.0
    if keeps_waiting(finding) and not steps.shortened:
        share, words, saves_ms = _live_wait(finding, share, saves_ms, steps)
        title = f"{words}. Recorded, which slows the host: {finding.title}"
    else:
        title = f"{finding.title}; of a live step it is {min(share, 100.0):.0f} %{steps.averaged}"
    limited = finding.saves is not None and finding.saves.at_most  # by what the other ranks save
    saves = finding.saves and saving(saves_ms, live_ms, at_most=finding.saves.at_most, cost_ms=share * live_ms / 100)
    if _IS_AHEAD in finding.evidence:
        limited, saves = True, expected(share * live_ms / 100, live_ms, finding.code)
    return replace(
        finding,
        share_pct=min(share, 100.0),
        title=title,
        evidence={**finding.evidence, "share_of_recorded_step_pct": round(finding.share_pct, 3)},
        saves=(None if limited else replayed_saving(steps.rank.replay, finding.code, live_ms)) or saves,
    )


def _live_wait(finding: Finding, share: float, saves_ms: float, steps: RecordedSteps) -> tuple[float, str, float]:
    """Share, words and saving of a wait for the host, without what recording added to it."""
    recorded_ms, live_ms = steps.rank.step_ms.mean, steps.run.timing.step_ms.mean
    idle_recorded_ms, idle_live_ms = steps.idle_ms
    if finding.code == "slow-optimizer" and "optimizer" in steps.run.timing.regions:  # which the run has timed
        share = steps.live.times.share_pct("optimizer")
        words = f"the optimizer takes {of_step(share * live_ms / 100, live_ms)}"
    else:
        share = min(share * idle_live_ms / idle_recorded_ms if idle_recorded_ms > 0 else 0.0, share)
        words = f"the GPU waits up to {of_step(share * live_ms / 100, live_ms)} for the host{steps.averaged}"
    gpu_ms = _gpu_work_ms(finding)
    # no more of the waits than there are in a live step; the GPU's own work stays
    if gpu_ms or saves_ms > _ROUNDING * finding.share_pct * recorded_ms / 100:
        return share, words, min(saves_ms - gpu_ms, idle_live_ms) + gpu_ms
    return share, words, share * live_ms / 100  # its own waits alone


def _gpu_work_ms(finding: Finding) -> float:
    """The GPU's own work in an optimizer's update; 0 for other findings, whose fixes only end waits."""
    return float(finding.evidence["gpu_busy_ms_per_step"]) if finding.code == "slow-optimizer" else 0.0


def _bounded_by_region(finding: Finding, steps: RecordedSteps) -> Finding:
    """The optimizer's fix takes away no more than the GPU's work in it and the time that the host spends in it."""
    # the step is a chain of work on host and GPU. Without the update the chain still has all of its other links, so it
    # gets shorter by no more than those of the update, on either side. The run timed the host's without recording.
    region, saves, live_ms = steps.run.timing.regions.get("optimizer"), finding.saves, steps.run.timing.step_ms.mean
    if finding.code != "slow-optimizer" or region is None or saves is None:
        return finding
    most_ms = max(region.host_ms, region.device_ms) + _gpu_work_ms(finding)
    if saves.ms_per_step <= most_ms:
        return finding
    return replace(finding, saves=saving(most_ms, live_ms, at_most=True, cost_ms=finding.share_pct * live_ms / 100))


def _measured(
    code: str, recorded: Sequence[Finding], traced: Sequence[Finding], live: Mapping[str, Finding], steps: RecordedSteps
) -> tuple[list[Finding], list[str]]:
    """The trace's findings, or the run's, of a wait that both measure; and where they differ."""
    of_trace = [finding for finding in traced if finding.code == code]
    if REGION_OF[code] not in steps.run.timing.regions:  # the region was not timed
        return of_trace, []
    # the run's figures are of the lowest rank; and of what is no finding, the trace may still have a little
    shares = [finding.share_pct for finding in steps.own(traced, code)]
    in_trace, in_run = max(shares, default=MIN_SHARE_PCT), steps.live.times.share_pct(REGION_OF[code])
    more = in_run > in_trace + DIFFER_BY_PCT
    # copies outside of the region are in the trace alone, and no sign that the two differ
    less = in_run < in_trace - DIFFER_BY_PCT and code == "input-bound"
    differences = []
    if more or less:
        converted_pct = in_trace if steps.slowed and shares else None
        differences = [steps.disagreement(code, steps.own(recorded, code), converted_pct)]
    # a window may contain the restart of workers, which then is no part of this finding
    if not of_trace or more or (less and (steps.slowed or "worker-restarts" in live)):
        return [live[code]] if code in live else [], differences
    return [_bounded_by_run(finding, live.get(code), steps.run) for finding in of_trace], differences


def _bounded_by_run(finding: Finding, of_run: Finding | None, run: RunEvidence) -> Finding:
    """A bound on what the fix saves holds for all steps of the run, not only for the recorded ones."""
    if of_run is None:
        return finding
    if finding.code == "input-bound" and run.settings.loader is not None:  # the run's advice knows the use of the cores
        finding = with_advice_of(finding, of_run)
    recorded, live = finding.saves, of_run.saves
    if recorded is None or live is None or not recorded.at_most or live.ms_per_step <= recorded.ms_per_step:
        return finding
    return replace(finding, saves=saving(live.ms_per_step, run.timing.step_ms.mean, at_most=True))


def _contradictions(findings: Sequence[Finding], live: Mapping[str, Finding], steps: RecordedSteps) -> list[str]:
    """Where trace and run disagree on whether host or GPU is ahead. The trace, which has both, decides."""
    launching = "launch-bound"
    if launching in live and not any(map(keeps_waiting, findings)):
        in_run, idle_pct = live[launching].share_pct, steps.rank.gpu.idle_pct
        text = f"by the whole run's regions the host sets the pace in {in_run:.0f} % of a step, "
        return [f"{text}in the recorded steps the GPU was idle for {idle_pct:.0f} %"]
    queued_pct = 100 - (100.0 if steps.run.timing.gpu_starved_pct is None else steps.run.timing.gpu_starved_pct)
    paced = (each for each in findings if each.code == launching or each.evidence.get("waits_for") == "host")
    finding = next(paced, None)
    if finding is not None and launching not in live and queued_pct > _QUEUED_PCT:
        recorded_pct = finding.evidence.get("share_of_recorded_step_pct", finding.share_pct)
        text = f"{finding.code} took {recorded_pct:.0f} % of the recorded steps, but in the whole run the GPU "
        return [f"{text}still had work queued at {queued_pct:.0f} % of the batch ends"]
    return []


# -- without a GPU ---------------------------------------------------------------------------------------------------


def cpu_findings(
    recorded: Sequence[Finding], live: Mapping[str, Finding], steps: RecordedSteps
) -> tuple[list[Finding], list[str]]:
    """The run's causes with the trace's on operators and Python: of waits, the trace knows no more than the run."""
    run = steps.run
    recorded = [finding for finding in recorded if finding.code != "communication-bound"]  # waits are the run's
    others = [
        finding for finding in recorded if finding.code not in live and finding.rank not in {None, steps.rank.rank}
    ]
    waits = steps.own(recorded, "input-bound")
    computing, differences = _operators_and_python(recorded, steps)
    of_trace, of_run = {finding.code: finding for finding in computing}, dict(live)
    if "python-bound" in of_trace and "between-regions" in of_run:  # they overlap: keep the one that explains more
        if of_run["between-regions"].share_pct > of_trace["python-bound"].share_pct / 2:
            del of_trace["python-bound"]
        else:
            del of_run["between-regions"]
    others += of_trace.values()
    of_run = {code: finding for code, finding in of_run.items() if code not in of_trace}
    if "data" not in run.timing.regions:  # the region was not timed
        return [*waits, *others, *of_run.values()], differences
    if waits and "input-bound" in of_run and not run.timing.on_device and run.settings.loader is None:
        # the trace's advice knows the loader
        of_run["input-bound"] = with_advice_of(of_run["input-bound"], waits[0])
    in_trace = max((finding.share_pct for finding in waits), default=MIN_SHARE_PCT)
    if abs(steps.live.times.share_pct("data") - in_trace) > DIFFER_BY_PCT:
        differences = [*differences, steps.disagreement("input-bound", waits)]
    return [*of_run.values(), *others], differences


def _operators_and_python(recorded: Sequence[Finding], steps: RecordedSteps) -> tuple[list[Finding], list[str]]:
    """The trace's findings of the CPU's work, converted to the live step where recording or hooks made a difference."""
    rank, run = steps.rank, steps.run
    if rank.cpu is None or run.timing.on_device:
        return [], []
    mine = {code: finding for code in _CPU_WORK for finding in steps.own(recorded, code)}
    update, own, live_ms = mine.get("slow-optimizer"), self_times(run), run.timing.step_ms.mean
    update_differs = (
        update is not None
        and "optimizer" in run.timing.regions
        and abs(update.share_pct - steps.live.times.share_pct("optimizer")) > DIFFER_BY_PCT
    )
    # what is no operator's and not Python's between them: hooks, known waits, waits for other ranks
    apart_ms = (
        hooks_ms(run, "transfer", "forward", "backward", "optimizer", "other")
        + own.blocked_ms(*COMPUTE)
        + steps.live.known_ms
    )
    if not steps.difference and not update_differs and 100 * apart_ms < MIN_SHARE_PCT * live_ms:
        known = RuleContext(rank, run=run)
        explained = {code: _CPU_WORK[code].explain(known) for code in mine}
        return [
            replace(finding, advice=explained[code].advice, fix=explained[code].fix) for code, finding in mine.items()
        ], []
    context, findings = _live_cpu(rank, own, apart_ms), []
    for code, before in mine.items():
        case = _CPU_WORK[code]
        pct = context.pct(case.cost(context))
        if pct >= MIN_SHARE_PCT:
            number = rank.rank if run.ranks.world_size > 1 else before.rank
            saves = case.saving(context, live_ms)
            finding = as_finding(code, case.explain(context), share_pct=pct, saves=saves, rank=number)
            recorded_pct = round(before.share_pct, 3)
            findings.append(replace(finding, evidence={**finding.evidence, "share_of_recorded_step_pct": recorded_pct}))
    if steps.difference or update is None or not update_differs:
        return findings, steps.difference
    return findings, [steps.disagreement("slow-optimizer", [update])]


def _live_cpu(rank: RankSummary, own: RunTimes, apart_ms: float) -> RuleContext:
    """CPU times of a live step: loader and update as in the run, the rest bounds the others."""
    cpu, live_ms, run = RuleContext(rank).cpu, own.step_ms, own.evidence
    regions_ms = {name: region.device_ms for name, region in own.regions.items()}
    data_ms = regions_ms.get("data", cpu.data_ms_per_step)
    update_ms = own.works_ms("optimizer") if "optimizer" in regions_ms else cpu.optimizer_ms_per_step
    added_ms = max(rank.step_ms.mean - live_ms, 0.0)
    # assumes that recording slows only Python, of which waits for other ranks are no part
    mine = (work for work in run.ranks.works if work.rank == run.ranks.rank)
    waits_ms = sum(ms for work in mine for leaf, ms in work.waits_ms.items() if leaf not in work.outside)
    python_ms = max(cpu.python_ms_per_step - added_ms - max(apart_ms - waits_ms, 0.0), 0.0)
    operators_ms = live_ms - apart_ms - data_ms - update_ms - max(python_ms, regions_ms.get("other", 0.0))
    operators_ms = min(cpu.operators_ms_per_step, max(operators_ms, 0.0))
    scale = operators_ms / cpu.operators_ms_per_step if cpu.operators_ms_per_step else 0.0
    live = replace(
        cpu,
        data_ms_per_step=data_ms,
        optimizer_ms_per_step=min(update_ms, live_ms),
        operators_ms_per_step=operators_ms,
        python_ms_per_step=min(python_ms, live_ms),
        costliest_ms_per_step={name: ms * scale for name, ms in cpu.costliest_ms_per_step.items()},
    )
    return RuleContext(replace(rank, step_ms=run.timing.step_ms, cpu=live), live=True, run=run)
