"""Stand where Lightning announces what it does, in front of the user's own profiler.

Lightning wraps every hook in `trainer.profiler.profile(name)` and announces fetches and manual optimizer steps by
`start(name)` and `stop(name)`. That is a public extension point, and the only place that sees the boundaries of the
data fetch and of the transfer to the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.callbacks.lightning_api import Actions
from lightning_forge_profiling.callbacks.recorder import StepRecorder
from lightning_forge_profiling.timing.steps import LOADER_START

__all__ = ["BoundaryProfiler"]


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


class _Boundary(NamedTuple):
    """What is called right before and right after something that Lightning announces."""

    before: Callable[[], object]
    after: Callable[[], object]


def _boundaries(recorder: StepRecorder, actions: Actions) -> dict[str, _Boundary]:
    found = {
        name: _Boundary(partial(recorder.enter, region), partial(recorder.exit, region))
        for name, region in actions.regions.items()
    }
    checkpoint = _Checkpoint(recorder)
    found |= dict.fromkeys(actions.saves, _Boundary(checkpoint.save, checkpoint.saved))
    found |= dict.fromkeys(actions.may_save, _Boundary(checkpoint.enter_hook, checkpoint.leave_hook))
    found |= dict.fromkeys(actions.loader_starts, _Boundary(recorder.enter_loader_start, _nothing))
    found |= dict.fromkeys(actions.loader_started, _Boundary(partial(recorder.exit, LOADER_START), _nothing))
    found |= dict.fromkeys(actions.validation_begins, _Boundary(recorder.enter_validation, _nothing))
    found |= dict.fromkeys(actions.validation_ends, _Boundary(_nothing, recorder.exit_validation))
    return found


class _Checkpoint:
    """From where a checkpoint is saved to the end of the hook that does so, which removes older ones after that."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._in_hook = self._open = False

    def save(self) -> None:
        if not self._open:
            self._open = True
            self._recorder.enter("checkpoint")

    def saved(self) -> None:
        if self._open and not self._in_hook:
            self._open = False
            self._recorder.exit("checkpoint")

    def enter_hook(self) -> None:
        self._in_hook = True

    def leave_hook(self) -> None:
        self._in_hook = False
        self.saved()


def _nothing() -> None:
    pass


class _Announced:
    """Calls at a boundary, inside the user's profiler where there is one."""

    __slots__ = ("_after", "_before", "_inner")

    def __init__(self, boundary: _Boundary, inner: AbstractContextManager[Any] | None = None) -> None:
        self._before, self._after = boundary
        self._inner = inner

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()
        self._before()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._after()
        if self._inner is not None:
            self._inner.__exit__(exc_type, exc, tb)


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
        actions: what Lightning calls its actions.
    """

    _OWN: Final = frozenset({"inner", "recorder", "profile", "_boundaries"})

    def __init__(self, inner: Any, recorder: StepRecorder, actions: Actions) -> None:
        self.inner = inner
        self.recorder = recorder
        self._boundaries = _boundaries(recorder, actions)
        self.profile: Callable[[str], AbstractContextManager[Any]] = self._profile_both
        """A context manager around the action of that name."""
        if type(inner).__name__ == "PassThroughProfiler":
            known: dict[str, AbstractContextManager[Any]] = {
                name: _Announced(boundary) for name, boundary in self._boundaries.items()
            }
            self.profile = _Contexts(inner, known).__getitem__

    def _profile_both(self, action_name: str) -> AbstractContextManager[Any]:
        inner: AbstractContextManager[Any] = self.inner.profile(action_name)
        boundary = self._boundaries.get(action_name)
        return inner if boundary is None else _Announced(boundary, inner)

    def start(self, action_name: str) -> None:
        """The action begins."""
        self.inner.start(action_name)
        boundary = self._boundaries.get(action_name)
        if boundary is not None:
            boundary.before()

    def stop(self, action_name: str) -> None:
        """The action ends."""
        boundary = self._boundaries.get(action_name)
        if boundary is not None:
            boundary.after()
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
