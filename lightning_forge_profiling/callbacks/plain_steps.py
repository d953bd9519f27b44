"""The short way to end a step: one like those before it, timed as a whole."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from lightning_forge_profiling.callbacks.accumulation import AccumulationCycles
from lightning_forge_profiling.callbacks.batch_counts import Amounts, WorkCounter
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
        self._left = 0
        self._ended: list[tuple[Amounts, int]] = []
        """Of each step what is in its batch, and the optimizer steps up to its end."""
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

    def take(self) -> list[StepWork]:
        """What is in the batches of the steps that have ended the short way since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        first, works = self._step_timer.step - len(ended), []
        for step, ((samples, tokens, flops), updates) in enumerate(ended, first):
            changed, ends_cycle = self._cycles.after_batch(updates, step, each_changes=self._progress.each_changes)
            works.append(StepWork(samples, tokens, int(changed), flops, ends_cycle))
        return works

    def end(self, batch: Any) -> bool:
        """End the current step if it is plain; otherwise do nothing.

        Args:
            batch: the step's batch.

        Returns:
            Whether the step was ended.
        """
        step_timer = self._step_timer
        if not self._left or step_timer.disturbed or step_timer.awaits_training:
            return False
        batches, updates, _ = self._progress
        if batches.is_last_batch or self._trainer.profiler is not self._profiler:
            return False
        began_ns = self._clock_ns()
        try:
            amounts = self._counter.usual(batch)
            if amounts is None:
                return False
            self._left -= 1
            self._ended.append((amounts, updates.completed))
            step_timer.end_plain_step(began_ns)
        except Exception as exc:
            step_timer.fail(exc)
        return True
