"""Feeds the ledger of a fit: the part of each action that Lightning announces, the loggers' calls, compilation, GC."""

import gc
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from threading import get_ident
from typing import Any, Final

from lightning_forge_profiling.timing.ledger import LedgerClock

__all__ = ["LedgerParts", "part_of"]

_PER_BATCH: Final = ("batch", "zero_grad", "backward", "optimizer_step", "clipping")
"""What the names of hooks have in them that come in every batch."""

_OLDEST: Final = 2
"""Collecting the younger generations takes microseconds."""

_LOGGER_CALLS: Final = ("log_metrics", "save")


def part_of(action: str, own: Collection[str] = ()) -> tuple[str, bool] | None:
    """The part of the ledger that an announced action is, and whether it comes in every batch.

    Args:
        action: Lightning's name for it, such as `[Callback]EMA.on_train_batch_end`.
        own: state keys of this package's callbacks.

    Returns:
        None for an action that is not a part, as those of the strategy.

    Example:
        >>> part_of("[Callback]ModelCheckpoint{'monitor': None}.on_train_epoch_end")
        ('callback/ModelCheckpoint.on_train_epoch_end', False)
        >>> part_of("[LightningModule]GPT.on_train_batch_start")
        ('module/on_train_batch_start', True)
    """
    kind, _, rest = action.removeprefix("[").partition("]")
    owner, _, hook = rest.rpartition(".")
    per_batch = any(word in hook for word in _PER_BATCH)
    match kind:
        case "Callback" if owner in own:
            return "profiler", per_batch
        case "Callback":
            name = owner.partition("{")[0].rpartition(".")[2]  # of a class in a function, its own name
            return f"callback/{name}.{hook}", per_batch
        case "LightningModule":
            return f"module/{hook}", per_batch
        case "LightningDataModule":
            return f"datamodule/{hook}", per_batch
    return None


class LedgerParts:
    """Has the ledger told of what Lightning does not announce, while a training loop runs.

    Args:
        clock: the ledger's.
        loggers: the Trainer's.
    """

    def __init__(self, clock: LedgerClock, loggers: Iterable[Any]) -> None:
        self._clock = clock
        self._thread = get_ident()
        self._compiling = 0
        self._undo: list[Callable[[], object]] = []
        gc.callbacks.append(self._collecting)
        self._undo.append(partial(_remove, gc.callbacks, self._collecting))
        for logger in loggers:
            part = f"logger/{type(logger).__name__}"
            for call in _LOGGER_CALLS:
                if call not in vars(logger):
                    setattr(logger, call, _Timed(logger, call, clock, part))
                    self._undo.append(partial(vars(logger).pop, call, None))
        dynamo = sys.modules.get("torch._dynamo.callback")  # not imported for this
        if dynamo is not None:
            handler = dynamo.callback_handler
            handler.register_start_callback(self._compile_begins)
            handler.register_end_callback(self._compile_ends)
            self._undo += [
                partial(_remove, handler.start_callbacks, self._compile_begins),
                partial(_remove, handler.end_callbacks, self._compile_ends),
            ]

    def close(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < _OLDEST or get_ident() != self._thread:
            return
        if phase == "start":
            self._clock.enter("gc")
        else:
            self._clock.exit("gc")

    def _compile_begins(self, _: Any) -> None:
        if get_ident() == self._thread:
            self._compiling += 1
            if self._compiling == 1:
                self._clock.enter("compile")

    def _compile_ends(self, _: Any) -> None:
        if get_ident() == self._thread and self._compiling:
            self._compiling -= 1
            if not self._compiling:
                self._clock.exit("compile")


class _Timed:
    """A method of a logger, timed as a part of the ledger. A copy of it is the method."""

    def __init__(self, logger: Any, call: str, clock: LedgerClock, part: str) -> None:
        self._logger, self._call, self._clock, self._part = logger, call, clock, part
        self._method = getattr(logger, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.enter(self._part)
        try:
            return self._method(*args, **kwargs)
        finally:
            self._clock.exit(self._part)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method, (self._logger, self._call)


def _method(logger: Any, call: str) -> Any:
    return partial(getattr(type(logger), call), logger)


def _remove(listed: list[Any], item: Any) -> None:
    if item in listed:
        listed.remove(item)
