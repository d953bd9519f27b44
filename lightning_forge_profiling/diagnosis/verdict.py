"""The order of findings, and the verdict: the one whose fix can be expected to save most."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.results.analysis import NOTHING_STANDS_OUT, Finding

RECOVERABLE: Final = MappingProxyType(
    {"launch-bound": 0.6, "python-bound": 0.6, "compute-bound": 0.15, "memory-bandwidth-bound": 0.2}
)
"""The part of a finding's share that its fix can be expected to save, where that is less than its bound.

A wait can be removed. But recording slows the host, so that launching costs less without it: on an H200, steps that
Python paces took 1.4 to 1.8 times as long while they were recorded. Work has to be done, and can be done somewhat
better (a lower precision, fused kernels): those two figures are a judgement, not a measurement. All of them only decide
which finding comes first, and `order_note` says so where it does.
"""

_NOTHING_WITHOUT_GPU: Final = (
    "Nothing stands out: training does not wait for the data loader. A recorded window (ForgeProfilerCallback) "
    "shows which operators take the rest of the step."
)


def by_gain(findings: Iterable[Finding], *, in_steps_pct: float = 100.0) -> tuple[Finding, ...]:
    """The findings, the one whose fix can be expected to save most first.

    Args:
        findings: of the step, and of the whole run.
        in_steps_pct: how much of the run its steps take.
    """

    def gain(found: Finding) -> float:
        in_run = in_steps_pct / 100 if found.of == "step" else 1.0
        return found.share_pct * RECOVERABLE.get(found.code, 1.0) * in_run

    return tuple(sorted(findings, key=gain, reverse=True))


def order_note(findings: Sequence[Finding]) -> str:
    """Why a finding stands below one that costs less; "" where the shares descend.

    Args:
        findings: in the order of `by_gain`.

    Example:
        >>> def costs(code, pct):
        ...     return Finding(
        ...         code=code, share_pct=pct, rank=None, source="trace", title="", evidence={}, advice=""
        ...     )
        >>> order_note([costs("slow-optimizer", 44.0), costs("compute-bound", 49.0)])
        "Findings are ordered by what a fix can be expected to save: 15 % of compute-bound's share, all of the others'."
    """
    shares = [found.share_pct for found in findings]
    if len({found.of for found in findings}) > 1:
        return "Findings are ordered by what a fix can be expected to save of the whole fit's wall time."
    if shares == sorted(shares, reverse=True):
        return ""
    codes = dict.fromkeys(found.code for found in findings)
    counted = [f"{100 * RECOVERABLE[code]:.0f} % of {code}'s share" for code in codes if code in RECOVERABLE]
    return f"Findings are ordered by what a fix can be expected to save: {', '.join(counted)}, all of the others'."


def decide(findings: Sequence[Finding], *, gpu: bool = True) -> tuple[str, str]:
    """The verdict on findings in the order of `by_gain`.

    Args:
        findings: what was found.
        gpu: whether GPU work was recorded.

    Returns:
        Its code, and its sentences.

    Example:
        >>> decide([])[0]
        'nothing stands out'
    """
    if not findings and not gpu:
        return NOTHING_STANDS_OUT, _NOTHING_WITHOUT_GPU
    if not findings:
        return NOTHING_STANDS_OUT, "Nothing stands out: no single cause costs enough of the step to be worth naming."
    first = findings[0]
    return first.code, f"{first.code}: {first.title}. {first.remedy}"
