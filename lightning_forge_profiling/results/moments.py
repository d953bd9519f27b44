"""When the long parts of a run took place, and its slowest steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpan:
    """When a part of the ledger took place, with what ran inside it.

    Attributes:
        part: the part of the ledger; `epoch` or `window`, the recorded one, are no parts.
        start_s: when it began, in seconds since the run began.
        end_s: when it ended. Of over 128 spans of one part, those near each other are merged into one.
        seconds: time in it; of a merged span less than `end_s - start_s`.
        count: number of spans merged into it; 1 for one that stands for itself.
        step: number of the step under way when it ended; None before the first.
    """

    part: str
    start_s: float
    end_s: float
    seconds: float
    count: int = 1
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """One of the slowest counted steps of a run.

    Attributes:
        step: its number, counted from 0 at the start of the fit.
        ms: its time; `step_ms.p50` of the run is the median beside it.
        end_s: when the host ended it, in seconds since the run began; None if unknown.
        parts_ms: parts of the ledger that took 0.1 ms or more of it on the host, such as `callback/NAME.hook`, the
            largest first.
        regions_ms: its time by built-in region; empty if its regions were not timed.
    """

    step: int
    ms: float
    end_s: float | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    regions_ms: Mapping[str, float] = field(default_factory=dict)
