"""`with step():` in a plain PyTorch or Fabric loop: there the callbacks do what they do in a Trainer."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from math import inf
from numbers import Real
from types import TracebackType
from typing import Any, Self, TypeVar

from lightning_forge_profiling import entry_point
from lightning_forge_profiling.callbacks.plain_loop import LoopProfiling, PlainLoop
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.names import switched_off
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.timing.region import region

_log = plain_logger(__name__)

T = TypeVar("T")


class profile(LoopProfiling):  # noqa: N801  (used like a function)
    """Settings for the steps of a plain loop, and where the loop ends; also a callback for Fabric.

    The table is printed to standard error and the record closed at the end of the block. Without a block the first
    `step` begins one with a `ThroughputCallback`, which ends with the process.

    Args:
        *callbacks: a `ForgeProfilerCallback` to record a window of steps, a `ThroughputCallback` with other settings,
            or both.
        log_dir: the folder for the record and the traces; None for the working directory.

    Raises:
        ConfigurationError: something else than one callback of each kind, or a `log_dir` that is no path; at the first
            step, what the callbacks refuse in a Trainer's `setup`.

    Examples:
        ```python
        with forge.profile(forge.ForgeProfilerCallback(start_step=5, end_step=8), log_dir="runs/1"):
            for batch in loader:
                with forge.step():
                    ...

        fabric = Fabric(callbacks=[forge.profile()])
        ```
    """

    def __init__(self, *callbacks: TimedCallback, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(callbacks, added=entry_point.callbacks(), folder=log_dir)
        _Process.given = weakref.ref(self)

    def __enter__(self) -> Self:
        """Steps from here on are of this block."""
        if _Process.block is not None:
            raise ConfigurationError("profile() inside of profile(): end the outer block first.")
        _Process.block, self.began = self, False
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """The loop has ended."""
        _Process.block = None
        if exc is None and not self.began and not switched_off():
            _log.warning("Nothing was profiled: no step() began inside of profile().")
        self.end(exc)


class _Process:
    """Where the steps of this process belong to."""

    block: profile | None = None  # the `with profile():` that is open
    rest: profile | None = None  # for steps outside of all blocks
    given: Callable[[], profile | None] = lambda: None  # the latest that the script made, as for Fabric's callbacks

    @classmethod
    def loop(cls) -> PlainLoop | None:
        if cls.block is not None:
            return cls.block.loop()
        if cls.rest is None:
            given = cls.given()
            cls.rest = profile() if given is None or given.began else given
        return cls.rest.loop()


class step:  # noqa: N801  (used like a function)
    """Delimits a step of a plain PyTorch loop or a Fabric loop, for everything that a Trainer's steps get.

    At the end of the process, or of `with profile():`, standard error gets the table with the verdict, and
    `forge_record/` is complete, for `forge-profiling watch`, `show`, `view` and `compare`. `FORGE_PROFILING=0`
    switches it off.

    A step includes the fetch of its batch before it, which is seen for each `DataLoader` (for another iterable,
    `batches`). `backward()` and an optimizer's `step()` are seen too; what precedes `backward` is `forward`. Name other
    parts with `region`, between steps as well: `with region("validation"):` and `"checkpoint"` are no part of a step.
    Reading another DataLoader between two steps is taken for validation.

    Args:
        batch: what the step trains on, for `ThroughputCallback`'s functions of a batch; None for what the DataLoader
            gave.
        samples: how many samples it has; None for the first dimension of its first tensor, or its loader's batch size.

    Raises:
        ConfigurationError: `samples` is not a number of samples, or a step is inside of another one.

    Examples:
        >>> import torch, lightning_forge_profiling as forge
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with forge.profile(forge.ThroughputCallback(record=False)) as profile:
        ...     for batch in torch.randn(20, 8, 4):
        ...         with forge.step(samples=len(batch)):
        ...             model(batch).sum().backward()
        ...             optimizer.step()
    """

    __slots__ = ("_batch", "_loop", "_samples")

    def __init__(self, batch: Any = None, *, samples: float | None = None) -> None:
        if samples is not None and (
            not isinstance(samples, Real) or isinstance(samples, bool) or not 0 <= samples < inf
        ):
            raise ConfigurationError(f"samples must be a number of samples, got {samples!r}.")
        self._batch, self._samples = batch, samples
        self._loop: PlainLoop | None = None

    def __enter__(self) -> None:
        loop = _Process.loop()
        if loop is None or loop.failed:
            return
        if loop.in_step:
            raise ConfigurationError("step() inside of step(): a step is one batch. Name parts of it with region().")
        loop.begin_step(self._batch, self._samples)
        self._loop = loop

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if exc is None:
            loop.end_step()
        else:
            loop.leave_step(exc)


def batches(iterable: Iterable[T]) -> Iterator[T]:
    """The batches of an iterable that is no `DataLoader`, each fetch timed as the next step's `data`.

    Args:
        iterable: what yields batches.

    Examples:
        >>> list(batches(["a", "b"]))
        ['a', 'b']
    """
    fetches = iter(iterable)
    while True:
        with region("data"):
            try:
                batch = next(fetches)
            except StopIteration:
                return
        yield batch
