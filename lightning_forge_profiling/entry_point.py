"""Lightning's entry point for callbacks of a new Trainer. Adds none unless `forge-profiling run` started the script.

Lightning imports this module in every script of the environment, so it imports only the standard library.
"""

import os
from typing import Final

RUN_OPTIONS: Final = "FORGE_PROFILING_RUN"
"""Environment variable set by `run`: a JSON object with the arguments of each callback, by class name."""


def callbacks() -> list[object]:
    """Callbacks for one Trainer.

    Example:
        >>> callbacks()
        []
    """
    options = os.environ.get(RUN_OPTIONS)
    if not options:
        return []
    from lightning_forge_profiling.callbacks.added import added_callbacks  # noqa: PLC0415  (loads torch)

    return [*added_callbacks(options)]
