"""The schedule: which steps are recorded, as a pure function of the step's number."""

from dataclasses import dataclass
from enum import Enum

from lightning_forge_profiling.errors import ConfigurationError


class Phase(Enum):
    """The profiler's phase in a step."""

    WAIT = "wait"
    WARMUP = "warm-up"
    RECORD = "record"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The half-open range of steps `[start_step, end_step)` that is recorded, after one warm-up step.

    The profiler runs in the warm-up step, but its events are dropped: they contain the cost of starting it. A window
    that starts at step 0 has no warm-up step.

    Example:
        >>> [StepWindow(2, 4).phase(step).value for step in range(6)]
        ['wait', 'warm-up', 'record', 'record', 'done', 'done']
    """

    start_step: int
    end_step: int

    def __post_init__(self) -> None:
        for name in ("start_step", "end_step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigurationError(f"{name} must be an integer, got {value!r}.")
            if value < 0:
                raise ConfigurationError(f"{name} must not be negative, got {value}.")
        if self.end_step <= self.start_step:
            raise ConfigurationError(
                f"end_step must be greater than start_step: [{self.start_step}, {self.end_step}) records nothing. "
                f"end_step={self.start_step + 1} records the one step {self.start_step}."
            )

    @property
    def steps(self) -> int:
        """How many steps are recorded."""
        return self.end_step - self.start_step

    def phase(self, step: int) -> Phase:
        """The phase of `step`."""
        if step >= self.end_step:
            return Phase.DONE
        if step >= self.start_step:
            return Phase.RECORD
        return Phase.WARMUP if step == self.start_step - 1 else Phase.WAIT

    def __str__(self) -> str:
        last = self.end_step - 1
        return f"step {last}" if self.steps == 1 else f"steps {self.start_step}-{last}"
