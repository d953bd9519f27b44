"""What Lightning asks for callbacks whenever a Trainer is built: none, unless `forge-profiling run` started the script.

Lightning loads this module in every script of an environment that has the package, so it imports nothing more.
"""

import os
from typing import Final

RUN_OPTIONS: Final = "FORGE_PROFILING_RUN"
"""The environment variable that `run` sets: a JSON object, from the class of each callback to its arguments."""


def callbacks() -> list[object]:
    """The callbacks for one Trainer.

    Returns:
        New ones of the kinds that the environment variable names; without it an empty list, and no import.

    Example:
        >>> callbacks()
        []
    """
    options = os.environ.get(RUN_OPTIONS)
    if not options:
        return []
    from lightning_forge_profiling.callbacks.added import added_callbacks  # noqa: PLC0415  (loads torch)

    return [*added_callbacks(options)]
