"""What grows from step to step, and so costs more the longer a run is: the time of a part, the host's memory."""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.hints import LARGER_BATCHES
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.machine_rules import growth_advice, growth_evidence, growth_words
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    MIN_SHARE_PCT,
    Explanation,
    as_finding,
    in_ms,
    of_step,
    saving,
    subtract,
)
from lightning_forge_profiling.diagnosis.verdict import WORK, measured_by
from lightning_forge_profiling.names import REGIONS, hook_region
from lightning_forge_profiling.schema import Finding, PartGrowth, RunEvidence

GROWTH: Final = "growth"

# of the kernel's time: 68 and 85 % of it went where graphs were no longer kept (two CPU cores, torch 2.13, 2026-11-28)
_LEAST_OF_KERNEL: Final = 0.5

_LOOK: Final = (
    "Look for what gets longer with each step: a list, table or tensor that is added to and read again, a metric that "
    "is never reset"
)
# by part, where else to look
_LOOK_IN: Final = {
    "data": "Look for what gets longer with each batch: a list or cache in the dataset, a file that is read from its "
    "beginning, samples in order of length",
    "backward": "A state or a loss keeps the graph of earlier steps: detach it (state = state.detach())",
}


def with_growth(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """The findings, with what they take in the end where that grows."""
    own = _own(run)
    return [
        _growing(finding, name, own[name]) if (name := next(_named(finding, own), "")) else finding
        for finding in findings
    ]


def growth_findings(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """What grows and is named by none of these findings."""
    own = _own(run)
    named = {name for finding in findings for name in _named(finding, own)}
    costs = [_time_finding(name, growth, run) for name, growth in own.items() if name not in named]
    return [*filter(None, costs), *host_memory_findings(run)]


def without_growth(run: RunEvidence, grows: Iterable[Finding]) -> RunEvidence:
    """The run without the time that is of these findings, and of no other cause."""
    regions = dict(run.timing.regions)
    for finding in grows:
        part, ms = finding.evidence.get("part"), finding.saves.ms_per_step if finding.saves else 0.0
        names = [part] if part in regions else [] if part else [name for name in COMPUTE if name in regions]
        whole_ms = sum(regions[name].device_ms for name in names)
        for name in names if whole_ms else ():
            less = ms * regions[name].device_ms / whole_ms
            regions[name] = subtract(regions[name], less, less, less)
    return replace(run, timing=replace(run.timing, regions=regions))


def _own(run: RunEvidence) -> dict[str, PartGrowth]:
    """What grows by itself."""
    # a region grows with a part of the ledger inside it, and forward and backward with the batches
    grows = run.timing.grows
    within = {hook_region(name) for name in grows} | (LARGER_BATCHES if grows.keys() >= LARGER_BATCHES else set())
    return {name: growth for name, growth in grows.items() if name not in within and _is_own(name, growth, run)}


def _named(finding: Finding, own: Container[str]) -> Iterator[str]:
    """What grows of the regions and parts of the ledger that a finding's time is of."""
    part, parts = (finding.evidence.get(name) for name in ("part", "parts"))
    if isinstance(part, str):
        names: Sequence[str] = (part,)
    else:
        names = parts.split(", ") if isinstance(parts, str) else measured_by(finding)
    return (name for name in names if name in own and finding.code not in {*WORK, GROWTH})


def _growing(finding: Finding, name: str, growth: PartGrowth) -> Finding:
    what = f"{name} grows" if name in REGIONS else "it grows"
    title = f"{finding.title}; {what} {_from_to(growth)}"
    evidence = {"first_ms_per_step": round(growth.first_ms, 3), "last_ms_per_step": round(growth.last_ms, 3)}
    return replace(finding, title=title, evidence={**finding.evidence, **evidence})


def _from_to(growth: PartGrowth) -> str:
    return f"from {in_ms(growth.first_ms)} to {in_ms(growth.last_ms)} a step over the run"


_BEFORE_FIRST: Final = 1 / 8  # the ends are the middles of the first and last fifth: a tenth and nine tenths of the run


def _more_ms(name: str, growth: PartGrowth, run: RunEvidence) -> float:
    """What a step takes more of a part than in the very beginning, if it grows by as much with each step."""
    region = run.timing.regions.get(name)
    at_0_ms = max(growth.first_ms - _BEFORE_FIRST * (growth.last_ms - growth.first_ms), 0.0)
    return (LedgerCosts(run).exposed_ms(name) if region is None else region.device_ms) - at_0_ms


def _is_own(name: str, growth: PartGrowth, run: RunEvidence) -> bool:
    """Whether a part grows by more than what training waits for a core, which may be in any part."""
    cpu = run.machine.cpu
    waits_pct = 0.0 if cpu is None else (cpu.waits_pct or 0.0) + cpu.stolen_pct
    return _more_ms(name, growth, run) > waits_pct * run.timing.step_ms.mean / 100


def _time_finding(name: str, growth: PartGrowth, run: RunEvidence) -> Finding | None:
    """A part that grows and that nothing else names; its cost is what a step takes more than in the beginning."""
    ms, step_ms = _more_ms(name, growth, run), run.timing.step_ms.mean
    if step_ms <= 0 or 100 * ms < MIN_SHARE_PCT * step_ms:
        return None
    explained = Explanation(
        f"{name} grows {_from_to(growth)}",
        {
            "part": name,
            "first_ms_per_step": round(growth.first_ms, 3),
            "last_ms_per_step": round(growth.last_ms, 3),
            "more_ms_per_step": round(ms, 3),
        },
        f"{_LOOK_IN.get(name, _LOOK)}.",
    )
    return as_finding(
        GROWTH,
        explained,
        share_pct=100 * ms / step_ms,
        saves=saving(ms, step_ms, at_most=True),
        run=run,
    )


def host_memory_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """The host's memory that grows. Where the kernel's work for it is known, it costs time, else memory alone."""
    growth, step_ms = run.machine.growth, run.timing.step_ms.mean
    if growth is None or step_ms <= 0:
        return ()
    ms = 0.0 if run.timing.on_device or growth.kernel_ms is None else min(growth.kernel_ms, step_ms)
    title, evidence = growth_words(growth), growth_evidence(growth)
    # of an entry without a graph the kernel's time is mostly that of other things
    if 100 * ms < MIN_SHARE_PCT * step_ms or growth.holder is None or growth.holder.holds != "graphs":
        taken, left = growth.to_step - growth.from_step, (growth.full_step or 0) - growth.to_step
        share_pct = 100 * taken / (taken + left) if left > 0 else 100.0  # of what was free when it began
        explained = Explanation(title, evidence, growth_advice(growth))
        return (as_finding(GROWTH, explained, share_pct=share_pct, run=run, of="memory"),)
    title = f"the kernel takes {of_step(ms, step_ms)}, as {title}"
    evidence |= {"kernel_ms_per_step": round(ms, 3), "step_ms": round(step_ms, 3)}
    explained = Explanation(title, evidence, growth_advice(growth))
    saves, pct = saving(ms, step_ms, at_most=True), 100 * ms / step_ms
    between_pct = (_LEAST_OF_KERNEL * pct, pct)
    return (as_finding(GROWTH, explained, share_pct=pct, saves=saves, run=run, between_pct=between_pct),)
