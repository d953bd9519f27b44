"""The order of findings, and the verdict: the one whose fix can be expected to save most."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.diagnosis.rule import COMPUTE, NAMED_FROM_PCT
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.results.analysis import NO_VERDICT, NOTHING_STANDS_OUT, Finding, RunEvidence

RECOVERABLE: Final = MappingProxyType(
    {"launch-bound": 0.6, "python-bound": 0.6, "compute-bound": 0.15, "memory-bandwidth-bound": 0.2}
)
"""The part of a finding's share that its fix can be expected to save, where that is less than its bound.

A wait can be removed. But recording slows the host, so that launching costs less without it: on an H200, steps that
Python paces took 1.4 to 1.8 times as long while they were recorded. Work has to be done, and can be done somewhat
better (a lower precision, fused kernels): those two figures are a judgement, not a measurement. All of them only decide
which finding comes first, and `order_note` says so where it does.
"""

NAMED_FROM: Final = MappingProxyType({("slow-optimizer", "run"): 20.0, ("between-regions", "run"): 10.0})
"""The share from which a finding is named where it is not `NAMED_FROM_PCT`, by its code and source.

A fused update of a model that is trained with a sensible batch takes 1 to 10 % of the step. Lightning's own loop with
its default callbacks takes some 0.3 ms a step.
"""

_OF_REGION: Final = MappingProxyType(
    {
        "input-bound": ("data",),
        "transfer-bound": ("transfer",),
        "slow-optimizer": ("optimizer",),
        "between-regions": ("other",),
        "blocked-forward": ("forward",),
        "blocked-backward": ("backward",),
    }
)
_MOST_NEEDED: Final = 20.0
"""A longer run is asked for only if so many times the steps would do."""

_NOTHING_WITHOUT_GPU: Final = (
    "Nothing stands out: training does not wait for the data loader. A recorded window (ForgeProfilerCallback) "
    "shows which operators take the rest of the step."
)


def by_gain(findings: Iterable[Finding], *, in_steps_pct: float = 100.0) -> tuple[Finding, ...]:
    """The findings, the one whose fix can be expected to save most first."""

    def gain(found: Finding) -> float:
        in_run = in_steps_pct / 100 if found.of == "step" else 1.0
        return found.share_pct * RECOVERABLE.get(found.code, 1.0) * in_run

    return tuple(sorted(findings, key=gain, reverse=True))


def order_note(findings: Sequence[Finding]) -> str:
    """Why a finding stands below one that costs less; "" where the shares descend.

    Example:
        >>> def costs(code, pct):
        ...     return Finding(
        ...         code=code, share_pct=pct, rank=None, source="trace", title="", evidence={}, advice=""
        ...     )
        >>> order_note([costs("slow-optimizer", 44.0), costs("compute-bound", 49.0)])
        "Findings are ordered by what a fix can be expected to save: 15 % of compute-bound's share, all of the others'."
    """
    findings = [found for found in findings if is_certain(found) and found.code not in MACHINE]
    shares = [found.share_pct for found in findings]
    if len({found.of for found in findings}) > 1:
        return "Findings are ordered by what a fix can be expected to save of the whole fit's wall time."
    if shares == sorted(shares, reverse=True):
        return ""
    codes = dict.fromkeys(found.code for found in findings)
    counted = [f"{100 * RECOVERABLE[code]:.0f} % of {code}'s share" for code in codes if code in RECOVERABLE]
    return f"Findings are ordered by what a fix can be expected to save: {', '.join(counted)}, all of the others'."


def decide(findings: Sequence[Finding], *, gpu: bool = True, steps: int = 0) -> tuple[str, str]:
    """The verdict on findings in the order of `by_gain`: the first whose interval lies above its threshold.

    Example:
        >>> decide([])[0]
        'nothing stands out'
        >>> wide = Finding(
        ...     code="input-bound", share_pct=9.0, low_pct=1.0, high_pct=20.0, rank=None, source="run", title="",
        ...     evidence={}, advice=""
        ... )  # fmt: skip
        >>> decide([wide], steps=38)[1].partition(". ")[2]
        '38 steps counted, about 150 needed.'
    """
    if not findings and not gpu:
        return NOTHING_STANDS_OUT, _NOTHING_WITHOUT_GPU
    if not findings:
        return NOTHING_STANDS_OUT, "Nothing stands out: no single cause costs enough of the step to be worth naming."
    first = next((found for found in findings if is_certain(found)), None)
    if first is not None:
        return first.code, f"{first.code}: {first.title}. {first.remedy}"
    return _uncertain(findings[0], steps)


def is_certain(found: Finding) -> bool:
    """Whether a finding's interval lies above the share from which it is named, so that it may be the verdict.

    So must its typical share: a few slow steps make a region uneven, not slow.
    """
    least = threshold_pct(found)
    return all(pct is None or pct >= least for pct in (found.low_pct, found.typical_pct))


def threshold_pct(found: Finding) -> float:
    """The share from which a finding is named, in percent."""
    return NAMED_FROM.get((found.code, found.source), NAMED_FROM_PCT)


def with_intervals(findings: Iterable[Finding], evidence: RunEvidence) -> list[Finding]:
    """The findings with the intervals of their shares, as far as the run's own steps give them.

    A share follows from the times of regions or of a part of the ledger: its interval is as wide, in proportion, as
    theirs together.
    """
    return [_with_interval(found, evidence) for found in findings]


def _with_interval(found: Finding, evidence: RunEvidence) -> Finding:
    known = [evidence.intervals[name] for name in _measured_by(found) if name in evidence.intervals]
    pct = sum(interval.pct for interval in known)
    if found.low_pct is not None or pct <= 0:
        return found
    low, high = (sum(getattr(interval, end) for interval in known) / pct for end in ("low_pct", "high_pct"))
    typical = None
    if found.code in _OF_REGION and all(interval.typical_pct is not None for interval in known):
        typical = found.share_pct * sum(interval.typical_pct or 0.0 for interval in known) / pct
    return replace(
        found, low_pct=low * found.share_pct, high_pct=min(high * found.share_pct, 100.0), typical_pct=typical
    )


def _measured_by(found: Finding) -> tuple[str, ...]:
    """The regions, or the part of the ledger, that a finding's share is of; none for one that only a trace shows."""
    part = found.evidence.get("part")
    if isinstance(part, str):
        return (part,) if found.of == "step" else ()  # of a whole run it is no sample
    if found.code == "launch-bound" and found.source == "run":
        return tuple(name for name in REGIONS if f"{name}_host_ms_per_step" in found.evidence)
    if found.code == "compute-bound" and found.source == "run":
        return COMPUTE
    return _OF_REGION.get(found.code, ())


def certain_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings with those that may be the verdict before the others."""
    return tuple(sorted(findings, key=lambda found: not is_certain(found)))


def _uncertain(found: Finding, steps: int) -> tuple[str, str]:
    """What is said where no finding is certain: how many steps would be needed, if that is the reason."""
    low, high, least = found.low_pct or 0.0, found.high_pct or 100.0, threshold_pct(found)
    of = "fit" if found.of == "run" else "step"
    share = f"{found.share_pct:.0f} % of the {of} ({low:.0f} to {high:.0f} %)"
    if found.typical_pct is not None and found.typical_pct < least <= low:
        return NOTHING_STANDS_OUT, (
            f"Nothing stands out: {found.code} takes {share}, but {found.typical_pct:.0f} % of typical steps: it is "
            "uneven, not slow."
        )
    beyond = found.share_pct - least
    needed = steps * ((found.share_pct - low) / beyond) ** 2 if beyond > 0 else 0.0
    if not steps < needed <= _MOST_NEEDED * steps:
        return NOTHING_STANDS_OUT, (
            f"Nothing stands out: {found.code}, the largest cause, takes {share}, which is not certain to be above the "
            f"{least:.0f} % from which it is named."
        )
    return NO_VERDICT, (
        f"Not enough steps to tell: {found.code} takes {share}. {steps} steps counted, about "
        f"{float(f'{needed:.2g}'):.0f} needed."
    )
