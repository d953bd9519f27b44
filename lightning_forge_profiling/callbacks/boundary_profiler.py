"""Stand where Lightning announces what it does, in front of the user's own profiler.

Lightning wraps every hook in `trainer.profiler.profile(name)` and announces fetches and manual optimizer steps by
`start(name)` and `stop(name)`. That is a public extension point, and the only place that sees the boundaries of the
data fetch and of the transfer to the device.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.recorder import StepRecorder

__all__ = ["BoundaryProfiler", "StandIn"]

_log = logging.getLogger(__name__)

_LOST_IN_A_ROW: Final = 3
"""A profiler that is assigned once or twice costs a step or two; from so many on it is not to be followed."""


class _Nothing:
    """Does nothing, cheaper than a generator context manager by an order of magnitude."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass


_NOTHING: Final = _Nothing()


class _Boundary:
    """A region of the recorder's around what Lightning does, inside the user's profiler where there is one."""

    __slots__ = ("_inner", "_recorder", "_region")

    def __init__(self, recorder: StepRecorder, region: str, inner: AbstractContextManager[Any] | None = None) -> None:
        self._recorder = recorder
        self._region = region
        self._inner = inner

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()
        self._recorder.enter(self._region)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._recorder.exit(self._region)
        if self._inner is not None:
            self._inner.__exit__(exc_type, exc, tb)


class _TrainingStep(_Boundary):
    """The region of the training step, which no step goes without."""

    __slots__ = ("_profiler",)

    def __init__(self, profiler: "BoundaryProfiler", region: str, inner: AbstractContextManager[Any] | None) -> None:
        super().__init__(profiler.recorder, region, inner)
        self._profiler = profiler

    def __enter__(self) -> None:
        super().__enter__()
        self._profiler.saw_training = True


class _ValidationBegins(_Nothing):
    """The first that is heard of a validation run."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.enter_validation()


class _Contexts(dict[str, AbstractContextManager[Any]]):
    """By action name, what Lightning is given to enter where the user has no profiler.

    A look-up here stands for a call of the user's profiler some sixty times a step, so names are learnt as they come.
    """

    MOST = 4096

    def __init__(self, inner: Any, known: dict[str, AbstractContextManager[Any]]) -> None:
        super().__init__(known)
        self._inner = inner

    def __missing__(self, action_name: str) -> AbstractContextManager[Any]:
        if action_name[:1] != "[":  # not one of Lightning's hooks; the user may want what `as` gives
            inner: AbstractContextManager[Any] = self._inner.profile(action_name)
            return inner
        if len(self) < self.MOST:
            self[action_name] = _NOTHING
        return _NOTHING


class BoundaryProfiler:
    """Forward everything to the user's profiler and tell a recorder of the boundaries on the way.

    Where the user has none, Lightning's pass-through stands there, which costs a generator context manager per hook,
    some sixty a step; its place is taken by shared objects that do nothing.

    Args:
        inner: the profiler the Trainer had.
        recorder: who is told.
        boundaries: which of Lightning's action names begin and end which region.
        validation_begins: the action name that comes first of all when validation does.
    """

    _OWN: Final = frozenset({"inner", "recorder", "profile", "saw_training", "_boundaries", "_validation_begins"})

    def __init__(self, inner: Any, recorder: StepRecorder, boundaries: dict[str, str], validation_begins: str) -> None:
        self.inner = inner
        self.recorder = recorder
        self.saw_training = False
        """Whether a training step was announced, until somebody sets it back."""
        self._boundaries = boundaries
        self._validation_begins = validation_begins
        self.profile: Callable[[str], AbstractContextManager[Any]] = self._profile_both
        """A context manager around the action of that name."""
        if type(inner).__name__ == "PassThroughProfiler":
            known: dict[str, AbstractContextManager[Any]] = {
                name: self._boundary(region) for name, region in boundaries.items()
            }
            known[validation_begins] = _ValidationBegins(recorder)
            self.profile = _Contexts(inner, known).__getitem__

    def _profile_both(self, action_name: str) -> AbstractContextManager[Any]:
        if action_name == self._validation_begins:
            self.recorder.enter_validation()
        inner: AbstractContextManager[Any] = self.inner.profile(action_name)
        region = self._boundaries.get(action_name)
        return inner if region is None else self._boundary(region, inner)

    def _boundary(self, region: str, inner: AbstractContextManager[Any] | None = None) -> _Boundary:
        return _TrainingStep(self, region, inner) if region == "forward" else _Boundary(self.recorder, region, inner)

    def start(self, action_name: str) -> None:
        """The action begins."""
        self.inner.start(action_name)
        region = self._boundaries.get(action_name)
        if region is not None:
            self.recorder.enter(region)

    def stop(self, action_name: str) -> None:
        """The action ends."""
        region = self._boundaries.get(action_name)
        if region is not None:
            self.recorder.exit(region)
        self.inner.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not yet set, as while unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """A copy, as of a Trainer in the middle of a fit, is one of the user's profiler."""
        return _itself, (self.inner,)


def _itself(profiler: Any) -> Any:
    return profiler


class StandIn:
    """Keeps a `BoundaryProfiler` in `trainer.profiler` while a training loop runs, whatever else is assigned to it.

    Args:
        recorder: who is told of the boundaries.
        boundaries: which of Lightning's action names begin and end which region.
        validation_begins: the action name that comes first of all when validation does.
    """

    def __init__(self, recorder: StepRecorder, boundaries: dict[str, str], validation_begins: str) -> None:
        self._recorder = recorder
        self._boundaries = boundaries
        self._validation_begins = validation_begins
        self._ours: BoundaryProfiler | None = None
        self._replaced = self._warned = False
        self._lost = 0

    def take_place(self, trainer: Trainer) -> None:
        """Stand in front of the Trainer's profiler."""
        if not (isinstance(trainer.profiler, BoundaryProfiler) and trainer.profiler.recorder is self._recorder):
            self.leave(trainer)  # one of a fit that ended without a word to us
            trainer.profiler = BoundaryProfiler(
                trainer.profiler, self._recorder, self._boundaries, self._validation_begins
            )
        self._ours = trainer.profiler

    def follow(self, trainer: Trainer) -> None:
        """Stand in front of another profiler that was assigned to `trainer.profiler` since the last look."""
        if trainer.profiler is not self._ours and self._recorder.active:
            self._replaced = True
            self.take_place(trainer)

    def saw_step(self, trainer: Trainer, *, trained: bool) -> bool:
        """Called at the end of a step: whether its boundaries were all announced to our profiler.

        Args:
            trainer: whose step it was.
            trained: whether it had a training step.
        """
        self.follow(trainer)
        ours = self._ours
        assert ours is not None  # noqa: S101  (take_place came before)
        saw = not self._replaced and (ours.saw_training or not trained)
        self._replaced = ours.saw_training = False
        self._lost = 0 if saw else self._lost + 1
        if self._lost == _LOST_IN_A_ROW and not self._warned:
            self._warned = True
            _log.warning(
                "trainer.profiler was assigned in each of %d steps in a row: of such steps no regions are timed, only "
                "the whole step. Assign it once, or before the fit.",
                self._lost,
            )
        return saw

    @staticmethod
    def leave(trainer: Trainer) -> None:
        """Put the user's newest profiler back."""
        while isinstance(trainer.profiler, BoundaryProfiler):
            trainer.profiler = trainer.profiler.inner
