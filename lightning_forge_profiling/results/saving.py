"""Predicted time saved by the fix of a finding."""

from dataclasses import dataclass

__all__ = ["Saving", "saving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Predicted time saved by the fix of a finding.

    Attributes:
        ms_per_step: milliseconds per step.
        pct: the same in percent of the step.
        at_most: whether it is an upper bound; else the expected value.
        text: the same as a sentence.
    """

    ms_per_step: float
    pct: float
    at_most: bool
    text: str


_BEYOND = 1.2
"""A saving above this multiple of the cause's cost is more than rounding, and the text explains it."""


def saving(ms: float | None, step_ms: float, *, at_most: bool, cost_ms: float | None = None) -> Saving | None:
    """Puts a predicted saving into words.

    Args:
        ms: milliseconds saved per step; None if it cannot be predicted.
        step_ms: step time.
        at_most: whether `ms` is an upper bound.
        cost_ms: cost that the finding states; None for `ms`.

    Returns:
        None without a saving.

    Example:
        >>> saving(29.5, 38.3, at_most=False).text
        'That saves about 29.5 ms of each 38.3 ms step (77 %).'
    """
    if ms is None or ms <= 0 or step_ms <= 0:
        return None
    ms = min(ms, step_ms)
    pct = 100 * ms / step_ms
    much = "at most" if at_most else "about"
    text = f"That saves {much} {_ms(ms)} of each {_ms(step_ms)} step ({pct:.0f} %)."
    if cost_ms is not None and ms > _BEYOND * cost_ms:
        text = f"{text[:-1]}, other waits for the host included: without this delay, the host runs ahead of the GPU."
    return Saving(ms_per_step=ms, pct=pct, at_most=at_most, text=text)


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
