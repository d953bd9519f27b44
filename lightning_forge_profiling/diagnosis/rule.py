"""What a rule is, and how it becomes a finding: the one model for causes in traces, in runs, and for hints.

To add one, write a function for its cost and one for its words, and add a `Rule` of both to the tuple at the end of
`trace_rules.py` (a rank of a trace), `cpu_rules.py` (a rank without a GPU), `run_rules.py` (a whole run) or `hints.py`
(a rank; less than a cause).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar

from lightning_forge_profiling.results.analysis import Finding
from lightning_forge_profiling.results.saving import Saving

NAMED_FROM_PCT: Final = 5.0
"""What costs less of a step is not named: run-to-run variation is of that size."""

_BEYOND: Final = 1.2
"""From this multiple of the cause's cost on, a saving needs an explanation."""

_ONE_DECIMAL_FROM_MS: Final = 10

Evidence = dict[str, float | str]
Context = TypeVar("Context")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a rule says about one case.

    Attributes:
        title: one sentence with the numbers that matter.
        evidence: the numbers, each named with its unit.
        advice: what to change, naming the setting.
    """

    title: str
    evidence: Evidence = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Context]):
    """One cause of lost time, or one thing worth a look.

    Attributes:
        code: the code of its finding or hint.
        cost: milliseconds per step that it costs, 0 where it is not the case; for a hint, the figure it looks at.
        explain: the words for it, called only where it applies.
        saves_ms: milliseconds per step that its fix saves, None if that cannot be predicted; by default all that it
            costs.
        at_most: whether that is a bound, and not the expected value; always by default.
        above: the rule applies where the cost is greater. Causes also have to cost `NAMED_FROM_PCT` of a step.
    """

    code: str
    cost: Callable[[Context], float]
    explain: Callable[[Context], Explanation]
    saves_ms: Callable[[Context], float | None] | None = None
    at_most: Callable[[Context], bool] = lambda _: True
    above: float = 0.0


MEASURE: Final = "forge-profiling run --no-window train.py with each, then forge-profiling compare A B"
"""How to measure a setting where there is no evidence that it gains."""


def unpredicted(_: object) -> None:
    """For `Rule.saves_ms`: there is no fix, or nothing bounds what it saves."""


def finding(
    rule: Rule[Context],
    context: Context,
    *,
    step_ms: float,
    share_pct: float,
    source: Literal["trace", "run"],
    rank: int | None = None,
) -> Finding:
    """A rule that applies, as a finding."""
    cost_ms, explained = rule.cost(context), rule.explain(context)
    return Finding(
        code=rule.code,
        share_pct=share_pct,
        rank=rank,
        source=source,
        title=explained.title,
        evidence=explained.evidence,
        advice=explained.advice,
        saves=saving(
            cost_ms if rule.saves_ms is None else rule.saves_ms(context),
            step_ms,
            at_most=rule.at_most(context),
            cost_ms=cost_ms,
        ),
    )


def saving(ms: float | None, step_ms: float, *, at_most: bool, cost_ms: float | None = None) -> Saving | None:
    """A predicted saving.

    Example:
        >>> saving(29.5, 38.3, at_most=False).text
        'That saves about 29.5 ms a step (77 %).'
    """
    if ms is None or ms <= 0 or step_ms <= 0:
        return None
    ms = min(ms, step_ms)
    pct = 100 * ms / step_ms
    text = f"That saves {'at most' if at_most else 'about'} {in_ms(ms)} a step ({pct:.0f} %)."
    if cost_ms is not None and ms > _BEYOND * cost_ms:
        text = f"{text[:-1]}, other waits for the host included: without this delay, the host runs ahead of the GPU."
    return Saving(ms_per_step=ms, pct=pct, at_most=at_most, text=text)


def in_ms(value: float) -> str:
    """A time with three digits.

    Example:
        >>> in_ms(53.27), in_ms(9.14), in_ms(0.386)
        ('53.3 ms', '9.14 ms', '0.39 ms')
    """
    return f"{value:.{1 if value >= _ONE_DECIMAL_FROM_MS else 2}f} ms"
