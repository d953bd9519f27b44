"""Wraps `trainer.profiler`, where Lightning announces each hook, fetch and transfer, to see the regions' boundaries.

Lightning wraps every hook in `trainer.profiler.profile(name)` and announces fetches and manual optimizer steps by
`start(name)` and `stop(name)`. That is a public extension point, and the only place that sees the boundaries of the
data fetch and of the transfer to the device.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.callbacks.lightning_api import Actions, Trainer
from lightning_forge_profiling.names import CHECKPOINT_WRITE, EPOCH
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.run.training import Boundaries
from lightning_forge_profiling.timing.ledger import LedgerClock

_log = plain_logger(__name__)

_NO_ACTIONS: Final = Actions()
_NO_PARTS: Final[Mapping[str, str]] = MappingProxyType({})

# one or two assignments of a profiler cost a step or two; after this many in a row, give up following them
_LOST_IN_A_ROW: Final = 3


def _nothing() -> None:
    pass


class _Boundary(NamedTuple):
    """The functions called right before and right after an announced action."""

    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing

    def around(self, inner: "_Boundary") -> "_Boundary":
        return _Boundary(partial(_both, self.before, inner.before), partial(_both, inner.after, self.after))


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


_IDLE: Final = _Boundary()


def _boundaries(step_timer: StepTimer, actions: Actions) -> dict[str, _Boundary]:
    boundaries = {
        name: _Boundary(partial(step_timer.regions.enter, region), partial(step_timer.regions.exit, region))
        for name, region in actions.regions.items()
    }
    fetched = _Boundary(after=actions.fetched)
    boundaries |= {
        name: boundaries[name].around(fetched) for name, region in actions.regions.items() if region == "data"
    }
    checkpoint = _Checkpoint(step_timer)
    boundaries |= dict.fromkeys(actions.saves, _Boundary(checkpoint.save, checkpoint.saved))
    boundaries |= dict.fromkeys(actions.may_save, _Boundary(checkpoint.enter_hook, checkpoint.leave_hook))
    boundaries |= dict.fromkeys(actions.state_collected, _Boundary(after=checkpoint.write))
    boundaries |= dict.fromkeys(actions.loader_starts, _Boundary(step_timer.regions.enter_loader_start))
    boundaries |= dict.fromkeys(actions.loader_started, _Boundary(step_timer.regions.exit_loader_start))
    boundaries |= dict.fromkeys(actions.validation_begins, _Boundary(step_timer.regions.enter_validation))
    to_validate = _Boundary(actions.fetches_to_validate, step_timer.regions.end_validation_fetch)
    boundaries |= dict.fromkeys(actions.validation_fetches, to_validate)
    boundaries |= dict.fromkeys(actions.validation_ends, _Boundary(after=step_timer.regions.exit_validation))
    ledger = step_timer.ledger
    epoch = _Boundary(partial(ledger.open_span, EPOCH), partial(ledger.close_span, EPOCH))
    return boundaries | {name: epoch.around(boundaries.get(name, _IDLE)) for name in actions.epochs}


def _without_regions(boundaries: dict[str, _Boundary], step_timer: StepTimer, actions: Actions) -> dict[str, _Boundary]:
    """The boundaries in a step that is timed as a whole: calls without effect would take 20 us."""
    training_step = _Boundary(partial(setattr, step_timer.regions.now, "saw_training_step", True))  # noqa: FBT003
    kept = {}
    for name, boundary in boundaries.items():
        region = actions.regions.get(name, "")
        if region == "forward":
            kept[name] = training_step
        elif not region or (region == "data" and step_timer.regions.each_fetch):
            kept[name] = boundary
    return kept


class _Checkpoint:
    """The region `checkpoint`, to the end of the hook, which removes older ones; writing is its own ledger part."""

    def __init__(self, step_timer: StepTimer) -> None:
        self._step_timer = step_timer
        self._in_hook = self._open = False

    def save(self) -> None:
        if not self._open:
            self._open = True
            self._step_timer.regions.enter("checkpoint")

    def write(self) -> None:
        if self._open:
            self._step_timer.ledger.enter(CHECKPOINT_WRITE)

    def saved(self) -> None:
        self._step_timer.ledger.exit(CHECKPOINT_WRITE)
        if self._open and not self._in_hook:
            self._open = False
            self._step_timer.regions.exit("checkpoint")

    def enter_hook(self) -> None:
        self._in_hook = True

    def leave_hook(self) -> None:
        self._in_hook = False
        self.saved()


class _Announced:
    """Calls the functions of a boundary, inside the user's own profiler if there is one."""

    __slots__ = ("_after", "_before", "_inner", "_raised")

    def __init__(
        self,
        boundary: _Boundary,
        inner: AbstractContextManager[Any] | None = None,
        raised: Callable[[], object] | None = None,
    ) -> None:
        self._before, self._after = boundary
        self._inner, self._raised = inner, raised

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
        if exc_type is not None and self._raised is not None:
            self._raised()


class _Contexts(dict[str, AbstractContextManager[Any]]):
    """The context manager for each action name; Lightning asks some sixty times a step, so each is kept."""

    MOST = 4096

    def __init__(
        self, inner: Any, boundary_of: Callable[[str], _Boundary | None], raised: Callable[[], object] | None
    ) -> None:
        super().__init__()
        self._inner, self._raised = inner, raised
        self._boundary_of = boundary_of

    def __missing__(self, action_name: str) -> AbstractContextManager[Any]:
        boundary = self._boundary_of(action_name)
        of_lightning = action_name[:1] == "[" or action_name == "run_training_batch"
        if boundary is None and not of_lightning:  # announced by the user, who may want what `as` gives
            inner: AbstractContextManager[Any] = self._inner.profile(action_name)
            return inner
        context = nullcontext() if boundary is None else _Announced(boundary, raised=self._raised)
        if len(self) < self.MOST:
            self[action_name] = context
        return context


class BoundaryProfiler:
    """Forwards everything to the user's profiler, and reports the regions' boundaries to the step timer."""

    _OWN: Final = {
        *("inner", "step_timer", "profile", "_parts", "_around_parts", "_both", "_of_split", "_of_unsplit"),
        *("_boundaries", "_contexts", "_shares", "_ledger", "_over", "_raised"),
    }

    def __init__(
        self,
        inner: Any,
        step_timer: StepTimer | None,
        actions: Actions = _NO_ACTIONS,
        parts: Mapping[str, str] = _NO_PARTS,
        *,
        ledger: LedgerClock | None = None,
        over: Callable[[], object] | None = None,
        raised: Callable[[], object] | None = None,
    ) -> None:
        self.inner = inner
        self.step_timer = step_timer
        self._ledger = ledger if step_timer is None else step_timer.ledger
        self._over, self._raised = over, raised
        self._parts = parts
        self._around_parts = frozenset((*actions.loader_starts, *actions.state_collected, *actions.regions))
        self._both = self._around_parts.union(actions.may_save)
        self._of_split = self._of_unsplit = {}
        if step_timer is not None:
            self._of_split = _boundaries(step_timer, actions)
            self._of_unsplit = _without_regions(self._of_split, step_timer, actions)
        self._shares = type(inner).__name__ == "PassThroughProfiler"  # Lightning's own, for none
        self._contexts = _Contexts(inner, self._boundary, raised), _Contexts(inner, self._boundary, raised)
        self.turn(split=True)

    def turn(self, *, split: bool) -> None:
        """The next actions are of a step that is split into regions, or of one that is timed as a whole."""
        self._boundaries = self._of_split if split else self._of_unsplit
        contexts = self._contexts[split]

        def shared(action_name: str) -> AbstractContextManager[Any]:
            return contexts[action_name]

        # a context manager around the action of that name; Lightning's pass-through would make a generator for each of
        # some sixty hooks a step
        self.profile: Callable[[str], AbstractContextManager[Any]] = shared if self._shares else self._profile_both

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's profiler, for code that asks for it."""
        return type(vars(self).get("inner", self))

    def _boundary(self, action_name: str) -> _Boundary | None:
        """The functions to call at the boundaries of an action: for its region, and for its part of the ledger."""
        boundary = self._boundaries.get(action_name)
        ledger, part = self._ledger, self._parts.get(action_name)
        if ledger is None or part is None or (boundary is not None and action_name not in self._both):
            return boundary
        of_part = _Boundary(partial(ledger.enter, part), partial(ledger.exit, part))
        if boundary is None:
            return of_part
        return boundary.around(of_part) if action_name in self._around_parts else of_part.around(boundary)

    def _profile_both(self, action_name: str) -> AbstractContextManager[Any]:
        inner: AbstractContextManager[Any] = self.inner.profile(action_name)
        boundary = self._boundary(action_name)
        return inner if boundary is None else _Announced(boundary, inner, self._raised)

    def start(self, action_name: str) -> None:
        """Begin an action."""
        self.inner.start(action_name)
        if (boundary := self._boundary(action_name)) is not None:
            boundary.before()

    def stop(self, action_name: str) -> None:
        """End an action."""
        if (boundary := self._boundary(action_name)) is not None:
            boundary.after()
        self.inner.stop(action_name)

    def describe(self) -> None:
        """Let the user's profiler print or save what it has; the run is then over."""
        self.inner.describe()
        if self._over is not None:
            self._over()

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
        """A copy, as of a Trainer during a fit, is a copy of the user's profiler."""
        return _itself, (self.inner,)


def _itself(profiler: Any) -> Any:
    return profiler


class ProfilerProxy(Boundaries):
    """Keeps a `BoundaryProfiler` in `trainer.profiler` while a training loop runs, even if another is assigned."""

    def __init__(
        self, trainer: Trainer, step_timer: StepTimer, actions: Actions, parts: Mapping[str, str] = _NO_PARTS
    ) -> None:
        super().__init__(step_timer)
        self._trainer = trainer
        self._actions = actions
        self._parts = parts
        self._ours: BoundaryProfiler | None = None
        self._replaced = self._warned = False
        self._lost = 0

    def install(self) -> None:
        """Wrap the Trainer's profiler."""
        trainer = self._trainer
        if not (isinstance(trainer.profiler, BoundaryProfiler) and trainer.profiler.step_timer is self._step_timer):
            self.uninstall(trainer)  # a fit that ended without calling any hook left one
            trainer.profiler = BoundaryProfiler(trainer.profiler, self._step_timer, self._actions, self._parts)
        self._ours = ours = trainer.profiler
        self._step_timer.regions.followers.split_changes = ours.turn
        ours.turn(split=self._step_timer.regions.is_split)

    def follow(self) -> None:
        """Wrap another profiler that was assigned to `trainer.profiler` since the last check."""
        if self._trainer.profiler is not self._ours and self._step_timer.regions.active:
            self._replaced = True
            self.install()

    def validation_ends(self) -> None:
        """Stay there: the end of the region is announced."""
        self.follow()

    def saw_step(self, *, trained: bool) -> bool:
        """Whether all boundaries of the step that has just ended were announced to our profiler."""
        step_timer = self._step_timer
        saw = step_timer.regions.now.saw_training_step or not trained
        step_timer.regions.now.saw_training_step = False
        if saw and self._trainer.profiler is self._ours and not self._replaced:
            self._lost = 0
            return True
        self.follow()
        saw = saw and not self._replaced
        self._replaced = False
        self._lost = 0 if saw else self._lost + 1
        if self._lost == _LOST_IN_A_ROW and not self._warned:
            self._warned = True
            _log.warning(
                "trainer.profiler was assigned in each of %d steps in a row: such steps are timed as a whole, without "
                "regions. Assign it once, or before the fit.",
                self._lost,
            )
        return saw

    def release(self) -> None:
        """Restore the user's profiler."""
        self.uninstall(self._trainer)

    @staticmethod
    def uninstall(trainer: Trainer) -> None:
        """Restore the user's profiler, the one assigned last."""
        while isinstance(trainer.profiler, BoundaryProfiler):
            trainer.profiler = trainer.profiler.inner
