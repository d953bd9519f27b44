"""Which batches change the weights, and which end a cycle of gradient accumulation."""

from typing import Final

from lightning_forge_profiling.callbacks.lightning_api import StepProgress

_LONGEST_CYCLE: Final = 64
"""If the module accumulates gradients by itself, its first cycle ends within this many steps."""


class AccumulationCycles:
    """Follows gradient accumulation from batch to batch.

    Args:
        progress: of the fit, before its first batch.
    """

    def __init__(self, progress: StepProgress) -> None:
        self._updates = progress.updates.completed

    def after_batch(self, progress: StepProgress, step: int) -> tuple[bool, bool]:
        """Whether the batch that has just ended changed the weights, and whether it was the last of its cycle.

        Several optimizers in one batch are one change of the weights.
        """
        updates = progress.updates.completed
        changed, self._updates = updates != self._updates, updates
        # a module may step an optimizer that Lightning does not know of
        return changed, changed or progress.each_changes or (not updates and step >= _LONGEST_CYCLE)
