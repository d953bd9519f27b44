"""Whether a metric of two runs got worse by more than a limit, and what difference their steps can show."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final, Literal

from lightning_forge_profiling.diagnosis.bootstrap import FEWEST_VALUES
from lightning_forge_profiling.diagnosis.compare import Comparison, Metric

Outcome = Literal["same", "faster", "slower", "inconclusive"]

_POWER: Final = 5.0
"""Normal quantiles of 97.5 % and 80 % (1.96 and 0.84), times 1.2533 for medians and the root of 2 for two sides, make
4.96. Simulated with the interval of `bootstrap_difference`, a difference of 5 deviations over the root of the steps is
called slower in 76 to 82 % of comparisons of 5, 8 and 20 normal steps a side."""

_EXAMPLES: Final = (5, 8, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a comparison says of one metric and a limit.

    Attributes:
        metric: which one.
        limit_pct: the limit.
        outcome: `slower` where the whole 95 % interval of the difference lies above the limit, `same` where it lies
            below the limit, `faster` where it lies below zero, `inconclusive` where it contains the limit, or where
            the steps are too few for an interval.
        text: why, with the numbers.
        missing: of runs, what would decide an inconclusive outcome; "" for a decided one, and of traces, where `text`
            says it.
    """

    metric: str
    limit_pct: float
    outcome: Outcome
    text: str
    missing: str = ""


def gate(comparison: Comparison, metric: str, limit_pct: float) -> Gate:
    """Decide whether a metric is worse by more than a limit.

    Noise alone makes at most one comparison of equal runs in forty `slower`.
    """
    found = comparison.metrics[metric]
    outcome, why = _decided(found, limit_pct)
    change = f"{metric}: median {found.a_ms:.3f} ms before, {found.b_ms:.3f} ms now{_in_percent(found.pct)}"
    if found.low_ms is not None and found.high_ms is not None:
        change += f", 95 % interval of the difference {found.low_ms:+.3f} to {found.high_ms:+.3f} ms"
    text = f"{change}: {why}"
    if outcome == "inconclusive":
        text += _what_steps_show(found, limit_pct)
    return Gate(metric=metric, limit_pct=limit_pct, outcome=outcome, text=text)


def overall(gates: Iterable[Gate]) -> Outcome | None:
    """The outcome of several gates: slower before inconclusive, and faster where all of them are; None without any."""
    outcomes = {decided.outcome for decided in gates}
    order: tuple[Outcome, ...] = ("slower", "inconclusive", "same", "faster")
    return next((outcome for outcome in order if outcome in outcomes), None)


def shown_difference(noise: float, steps: int) -> float:
    """The difference of two medians that a comparison finds in four of five cases.

    So much has a run to be slower than the limit to be called slower, and so much does the limit have to be for equal
    runs not to be inconclusive.

    Example:
        >>> [round(shown_difference(1.0, steps), 1) for steps in (5, 8, 20)]
        [2.2, 1.8, 1.1]
    """
    return _POWER * noise / sqrt(steps)


def _decided(found: Metric, limit_pct: float) -> tuple[Outcome, str]:
    if found.low_ms is None or found.high_ms is None:
        steps = f"{found.a_steps} before and {found.b_steps} now, each side needs {FEWEST_VALUES}"
        return "inconclusive", f"too few steps to decide: {steps}"
    limit_ms = limit_pct / 100 * found.a_ms
    if found.low_ms > limit_ms:
        return "slower", f"worse by more than {limit_pct:g} %"
    if found.high_ms > limit_ms:
        return "inconclusive", f"the steps vary too much to decide whether it is worse by more than {limit_pct:g} %"
    if found.high_ms < 0:
        return "faster", "better"
    return "same", f"not worse by more than {limit_pct:g} %"


def _what_steps_show(found: Metric, limit_pct: float) -> str:
    """What difference more steps would show, with the noise of these."""
    if not found.noise_ms or not found.a_ms:
        return ""
    noise_pct = 100 * found.noise_ms / found.a_ms
    shown = ", ".join(f"{steps} steps show {shown_difference(noise_pct, steps):.2g} %" for steps in _EXAMPLES)
    text = f". The steps vary by {noise_pct:.2g} %: {shown} on each side"
    if limit_pct:
        needed = max(ceil((_POWER * noise_pct / limit_pct) ** 2), FEWEST_VALUES)
        few = min(found.a_steps, found.b_steps) < needed
        near = f"the difference lies near the limit of {limit_pct:g} %, more steps on each side separate them"
        text += f"; a limit of {limit_pct:g} % takes about {needed:,}" if few else f"; {near}"
    return text


def _in_percent(pct: float | None) -> str:
    return "" if pct is None else f" ({pct:+.1f} %)"
