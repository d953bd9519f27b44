"""Which batches change the weights, and which end a cycle of gradient accumulation."""

from typing import Final

_LONGEST_CYCLE: Final = 64
"""If the module accumulates gradients by itself, its first cycle ends within this many steps."""


class AccumulationCycles:
    """Follows gradient accumulation from batch to batch."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def after_batch(self, updates: int, step: int, *, each_changes: bool) -> tuple[bool, bool]:
        """Whether a batch changed the weights, and whether it was the last of its cycle.

        Several optimizers in one batch are one change of the weights.
        """
        changed, self._updates = updates != self._updates, updates
        # a module may step an optimizer that Lightning does not know of
        return changed, changed or each_changes or (not updates and step >= _LONGEST_CYCLE)
