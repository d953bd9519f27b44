"""Whether a recorded window left the run slower than it was before."""

from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import Final

from lightning_forge_profiling.analysis.bootstrap import bootstrap_difference
from lightning_forge_profiling.analysis.results import WindowEffect

__all__ = ["FEWEST_STEPS", "window_effect"]

FEWEST_STEPS: Final = 20
"""On each side; with fewer the interval is wider than what is looked for."""


def window_effect(before_ms: Sequence[float], after_ms: Sequence[float]) -> WindowEffect | None:
    """Compare the steps after a window with those before it.

    Args:
        before_ms: times of the steps before.
        after_ms: times of the steps after.

    Returns:
        The ratio of the medians with its 95 % bootstrap interval, in percent; None where a side has fewer than
        `FEWEST_STEPS` steps.

    Example:
        >>> effect = window_effect([5.0, 5.1] * 20, [6.0, 6.1] * 20)
        >>> round(effect.change_pct, 1), effect.low_pct > 10
        (19.8, True)
    """
    if min(len(before_ms), len(after_ms)) < FEWEST_STEPS or min(*before_ms, *after_ms) <= 0:
        return None
    before, after = median(before_ms), median(after_ms)
    # the difference of logarithms is the logarithm of the ratio
    low, high = bootstrap_difference([log(ms) for ms in before_ms], [log(ms) for ms in after_ms])
    return WindowEffect(
        steps_before=len(before_ms),
        steps_after=len(after_ms),
        before_ms=before,
        after_ms=after,
        change_pct=100 * (after / before - 1),
        low_pct=100 * (exp(low) - 1),
        high_pct=100 * (exp(high) - 1),
    )
