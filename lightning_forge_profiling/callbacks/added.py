"""Callbacks that `forge-profiling run` adds to the Trainers of a script."""

import json
from collections.abc import Iterable, Sequence

from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback
from lightning_forge_profiling.callbacks.throughput import ThroughputCallback
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.plain_text import plain_logger

_log = plain_logger(__name__)

_KINDS: dict[str, type[TimedCallback]] = {kind.__name__: kind for kind in (ForgeProfilerCallback, ThroughputCallback)}


def added_callbacks(options: str) -> Sequence[TimedCallback]:
    """New callbacks for one Trainer.

    Example:
        >>> [callback] = added_callbacks('{"ThroughputCallback": {"warmup_steps": 3}}')
        >>> callback.warmup_steps, callback.added
        (3, True)
    """
    try:
        return tuple(_added(json.loads(options).items()))
    except Exception as exc:
        _log.warning("Nothing will be profiled: the options of `forge-profiling run` in %r: %s", options, exc)
        return ()


def _added(chosen: Iterable[tuple[str, dict[str, object]]]) -> Iterable[TimedCallback]:
    for name, arguments in chosen:
        callback = _KINDS[name](**arguments)
        callback.added = True
        yield callback
