"""Single steps as they enter a run's totals, which keep sums alone."""

from collections.abc import Callable, Sequence

from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.timing.rates import PlainSteps, StepTiming, StepWork
from lightning_forge_profiling.timing.run_totals import LeftOut
from lightning_forge_profiling.timing.steps import WHOLE, StepTimes


def watch(step_timer: StepTimer, entered: Callable[[StepTimes, StepWork, LeftOut | None], object]) -> None:
    """Have a function called with each step that enters the totals, plain ones one by one."""
    totals = step_timer.totals
    add, add_plain = totals.add, totals.add_plain

    def added(times: StepTimes, work: StepWork, left_out: LeftOut | None, timing: StepTiming | None = None) -> None:
        add(times, work, left_out, timing)
        entered(times, work, left_out)

    def added_plain(plain: PlainSteps, took_ms: Sequence[float]) -> None:
        add_plain(plain, took_ms)
        for step, (ms, host_ms, work) in enumerate(zip(took_ms, plain.host_ms, plain.works, strict=True), plain.first):
            entered(StepTimes(step, {WHOLE: ms}, {WHOLE: host_ms}, {WHOLE: 1}), work, None)

    totals.add, totals.add_plain = added, added_plain  # type: ignore[assignment,method-assign]
