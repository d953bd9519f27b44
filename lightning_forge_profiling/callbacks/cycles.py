"""Which batches change the weights, and which end a cycle of gradient accumulation."""

from typing import Final

from lightning_forge_profiling.callbacks.lightning_api import Trainer, is_accumulating, optimizer_steps

__all__ = ["AccumulationCycles"]

_LONGEST_CYCLE: Final = 64
"""Where the module accumulates gradients by itself, the first cycle ends within so many steps, or none ever does."""


class AccumulationCycles:
    """Follows a fit from batch to batch.

    Args:
        trainer: of the fit, before its first batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._global_step = optimizer_steps(trainer)

    def after_batch(self, trainer: Trainer, step: int) -> tuple[bool, bool]:
        """Whether the batch that has just ended changed the weights, and whether it was the last of its cycle.

        Several optimizers in one batch are one change of the weights.
        """
        before, self._global_step = self._global_step, optimizer_steps(trainer)
        changed = self._global_step != before
        if trainer.lightning_module.automatic_optimization:
            return changed, trainer.accumulate_grad_batches == 1 or not is_accumulating(trainer)
        # a module may step an optimizer that Lightning does not know of
        return changed, changed or (not self._global_step and step >= _LONGEST_CYCLE)
