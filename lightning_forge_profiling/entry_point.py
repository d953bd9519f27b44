"""Lightning's entry point for callbacks of a new Trainer. Adds none unless `forge-profiling run` started the script.

Lightning imports this module in every script of the environment, so it imports only the standard library.
"""

import os
from typing import Any, Final

RUN_OPTIONS: Final = "FORGE_PROFILING_RUN"
"""Environment variable set by `run`: a JSON object with the arguments of each callback, by class name."""


def callbacks() -> list[object]:
    """Callbacks for one Trainer.

    Examples:
        >>> callbacks()
        []
    """
    options = os.environ.get(RUN_OPTIONS)
    if not options:
        return []
    import json  # noqa: PLC0415  (every script of the environment imports this module)

    from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback  # noqa: PLC0415  (loads torch)
    from lightning_forge_profiling.callbacks.throughput import ThroughputCallback  # noqa: PLC0415
    from lightning_forge_profiling.plain_text import plain_logger  # noqa: PLC0415

    kinds: dict[str, Any] = {kind.__name__: kind for kind in (ForgeProfilerCallback, ThroughputCallback)}
    try:
        added = [kinds[name](**arguments) for name, arguments in json.loads(options).items()]
    except Exception as exc:
        message = "Nothing will be profiled: the options of `forge-profiling run` in %r: %s"
        plain_logger(__name__).warning(message, options, exc)
        return []
    for callback in added:
        callback.added = True
    return added
