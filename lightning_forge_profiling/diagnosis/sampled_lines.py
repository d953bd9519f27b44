"""The line of the user's code that a finding's time is spent in, by samples of the training thread's stack."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from lightning_forge_profiling.diagnosis.rule import in_ms, region
from lightning_forge_profiling.results.analysis import Finding, RunEvidence
from lightning_forge_profiling.results.run import WORKER_LINES

LEAST_PCT: Final = 25.0
"""A line with a smaller share of a finding's time is not what to change first."""

_WAITING_PCT: Final = 50.0

_OF_HOST: Final = ("transfer", "forward", "backward", "optimizer", "other")
_REGIONS: Final = {
    "input-bound": ("data",),
    "transfer-bound": ("transfer",),
    "blocked-forward": ("forward",),
    "blocked-backward": ("backward",),
    "between-regions": ("other",),
    "python-bound": _OF_HOST,
    "launch-bound": _OF_HOST,
    "sync-bound": _OF_HOST,
}


def with_lines(findings: Iterable[Finding], evidence: RunEvidence) -> list[Finding]:
    """The findings with the line that most of their time is in, if there is one."""
    return [_with_line(found, evidence) if evidence.lines else found for found in findings]


def _with_line(found: Finding, evidence: RunEvidence) -> Finding:
    if "where" in found.evidence:  # by recorded stacks
        return found
    if found.code == "input-bound" and WORKER_LINES in evidence.lines:
        line = evidence.lines[WORKER_LINES][0]
        where = f"{line.file}:{line.line} {line.function}"
        title = f"{found.title}; a worker spends {line.pct:.0f} % of its time on batches in {where}"
        return replace(found, title=title, evidence={**found.evidence, "line": where, "line_pct": round(line.pct, 1)})
    part = found.evidence.get("part")
    parts = (part,) if isinstance(part, str) else _REGIONS.get(found.code, ())
    weights = {
        name: 1.0 if name == part else region(evidence, name).host_ms for name in parts if name in evidence.lines
    }
    shares: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, weight in weights.items():
        for line in evidence.lines[name]:
            sums = shares[f"{line.file}:{line.line} {line.function}"]
            sums[0] += weight * line.pct
            sums[1] += weight * line.pct * (line.waiting_pct or 0.0) / 100
    all_ms = sum(region(evidence, name).host_ms for name in parts) if part is None else 1.0
    where, (part_of, waiting) = max(shares.items(), key=lambda item: item[1][0], default=("", [0.0, 0.0]))
    pct = part_of / all_ms if all_ms > 0 else 0.0
    if pct < LEAST_PCT:
        return found
    took_ms = found.share_pct * evidence.step_ms.mean / 100
    share = f"{pct:.0f} % of it" if found.of == "run" else f"{in_ms(pct * took_ms / 100)} of it"
    waits = ", waiting" if 100 * waiting > _WAITING_PCT * part_of else ""
    return replace(
        found,
        title=f"{found.title}; {share} in {where}{waits}",
        evidence={**found.evidence, "line": where, "line_pct": round(pct, 1)},
    )
