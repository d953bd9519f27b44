"""Whether a recorded window left the run slower than it was before."""

from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import Final

from lightning_forge_profiling.diagnosis.bootstrap import bootstrap_difference
from lightning_forge_profiling.results.analysis import WindowEffect

FEWEST_STEPS: Final = 20
"""On each side; with fewer the interval is wider than the effects of interest."""

_BLOCKS: Final = 8
"""Each side is resampled in so many blocks: a shared machine's pace changes within tens of steps, not from one to the
next."""


def window_effect(before_ms: Sequence[float], after_ms: Sequence[float]) -> WindowEffect | None:
    """Compare the steps after a window with those before it.

    Example:
        >>> effect = window_effect([5.0, 5.1] * 20, [6.0, 6.1] * 20)
        >>> round(effect.change_pct, 1), effect.low_pct > 10
        (19.8, True)
    """
    if min(len(before_ms), len(after_ms)) < FEWEST_STEPS or min(*before_ms, *after_ms) <= 0:
        return None
    before, after = median(before_ms), median(after_ms)
    # the difference of logarithms is the logarithm of the ratio
    logarithms = [log(ms) for ms in before_ms], [log(ms) for ms in after_ms]
    low, high = bootstrap_difference(*logarithms, block=min(len(before_ms), len(after_ms)) // _BLOCKS)
    return WindowEffect(
        steps_before=len(before_ms),
        steps_after=len(after_ms),
        before_ms=before,
        after_ms=after,
        change_pct=100 * (after / before - 1),
        low_pct=100 * (exp(low) - 1),
        high_pct=100 * (exp(high) - 1),
    )
