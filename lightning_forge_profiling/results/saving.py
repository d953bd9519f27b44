"""What the fix of a finding saves of a step."""

from dataclasses import dataclass

__all__ = ["Saving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the fix of a finding is predicted to save.

    Attributes:
        ms_per_step: milliseconds of a step; of a finding on the whole run, spread over its steps.
        pct: the same in percent of the step.
        at_most: whether the cause only bounds it; else it is the expected value.
        text: the same as a sentence.
    """

    ms_per_step: float
    pct: float
    at_most: bool
    text: str
