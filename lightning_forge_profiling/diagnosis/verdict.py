"""From findings to a verdict: the one whose fix gains most."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.results.analysis import NOTHING_STANDS_OUT, Finding

__all__ = ["RECOVERABLE", "by_gain", "decide"]

RECOVERABLE: Final = MappingProxyType(
    {"launch-bound": 0.6, "python-bound": 0.6, "compute-bound": 0.15, "memory-bandwidth-bound": 0.2}
)
"""What part of a finding's cost its fix can be expected to win back, where that is not all of it.

A wait can be removed. But recording slows the host, so that launching costs less without it: on an H200, steps that
Python paces took 1.4 to 1.8 times as long while they were recorded. Work has to be done, and can be done somewhat
better (a lower precision, fused kernels): those two figures are a judgement, not a measurement. All of them only decide
which of two findings comes first, and are shown nowhere.
"""


_NOTHING_WITHOUT_GPU: Final = (
    "Nothing stands out: training does not wait for the data loader. What else takes the time of a step without a GPU "
    "shows in the operators of a recorded window (ForgeProfilerCallback)."
)


def by_gain(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, the one whose fix gains most first."""
    return tuple(sorted(findings, key=lambda found: -found.share_pct * RECOVERABLE.get(found.code, 1.0)))


def decide(findings: Sequence[Finding], *, gpu: bool = True) -> tuple[str, str]:
    """The verdict on findings in the order of `by_gain`.

    Args:
        findings: what was found.
        gpu: whether there was a GPU to look at.

    Returns:
        Its code, and what to tell the user.

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
