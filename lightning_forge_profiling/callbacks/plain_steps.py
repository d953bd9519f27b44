"""The ends of steps that are like those before them and of which nothing but the end is timed."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from lightning_forge_profiling.callbacks.accumulation import AccumulationCycles
from lightning_forge_profiling.callbacks.batch_counts import WorkCounter
from lightning_forge_profiling.callbacks.lightning_api import LightningModule, StepProgress, Trainer, step_progress
from lightning_forge_profiling.callbacks.step_timer import StepRecorder
from lightning_forge_profiling.timing.rates import StepWork

__all__ = ["PlainSteps"]


class PlainSteps:
    """Ends plain steps with as few lines as that takes; what can be done for many of them at once is done later.

    The end of a step comes after milliseconds of PyTorch's own code and before some more. So its lines run from cold
    caches, at several times of what they take in a loop, and what they evict is missed by the training.

    Args:
        recorder: to which the steps belong.
        counter: counts what is in a batch.
        cycles: of gradient accumulation.
        clock_ns: the host clock.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        counter: WorkCounter,
        cycles: AccumulationCycles,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._recorder = recorder
        self._counter = counter
        self._cycles = cycles
        self._clock_ns = clock_ns
        self._left = self._ended = 0
        self._trainer: Trainer = None
        self._profiler: object = None
        self._progress = StepProgress(None, None, each_changes=True)

    def expect(self, trainer: Trainer, module: LightningModule, steps: int) -> None:
        """Nothing has to be done in the next steps but to end them, unless one of them turns out to be different.

        Args:
            trainer: whose steps they are.
            module: what it trains.
            steps: how many.
        """
        self._left = min(steps, self._recorder.plain_steps_ahead())
        if self._left:
            self._trainer, self._profiler = trainer, trainer.profiler
            self._progress = step_progress(trainer, module)

    def take(self) -> int:
        """How many steps were ended since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def end(self, batch: Any) -> bool:
        """End the step under way, where it is a plain one like those before it; else do nothing.

        Args:
            batch: its batch.

        Returns:
            Whether it was.
        """
        recorder = self._recorder
        if not self._left or not recorder.plain or self._trainer.profiler is not self._profiler:
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
            changed, ends_cycle = self._cycles.after_batch(progress, recorder.step)
            samples, tokens, flops = amounts
            recorder.end_plain_step(StepWork(samples, tokens, int(changed), flops, ends_cycle), began_ns)
        except Exception as exc:
            recorder.fail(exc)
        return True
