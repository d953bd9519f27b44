"""The short way to end a step: one like those before it, timed as a whole."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from lightning_forge_profiling.callbacks.accumulation import AccumulationCycles
from lightning_forge_profiling.callbacks.batch_counts import WorkCounter
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, StepProgress, Trainer, step_progress
from lightning_forge_profiling.callbacks.step_timer import StepTimer
from lightning_forge_profiling.timing.rates import StepWork


class PlainSteps:
    """Ends plain steps in as few lines as possible, and leaves the rest to the next step that is not plain.

    The end of a step comes between milliseconds of PyTorch's own code, so its lines run from cold caches, at several
    times their cost in a loop, and evict what training then has to load again.

    Args:
        step_timer: times the steps.
        counter: counts the samples, tokens and FLOPs of a batch.
        cycles: of gradient accumulation.
        clock_ns: the host clock.
    """

    def __init__(
        self,
        step_timer: StepTimer,
        counter: WorkCounter,
        cycles: AccumulationCycles,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._step_timer = step_timer
        self._counter = counter
        self._cycles = cycles
        self._clock_ns = clock_ns
        self._left = self._ended = 0
        self._trainer: Trainer = None
        self._profiler: object = None
        self._progress = StepProgress(None, None, each_changes=True)

    def expect(self, trainer: Trainer, module: LightningModule, steps: int) -> None:
        """Allow the next steps to end the short way, unless one of them turns out to be different.

        Args:
            trainer: of the fit.
            module: the module it trains.
            steps: how many steps.
        """
        self._left = min(steps, self._step_timer.plain_steps_ahead())
        if self._left:
            self._trainer, self._profiler = trainer, trainer.profiler
            self._progress = step_progress(trainer, module)

    def take(self) -> int:
        """How many steps have ended the short way since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def end(self, batch: Any) -> bool:
        """End the current step if it is plain; otherwise do nothing.

        Args:
            batch: the step's batch.

        Returns:
            Whether the step was ended.
        """
        step_timer = self._step_timer
        if not self._left or not step_timer.plain or self._trainer.profiler is not self._profiler:
            return False
        progress = self._progress
        if progress.batches.is_last_batch:
            return False
        began_ns = self._clock_ns()
        try:
            amounts = self._counter.usual(batch)
            if amounts is None:
                return False
            self._left -= 1
            self._ended += 1
            changed, ends_cycle = self._cycles.after_batch(progress, step_timer.step)
            samples, tokens, flops = amounts
            step_timer.end_plain_step(StepWork(samples, tokens, int(changed), flops, ends_cycle), began_ns)
        except Exception as exc:
            step_timer.fail(exc)
        return True
