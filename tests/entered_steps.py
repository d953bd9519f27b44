"""Single steps as they enter a run's totals, which keep sums alone."""

from collections.abc import Callable

from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.run_totals import LeftOut
from lightning_forge_profiling.timing.steps import StepTimes, StepTiming, StepWork


def watch(step_timer: StepTimer, entered: Callable[[StepTimes, StepWork, LeftOut | None], object]) -> None:
    """Have a function called with each step that enters the totals."""
    totals = step_timer.totals
    add = totals.add

    def added(times: StepTimes, work: StepWork, left_out: LeftOut | None, timing: StepTiming | None = None) -> None:
        add(times, work, left_out, timing)
        entered(times, work, left_out)

    totals.add = added  # type: ignore[method-assign]
