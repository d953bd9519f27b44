"""One list of findings from a trace and from the whole run.

A trace has the kernels and calls of few steps, which recording slows. The run has the regions of many steps, which it
does not slow. So the trace decides what the cause is, the run how long a step takes, and `differences` says where the
two disagree. Without a GPU the run decides about waiting; operators and Python are in the trace alone.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.calls import (
    beside_calls,
    call_findings,
    find_calls,
    with_explained,
    without_calls,
)
from lightning_forge_profiling.diagnosis.compute import CPU_WORK
from lightning_forge_profiling.diagnosis.findings import (
    find_causes,
    rank_causes,
    run_findings,
)
from lightning_forge_profiling.diagnosis.growth import growth_findings, with_growth, without_growth
from lightning_forge_profiling.diagnosis.hints import rules_of_thumb, run_hints, switch_hints
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts, hooks_ms
from lightning_forge_profiling.diagnosis.ledger_rules import ledger_findings
from lightning_forge_profiling.diagnosis.live_step import LiveRun, RecordedSteps, cpu_findings, gpu_findings
from lightning_forge_profiling.diagnosis.machine_rules import (
    memory_findings,
    prioritize_distorting_settings,
    prioritize_machine_findings,
)
from lightning_forge_profiling.diagnosis.ranks import (
    STRAGGLER,
    beside_straggler,
    late_in_turns,
    not_measured,
    part_of,
    rank_list,
    straggler,
    with_waits,
    without_rank_waits,
)
from lightning_forge_profiling.diagnosis.rule import COMPUTE, MIN_STEPS, in_s
from lightning_forge_profiling.diagnosis.trainers import for_trainer
from lightning_forge_profiling.diagnosis.validation import of_both_loaders
from lightning_forge_profiling.diagnosis.verdict import (
    decide,
    in_order,
    is_certain,
    located,
    no_verdict,
    with_intervals,
    with_lines,
)
from lightning_forge_profiling.names import COMPILE, HANG
from lightning_forge_profiling.schema import (
    NO_VERDICT,
    NOTHING_STANDS_OUT,
    Analysis,
    Finding,
    Hint,
    RankSummary,
    RankWait,
    RunEvidence,
)

THE_RUN: Final = "the run"  # the source of an analysis without a trace

_MOSTLY_PCT: Final = 50.0

# from this share of all time on, steps of which nothing but the length is known leave no verdict, if there are so many:
# one or two are no cause of a slow run
_UNKNOWN_PCT: Final = 10.0
_UNKNOWN_STEPS: Final = 3

_PAIR: Final = 2


def combine(analysis: Analysis | None, evidence: RunEvidence | None) -> Analysis:
    """Findings and verdict from the trace, the run, or both."""
    if evidence is None:
        if analysis is None:
            raise ValueError("combine() needs an analysis or the run's evidence.")
        return analysis
    works = with_waits(evidence.ranks.works)
    compared = replace(evidence, ranks=replace(evidence.ranks, works=works))
    enough = compared.timing.steps >= MIN_STEPS
    late, turns = (straggler(compared), late_in_turns(compared)) if enough else (None, None)
    if late is not None and turns is not None and turns.share_pct >= late.share_pct:  # some ranks had more of the steps
        late = None
    own = without_rank_waits(compared, late)
    traced = () if analysis is None else analysis.ranks
    recorded = min(traced, key=lambda each: each.rank).operators if traced else ()
    steps = RecordedSteps(analysis, LiveRun(compared, own, late)) if analysis is not None and traced else None
    idle_ms = 0.0 if steps is None or not steps.rank.gpu.busy_ms_per_step else steps.idle_ms[1]
    synced = analysis is not None and any(finding.code == "sync-bound" for finding in analysis.findings)
    calls = find_calls(own, recorded, idle_ms, synced=synced) if enough else ()
    run = LiveRun(compared, without_calls(own, calls), late)
    if analysis is not None and evidence.timing.steps < MIN_STEPS:
        combined = replace(analysis, run=run.all)
    else:
        findings, differences = _to_live_step(analysis, run)
        calls = with_explained(calls, findings, own)
        explained = {call.explains for call in calls}
        findings = [finding for finding in findings if finding.code not in explained]
        named = call_findings(own, calls)
        of_fit = (finding for finding in ledger_findings(run.own) if finding.code not in explained)
        others = (*of_fit, *memory_findings(run.all))
        if grows := growth_findings((*findings, *others, *named), run.all):
            named += grows
            run = LiveRun(compared, without_growth(run.own, grows), late)
            findings, differences = _to_live_step(analysis, run)
        merged = with_growth(beside_straggler(_merged(findings, others, run.own), run.all, late) + named, run.all)
        of_ranks = late or turns
        ranked = _ranked(merged if of_ranks is None else [*merged, of_ranks], run, analysis)
        ranked = beside_calls(ranked, calls, own)
        combined = naming_missing(
            prioritize_machine_findings(_with_verdict(ranked, differences, analysis, run), run.all)
        )
    combined = without_verdict_of_hang(prioritize_distorting_settings(combined, run.all))
    measured = {finding.evidence.get("mistake") for finding in combined.findings}
    switches = (hint for hint in switch_hints(evidence.settings.switches) if hint.code not in measured)
    return for_trainer(replace(combined, hints=(*switches, *combined.hints)))


def naming_missing(analysis: Analysis) -> Analysis:
    """The analysis with the ranks that its verdict knows nothing of named first."""
    run, missing = analysis.run, set(analysis.missing)
    of = run.ranks.world_size if run is not None and not analysis.ranks else analysis.all_ranks + len(missing)
    source = next((finding.source for finding in analysis.findings if finding.code == analysis.verdict), "run")
    if run is not None and run.ranks.works and source == "run":
        unheard = {*range(run.ranks.world_size)} - {work.rank for work in run.ranks.works}
        missing = unheard & missing if analysis.ranks else unheard
    are = "is" if len(missing) == 1 else "are"
    words = f"Without {rank_list(missing)} of {of:,}, which {are} missing and may be the cause" if missing else ""
    if analysis.verdict_text.startswith(words):
        return analysis
    warnings = tuple(dict.fromkeys((words, *analysis.warnings)))
    return replace(analysis, verdict_text=f"{words}: {analysis.verdict_text}", warnings=warnings)


def without_verdict_of_hang(analysis: Analysis) -> Analysis:
    """The analysis without verdict and findings if training stood still for most of the fit."""
    run = analysis.run
    if run is None or run.ledger is None:
        return analysis
    stood_s, whole_s = run.ledger.parts.get(HANG, 0.0), LedgerCosts(run).whole_s
    if 100 * stood_s <= _MOSTLY_PCT * whole_s:
        return analysis
    text = f"No verdict: training stood still for {in_s(stood_s)} of the fit's {in_s(whole_s)}."
    return replace(analysis, verdict=NO_VERDICT, verdict_text=text, findings=(), hints=(), differences=())


def judge(
    ranks: Sequence[RankSummary], waits: Sequence[RankWait], cut_off: Sequence[str]
) -> tuple[tuple[Finding, ...], tuple[Hint, ...], str, str]:
    """Findings, hints, verdict and its text of recorded ranks; of those cut off only if there are no others."""
    whole = [rank for rank in ranks if not rank.cut_off]
    gpu = any(rank.gpu.busy_ms_per_step for rank in ranks)
    findings = in_order(find_causes(whole, waits), gpu=gpu)
    verdict, text = decide(findings, gpu=gpu)
    unseen = next((rank.unseen for rank in ranks if rank.unseen), "")
    if unseen:
        findings, verdict, text = (), NO_VERDICT, f"No verdict: {unseen}."
    if cut_off:
        verdict, text = (verdict, f"{cut_off[0]} {text}") if whole else (NO_VERDICT, no_verdict(cut_off[0]))
    return findings, rules_of_thumb(whole), verdict, text


def without_run(analysis: Analysis) -> Analysis:
    """The analysis of the trace alone, of at most 16 ranks, from one that had been combined with a run."""
    if analysis.run is None:
        return analysis
    findings, hints, verdict, text = judge(analysis.ranks, analysis.rank_waits, analysis.cut_off)
    return naming_missing(
        replace(analysis, verdict=verdict, verdict_text=text, findings=findings, hints=hints, run=None, differences=())
    )


def _without_late_hosts(analysis: Analysis, run: LiveRun) -> tuple[Finding, ...]:
    """The trace's findings without what the ranks' own clocks decide: which host is late in live steps."""
    # recording slows every rank's host, each by another amount, so that in a trace another rank may be the late one.
    findings, late = analysis.findings, run.straggler
    if len(run.all.ranks.works) < _PAIR or (late is None and not_measured(run.all.ranks.works)):
        return findings
    recorded = next((finding for finding in findings if finding.code == STRAGGLER), None)
    if recorded is not None and (late is not None or recorded.evidence.get("late") == "host"):
        whole = [rank for rank in analysis.ranks if not rank.cut_off]
        own = {finding.code: finding for finding in rank_causes(whole, analysis.rank_waits)}
        # a late rank's own waits for its host are again a cause of their own; shares are those over all ranks
        findings = tuple(
            replace(finding, advice=own[finding.code].advice, fix=own[finding.code].fix, saves=own[finding.code].saves)
            if finding.rank == recorded.rank and finding.code in own
            else finding
            for finding in findings
            if finding is not recorded
        )
    if late is not None and run.all.timing.on_device:
        findings = tuple(part_of(late, finding) for finding in findings)
    return findings


def _to_live_step(analysis: Analysis | None, run: LiveRun) -> tuple[list[Finding], list[str]]:
    """The causes in the step as shares of the live step, and where trace and run differ."""
    live = {finding.code: finding for finding in run_findings(run.own)}
    if analysis is None or not analysis.ranks:
        return list(live.values()), []
    recorded = _without_late_hosts(analysis, run)
    steps = RecordedSteps(analysis, run)
    if steps.rank.gpu.busy_ms_per_step:
        return gpu_findings(recorded, live, steps)
    if any(rank.gpu.busy_ms_per_step for rank in analysis.ranks):  # the run is of a rank without one
        known = {finding.code for finding in recorded}
        return [*recorded, *(finding for code, finding in live.items() if code not in known)], []
    return cpu_findings(recorded, live, steps)


def _merged(findings: Sequence[Finding], ledger: Sequence[Finding], run: RunEvidence) -> list[Finding]:
    """Findings of the step and of the ledger without those whose time another one explains better."""
    hidden, step_ms = set(), run.timing.step_ms.mean
    collecting_ms = sum(finding.saves.ms_per_step for finding in ledger if finding.code == "gc-bound" and finding.saves)
    for code in ("between-regions", "python-bound"):  # in which of the regions collections are is not known
        pct = max((finding.share_pct for finding in findings if finding.code == code), default=0.0)
        if collecting_ms > step_ms * pct / 100 / 2:
            hidden.add(code)
    if any(finding.code == "worker-restarts" for finding in findings):
        hidden.add("loader-startup")
    in_update_pct = 100 * hooks_ms(run, "optimizer") / step_ms if step_ms > 0 else 0.0
    updates = [finding for finding in findings if finding.code == "slow-optimizer" and finding.source == "trace"]
    if any(finding.share_pct < 2 * in_update_pct for finding in updates):  # its region contains the hooks
        hidden.add("slow-optimizer")
    kept = [finding for finding in (*findings, *ledger) if finding.code not in hidden]
    return of_both_loaders(kept, run)


def _ranked(findings: Sequence[Finding], run: LiveRun, recorded: Analysis | None = None) -> tuple[Finding, ...]:
    """The findings in their order, with intervals and lines."""
    known = with_lines(with_intervals(findings, run.all), run.own)
    if recorded is not None and len(recorded.ranks) == 1:  # of several, the trace's rules have named the function
        known = [located(finding, recorded.ranks[0]) for finding in known]
    return in_order(known, run.all, gpu=run.all.timing.on_device)


def _with_verdict(
    ranked: tuple[Finding, ...], differences: Sequence[str], analysis: Analysis | None, run: LiveRun
) -> Analysis:
    if analysis is None:
        return _of_run(ranked, run)
    verdict, text = decide(ranked, gpu=run.all.timing.on_device, steps=run.all.timing.steps)
    return replace(
        analysis,
        verdict=verdict,
        verdict_text=text,
        findings=ranked,
        hints=(*analysis.hints, *run_hints(run.all)),
        run=run.all,
        differences=(*analysis.differences, *differences),
    )


def _unknown_pct(run: RunEvidence) -> float:
    """The share of time in long steps of which only the length is known, compilation and collections not counted."""
    if run.timing.unknown_steps < _UNKNOWN_STEPS:
        return 0.0
    counted_s = {} if run.ledger is None else run.ledger.counted_s or {}
    known_ms = 1e3 * sum(s for part, s in counted_s.items() if part.startswith((COMPILE, "gc/"))) / run.timing.steps
    return 100 * max(run.timing.unknown_ms - known_ms, 0.0) / run.timing.step_ms.mean


def _of_run(ranked: tuple[Finding, ...], run: LiveRun) -> Analysis:
    """The analysis without a trace: what a CPU computes is a finding beside others."""
    steps, certain = run.all.timing.steps, [finding for finding in ranked if is_certain(finding)]
    findings = ranked
    if certain and not run.all.timing.on_device:  # what a step computes, without the waits and what those name
        work = run_findings(run.own, (CPU_WORK,))
        findings = _ranked([*ranked, *beside_straggler(work, run.all, run.straggler)], run)
    verdict, text = decide(findings, gpu=run.all.timing.on_device, steps=steps)
    if verdict == CPU_WORK.code and not run.all.timing.on_device:  # what can be removed is small beside it
        findings, verdict = ranked, NOTHING_STANDS_OUT
        text = (
            f"Nothing stands out: forward, backward and optimizer take {run.times.share_pct(*COMPUTE):.0f} % of the "
            f"step. The largest cause beside them costs {certain[0].share_pct:.0f} %: {decide(certain)[1]}"
        )
    unknown_pct = _unknown_pct(run.all)
    if unknown_pct >= _UNKNOWN_PCT and not any(finding.share_pct >= unknown_pct for finding in certain):
        long = f"{run.all.timing.unknown_steps} long steps, none of which had its regions timed,"
        took = f"{long} take {unknown_pct:.0f} % of all the time"
        times_all = "ThroughputCallback(overhead=None) times the regions of each step."
        verdict, text = NO_VERDICT, f"No verdict: {took}. {times_all}"
    if steps < MIN_STEPS and not ranked:
        steady = f"{steps} steady step{'' if steps == 1 else 's'}"
        verdict, text = NO_VERDICT, f"No verdict: {steady}, at least {MIN_STEPS} needed."
    hints = run_hints(run.all)
    return Analysis(source=THE_RUN, verdict=verdict, verdict_text=text, findings=findings, hints=hints, run=run.all)
