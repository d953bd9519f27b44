"""The interval of a share: what else it may be in a longer run of the same steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareInterval:
    """A part's share of the step, in percent, with its 95 % interval by a bootstrap of blocks of consecutive steps.

    Attributes:
        pct: the part's time over the steps' time.
        low_pct: lower end of the interval.
        high_pct: upper end of the interval.
        typical_pct: the median over blocks of at least eight steps, which a few slow ones do not move; None for fewer
            than eight such blocks.
    """

    pct: float
    low_pct: float
    high_pct: float
    typical_pct: float | None = None
