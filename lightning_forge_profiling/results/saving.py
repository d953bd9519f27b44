"""Predicted time saved by the fix of a finding."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Predicted time saved by the fix of a finding.

    Attributes:
        ms_per_step: milliseconds per step; of a finding on the whole run, spread over its steps.
        pct: the same in percent of the step.
        at_most: whether it is an upper bound; else the expected value.
        text: the same as a sentence.
    """

    ms_per_step: float
    pct: float
    at_most: bool
    text: str
