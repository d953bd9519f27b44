"""Whether a recorded window left the run slower than it was before."""

from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import Final

from lightning_forge_profiling.diagnosis.bootstrap import bootstrap_difference
from lightning_forge_profiling.schema import StepDrift, WindowEffect

DRIFT_STEPS: Final = 100  # fewest steps to test. With fewer, slow moments of a shared machine look like a warm-up.

# long blocks detect a slow drift despite noise, short ones a warm-up of a dozen steps
_BLOCK_STEPS: Final = (32, 16, 8, 4)
_FEWEST_BLOCKS: Final = 16

# least distance of the first block from the later level, relative to the largest distance of a later block. Noise alone
# reaches it in under 5 % of runs: simulated with a step-to-step autocorrelation of up to 0.9
# (`tests/test_step_drift.py`).
_BEYOND: Final = 2.5

_LEAST: Final = 0.05  # least drift, as a share of the step. Less is not worth a longer warm-up.

_STEADY: Final = 0.02


def step_drift(steps: Sequence[int], times_ms: Sequence[float]) -> StepDrift | None:
    """Drift at the start of the counted steps."""
    # the later half of the steps is the reference. Its median is the level; the largest distance of a block's median
    # from it is the noise. There is a drift if the median of the first block is at least 5 % and 2.5 times the noise
    # away from the level. It lasts while the following blocks are on the same side, further away than the noise and 2 %
    # of the level.
    if len(times_ms) < DRIFT_STEPS:
        return None
    level = median(times_ms[len(times_ms) // 2 :])
    for size in _BLOCK_STEPS:
        blocks = [median(times_ms[at : at + size]) for at in range(0, len(times_ms) - size + 1, size)]
        if len(blocks) < _FEWEST_BLOCKS:
            continue
        half = (len(blocks) + 1) // 2
        noise = max(abs(block - level) for block in blocks[half:])
        side = 1 if blocks[0] > level else -1
        above = [side * (block - level) for block in blocks]
        if above[0] <= max(_BEYOND * noise, _LEAST * level):
            continue
        steady = max(noise, _STEADY * level)
        lasts = next((block for block in range(half) if above[block] <= steady), half)
        return StepDrift(first_ms=blocks[0], steady_ms=level, until_step=steps[lasts * size] if lasts < half else None)
    return None


WINDOW_STEPS: Final = 20  # on each side; with fewer the interval is wider than the effects of interest

# each side is resampled in so many blocks: a shared machine's pace changes within tens of steps, not from one to the
# next
_BLOCKS: Final = 8


def window_effect(before_ms: Sequence[float], after_ms: Sequence[float]) -> WindowEffect | None:
    """Compare the steps after a window with those before it; None with too few on a side."""
    if min(len(before_ms), len(after_ms)) < WINDOW_STEPS or min(*before_ms, *after_ms) <= 0:
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
