"""What the machine does to a run: training waits for a core, for its quota of one, or for the interpreter lock.

Such waits fall on whatever the thread was doing, so that they lengthen any region: they come before all other causes.
"""

from dataclasses import replace
from typing import Final

from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, Evidence, Explanation, in_ms, saving
from lightning_forge_profiling.results.analysis import Analysis, Finding, RunEvidence
from lightning_forge_profiling.results.run import OTHERS, CpuUse, ShareInterval

STARVED: Final = "cpu-starved"
THROTTLED: Final = "cpu-throttled"
GIL_HELD: Final = "gil-held"
MACHINE: Final = frozenset({STARVED, THROTTLED, GIL_HELD})

_MOSTLY: Final = 0.5
_DECIDES_PCT: Final = 10.0

_UNRELIABLE: Final = "All other shares include such waits and are unreliable."


def before_all(analysis: Analysis, evidence: RunEvidence) -> Analysis:
    """The analysis with what the machine does to the run as its verdict, if it costs enough.

    Under 10 % of the step it leaves the verdict to a cause that would be one without all of that time.
    """
    found = machine_findings(evidence)
    if not found:
        return analysis
    first, others = found[0], analysis.findings
    note = ". ".join(filter(None, (analysis.findings_note, _UNRELIABLE)))
    largest = others[0] if others and others[0].code == analysis.verdict else None
    small = sum(each.share_pct for each in found) < _DECIDES_PCT
    if small and largest is not None and (largest.low_pct or 0.0) - first.share_pct > NAMED_FROM_PCT:
        return replace(analysis, findings=(largest, *found, *others[1:]), findings_note=note)
    return replace(
        analysis,
        verdict=first.code,
        verdict_text=f"{first.code}: {first.title}. {first.remedy} {_UNRELIABLE}",
        findings=(*found, *others),
        findings_note=note,
    )


def machine_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What the machine does to the run, the costliest first."""
    cpu = evidence.cpu
    if cpu is None or evidence.step_ms.mean <= 0:
        return ()
    found = []
    waits_pct = (cpu.waits_pct or 0.0) + cpu.stolen_pct
    if (pct := _exposed(evidence, waits_pct)) >= NAMED_FROM_PCT:
        throttled = cpu.throttled_periods > 0 and cpu.throttled_pct >= NAMED_FROM_PCT
        code, explain = (THROTTLED, _throttled) if throttled else (STARVED, _starved)
        found.append(_finding(code, pct, explain(evidence, cpu, pct), evidence, cpu.waits))
    if cpu.gil is not None and (pct := _exposed(evidence, cpu.gil.low_pct)) >= NAMED_FROM_PCT:
        pct = _exposed(evidence, cpu.gil.pct)
        found.append(_finding(GIL_HELD, pct, _held(evidence, cpu, pct), evidence, cpu.gil))
    return tuple(sorted(found, key=lambda each: -each.share_pct))


def _exposed(evidence: RunEvidence, pct: float) -> float:
    """The part of the host's waits that the GPU waits for too."""
    hidden = evidence.on_device and evidence.drained_pct is not None
    return pct * (evidence.drained_pct or 0.0) / 100 if hidden else pct


def _finding(
    code: str, pct: float, explained: Explanation, evidence: RunEvidence, interval: ShareInterval | None
) -> Finding:
    step_ms = evidence.step_ms.mean
    return Finding(
        code=code,
        share_pct=min(pct, 100.0),
        rank=evidence.rank if evidence.world_size > 1 else None,
        source="run",
        title=explained.title,
        evidence={
            "waits_ms_per_step": round(pct * step_ms / 100, 3),
            "step_ms": round(step_ms, 3),
            **explained.evidence,
        },
        advice=explained.advice,
        saves=saving(pct * step_ms / 100, step_ms, at_most=True),
        low_pct=None if interval is None else interval.low_pct,
        high_pct=None if interval is None else interval.high_pct,
    )


def _waiting(cpu: CpuUse) -> Evidence:
    numbers: Evidence = {
        "usable_cores": cpu.cores,
        "used_cores": round(cpu.used, 2),
        "loader_workers_cores": round(cpu.workers, 2),
        "operator_threads": cpu.threads,
        "involuntary_switches_per_s": round(cpu.switches_per_s, 1),
        "cpu_pressure_pct": round(cpu.pressure_pct, 1),
        "stolen_pct": round(cpu.stolen_pct, 1),
        "throttled_pct": round(cpu.throttled_pct, 1),
    }
    return numbers | ({"unknown": ", ".join(cpu.missing)} if cpu.missing else {})


def _of_step(evidence: RunEvidence, pct: float) -> str:
    return f"{in_ms(pct * evidence.step_ms.mean / 100)} of each {in_ms(evidence.step_ms.mean)} step"


def _starved(evidence: RunEvidence, cpu: CpuUse, pct: float) -> Explanation:
    others = 0.0 if cpu.idle is None else cpu.cores - cpu.used - cpu.idle - cpu.workers
    title, advice = f"training waits {_of_step(evidence, pct)} for a core", []
    if cpu.stolen_pct > _MOSTLY * (cpu.waits_pct or 0.0):
        title += f": the hypervisor gave {cpu.stolen_pct:.0f} % of the cores' time to other machines"
        advice.append("Move to a machine whose cores are not shared.")
    elif others > OTHERS:
        cores = "the one usable core" if cpu.cores == 1 else f"the {cpu.cores:g} usable cores"
        title += f"; other processes use {others:.1f} of {cores}"
        advice.append(
            "Stop the other processes (top shows them), or give training cores of its own: taskset -c, the batch "
            "system's --cpus-per-task."
        )
    if cpu.workers > OTHERS and evidence.loader is not None and evidence.loader.num_workers:
        advice.append(
            f"The loader's num_workers={evidence.loader.num_workers} want {cpu.workers:.1f} cores: measure fewer."
        )
    if cpu.threads > cpu.cores:
        advice.append(f"An operator uses {cpu.threads} threads: set OMP_NUM_THREADS={max(int(cpu.cores), 1)}.")
    if not advice:
        advice.append(
            f"nproc shows the usable cores, here {cpu.cores:g}: run fewer processes and threads (OMP_NUM_THREADS, now "
            f"{cpu.threads}), or on more cores."
        )
    return Explanation(title, _waiting(cpu), " ".join(advice))


def _throttled(evidence: RunEvidence, cpu: CpuUse, pct: float) -> Explanation:
    return Explanation(
        f"training waits {_of_step(evidence, pct)} for its CPU quota, which stopped its control group in "
        f"{cpu.throttled_periods} periods",
        _waiting(cpu),
        "Raise the quota (docker --cpus, resources.limits.cpu of Kubernetes, CPUQuota of systemd), or use fewer "
        f"threads: OMP_NUM_THREADS (now {cpu.threads}), num_workers.",
    )


def _held(evidence: RunEvidence, cpu: CpuUse, pct: float) -> Explanation:
    thread = f"the Python thread {cpu.gil_thread}" if cpu.gil_thread else "another Python thread"
    return Explanation(
        f"training waits {_of_step(evidence, pct)} for the interpreter lock, which {thread} holds",
        {"thread": cpu.gil_thread or "unknown"},
        "Move that thread's work to a process (multiprocessing, DataLoader workers), or to calls that release the "
        "lock, as most of NumPy's and PyTorch's do.",
    )
